"""`meshmuon plan`: golden outputs, user models, and what it says when something is wrong.

To renew the golden files after a wanted change, then read the diff:
MESHMUON_RENEW_GOLDEN=1 python -m pytest tests/unit/cli/test_plan.py
"""

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from meshmuon import planner
from meshmuon.cli.main import build_app
from meshmuon.plan.models import EXPERTS_PER_TOKEN, MODELS

GOLDEN = Path(__file__).with_name("golden")
HERE = "tests.unit.cli.factories"
CASES = {
    "gpt2-one": ["--shapes", "gpt2"],
    "gpt2-dp64-tp8": ["--shapes", "gpt2", "--mesh", "dp=64,tp=8"],
    "llama-3-8b-one": ["--shapes", "llama-3-8b"],
    "llama-3-8b-dp64-tp8": ["--shapes", "llama-3-8b", "--mesh", "dp=64,tp=8"],
}


def run(*arguments):
    return CliRunner().invoke(build_app(), ["plan", *arguments])


def planned(*arguments):
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize("case", CASES)
def test_golden_output(case):
    path = GOLDEN / f"plan-{case}.txt"
    text = planned(*CASES[case])
    if os.environ.get("MESHMUON_RENEW_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


def test_the_page_shows_what_is_printed():
    page = (Path(__file__).parents[3] / "docs" / "commands.md").read_text(encoding="utf-8")
    printed = (GOLDEN / "plan-llama-3-8b-dp64-tp8.txt").read_text(encoding="utf-8")
    shown = [block for block in page.split("```\n") if block.startswith(("ROUTING", "MEMORY"))]
    assert len(shown) == 2 and all(block.strip() in printed for block in shown)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("mesh", ["dp=8,ep=8", "dp_replicate=2,fsdp=8,tp=4"])
def test_every_known_model_fits_eighty_columns_without_colour(model, mesh):
    text = planned("--shapes", model, "--mesh", mesh)
    assert max(map(len, text.splitlines())) <= 80
    assert "\x1b" not in text
    assert "unknown" not in text, "the training step is estimated for all of them"


def test_json_says_what_the_planner_says():
    record = json.loads(planned("--shapes", "llama-3-8b", "--mesh", "dp=64,tp=8", "--gpu", "h100", "--json"))
    forecast = planner.plan_for("llama-3-8b", {"dp": 64, "tp": 8}, {"dp": "shard0", "tp": "tensor"}, "h100")
    route = forecast.route()
    assert (record["ranks"], record["chosen"], record["gpu"]) == (512, forecast.chosen, "h100")
    assert record["routes"][forecast.chosen]["ms"] == route.ms
    assert tuple(record["routes"][forecast.chosen]["bytes sent"]) == route.bytes_sent.each
    assert sum(row["count"] for row in record["routing"] if row["algorithm"] == "muon") == forecast.matrices
    tokens = 6 * forecast.parameters * 16384 / (0.6 * forecast.hardware.calibration.rates[0])
    assert record["training step"]["ms"] == pytest.approx(1e3 * tokens)


def test_bars_tell_who_waits():
    text = planned("--shapes", "gpt2", "--mesh", "dp=64,tp=8")
    bars = [line for line in text.splitlines() if "█" in line or "idle" in line]
    assert len(bars) == 16 and bars[0].split()[0] == "0-31" and bars[-1].endswith("idle")
    assert len([line for line in planned("--shapes", "gpt2", "--mesh", "dp=3").splitlines() if "█" in line]) == 3


def test_loads_in_fp32_are_said_to_count_more():
    remark = "those of small matrices, in fp32, count more"
    assert remark in planned("--shapes", "qwen2-0.5b", "--mesh", "dp=2"), "it has 128x896"
    assert remark not in planned("--shapes", "gpt2", "--mesh", "dp=2")


@pytest.mark.parametrize("name", ["build", "Net"])
def test_a_model_of_the_user_is_built_without_memory(name):
    text = planned(f"{HERE}:{name}", "--mesh", "fsdp=4")
    assert "hidden matrix (nn.Linear)" in text and "dim 0/4" in text


def test_a_model_larger_than_any_machine():
    assert "1.0 T parameters" in planned(f"{HERE}:far_too_large", "--mesh", "dp=128")


def test_placements_by_name_and_other_axes():
    text = planned("--shapes", "gpt2", "--mesh", "x=4", "--placement", "x=*.c_fc.*:shard1,*:replicate")
    assert "h.*.mlp.c_fc.weight     dim 1/4" in text and "h.*.attn.c_attn.weight  replicated" in text


def test_overrides_have_the_last_word():
    text = planned("--shapes", "gpt2", "--override", "*.c_fc.weight=adamw", "--override", "wpe.weight=muon")
    assert "adamw, override: 28.3 M" in text and "muon, override: 786.4 k" in text
    stack = planned(f"{HERE}:stack", "--override", "w=experts")
    assert "one matrix per leading index" in stack


def test_experts_need_to_be_told_how_many_take_part():
    assert "say --experts-per-token" in planned(f"{HERE}:with_experts")
    assert "the optimizer adds" in planned(f"{HERE}:with_experts", "--experts-per-token", "2")
    assert set(EXPERTS_PER_TOKEN) == {name for name, shapes in MODELS.items() if any("experts." in n for n in shapes())}


@pytest.mark.parametrize(
    ("arguments", "found", "remedy"),
    [
        (["--shapes", "lama-3-8b"], "unknown model 'lama-3-8b'", "Did you mean llama-3-8b?"),
        (["--shapes", "gpt2", "--gpu", "h20"], "unknown word 'h20'", "Did you mean h200?"),
        (["--shapes", "gpt2", "--network", "wifi"], "unknown word 'wifi'", "Choose from infiniband"),
        (["--shapes", "gpt2", "--dtype", "bf16"], "unknown word 'bf16'", "Choose from float32, bfloat16"),
        ([f"{HERE}:stack"], "'w': 3-D", "--override"),
        (["--shapes", "gpt2", "--override", "wte.weight"], "found 'wte.weight'", "Write PATTERN=ROUTE"),
        (["--shapes", "gpt2", "--override", "wte.weight=sgd"], "unknown word 'sgd'", "Choose from muon, adamw"),
        (["--shapes", "gpt2", "--override", "nothing=adamw"], "nothing", "match"),
        ([], "neither a model nor --shapes", "--shapes llama-3-8b"),
        (["a:b", "--shapes", "gpt2"], "both", "Give one of them"),
        (["build"], "found 'build'", "Write pkg.module:build"),
        (["no.such.module:build"], "no module named 'no'", "install it"),
        ([f"{HERE}:bild"], "has no 'bild'", "Did you mean build?"),
        ([f"{HERE}:no_module"], "gave a dict", "must return a torch.nn.Module"),
        ([f"{HERE}:raises"], "raised KeyError", "without arguments"),
        ([f"{HERE}:on_the_cpu"], "ran out of memory", "Leave out device="),
        ([f"{HERE}:no_matrix"], "takes Muon", "overrides="),
        (["--shapes", "gpt2", "--mesh", "dp=8,tq=2"], "unknown axis 'tq'", "Did you mean tp?"),
        (["--shapes", "gpt2", "--mesh", "pp=2"], "pp is no axis", "Plan one stage"),
        (["--shapes", "gpt2", "--mesh", "dp"], "found 'dp'", "Write axis=size"),
        (["--shapes", "gpt2", "--mesh", "dp=2,dp=4"], "twice", "once"),
        (["--shapes", "gpt2", "--mesh", "dp=8,tp=2", "--world-size", "8"], "8 x 2 = 16 ranks", "Make them agree"),
        (["--shapes", "gpt2", "--world-size", "8"], "1 = 1 ranks", "Make them agree"),
        (["--shapes", "gpt2", "--mesh", "dp=8", "--placement", "tp=shard0"], "not in --mesh", "Choose from dp"),
        (["--shapes", "gpt2", "--mesh", "dp=8", "--placement", "dp=cut"], "'cut'", '"shard0"'),
        (["--shapes", "gpt2", "--placement", "dp=shard0"], "without --mesh", "--mesh dp=8"),
    ],
)
def test_bad_input_is_one_line_with_a_remedy(arguments, found, remedy):
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("meshmuon plan: ") and result.stderr.count("\n") == 1
    assert found in result.stderr and remedy in result.stderr and result.stdout == ""


def test_verbose_shows_the_traceback():
    result = run(f"{HERE}:raises", "-v")
    assert result.exit_code == 2 and 'raise KeyError("width")' in result.stderr
    assert result.stderr.splitlines()[-1].startswith("meshmuon plan: ")


def test_a_mistake_of_ours_is_not_blamed_on_the_user(monkeypatch):
    def broken(*_, **__):
        raise AssertionError("unreachable")

    monkeypatch.setattr(planner, "plan_for", broken)
    result = run("--shapes", "gpt2")
    assert result.exit_code == 1 and "unexpected AssertionError" in result.stderr and "report this" in result.stderr
