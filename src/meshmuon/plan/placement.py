"""From a mesh and a rule for each of its axes to where every parameter lies, for jobs that do not exist yet."""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from meshmuon.checks import check_integer
from meshmuon.errors import message, some
from meshmuon.layout.matrix_view import MatrixView
from meshmuon.layout.shard_layout import Cut, ShardLayout

Rule: TypeAlias = "str | Mapping[str, str]"

_WORDS = '"replicate", "shard0", "shard1", ..., "tensor" or "experts", or a dict of name patterns → these'
_SHARD = re.compile(r"shard(\d)")
# Megatron's rules: projections into the hidden space of a block are cut along their outputs, those out of it along
# their inputs, so that no activation travels between the two. Names of Hugging Face, Megatron-LM, GPT-2 and Llama.
_COLUMN = re.compile(
    r"(^|\.)(q|k|v|q_proj|k_proj|v_proj|qkv|qkv_proj|q_b_proj|kv_b_proj|query|key|value|linear_qkv|query_key_value|c_attn|"
    r"gate_proj|up_proj|gate_up_proj|w1|w3|fc1|c_fc|linear_fc1|dense_h_to_4h|"
    r"embed_tokens|wte|tok_embeddings|word_embeddings|lm_head|output|output_layer)(\.weight|\.bias)?$"
)
_ROW = re.compile(
    r"(^|\.)(o|o_proj|out_proj|linear_proj|c_proj|down_proj|w2|fc2|linear_fc2|dense_4h_to_h|wo)(\.weight)?$"
)


@dataclass(frozen=True, slots=True)
class Mesh:
    """The ranks of a job, by their axes.

    Attributes:
        axes: Names, the outermost first; ranks count along the last one first.
        sizes: Their sizes.
        rules: What each does to a parameter.
    """

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    rules: tuple[Rule, ...]

    @classmethod
    def of(cls, mesh: Mapping[str, int], placements: Mapping[str, Rule]) -> Mesh:
        """Read what a user says about a job.

        Args:
            mesh: Axis → size.
            placements: Axis → rule.

        Returns:
            The mesh.

        Raises:
            TypeError: If it is not made of names and numbers.
            ValueError: If axes and rules do not fit each other, or a rule is not known.
        """
        if not isinstance(mesh, Mapping) or not mesh or not isinstance(placements, Mapping):
            found, do = f"{mesh!r} with placements {placements!r}", 'Write mesh={"dp": 64}, placements={"dp": "shard0"}'
            raise TypeError(message("mesh", found=found, do=do))
        for axis, size in mesh.items():
            check_integer(f"mesh[{axis!r}]", size, low=1)
        if set(mesh) != set(placements):
            found = f"rules for {some(placements) or 'no axis'}, but the mesh has {some(mesh)}"
            raise ValueError(message("placements", found=found, do="Give one rule for each axis of the mesh"))
        for axis, rule in placements.items():
            for word in rule.values() if isinstance(rule, Mapping) else (rule,):
                if word not in ("replicate", "tensor", "experts") and not _SHARD.fullmatch(str(word)):
                    raise ValueError(message(f"placements[{axis!r}]", found=repr(word), do=f"Use {_WORDS}"))
        return cls(tuple(mesh), tuple(mesh.values()), tuple(placements[axis] for axis in mesh))

    @property
    def ranks(self) -> int:
        """How many."""
        return math.prod(self.sizes)

    def layout(self, name: str, shape: tuple[int, ...], view: MatrixView, ranks: tuple[int, ...]) -> ShardLayout:
        """Say where a parameter lies.

        An axis of data parallelism cuts what model parallelism has left: where both cut one dim, the outer cut is
        strided, as FSDP2 over tensor parallelism makes it.

        Args:
            name: The parameter.
            shape: Its shape.
            view: How it is a stack of matrices.
            ranks: All ranks, 0, 1, ...: handed in so that all layouts share one tuple.

        Returns:
            Its layout.

        Raises:
            ValueError: If a rule cuts a dim it does not have.
        """
        words = [_word(rule, name) for rule in self.rules]
        dims = [self._dim(axis, word, name, shape, view) for axis, word in zip(self.axes, words, strict=True)]
        cuts: list[list[Cut]] = [[] for _ in shape]
        for axis, (word, dim) in enumerate(zip(words, dims, strict=True)):
            if dim is None:
                continue
            inner = [i for i in range(axis + 1, len(dims)) if dims[i] == dim and words[i] in ("tensor", "experts")]
            strided = word not in ("tensor", "experts")
            factor = math.prod(self.sizes[i] for i in inner) if strided else 1
            cuts[dim].append(Cut(axis, self.sizes[axis], factor))
        return ShardLayout(shape, self.sizes, ranks, tuple(map(tuple, cuts)))

    def _dim(self, axis: str, word: str, name: str, shape: tuple[int, ...], view: MatrixView) -> int | None:
        if word == "replicate":
            return None
        if word == "experts":
            return 0 if view.experts else None
        if word == "tensor":
            return _tensor_dim(name, shape, view)
        dim = int(word.removeprefix("shard"))
        if dim < len(shape):
            return dim
        if len(shape) >= 2:
            found = f"{len(shape)}-D of shape {shape}, to be cut along dim {dim} by axis {axis!r}"
            do = f'Give that axis rules by name, e.g. {{"*experts*": "{word}", "*": "shard0"}}'
            raise ValueError(message(f"parameter {name!r}", found=found, do=do))
        return 0 if shape else None  # FSDP cuts vectors along the one dim they have


def _word(rule: Rule, name: str) -> str:
    if isinstance(rule, str):
        return rule
    return next((word for pattern, word in rule.items() if fnmatch.fnmatchcase(name, pattern)), "replicate")


def _tensor_dim(name: str, shape: Sequence[int], view: MatrixView) -> int | None:
    """The dim that Megatron's rules cut: outputs, inputs, or none."""
    rows = view.row_dim(len(shape)) if len(shape) >= 2 else 0
    if _COLUMN.search(name):
        return rows
    if _ROW.search(name) and len(shape) >= 2:
        return view.col_dims(len(shape))[0]
    return None
