"""`meshmuon bench`: a real run on tiny matrices, its record and its chart; what it says when something is wrong."""

import datetime
import json

import pytest
import torch
from typer.testing import CliRunner

from meshmuon.bench import measure, tune
from meshmuon.bench.steps import ON_CPU
from meshmuon.cli import bench
from meshmuon.cli.bench_plot import polar_times, step_times
from meshmuon.cli.main import build_app
from meshmuon.kernels.configs import TileConfig, as_row, read_tiles


def run(*arguments):
    return CliRunner().invoke(build_app(), ["bench", *arguments])


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    result = run(
        "--quick", "--device", "cpu", "--json", "--out", str(folder / "r.json"), "--plot", str(folder / "r.png")
    )
    assert result.exit_code == 0, result.output
    return result, folder


def test_the_record_says_what_when_and_on_what(quick):
    result, folder = quick
    record = json.loads(result.stdout)
    assert record == json.loads((folder / "r.json").read_text(encoding="utf-8"))
    assert record["date"] == str(datetime.date.today()) and record["torch"] == torch.__version__
    assert {"hardware", "threads", "python", "meshmuon"} <= record.keys()


def test_every_number_is_there_and_positive(quick):
    record = json.loads(quick[0].stdout)
    assert record["results"].pop("ceilings")["bf16 in fp32 products"] > 0
    (step,) = record["results"].values()
    assert set(step) == set(ON_CPU)
    assert all(row["ms"] >= row["least ms"] > 0 for row in step.values())
    ceilings = record["polar"].pop("ceilings")
    assert ceilings["flops"] > 0 and ceilings["bandwidth"] > 0 and len(record["polar"]) == 3
    for row in record["polar"].values():
        assert row["meshmuon"]["ms"] > 0 and row["floor ms"] > 0 and row["torch.optim.Muon"]["ms"] > 0
        assert row["reason"].startswith("on a CPU")


def test_tables_and_progress_go_beside_the_record(quick):
    text = quick[0].stderr
    assert "step 1/1" in text and "x torch" in text and "ceilings" in text
    assert max(len(line) for line in text.splitlines() if "/" not in line) <= 80 and "\x1b" not in text


def test_the_chart_is_a_picture_of_the_record(quick):
    result, folder = quick
    assert (folder / "r.png").read_bytes().startswith(b"\x89PNG")
    record = json.loads(result.stdout)
    assert [len(row) for row in step_times(record).values()] == [len(ON_CPU)]
    assert [set(row) for row in polar_times(record).values()] == [{"meshmuon", "torch.optim.Muon", "floor"}] * 3
    on_gpu = {"results": {"ceilings": {}, "gpt2": {"floor ms": 1.0, "optimizers": {"a": {"ms": 2.0}}}}}
    assert step_times(on_gpu) == {"gpt2": {"a": 2.0}}


def test_one_part_alone():
    result = run("polar", "--quick", "--device", "cpu", "--only", "24x96")
    assert result.exit_code == 0 and "2x24x96" in result.stdout
    assert "1x32x32" not in result.stdout and "optimizer" not in result.stdout


@pytest.mark.parametrize(
    ("arguments", "found", "remedy"),
    [
        (["--quick", "--device", "cpu", "--only", "gpt5"], "nothing has 'gpt5'", "Leave it out"),
        (["--quick", "--device", "gpu"], "unknown word 'gpu'", "Choose from auto, cpu, cuda"),
        (["steps", "--quick"], "unknown word 'steps'", "Did you mean step?"),
        (["--quick", "--out", "/no/such/folder/x.json"], "cannot write", "folder that exists"),
        (["--quick", "--plot", "/no/such/folder/x.png"], "cannot write", "folder that exists"),
    ],
)
def test_bad_input_is_one_line_with_a_remedy(arguments, found, remedy):
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    last = result.stderr.splitlines()[-1]
    assert last.startswith("meshmuon bench: ") and found in last and remedy in last and "Traceback" not in result.stderr


def test_a_chart_without_matplotlib_is_refused_before_anything_is_measured(monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "find_spec", lambda name: None)
    result = run("--quick", "--plot", str(tmp_path / "x.png"))
    assert result.exit_code == 2 and "pip install 'meshmuon[train]'" in result.stderr and result.stdout == ""


def test_out_of_memory_is_one_line(monkeypatch):
    def too_much(*_, **__):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 byte")

    monkeypatch.setattr(measure, "circumstances", too_much)
    result = run("--quick")
    assert result.exit_code == 1 and "out of memory" in result.stderr and "--quick" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "found"), [(["--tune", "tiles.json"], "no GPU"), (["--device", "cuda"], "no GPU")]
)
def test_without_a_gpu_the_reason_is_one_line(arguments, found, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = run(*arguments)
    assert result.exit_code == 2 and found in result.stderr and result.stderr.count("\n") == 1
    assert not (tmp_path / "tiles.json").exists()


def test_tune_writes_a_file_that_can_be_loaded(monkeypatch, tmp_path):
    config = TileConfig(128, 64, 4, 3, tensor_memory=True)

    def measured(*, say):
        say("8x2048x8192: 0.500 ms -> 0.480 ms")
        return {"gpu": "NVIDIA H200", "architecture": "hopper", "rows": [as_row(2048, 8192, 8, config)]}

    monkeypatch.setattr(tune, "run_tune", measured)
    result = run("--tune", str(tmp_path / "tiles.json"))
    assert result.exit_code == 0 and "MESHMUON_TILES=" in result.stdout
    record = json.loads((tmp_path / "tiles.json").read_text(encoding="utf-8"))
    assert read_tiles(record, source="file", gpu="NVIDIA H200") == {("hopper", 2048, 8192): {8: config}}
