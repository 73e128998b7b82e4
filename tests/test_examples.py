"""Every script in examples/ runs, and learns what it should."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "examples"
ALONE = ["one_device", "separate_adamw"]
ON_RANKS = ["fsdp_tp", "experts", "plain_shards", "grad_sync"]


def learns(losses):
    return losses[0] > 4.0 and losses[-1] < losses[0] / 3  # ln 64 = 4.16 nats know nothing


def test_all_of_them_are_listed_and_run_here():
    scripts = {path.stem for path in FOLDER.glob("*.py")}
    listed = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert scripts == {*ALONE, *ON_RANKS}
    for name in scripts:
        module = importlib.import_module(f"examples.{name}")
        command = next(line for line in module.__doc__.splitlines() if line.startswith(("python ", "torchrun ")))
        assert f"`{command}`" in listed and command.endswith(f"examples/{name}.py")


@pytest.mark.parametrize("name", ALONE)
def test_on_one_device(name, capsys):
    assert learns(importlib.import_module(f"examples.{name}").main())
    assert "every matrix is whole where it is computed" in capsys.readouterr().out


@pytest.mark.parametrize("name", ON_RANKS)
def test_on_four_ranks(pool, name):
    losses = pool(4).run(importlib.import_module(f"examples.{name}").main)
    assert all(learns(each) for each in losses)
    same_data = {"plain_shards": [{0, 1, 2, 3}], "fsdp_tp": [{0, 1}, {2, 3}]}.get(name, [{0}, {1}, {2}, {3}])
    for together in same_data:
        assert len({tuple(losses[rank]) for rank in together}) == 1
    assert len({tuple(each) for each in losses}) == len(same_data), "ranks see the data they should"


@pytest.mark.slow
def test_under_torchrun():
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*words, str(FOLDER / "grad_sync.py")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "8 states to save" in done.stdout
