"""The files of a checkpoint: written whole or not at all, and looked at before anything of them is loaded."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import pickle
import shutil
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from meshmuon.errors import CheckpointError, message, some

UNFINISHED = ".unfinished"
UNREADABLE = (pickle.UnpicklingError, RuntimeError, EOFError, KeyError, ValueError)  # what reading a broken file raises
ANOTHER = "Load another one: latest_checkpoint finds the newest that is complete"
_ITS_MODEL = "Load it into the model it was made of"


class WholeOrNothing(dcp.FileSystemWriter):
    """Writes beside the folder's name. The coordinator gives it the name while all other ranks still wait for it.

    Args:
        folder: The name.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._beside = folder.with_name(folder.name + UNFINISHED)
        self._coordinates = False
        super().__init__(self._beside)

    def prepare_global_plan(self, plans: Any) -> Any:
        """Begin: on the coordinator, when every rank is here and none has written. What a killed job left behind goes.

        Args:
            plans: torch's, of every rank.

        Returns:
            The same, completed.
        """
        self._coordinates = True
        shutil.rmtree(self._beside, ignore_errors=True)
        self._beside.mkdir(parents=True, exist_ok=True)
        return super().prepare_global_plan(plans)

    def finish(self, metadata: Metadata, results: Any) -> None:
        """End: on the coordinator, when every rank has written.

        Args:
            metadata: What was written.
            results: Where, by rank.
        """
        super().finish(metadata, results)
        # A rank may have written to a disk of its own. What torch 2.11 completes is a copy of the metadata: read it.
        check_files(self._beside, read_metadata(self._beside))
        os.replace(self._beside, self._folder)

    @contextlib.contextmanager
    def abandoning(self) -> Iterator[None]:
        """Have what goes wrong told in our words: torch's error is no Exception, and would end a training loop.

        Raises:
            CheckpointError: Says what went wrong on which ranks. An interrupt of any rank stays one.
        """
        try:
            yield
        except (CheckpointException, OSError) as error:
            raise self._abandoned(error) from error

    def told_by(self, saving: Any) -> Future[Any]:
        """Follow a save that is written while training goes on.

        Args:
            saving: torch's future.

        Returns:
            The same, but for what it raises; it is done when everything is cleared away, and nobody can cancel it.
        """
        told: Future[Any] = Future()
        told.set_running_or_notify_cancel()

        def tell(done: Any) -> None:
            try:
                with self.abandoning():
                    told.set_result(done.result())
            except BaseException as error:  # whatever it is, somebody may be waiting
                told.set_exception(error)

        saving.add_done_callback(tell)
        return told

    def _abandoned(self, error: BaseException) -> BaseException:
        """Clear away what could not be finished, on the coordinator, where every rank has said so.

        What a rank that was lost has begun stays: others may still be writing.
        """
        if (interrupt := interrupt_in(error)) is not None:
            return interrupt
        failures = error.failures if isinstance(error, CheckpointException) else {}
        causes = {f"rank {rank}: ": cause for rank, (cause, _) in failures.items()} or {"": error}
        told = some(f"{where}{type(cause).__name__}: {cause}" for where, cause in causes.items())
        only_files = all(isinstance(cause, OSError) for cause in causes.values())
        if only_files and self._coordinates:
            shutil.rmtree(self._beside, ignore_errors=True)
        do = "Make room, or save to where every rank can write" if only_files else "Save again once that is mended"
        found = f"it could not be written: {told}"
        return CheckpointError(message(f"checkpoint {self._folder}", found=found, do=f"{do}; training can go on"))


def interrupt_in(error: BaseException) -> BaseException | None:
    """Find what is no failure of a checkpoint: Ctrl-C on a rank, which torch hands round like any error.

    Args:
        error: What torch raised.

    Returns:
        The first such cause; None if there is none.
    """
    failures = error.failures if isinstance(error, CheckpointException) else {}
    return next((cause for cause, _ in failures.values() if not isinstance(cause, Exception)), None)


