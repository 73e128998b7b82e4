"""Checkpoints of a whole job: complete or not there, and loaded whole or not at all.

The format is torch.distributed.checkpoint's own; any of its tools reads it. Added here is what a killed job needs: a
folder has its name only once everything in it is written, and everything is checked before anything is loaded.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.optim import Optimizer

from meshmuon.errors import CheckpointError, message
from meshmuon.exchange.groups import side_group
from meshmuon.exchange.refusals import agree
from meshmuon.muon import Muon
from meshmuon.saved_files import (
    ANOTHER,
    UNFINISHED,
    UNREADABLE,
    WholeOrNothing,
    check_files,
    check_keys,
    fingerprint,
    interrupt_in,
    packed_extra,
    read_metadata,
    room_for_extra,
    unpacked_extra,
)

# Saves that are being written while training goes on. The next one waits: two at a time on one group would meet each
# other's collectives in another order on each rank.
_PENDING: list[Any] = []


def save_checkpoint(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    extra: Mapping[str, Any] | None = None,
    wait: bool = True,
    process_group: Any = None,
) -> Any:
    """Save a model and its optimizer. Every rank must call.

    Args:
        folder: Made here, the same on every rank, where all can write. It appears when the checkpoint is complete; a
            job killed before that leaves one whose name ends in ".unfinished", which the next save to the same name
            removes.
        model: The model, in any layout.
        optimizer: Its optimizer, or several that share its parameters out.
        extra: Whatever else must come back, the same on every rank: the step, a scheduler's state, a seed.
        wait: False returns once everything is copied, and writes while training goes on. The next save waits for it.
        process_group: The ranks that hold the model and call, such as those of a pipeline stage; None: all of the job.

    Returns:
        None, or with `wait=False` a future whose `result()` waits for the end and raises what went wrong.

    Raises:
        CheckpointError: If the folder is already there or not the same on all ranks, `extra` could not be loaded
            again, or it could not be written.
    """
    _wait_for_pending()
    path = Path(folder).absolute()
    packed: list[Tensor] = []
    model_state, optimizer_state = get_state_dict(model, optimizer)
    groups: Any = optimizer_state["param_groups"]
    agree(
        lambda: packed.append(_ready_to_save(path, groups, dict(extra or {}))),
        same=lambda: f"the folder {path}",
        members=process_group,
    )
    everything = {"model": model_state, "state": optimizer_state["state"], "extra": packed[0]}
    writer = WholeOrNothing(path)
    if wait:
        with writer.abandoning(), _quiet():
            dcp.save(everything, storage_writer=writer, process_group=process_group)
        return None
    with writer.abandoning(), _quiet():
        future: Any = dcp.async_save(
            everything,
            storage_writer=writer,
            process_group=side_group(process_group),
            async_checkpointer_type=AsyncCheckpointerType.THREAD,
        )
    told = writer.told_by(future)
    _PENDING.append(told)  # not torch's: only then what could not be finished is cleared away
    return told


def load_checkpoint(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    process_group: Any = None,
) -> dict[str, Any]:
    """Load a model and its optimizer, saved on any number of ranks in any layout. Every rank must call.

    Names, shapes and files are checked first, and the values are read into memory of their own: where this raises,
    model and optimizer are as they were.

    Args:
        folder: What `save_checkpoint` made; the same on every rank.
        model: The model; written.
        optimizer: Its optimizer, or several; written. Parameters may be grouped otherwise than they were, if those of
            a group had the same hyper-parameters.
        process_group: The ranks that hold the model and call, such as those of a pipeline stage; None: all of the job.

    Returns:
        The `extra` that was saved.

    Raises:
        CheckpointError: Names the file or the key that does not fit, or the ranks that look at another checkpoint.
    """
    _wait_for_pending()
    path = Path(folder).absolute()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    wanted = _copied({"model": model_state, "state": optimizer_state["state"]})
    agree(
        lambda: wanted.update(extra=_checked(path, wanted)),
        same=lambda: f"the checkpoint {path} ({fingerprint(path)})",
        members=process_group,
    )
    with _readable(path), _quiet():
        dcp.load(wanted, storage_reader=dcp.FileSystemReader(path), process_group=process_group)
        groups, extra = unpacked_extra(wanted["extra"])
    here: Any = optimizer_state["param_groups"]
    loaded = {"state": wanted["state"], "param_groups": _regrouped(groups, here, path)}
    agree(lambda: _check_groups(optimizer, loaded), members=process_group)
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
    metadata = read_metadata(path)
    check_files(path, metadata)
    if "extra" not in metadata.state_dict_metadata:
        raise CheckpointError(message(f"checkpoint {path}", found="no extra", do="Give what save_checkpoint made"))
    wanted = {"extra": room_for_extra(metadata)}
    with _readable(path), _quiet():
        dcp.load(wanted, storage_reader=dcp.FileSystemReader(path), no_dist=True)
        return unpacked_extra(wanted["extra"])[1]


def latest_checkpoint(root: str | os.PathLike[str]) -> Path | None:
    """Find the newest complete checkpoint among the folders in a folder.

    Args:
        root: Where checkpoints are saved, each to its own folder.

    Returns:
        The one completed last whose files are all there, whole; None if there is none.
    """
    found = [path.parent for path in Path(root).glob("*/.metadata") if not path.parent.name.endswith(UNFINISHED)]
    for path in sorted(found, key=lambda path: ((path / ".metadata").stat().st_mtime_ns, path.name), reverse=True):
        with contextlib.suppress(CheckpointError):  # cut short by a full disk, or copied in part
            check_files(path, read_metadata(path))
            return path
    return None


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (CheckpointException, *UNREADABLE) as error:  # torch's is no Exception
        if (interrupt := interrupt_in(error)) is not None:
            raise interrupt from error
        raise CheckpointError(message(f"checkpoint {path}", found=str(error), do=ANOTHER)) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """torch warns that one process is one process, and that what a killed job left behind goes."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        warnings.filterwarnings("ignore", message=f"Detected an existing checkpoint in .*{UNFINISHED}")
        yield


