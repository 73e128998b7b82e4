"""What the README shows is what the code prints."""

import re
from pathlib import Path

import pytest
import torch
from benchmarks.results import FOLDER, page
from benchmarks.table import table

import meshmuon
from meshmuon.cli.gpt import GPT, GPTConfig
from meshmuon.cli.outcomes import best_rates
from meshmuon.cli.settings import SIZES

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_routing_table_is_the_one_printed_for_the_model_of_make_train():
    printed = str(meshmuon.Muon(GPT(GPTConfig()), lr=3e-4).plan)
    shown = re.search(r"```\n(route .*?)\n```", README, re.S)
    assert shown is not None
    assert printed.replace("on a CPU, fp32 by oneDNN", "on a CPU").startswith(shown.group(1)), (
        "some processors do better"
    )


@pytest.mark.parametrize("page", ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", (ROOT / page).read_text(encoding="utf-8")):
        assert (ROOT / target).exists(), target


def test_the_ways_to_call_it_work():
    torch.manual_seed(0)
    model = GPT(GPTConfig(width=16, layers=1, heads=2))
    matrices = [p for p in model.parameters() if p.ndim == 2]
    the_rest = [p for p in model.parameters() if p.ndim != 2]
    block = re.search(r"## Ways to call it\n\n```python\n(.*?)```", README, re.S)
    assert block is not None
    source = block.group(1).replace('"*.gate.weight"', '"*.up.weight"')
    names = {"Muon": meshmuon.Muon, "meshmuon": meshmuon, "model": model, "matrices": matrices, "the_rest": the_rest}
    names["matrix"] = matrices[0]
    exec(source, names)
    assert names["direction"].shape == matrices[0].shape
    assert {group["algorithm"] for group in names["groups"]} == {"muon", "adamw"}


def test_the_conversions_of_the_learning_rate_page():
    page = (ROOT / "docs" / "learning-rates.md").read_text(encoding="utf-8")
    calls = re.findall(r"^(convert_lr\(.*?\))\s+# ([\d.]+)", page, re.M)
    assert len(calls) >= 2
    for call, shown in calls:
        assert eval(call, {"convert_lr": meshmuon.convert_lr}) == pytest.approx(float(shown), rel=5e-3)


def test_the_speed_table_is_made_from_the_results():
    assert table() in README


def test_the_code_of_the_qk_clip_page_runs():
    page = (ROOT / "docs" / "qk-clip.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.S)
    assert len(blocks) >= 5
    names = {}
    for block in blocks:
        exec(block, names)
    assert names["opt"].metrics()["qk_max_logit"] > 0 and names["logits"].shape == (4,)


def test_the_page_of_results_is_made_from_the_results():
    assert (FOLDER.parent / "results.md").read_text(encoding="utf-8") == page(FOLDER)


def test_the_default_learning_rates_are_the_best_of_the_sweeps():
    for path in FOLDER.glob("sweep-*.json"):
        size = SIZES[path.stem.removeprefix("sweep-")]
        assert size.lr == best_rates(path), path.name
