"""Checkpoints of `meshmuon train`: the latest of each run, which another number of processes can go on with."""

import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from torch import nn

from meshmuon import checkpoint_extra, latest_checkpoint, load_checkpoint, save_checkpoint
from meshmuon.cli.optimizers import Optimizers
from meshmuon.cli.parallel import ALONE, Parallel


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where a run is.

    Attributes:
        step: Steps done.
        elapsed: Seconds of training.
        first_loss: Validation loss before the first step.
    """

    step: int
    elapsed: float
    first_loss: float


class Checkpoints:
    """The latest checkpoint of one run; the older ones go once it is complete.

    Args:
        folder: Of this run alone.
        parallel: The processes that save and load together.
    """

    def __init__(self, folder: Path, parallel: Parallel = ALONE) -> None:
        self.folder = folder
        self._parallel = parallel

    def latest(self) -> Progress | None:
        """Look where the run was.

        Returns:
            Its progress at the last complete checkpoint, or None.
        """
        found = latest_checkpoint(self.folder)
        return None if found is None else Progress(**checkpoint_extra(found))

    def save(self, model: nn.Module, optimizers: Optimizers, progress: Progress) -> None:
        """Write a checkpoint. Every process must call.

        Args:
            model: As it is trained.
            optimizers: Likewise.
            progress: Where the run is.
        """
        folder = self.folder / f"step-{progress.step:07}"
        if folder.exists():  # resumed after its last step
            return
        save_checkpoint(folder, model, optimizers.parts, extra=asdict(progress))
        self._parallel.on_first(lambda: self._remove_all_but(folder))

    def load(self, model: nn.Module, optimizers: Optimizers) -> None:
        """Take over the latest checkpoint. Every process must call.

        Args:
            model: As it will be trained; written.
            optimizers: Likewise.
        """
        found = latest_checkpoint(self.folder)
        assert found is not None, "asked for by `latest`"
        load_checkpoint(found, model, optimizers.parts)

    def _remove_all_but(self, kept: Path) -> None:
        for other in self.folder.iterdir():
            if other != kept:
                shutil.rmtree(other)