def _wait_for_pending() -> None:
    """Wait until what was saved with `wait=False` is written. What went wrong with it is told by its own future."""
    while _PENDING:
        _PENDING.pop().exception()


def _ready_to_save(path: Path, groups: list[dict[str, Any]], extra: dict[str, Any]) -> Tensor:
    """What goes into a checkpoint beside model and state, after a look at whether it can come back."""
    if path.exists():
        raise CheckpointError(message(f"folder {path}", found="already there", do="Save every step to its own"))
    for key, value in extra.items():
        if not _comes_back([], {"": value}):
            found = f"a {type(value).__name__} that could not be loaded again"
            do = "Use numbers, strings, tensors, and lists, tuples and dicts of these"
            raise CheckpointError(message(f"extra[{key!r}]", found=found, do=do))
    groups = _plain(groups)
    for what, both in (("extra", ([], extra)), ("param_groups", (groups, {}))):
        if not _comes_back(*both):
            found = "names or numbers that could not be loaded again"
            raise CheckpointError(message(what, found=found, do="Use plain Python numbers and strings"))
    return packed_extra(groups, extra)


def _comes_back(groups: list[dict[str, Any]], extra: dict[str, Any]) -> bool:
    try:
        unpacked_extra(packed_extra(groups, extra))
    except Exception:  # whatever pickle, or an object of the user's, raises
        return False
    return True


def _plain(value: Any) -> Any:
    """Without numpy's numbers, which a schedule leaves in a group easily and a safe load refuses."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_plain, value))
    return value.item() if type(value).__module__ == "numpy" and hasattr(value, "item") else value


def _checked(path: Path, wanted: dict[str, Any]) -> Tensor:
    """See that a checkpoint is whole and fits; give room for what it holds beside model and state."""
    metadata = read_metadata(path)
    check_keys(path, wanted, metadata)
    check_files(path, metadata)
    return room_for_extra(metadata)


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


def _copied(value: Any) -> Any:
    """Tensors of their own in host memory, in the same layouts; the rest as it is."""
    if isinstance(value, Tensor):
        return value.detach().clone() if value.device.type == "cpu" else value.detach().cpu()
    if isinstance(value, dict):
        return {key: _copied(each) for key, each in value.items()}
    return [_copied(each) for each in value] if isinstance(value, list) else value
