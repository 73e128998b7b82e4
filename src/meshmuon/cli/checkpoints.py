"""Checkpoints of `meshmuon train`: torch.distributed.checkpoint, so another number of processes can go on with them.

What is saved is whole tensors in pieces, under the names of parameters: weights, and each optimizer's state, which has
the layout of its parameter. Learning rates are not: they follow from the step.
"""

import json
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

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
    """The latest checkpoint of one run; a new one replaces the old once it is complete.

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
        complete = self._complete()
        return Progress(**json.loads((complete[-1] / "progress.json").read_text())) if complete else None

    def save(self, model: nn.Module, optimizers: Optimizers, progress: Progress) -> None:
        """Write a checkpoint. Every process must call.

        Args:
            model: As it is trained.
            optimizers: Likewise.
            progress: Where the run is.
        """
        unfinished, final = self.folder / "unfinished", self.folder / f"step-{progress.step:07}"
        self._parallel.on_first(lambda: _make_empty(unfinished))
        with _quiet():
            dcp.save(_state(model, optimizers), checkpoint_id=unfinished, no_dist=self._parallel.size == 1)

        def complete() -> None:
            (unfinished / "progress.json").write_text(json.dumps(asdict(progress)))
            _remove(final)  # of a run that went on from an older one
            unfinished.rename(final)  # at once: whoever is killed in between leaves the older one behind
            for other in self._complete():
                if other != final:
                    _remove(other)

        self._parallel.on_first(complete)

    def load(self, model: nn.Module, optimizers: Optimizers) -> None:
        """Take over the latest checkpoint. Every process must call.

        Args:
            model: As it will be trained; written.
            optimizers: Likewise.
        """
        with _quiet():
            state = _state(model, optimizers)
            dcp.load(state, checkpoint_id=self._complete()[-1], no_dist=self._parallel.size == 1)
            set_model_state_dict(model, state["model"])
            groups = get_optimizer_state_dict(model, optimizers.parts)["param_groups"]
            whole = {"state": state["optimizer"], "param_groups": groups}
            set_optimizer_state_dict(model, optimizers.parts, whole)

    def _complete(self) -> list[Path]:
        return sorted(self.folder.glob("step-*"))


def _state(model: nn.Module, optimizers: Optimizers) -> dict[str, Any]:
    state = get_optimizer_state_dict(model, optimizers.parts)
    return {"model": get_model_state_dict(model), "optimizer": state["state"]}


def _make_empty(folder: Path) -> None:
    _remove(folder)
    folder.mkdir(parents=True)


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


@contextmanager
def _quiet() -> Iterator[None]:
    # torch warns about its own use of deprecated names, and that one process is one process.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
