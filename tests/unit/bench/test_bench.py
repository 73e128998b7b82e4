"""What `meshmuon bench` measures with: floors, tables, and the choice of tiles. The clocks need no test."""

import json
import os
import runpy
import subprocess
import sys

import pytest
import torch
from benchmarks import calibrate
from benchmarks.table import table

from meshmuon import orthogonalize
from meshmuon.bench import polar, steps, tune
from meshmuon.bench.measure import measure_ceilings
from meshmuon.bench.workloads import CPU, GPU, STACKS, Ceilings, Stack, floor_ms, polar_floor_ms, stacks
from meshmuon.kernels import configs
from meshmuon.kernels.configs import TileConfig, as_row, choose_config, read_tiles
from meshmuon.plan.hardware import known_hardware
from meshmuon.plan.models import known_model

H200 = Ceilings(flops=750e12, bandwidth=4.27e12)


def test_floors_are_those_of_the_published_table():
    # batch x m x n → ms at 750 TFLOP/s, products alone.
    table = {"16x768x768": 0.19, "8x2048x8192": 3.48, "4x4096x14336": 12.8, "64x1408x2048": 5.4, "1x8192x8192": 14.7}
    products_only = Ceilings(H200.flops, float("inf"))
    for stack in STACKS:
        if stack.name in table:
            expected = table.pop(stack.name)
            assert polar_floor_ms(stack, products_only, itemsize=2) == pytest.approx(expected, rel=0.05)
    assert not table
    assert floor_ms(GPU["llama-1b"], H200) == pytest.approx(34, rel=0.03)
    assert polar_floor_ms(Stack(1, 8, 8), Ceilings(float("inf"), 256e3), itemsize=2) == pytest.approx(1.0)


def test_qwen_is_its_model():
    matrices = [shape for name, shape in known_model("qwen2-0.5b").items() if "layers" in name and len(shape) == 2]
    assert sorted(GPU["qwen2-0.5b"]) == sorted(matrices)


def test_a_cpu_gets_smaller_stacks_each_once():
    assert len(stacks("full")) == 11 and len(stacks("small")) == len(set(stacks("small"))) == 11
    assert max(stack.n for stack in stacks("small")) <= 2048 and len(stacks("quick")) == 3


def test_both_sides_of_the_polar_table_compute_the_same_thing():
    x = torch.randn(2, 24, 40, generator=torch.Generator().manual_seed(0))
    ours = orthogonalize(x, coefficients="keller", dtype="bfloat16", form="standard")[-1]
    theirs = polar.torch_polar(x.clone()).float()
    assert float((ours - theirs).norm() / theirs.norm()) < 5e-2, "bf16 in two orders"
    assert float((ours + theirs).norm() / theirs.norm()) > 1.9, "the bound can fail"


def test_ceilings_are_rates():
    found = measure_ceilings("cpu", quick=True)
    assert 1e7 < found.flops < 1e14 and 1e7 < found.bandwidth < 1e13


def test_tables_fit_eighty_columns():
    row = {"ms": 1234.56, "least ms": 1.0, "host ms": 123.45, "first ms": 98765.0, "extra GB": 12.34}
    text = steps.gpu_table("llama-8b/4", dict.fromkeys(steps.ON_GPU, row), 100.0)
    for name in CPU:
        text += steps.cpu_table(name, dict.fromkeys(steps.ON_CPU, row))
    assert max(map(len, text.splitlines())) <= 80
    assert "12.35" in text, "x floor"


def test_a_very_slow_optimizer_is_timed_once(monkeypatch):
    steps_taken = []

    class Slow(torch.optim.SGD):
        def step(self, closure=None):
            steps_taken.append(self)

    monkeypatch.setattr(steps, "ON_CPU", {"slow": Slow, "quick": Slow})
    times = iter([5000.0, 10.0, 12.0, 11.0])
    monkeypatch.setattr(steps, "milliseconds", lambda work, device: (work(), next(times))[1])
    rows = steps.on_cpu([(4, 4)], repeats=3)
    assert len(steps_taken) == 6, "a first one of each, which is not timed"
    assert rows["slow"] == {"ms": 5000.0, "least ms": 5000.0, "rounds": 1}
    assert rows["quick"] == {"ms": 11.0, "least ms": 10.0, "rounds": 3}


def test_readers_of_recorded_results_still_work(capsys):
    calibrate.main()
    assert "| llama-1b |" in table() and "llama-1b" in capsys.readouterr().out


def test_forecasts_are_near_the_recorded_steps():
    """Both are numbers on file: whoever renews one of them looks at the other (docs/planning.md says 8 %)."""
    device = known_hardware("h200").calibration
    off = {name: device.seconds(sample.work) / sample.seconds for name, sample in calibrate.step_samples()}
    assert set(off) == set(GPU) and max(abs(ratio - 1) for ratio in off.values()) < 0.08, off


@pytest.mark.parametrize(("module", "part"), [("bench_step", "quick: 6 matrices"), ("bench_polar", "2x24x96")])
def test_scripts_write_what_they_measure(module, part, tmp_path, monkeypatch, capsys):
    path = tmp_path / "out.json"
    monkeypatch.setattr(sys, "argv", [module, "--device", "cpu", "--quick", "--repeats", "1", "--json", str(path)])
    runpy.run_module(f"benchmarks.{module}", run_name="__main__")
    record = json.loads(path.read_text(encoding="utf-8"))
    assert {"date", "hardware", "threads", "torch", "python", "results"} <= record.keys()
    assert any(name.startswith(part) for name in record["results"]) and part in capsys.readouterr().out


