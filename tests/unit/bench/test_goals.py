"""`python -m benchmarks.goals` judges what was measured; what was not measured is never called met."""

import copy
import json
import re
import runpy
import sys

import pytest
from benchmarks import first_step, goals

from meshmuon.bench.steps import OURS
from meshmuon.bench.workloads import QUICK


def workload(ms, *, floor, torch_ms, extra):
    optimizers = {OURS: {"ms": ms, "extra GB": extra}, "torch.optim.Muon": {"ms": torch_ms}}
    return {"floor ms": floor, "optimizers": optimizers}


def accuracy_row(shape, name, coefficients, *, default=0.1, fp32=0.095, sigma=1.2, wide=1e-3, half=2e-3):
    apart = {"gram - standard (fp32)": wide, "gram - standard (fp16)": half}
    return {
        "shape": shape,
        "input": name,
        "set": coefficients,
        "default": default,
        "fp32": fp32,
        "sigma": sigma,
        **apart,
    }


SIDES = (256, 512, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 16384)
RECORDS = {
    "step.json": {
        "results": {
            "gpt2-124m": workload(1.4, floor=1.0, torch_ms=20.0, extra=0.4),
            "llama-1b": workload(1.2, floor=1.0, torch_ms=3.0, extra=0.4),
            "llama-8b/4": workload(1.2, floor=1.0, torch_ms=3.0, extra=0.4),
            "moe 4x64": workload(1.2, floor=1.0, torch_ms=4.0, extra=1.05),
        }
    },
    "first-step.json": {"results": {"empty cache": {"first s": 9.0}}},
    "products.json": {"results": {f"1x{side}x{side}": {"ms": 1.0, "cuBLAS ms": 1.5} for side in SIDES}},
    "accuracy.json": {
        "rows": [
            accuracy_row("8192x8192", "gaussian", "polar_express 5"),
            accuracy_row("1024x1024", "low rank m/8", "you 5", half=0.3),  # only Gaussians are asked for in half
            accuracy_row("1024x1024", "rank 1", "keller 5", default=0.9),  # reported
            accuracy_row("1024x1024", "power law 1e3", "polar_express 10", default=0.9, wide=0.1),  # not of five steps
        ]
    },
    "options.json": {
        "results": {
            name: {"default": {"ms": 1.1}, "layout_invariant": {"ms": 1.04}, "default again": {"ms": 1.0}}
            for name in ("gpt2-124m", "llama-1b", "llama-8b/4", "moe 4x64")
        }
    },
    "training.json": {
        "results": {
            f"{size}, 524288 tokens": {
                OURS: {"training step ms": 102.0, "training step with equal weights ms": 100.5},
                "AdamW (fused)": {"training step ms": 100.0, "training step with equal weights ms": 100.0},
            }
            for size in ("124m", "0.5b")
        }
    },
}


@pytest.fixture
def folder(tmp_path):
    for name, record in RECORDS.items():
        (tmp_path / name).write_text(json.dumps(record))
    counts = 'errors="0" failures="0" skipped="0" tests="417" time="1.5"'
    (tmp_path / "tests.xml").write_text(f'<testsuites><testsuite name="pytest" {counts}/></testsuites>')
    return tmp_path


def judged(folder, capsys):
    code = goals.main([str(folder), "--judge"])
    return code, capsys.readouterr().out


def test_all_goals_met(folder, capsys):
    code, out = judged(folder, capsys)
    assert code == 0 and "MISSED" not in out and "not measured" not in out
    count = sum(len(part.goals) for part in goals.PARTS.values())
    assert out.rstrip().endswith(f"{count} of {count} goals met")


SPOILED = {
    "moe 4x64: step, x floor": ("step.json", ("moe 4x64", "floor ms"), 0.9),
    "llama-1b: torch.optim.Muon / ours": ("step.json", ("llama-1b", "optimizers", "torch.optim.Muon", "ms"), 2.5),
    "gpt2-124m: extra memory, GB": ("step.json", ("gpt2-124m", "optimizers", OURS, "extra GB"), 1.2),
    "llama-1b: first step, empty cache, s": ("first-step.json", ("empty cache", "first s"), 11.0),
    "X·Xᵀ of 512x512: cuBLAS / ours": ("products.json", ("1x512x512", "ms"), 1.3),
    "X·Xᵀ of 4096x4096: cuBLAS / ours": ("products.json", ("1x4096x4096", "ms"), 1.1),
    "moe 4x64: layout_invariant=True costs, %": ("options.json", ("moe 4x64", "layout_invariant", "ms"), 1.06),
    "training step of 0.5b, 524288 tokens": ("training.json", ("0.5b, 524288 tokens", OURS, "training step ms"), 103.0),
}


