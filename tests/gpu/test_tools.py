"""The commands on a GPU: quick runs of the benchmarks, one tuned product, and the doctor's look at the kernels."""

import importlib.util
import itertools

import pytest
import torch

from meshmuon.bench import tune
from meshmuon.bench.polar import run_polar
from meshmuon.bench.steps import ON_GPU, run_steps
from meshmuon.kernels.configs import architecture_of
from meshmuon.testing import health

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
]


def test_steps_are_measured():
    said = []
    results = run_steps("cuda", say=said.append, repeats=1, size="quick")
    assert results.pop("ceilings")["flops"] > 0
    (row,) = results.values()
    assert set(row["optimizers"]) == set(ON_GPU) and row["floor ms"] > 0
    assert all(numbers["ms"] > 0 and numbers["extra GB"] >= 0 for numbers in row["optimizers"].values())
    assert max(len(line) for text in said for line in text.splitlines()) <= 80


def test_polar_factors_are_measured():
    results = run_polar("cuda", say=lambda _: None, repeats=1, size="quick")
    assert len(results) == 4 and all(row["meshmuon"]["ms"] > 0 for name, row in results.items() if name != "ceilings")


def test_one_product_is_tuned():
    architecture = architecture_of(torch.device("cuda", torch.cuda.current_device()))
    product = tune.Product(4, 512, 1024)
    configs = itertools.islice(tune.candidates(architecture, product), 4)
    best = tune.best_tiles(product, configs, make=tune._operand, time_of=tune.event_ms)
    assert 0 < best.ms <= best.before and best.refused < 3


def test_the_doctor_finds_kernels_and_sets_sound():
    site = health.Site()
    findings = [finding for name in ("kernels", "coefficients") for finding in health.examine(site, name)]
    assert [finding for finding in findings if not finding.ok] == []
    assert any(finding.name == "kernels on cuda" for finding in findings)
