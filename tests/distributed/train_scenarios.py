"""Training runs that the tests of `meshmuon train --parallel` start, on ranks or alone."""

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from meshmuon.cli import train as train_module
from meshmuon.cli.checkpoints import Checkpoints
from meshmuon.cli.corpus import load_corpus
from meshmuon.cli.main import build_app
from meshmuon.cli.parallel import start_parallel
from meshmuon.cli.records import Finished, Stepped, Validated
from meshmuon.cli.settings import GPTConfig, OptimizerConfig, TrainConfig
from meshmuon.cli.training import train

MODEL = GPTConfig(width=32, layers=2, heads=4, context=32)
STEPS = 8


def config(name="muon"):
    optimizer = OptimizerConfig(name=name, lr=4e-3)
    few = {"batch": 8, "validate_every": 4, "validation_windows": 4, "sample_bytes": 4}
    return TrainConfig(model=MODEL, optimizer=optimizer, steps=STEPS, **few)


def command(arguments):
    """`meshmuon train` with the small model, on this rank: its exit code and what it said."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_module, "preset", lambda size, name, device: config(name))
        patch.setenv("RANK", str(torch.distributed.get_rank()))
        result = CliRunner().invoke(build_app(), ["train", "--device", "cpu", *arguments])
    return result.exit_code, result.output


def losses(mode, name, folder=None, stop_after=None, threads=1):
    """Train, or go on from what lies in the folder; every loss by its kind and step."""
    torch.set_num_threads(threads)
    parallel = start_parallel(mode, "cpu")
    parallel.check(config(name))
    checkpoints = None if folder is None else Checkpoints(Path(folder), parallel)
    seen = {}

    def interrupted():
        return stop_after is not None and ("step", stop_after) in seen

    corpus = load_corpus(Path(torch.__file__), window=MODEL.context + 1)  # any text of some size
    for record in train(config(name), corpus, parallel=parallel, checkpoints=checkpoints, interrupted=interrupted):
        if isinstance(record, Stepped | Validated):
            seen[record.kind, record.step] = record.loss
        elif isinstance(record, Finished):
            seen["sample", record.steps] = record.sample
    return seen