def packed_extra(groups: list[dict[str, Any]], extra: dict[str, Any]) -> Tensor:
    """Put what is not a tensor of the model into one tensor of bytes: its size is known before it is loaded.

    Args:
        groups: Hyper-parameters.
        extra: What the user gave.

    Returns:
        uint8.
    """
    file = io.BytesIO()
    torch.save({"param_groups": groups, "extra": extra}, file)
    return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)


def unpacked_extra(packed: Tensor) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Take apart what `packed_extra` made.

    Args:
        packed: Its bytes.

    Returns:
        Hyper-parameters, and what the user gave.
    """
    both = torch.load(io.BytesIO(packed.numpy().tobytes()), weights_only=True)
    return both["param_groups"], both["extra"]


def room_for_extra(metadata: Metadata) -> Tensor:
    """Give memory for what `packed_extra` made.

    Args:
        metadata: What is there.

    Returns:
        uint8, not filled.
    """
    there = metadata.state_dict_metadata["extra"]
    assert isinstance(there, TensorStorageMetadata)
    return torch.empty(there.size, dtype=torch.uint8, device="cpu")


def read_metadata(path: Path) -> Metadata:
    """Read what a checkpoint holds.

    Args:
        path: Its folder.

    Returns:
        torch's own record of it.

    Raises:
        CheckpointError: If it is none, or cannot be read.
    """
    if not (path / ".metadata").is_file():
        found = "no .metadata in it: no checkpoint, or never completed" if path.exists() else "no folder"
        raise CheckpointError(message(f"checkpoint {path}", found=found, do=ANOTHER))
    file = f"file {path / '.metadata'}"
    try:
        metadata = pickle.loads((path / ".metadata").read_bytes())
    except Exception as error:  # a pickle of anything may fail in any way
        raise CheckpointError(message(file, found=f"not readable ({error})", do=ANOTHER)) from error
    if not isinstance(metadata, Metadata) or metadata.storage_data is None:
        found = f"a {type(metadata).__name__}, not that of a checkpoint"
        raise CheckpointError(message(file, found=found, do=ANOTHER))
    return metadata


def fingerprint(path: Path) -> str:
    """Give a few letters that tell one checkpoint from another: equal names on two disks may be two.

    Args:
        path: Its folder.

    Returns:
        Letters and digits.
    """
    return hashlib.sha256((path / ".metadata").read_bytes()).hexdigest()[:12]


def check_keys(path: Path, wanted: dict[str, Any], metadata: Metadata) -> None:
    """Compare names and shapes of what is there with what is needed.

    Args:
        path: The checkpoint.
        wanted: What will be loaded.
        metadata: What is there.

    Raises:
        CheckpointError: Names what is missing, not wanted, or of another shape.
    """
    saved = metadata.state_dict_metadata
    needed, _ = flatten_state_dict(wanted)
    missing = [key for key in (*needed, "extra") if key not in saved]
    unknown = [key for key in saved if key not in needed and key != "extra"]
    for keys, what in ((missing, "has no"), (unknown, "has more than is wanted:")):
        if keys:
            found = f"the checkpoint {what} {some(keys)}"
            raise CheckpointError(message(f"checkpoint {path}", found=found, do=_ITS_MODEL))
    for key, value in needed.items():
        there = saved[key]
        if isinstance(there, TensorStorageMetadata) and tuple(there.size) != tuple(value.shape):
            found = f"{tuple(there.size)} in {path}, here it is {tuple(value.shape)}"
            raise CheckpointError(message(key, found=found, do=_ITS_MODEL))


def check_files(path: Path, metadata: Metadata) -> None:
    """See that every file is there and long enough.

    Args:
        path: The checkpoint.
        metadata: What should be there.

    Raises:
        CheckpointError: Names the first file that is not.
    """
    ends: dict[str, int] = {}
    for where in metadata.storage_data.values():
        ends[where.relative_path] = max(ends.get(where.relative_path, 0), where.offset + where.length)
    for name, end in ends.items():
        file = path / name
        size = file.stat().st_size if file.exists() else None
        if size is None or size < end:
            found = "missing" if size is None else f"{size:,} bytes, it should have {end:,}"
            raise CheckpointError(message(f"file {file}", found=found, do=ANOTHER))
