"""What a user may choose: the words, the ranges, and frozen records of the choices. Everything is checked here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from meshmuon.checks import check_bool, check_integer, check_number, check_sizes, check_word
from meshmuon.errors import message

Algorithm = Literal["muon", "adamw"]
Form = Literal["auto", "standard", "gram", "svd"]
DTypeChoice = Literal["auto", "float16", "bfloat16", "float32", "float64"]
LRRule = Literal["original", "shape_scaling", "match_rms_adamw", "spectral", "unit_rms_norm", "none"]
WeightDecayMode = Literal["decoupled", "cautious", "l2"]
KernelChoice = Literal["auto", "triton", "torch"]
RouteChoice = Literal["auto", "owner", "gram"]
Restarts: TypeAlias = Literal["auto"] | tuple[int, ...]
Mode = Literal["exact", "blockwise"]
Sharing = Literal["auto", "always", "never"]
NonFinite = Literal["skip", "raise", "ignore"]
GradSync = Literal["none", "optimizer", "reduce_scatter"]
AttentionKind = Literal["mha", "gqa", "mla"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Orthogonalizer:
    """How polar factors are computed.

    Attributes:
        form: "standard", "gram" (on the m×m Gram matrix), "svd" (exact), or "auto": the cheaper of the first two.
        dtype: What to compute in; "auto" is fp32 on a CPU; on a GPU fp16, and fp32 where the short side is below 256.
            "bfloat16" reproduces torch.optim.Muon.
        restarts: The steps before which the Gram form starts anew; "auto" chooses the fewest that are stable. Others
            are taken as they are; where rounding may grow too far between two of them, the optimizer warns. Our kernels
            fold a single one in fp16 into the Gram matrix where that is cheaper; the plan says so.
        kernels: "triton" for our own symmetric products and fused element-wise work, "torch" for torch's, or "auto":
            ours on GPUs they were measured on. The plan says which, and why.
    """

    form: Form = "auto"
    dtype: DTypeChoice = "auto"
    restarts: Restarts = "auto"
    kernels: KernelChoice = "auto"

    def __post_init__(self) -> None:
        check_word("form", self.form, get_args(Form))
        check_word("dtype", self.dtype, get_args(DTypeChoice))
        check_word("kernels", self.kernels, get_args(KernelChoice))
        if isinstance(self.restarts, str) and self.restarts == "auto":
            return
        if not isinstance(self.restarts, (tuple, list)):
            found = f"{self.restarts!r}"
            raise TypeError(message("restarts", found=found, do='Use "auto" or a tuple of step numbers, e.g. (2,)'))
        steps = tuple(check_integer("restarts", step, low=1) for step in self.restarts)
        if list(steps) != sorted(set(steps)):
            raise ValueError(message("restarts", found=f"{steps}", do="Use increasing step numbers"))
        object.__setattr__(self, "restarts", steps)

    def check_steps(self, steps: int) -> None:
        """Refuse restarts that an iteration of so many steps does not reach.

        Args:
            steps: Number of steps.

        Raises:
            ValueError: If a restart lies beyond the last step.
        """
        if self.restarts != "auto" and any(step >= steps for step in self.restarts):
            do = f"Each must be a step from 1 to {steps - 1}, before which the Gram matrix is formed anew"
            raise ValueError(message("restarts", found=f"{self.restarts} for {steps} steps", do=do))


@dataclass(frozen=True, slots=True, kw_only=True)
class QKClip:
    """Which rows of which parameters make the q and k heads, and how large their logits may become.

    Attributes:
        threshold: Heads whose largest logit is above it are scaled down to it.
        head_dim: Rows of a head in q and in k. For "mla", of its part without positions, which comes first.
        q: Name of the parameter that makes q, with `{layer}` for what differs between layers.
        k: The same for k. For "mla", of the parameter that makes k and v from the latent. A bias beside it (`.bias` for
            `.weight`) is scaled along.
        q_heads: Number of q heads; None: from the number of rows. "mla" needs it.
        k_heads: Number of k heads; None: from the number of rows.
        fused_rows: Where `q` and `k` are one parameter: rows of its parts, q first, k second, such as (q, k, v). Parts
            of one group of heads, if they repeat until the last row.
        kind: "mha": a k head for each q head; "gqa": one for several; "mla": k partly shared by all, without a head.
    """

    threshold: float = 100.0
    head_dim: int
    q: str
    k: str
    q_heads: int | None = None
    k_heads: int | None = None
    fused_rows: tuple[int, ...] | None = None
    kind: AttentionKind = "mha"

    def __post_init__(self) -> None:
        threshold = check_number("QKClip(threshold=)", self.threshold, low=0.0, open_low=True)
        object.__setattr__(self, "threshold", threshold)
        check_integer("QKClip(head_dim=)", self.head_dim, low=1)
        check_word("QKClip(kind=)", self.kind, get_args(AttentionKind))
        for name in ("q", "k"):
            check_layer_pattern(f"QKClip({name}=)", getattr(self, name))
        for name in ("q_heads", "k_heads"):
            if getattr(self, name) is not None:
                check_integer(f"QKClip({name}=)", getattr(self, name), low=1)
        if self.fused_rows is not None:
            object.__setattr__(self, "fused_rows", check_sizes("QKClip(fused_rows=)", self.fused_rows))
        self._check_heads()
        self._check_fused()

    def _check_heads(self) -> None:
        q, k = self.q_heads, self.k_heads
        if self.kind == "mla" and q is None:
            do = "Give it: the rows of a head are counted by it"
            raise ValueError(message("QKClip(q_heads=)", found='None with kind="mla"', do=do))
        if q is None or k is None:
            return
        if self.kind != "gqa" and q != k:
            do = 'Give the same number of both, or kind="gqa"'
            raise ValueError(message("QKClip(k_heads=)", found=f'{k} for {q} q heads with kind="{self.kind}"', do=do))
        if q % k:
            do = "Each k head belongs to the same number of q heads"
            raise ValueError(message("QKClip(k_heads=)", found=f"{k} for {q} q heads", do=do))

    def _check_fused(self) -> None:
        rows = self.fused_rows
        if (rows is None) == (self.q == self.k):
            found = f"{rows} for {'one parameter' if self.q == self.k else 'two parameters'} of q and k"
            do = "Give the rows of q, k and the rest where, and only where, q and k are one parameter"
            raise ValueError(message("QKClip(fused_rows=)", found=found, do=do))
        if rows is None:
            return
        if self.kind == "mla":
            found = f'{rows} with kind="mla"'
            raise ValueError(message("QKClip(fused_rows=)", found=found, do="Name the parameters of q and of k"))
        if len(rows) < 2 or rows[0] % self.head_dim or rows[1] % self.head_dim:
            found = f"{rows} with head_dim={self.head_dim}"
            do = "Give the rows of q, then of k, as multiples of head_dim, then of the rest"
            raise ValueError(message("QKClip(fused_rows=)", found=found, do=do))


def check_layer_pattern(name: str, value: Any) -> str:
    """Accept a name with `{layer}` in it, once.

    Args:
        name: The argument, for the message.
        value: What the user gave.

    Returns:
        The value.

    Raises:
        TypeError: If it is not a string.
        ValueError: If `{layer}` is not in it once.
    """
    do = 'Write {layer} once, for what differs between layers, e.g. "layers.{layer}.self_attn.q_proj.weight"'
    if not isinstance(value, str):
        raise TypeError(message(name, found=f"{value!r} ({type(value).__name__})", do=do))
    if value.count("{layer}") != 1:
        raise ValueError(message(name, found=f"{value!r}", do=do))
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """How a step runs, as opposed to what it computes.

    Attributes:
        orthogonalizer: Form, dtype and restarts of the polar factor.
        non_finite: What to do about NaN or inf in a gradient.
        release_grads: Whether a gradient is set to None once it has been read.
        max_in_flight: How many buckets may be between gather and scatter at a time.
        workspace_bytes: Bound on the memory a step takes beyond parameters, gradients and state.
        share_replicas: Whether replicas of a sharded matrix each compute a part of the matrices and exchange results.
        layout_invariant: Whether a matrix must get the same bits in every batch also where that costs speed.
        allow_no_muon: Whether an optimizer without any Muon parameter is accepted.
        grad_sync: Whether the optimizer averages gradients over ranks itself, and how.
        max_grad_norm: Bound on the norm of those averages.
        cuda_graph: Whether the launches of a step are captured in a CUDA graph and replayed.
        qk_clip: Which heads are scaled down when their logits grow too large; None: no heads.
    """

    orthogonalizer: Orthogonalizer = Orthogonalizer()
    non_finite: NonFinite = "skip"
    release_grads: bool = False
    max_in_flight: int = 2
    workspace_bytes: int = 2**30
    share_replicas: Sharing = "auto"
    layout_invariant: bool | None = None
    allow_no_muon: bool = False
    grad_sync: GradSync = "none"
    max_grad_norm: float | None = None
    cuda_graph: bool = False
    qk_clip: QKClip | None = None

    @property
    def syncs(self) -> bool:
        """Whether the optimizer averages gradients itself."""
        return self.grad_sync != "none"

    def __post_init__(self) -> None:
        if not isinstance(self.orthogonalizer, Orthogonalizer):
            found = f"{self.orthogonalizer!r}"
            raise TypeError(message("orthogonalizer", found=found, do='Use Orthogonalizer(form="auto", dtype="auto")'))
        if self.qk_clip is not None and not isinstance(self.qk_clip, QKClip):
            do = 'Use QKClip(head_dim=..., q="...{layer}...", k="...{layer}...")'
            raise TypeError(message("qk_clip", found=f"{self.qk_clip!r} ({type(self.qk_clip).__name__})", do=do))
        check_word("non_finite", self.non_finite, get_args(NonFinite))
        check_bool("release_grads", self.release_grads)
        check_integer("max_in_flight", self.max_in_flight, low=1)
        check_integer("workspace_bytes", self.workspace_bytes, low=1)
        check_word("share_replicas", self.share_replicas, get_args(Sharing))
        check_bool("allow_no_muon", self.allow_no_muon)
        check_word("grad_sync", self.grad_sync, get_args(GradSync))
        check_bool("cuda_graph", self.cuda_graph)
        on_the_host = {
            f"grad_sync={self.grad_sync!r}": self.syncs,
            "release_grads=True": self.release_grads,
            'non_finite="raise"': self.non_finite == "raise",
        }
        if self.cuda_graph and any(on_the_host.values()):
            found = f"given with {' and '.join(word for word, given in on_the_host.items() if given)}"
            do = "A graph cannot decide on the host: leave one of them out"
            raise ValueError(message("cuda_graph", found=found, do=do))
        if self.max_grad_norm is not None:
            check_number("max_grad_norm", self.max_grad_norm, low=0.0, open_low=True)
            if not self.syncs:
                found = 'given without grad_sync="optimizer"'
                do = "Clip before the step, with torch.nn.utils.clip_grad_norm_: gradients are averaged by then"
                raise ValueError(message("max_grad_norm", found=found, do=do))
        if self.layout_invariant is not None:
            check_bool("layout_invariant", self.layout_invariant)


def check_offload(value: Any, execution: Execution) -> bool:
    """Check whether state may live in host memory.

    Args:
        value: What the user gave.
        execution: The choices of the run.

    Returns:
        The value.

    Raises:
        TypeError: If it is neither True nor False.
        ValueError: If steps are replayed as a CUDA graph.
    """
    check_bool("offload", value)
    if value and execution.cuda_graph:
        found = "given with cuda_graph=True"
        raise ValueError(message("offload", found=found, do="A graph needs its state in place: leave one of them out"))
    return bool(value)