TABLE = TileConfig(64, 64, 4, 4, tensor_memory=True)
FASTER, SLOWER, OTHER_BITS, TOO_LARGE = (TileConfig(128, 64, 4, stages) for stages in (2, 3, 4, 5))
MILLISECONDS = {TABLE: 1.0, FASTER: 0.8, SLOWER: 1.2, OTHER_BITS: 0.1}


def best(*others, times=MILLISECONDS):
    ran = []

    def compute(config, x, *, out):
        if config == TOO_LARGE:
            raise RuntimeError("out of resource: shared memory")
        ran.append(config)
        torch.matmul(x, x.mT, out=out)
        return out.add_(1.0) if config == OTHER_BITS else out

    def time_of(work):
        work()
        return times[ran[-1]]

    product = tune.Product(2, 8, 16)
    return tune.best_tiles(
        product, iter([TABLE, *others]), make=lambda p: torch.randn(p.batch, p.m, p.k), time_of=time_of, compute=compute
    )


def test_the_fastest_tiles_with_the_same_bits_win():
    assert best(SLOWER, OTHER_BITS, TOO_LARGE, FASTER) == tune.Best(FASTER, 0.8, 1.0, 2)


def test_the_table_is_kept_where_others_are_not_clearly_faster():
    assert best(SLOWER).config == TABLE
    assert best(FASTER, times={**MILLISECONDS, FASTER: 0.99}).config == TABLE


def test_candidates_begin_with_the_table_and_keep_what_decides_bits():
    product = tune.Product(8, 2048, 8192)
    tried = list(tune.candidates("hopper", product))
    assert tried[0] == choose_config("hopper", 8, 2048, 8192, torch.float16)
    assert len(tried) == len(set(tried)) > 10 and {config.block_k for config in tried} == {64}
    assert tune.Product(16, 768, 768) in tune.products() and product in tune.products()


def record(architecture="hopper", gpu="NVIDIA H200", batch=8, config=FASTER):
    return {"gpu": gpu, "architecture": architecture, "rows": [as_row(2048, 8192, batch, config)]}


@pytest.fixture
def tiles_file(tmp_path, monkeypatch):
    def use(content):
        path = tmp_path / "tiles.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
        monkeypatch.setenv(configs.VARIABLE, str(path))
        forget()

    def forget():
        configs.tuned_tiles.cache_clear()
        choose_config.cache_clear()

    yield use
    monkeypatch.delenv(configs.VARIABLE, raising=False)
    forget()


def test_a_file_of_tiles_is_used_for_its_shapes_alone(tiles_file):
    usual = choose_config("hopper", 8, 2048, 8192, torch.float16)
    others = [choose_config("hopper", *shape, torch.float16) for shape in ((4, 2048, 8192), (8, 2048, 2048))]
    tiles_file(record())
    assert choose_config("hopper", 8, 2048, 8192, torch.float16) == FASTER != usual
    assert [choose_config("hopper", *s, torch.float16) for s in ((4, 2048, 8192), (8, 2048, 2048))] == others
    assert choose_config("hopper", 8, 2048, 8192, torch.float32) != FASTER
    tiles_file(record("ampere", batch=None))
    assert {choose_config("ampere", batch, 2048, 8192, torch.float16) for batch in (1, 5, 64)} == {FASTER}


@pytest.mark.parametrize("content", ["no JSON", "[]", "{}", json.dumps({"gpu": "x", "architecture": "hopper"})])
def test_a_file_that_is_no_table_is_refused(tiles_file, content):
    tiles_file(content)
    with pytest.raises(ValueError, match=rf"{configs.VARIABLE}=.*tiles\.json.*bench --tune"):
        choose_config("hopper", 8, 2048, 8192, torch.float16)


def test_a_file_that_does_not_exist_is_refused(tiles_file, monkeypatch):
    tiles_file(record())
    monkeypatch.setenv(configs.VARIABLE, "/no/such/file.json")
    with pytest.raises(ValueError, match=r"FileNotFoundError.*unset"):
        choose_config("hopper", 8, 2048, 8192, torch.float16)


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (record(gpu="NVIDIA A100"), "measured on NVIDIA A100, but this is NVIDIA H200"),
        (record("volta"), "architecture 'volta'"),
        (record(config=TileConfig(128, 32, 4, 3)), "block_k 32 for 2048x8192, which changes bits"),
        (record("ampere", batch=8), "a row for batch 8 on ampere"),
    ],
)
def test_tiles_that_would_be_wrong_here_are_refused(content, found):
    with pytest.raises(ValueError, match=found):
        read_tiles(content, source="tiles.json", gpu="NVIDIA H200")


def test_host_time_of_a_rank_of_many_can_be_measured():
    """It reaches into the step to take the polar factors off, and has come apart from it before."""
    command = [sys.executable, "-m", "benchmarks.host_time", "--ranks", "8", "--steps", "1"]
    result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1].split()[0] == "8"