@pytest.mark.parametrize("goal", SPOILED)
def test_each_bound_can_be_missed(goal, folder, capsys):
    name, path, value = SPOILED[goal]
    record = copy.deepcopy(RECORDS[name])
    row = record["results"]
    for key in path[:-1]:
        row = row[key]
    row[path[-1]] = value
    (folder / name).write_text(json.dumps(record))
    code, out = judged(folder, capsys)
    assert code == 1
    assert [line.startswith(goal) for line in out.splitlines() if line.endswith("MISSED")] == [True]


@pytest.mark.parametrize(
    ("row", "key", "value"),
    [
        (0, "default", 0.2),
        (3, "sigma", float("nan")),
        (0, "sigma", 1.4),
        (0, "gram - standard (fp16)", 6e-3),
        (2, "gram - standard (fp32)", 6e-3),
    ],
)
def test_accuracy_is_judged_where_it_is_promised(row, key, value, folder, capsys):
    record = copy.deepcopy(RECORDS["accuracy.json"])
    record["rows"][row][key] = value
    (folder / "accuracy.json").write_text(json.dumps(record))
    code, out = judged(folder, capsys)
    assert code == 1 and out.count("MISSED") == 1


def test_a_failed_or_skipped_test_is_a_missed_goal(folder, capsys):
    text = (folder / "tests.xml").read_text()
    (folder / "tests.xml").write_text(text.replace('skipped="0"', 'skipped="1"'))
    code, out = judged(folder, capsys)
    assert code == 1 and out.count("MISSED") == 1


@pytest.mark.parametrize("left", ["", "{}", "<testsuites/>", "<testsuites><testsuite/></testsuites>"])
@pytest.mark.parametrize("name", [*RECORDS, "tests.xml"])
def test_what_is_not_there_was_not_measured(name, left, folder, capsys):
    (folder / name).write_text(left)  # by a part that was killed, or by something else
    code, out = judged(folder, capsys)
    part = next(part for part in goals.PARTS.values() if part.record == name)
    assert code == 1 and out.count("not measured") == len(part.goals) and "MISSED" not in out


def test_a_part_is_run_and_its_old_record_is_not_kept(folder, capsys, monkeypatch):
    ran = []
    monkeypatch.setattr(goals.subprocess, "run", lambda command, **_: ran.append(command))
    assert goals.main([str(folder), "--parts", "first"]) == 1
    assert [command[1:] for command in ran] == [["-m", "benchmarks.first_step", "--json", f"{folder}/first-step.json"]]
    assert capsys.readouterr().out.count("not measured") == 1


def test_commands_are_those_of_this_folder(monkeypatch, capsys):
    for part in goals.PARTS.values():
        module, *options = part.command
        if module == "pytest":
            continue
        monkeypatch.setattr(sys, "argv", [module, "--help"])
        monkeypatch.delitem(sys.modules, module, raising=False)
        with pytest.raises(SystemExit, match="0"):
            runpy.run_module(module, run_name="__main__")
        known = capsys.readouterr().out
        assert all(re.search(rf"{option}\b", known) for option in options if option.startswith("--"))


def test_a_first_step_is_measured_in_processes_of_their_own(tmp_path, monkeypatch, capsys):
    path = tmp_path / "first.json"
    command = ["first_step", "--workload", next(iter(QUICK)), "--device", "cpu", "--json", str(path)]
    monkeypatch.setattr(sys, "argv", command)
    first_step.main()
    results = json.loads(path.read_text())["results"]
    assert list(results) == ["empty cache", "later process"] and capsys.readouterr().out.count("first step") == 2
    assert all(row["first s"] > row["second s"] > 0 for row in results.values())
