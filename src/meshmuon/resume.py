"""Checkpoints of a whole job: complete or not there, and loaded whole or not at all.

The format is torch.distributed.checkpoint's own; any of its tools reads it. Added here is what a killed job needs: a
folder has its name only once everything in it is written, and everything is checked before anything is loaded.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.optim import Optimizer

from meshmuon.errors import CheckpointError, message, some
from meshmuon.exchange.refusals import first_problem, side_group
from meshmuon.muon import Muon

_UNFINISHED = ".unfinished"
_ITS_MODEL = "Load it into the model it was made of"
_UNREADABLE = (pickle.UnpicklingError, RuntimeError, EOFError, KeyError, ValueError)
_PENDING: set[Path] = set()  # being written while training goes on
_ANOTHER = "Load another one: latest_checkpoint finds the newest that is complete"


class _WholeOrNothing(dcp.FileSystemWriter):
    """Writes beside the folder's name. The coordinator gives it the name while all other ranks still wait for it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._beside = folder.with_name(folder.name + _UNFINISHED)
        super().__init__(self._beside)

    def prepare_global_plan(self, plans: Any) -> Any:
        # On the coordinator, when every rank is here and none has written yet: what a killed job left behind goes.
        shutil.rmtree(self._beside, ignore_errors=True)
        self._beside.mkdir(parents=True, exist_ok=True)
        return super().prepare_global_plan(plans)

    def finish(self, metadata: Metadata, results: Any) -> None:
        super().finish(metadata, results)
        os.replace(self._beside, self._folder)


def save_checkpoint(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    extra: Mapping[str, Any] | None = None,
    wait: bool = True,
) -> Any:
    """Save a model and its optimizer. Every rank must call.

    Args:
        folder: Made here. It appears when the checkpoint is complete; a job killed before that leaves one whose name
            ends in ".unfinished", which the next save to the same name removes.
        model: The model, in any layout.
        optimizer: Its optimizer, or several that share its parameters out.
        extra: Whatever else must come back, the same on every rank: the step, a scheduler's state, a seed.
        wait: False returns once everything is copied, and writes while training goes on.

    Returns:
        None, or with `wait=False` a future whose `result()` waits for the end and raises what went wrong.

    Raises:
        CheckpointError: If the folder is already there or being written, or `extra` could not be loaded again.
    """
    path = Path(folder).absolute()
    packed: list[Tensor] = []
    model_state, optimizer_state = get_state_dict(model, optimizer)
    groups: Any = optimizer_state["param_groups"]
    _refuse_together(lambda: packed.append(_ready_to_save(path, groups, dict(extra or {}))))
    everything = {"model": model_state, "state": optimizer_state["state"], "extra": packed[0]}
    writer = _WholeOrNothing(path)
    if wait:
        with _quiet():
            dcp.save(everything, storage_writer=writer)
        return None
    _PENDING.add(path)
    with _quiet():
        future: Any = dcp.async_save(
            everything,
            storage_writer=writer,
            process_group=side_group(),
            async_checkpointer_type=AsyncCheckpointerType.THREAD,
        )
    future.add_done_callback(lambda _: _PENDING.discard(path))
    return future


def load_checkpoint(
    folder: str | os.PathLike[str], model: nn.Module, optimizer: Optimizer | Sequence[Optimizer]
) -> dict[str, Any]:
    """Load a model and its optimizer, saved on any number of ranks in any layout. Every rank must call.

    Names, shapes and files are checked first, and the values are read into memory of their own: where this raises,
    model and optimizer are as they were.

    Args:
        folder: What `save_checkpoint` made.
        model: The model; written.
        optimizer: Its optimizer, or several; written. Parameters may be grouped otherwise than they were, if those of
            a group had the same hyper-parameters.

    Returns:
        The `extra` that was saved.

    Raises:
        CheckpointError: Names the file or the key that does not fit.
    """
    path = Path(folder).absolute()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    wanted = _copied({"model": model_state, "state": optimizer_state["state"]})
    _refuse_together(lambda: wanted.update(extra=_checked(path, wanted)))
    try:
        with _quiet():
            dcp.load(wanted, storage_reader=dcp.FileSystemReader(path))
        groups, extra = _unpacked(wanted["extra"])
    except (CheckpointException, *_UNREADABLE) as error:
        raise CheckpointError(message(f"checkpoint {path}", found=str(error), do=_ANOTHER)) from error
    here: Any = optimizer_state["param_groups"]
    loaded = {"state": wanted["state"], "param_groups": _regrouped(groups, here, path)}
    _refuse_together(lambda: _check_groups(optimizer, loaded))
    set_state_dict(model, optimizer, model_state_dict=wanted["model"], optim_state_dict=loaded)
    return extra


def checkpoint_extra(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Read only what was saved beside model and optimizer. Any process may ask, alone.

    Args:
        folder: What `save_checkpoint` made.

    Returns:
        The `extra` that was saved.

    Raises:
        CheckpointError: Names the file that is not there or not whole.
    """
    path = Path(folder).absolute()
    metadata = _read_metadata(path)
    _check_files(path, metadata)
    if "extra" not in metadata.state_dict_metadata:
        raise CheckpointError(message(f"checkpoint {path}", found="no extra", do="Give what save_checkpoint made"))
    wanted = {"extra": _room_for_extra(metadata)}
    with _quiet():
        dcp.load(wanted, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    return _unpacked(wanted["extra"])[1]


def latest_checkpoint(root: str | os.PathLike[str]) -> Path | None:
    """Find the newest complete checkpoint among the folders in a folder.

    Args:
        root: Where checkpoints are saved, each to its own folder.

    Returns:
        The one completed last whose files are all there, whole; None if there is none.
    """
    found = [path.parent for path in Path(root).glob("*/.metadata") if not path.parent.name.endswith(_UNFINISHED)]
    for path in sorted(found, key=lambda path: ((path / ".metadata").stat().st_mtime_ns, path.name), reverse=True):
        with contextlib.suppress(CheckpointError):  # cut short by a full disk, or copied in part
            _check_files(path, _read_metadata(path))
            return path
    return None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """torch warns that one process is one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _refuse_together(check: Callable[[], object]) -> None:
    """Run a check of this rank's own. Where it fails on any, all raise: nobody waits in a collective for the others."""
    error: CheckpointError | None = None
    try:
        check()
    except CheckpointError as raised:
        error = raised
    problem = first_problem(None if error is None else str(error))
    if error is not None:
        raise error
    if problem is not None:
        raise CheckpointError(problem)


def _ready_to_save(path: Path, groups: list[dict[str, Any]], extra: dict[str, Any]) -> Tensor:
    """What goes into a checkpoint beside model and state, after a look at whether it can come back."""
    if path.exists() or path in _PENDING:
        found = "already there" if path.exists() else "being written: an earlier save to it has not finished"
        raise CheckpointError(message(f"folder {path}", found=found, do="Save every step to its own"))
    for key, value in extra.items():
        if not _comes_back(value):
            found = f"a {type(value).__name__} that could not be loaded again"
            do = "Use numbers, strings, tensors, and lists, tuples and dicts of these"
            raise CheckpointError(message(f"extra[{key!r}]", found=found, do=do))
    return _packed(groups, extra)


def _comes_back(value: object) -> bool:
    try:
        _unpacked(_packed([], {"": value}))
    except Exception:  # whatever pickle, or an object of the user's, raises
        return False
    return True


def _checked(path: Path, wanted: dict[str, Any]) -> Tensor:
    """See that a checkpoint is whole and fits; give room for what it holds beside model and state."""
    metadata = _read_metadata(path)
    _check_keys(path, wanted, metadata)
    _check_files(path, metadata)
    return _room_for_extra(metadata)


def _packed(groups: list[dict[str, Any]], extra: dict[str, Any]) -> Tensor:
    """One tensor of bytes: its size is known before it is loaded, whatever it holds."""
    file = io.BytesIO()
    torch.save({"param_groups": groups, "extra": extra}, file)
    return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)


def _unpacked(packed: Tensor) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    both = torch.load(io.BytesIO(packed.numpy().tobytes()), weights_only=True)
    return both["param_groups"], both["extra"]


def _regrouped(saved: list[dict[str, Any]], here: list[dict[str, Any]], path: Path) -> list[dict[str, Any]]:
    """Saved hyper-parameters in the groups of this optimizer: a layout may need parameters grouped by mesh."""
    of = {name: _hyperparameters(group) for group in saved for name in group["params"]}
    result = []
    for group in here:
        names = [name for name in group["params"] if name in of]
        for name in names[1:]:
            differing = sorted(key for key, value in of[name].items() if value != of[names[0]].get(key))
            if differing:
                found = f"{names[0]} and {name}, one group here, saved with different {', '.join(differing)}"
                raise CheckpointError(
                    message(f"checkpoint {path}", found=found, do="Group parameters as when it was saved")
                )
        result.append({**group, **(of[names[0]] if names else {})})
    return result


def _check_groups(optimizer: Optimizer | Sequence[Optimizer], loaded: Mapping[str, Any]) -> None:
    """Ask each Muon, before the first of several optimizers is changed, whether it will take its part."""
    groups = iter(loaded["param_groups"])
    for one in [optimizer] if isinstance(optimizer, Optimizer) else optimizer:
        mine = [next(groups) for _ in one.param_groups]
        if isinstance(one, Muon):
            one.check_state_dict({"state": loaded["state"], "param_groups": mine})


def _hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _room_for_extra(metadata: Metadata) -> Tensor:
    there = metadata.state_dict_metadata["extra"]
    assert isinstance(there, TensorStorageMetadata)
    return torch.empty(there.size, dtype=torch.uint8)


def _copied(value: Any) -> Any:
    """Tensors of their own in host memory, in the same layouts; the rest as it is."""
    if isinstance(value, Tensor):
        return value.detach().clone() if value.device.type == "cpu" else value.detach().cpu()
    if isinstance(value, dict):
        return {key: _copied(each) for key, each in value.items()}
    return [_copied(each) for each in value] if isinstance(value, list) else value


def _read_metadata(path: Path) -> Metadata:
    if not (path / ".metadata").is_file():
        found = "no .metadata in it: no checkpoint, or never completed" if path.exists() else "no folder"
        raise CheckpointError(message(f"checkpoint {path}", found=found, do=_ANOTHER))
    file = f"file {path / '.metadata'}"
    try:
        metadata = pickle.loads((path / ".metadata").read_bytes())
    except Exception as error:  # a pickle of anything may fail in any way
        raise CheckpointError(message(file, found=f"not readable ({error})", do=_ANOTHER)) from error
    if not isinstance(metadata, Metadata) or metadata.storage_data is None:
        found = f"a {type(metadata).__name__}, not that of a checkpoint"
        raise CheckpointError(message(file, found=found, do=_ANOTHER))
    return metadata


def _check_keys(path: Path, wanted: dict[str, Any], metadata: Metadata) -> None:
    """Compare names and shapes of what is there with what is needed."""
    saved = metadata.state_dict_metadata
    needed, _ = flatten_state_dict(wanted)
    missing = [key for key in (*needed, "extra") if key not in saved]
    unknown = [key for key in saved if key not in needed and key != "extra"]
    for keys, what in ((missing, "has no"), (unknown, "has more than is wanted:")):
        if keys:
            found = f"the checkpoint {what} {some(keys)}"
            raise CheckpointError(
                message(f"checkpoint {path}", found=found, do="Load it into the model it was made of")
            )
    for key, value in needed.items():
        there = saved[key]
        if isinstance(there, TensorStorageMetadata) and tuple(there.size) != tuple(value.shape):
            found = f"{tuple(there.size)} in {path}, here it is {tuple(value.shape)}"
            raise CheckpointError(message(key, found=found, do=_ITS_MODEL))


def _check_files(path: Path, metadata: Metadata) -> None:
    """See that every file is there and long enough."""
    ends: dict[str, int] = {}
    for where in metadata.storage_data.values():
        ends[where.relative_path] = max(ends.get(where.relative_path, 0), where.offset + where.length)
    for name, end in ends.items():
        file = path / name
        size = file.stat().st_size if file.exists() else None
        if size is None or size < end:
            found = "missing" if size is None else f"{size:,} bytes, it should have {end:,}"
            raise CheckpointError(message(f"file {file}", found=found, do=_ANOTHER))
