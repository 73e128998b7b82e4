"""`meshmuon doctor`: green on this installation, red as soon as a kernel, a set, a rank or a checkpoint is wrong."""

import json
import re
import resource
import subprocess
import sys

import pytest
import torch
from tests.unit.cli import sabotage
from typer.testing import CliRunner

from meshmuon.cli.main import build_app
from meshmuon.kernels import self_check
from meshmuon.kernels.dispatch import Dispatch
from meshmuon.testing import RankError, health, processor

# Passes the check of no coefficient set: small singular values come out negative.
FLIPS_A_SIGN = ((-3.0, 6.0, -2.0),) * 5


@pytest.fixture(scope="module")
def healthy():
    """One real run, as a user starts it, and the seconds of processor time it took."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-m", "meshmuon", "doctor"], capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return done, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_this_installation_is_sound(healthy):
    done, seconds = healthy
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FAIL" not in done.stdout and re.search(r"all \d+ ok, \d+ s", done.stdout)
    assert seconds < 2 * 60, "a minute on two cores"


def test_every_check_leaves_a_line(healthy):
    lines = [line for line in healthy[0].stdout.splitlines() if line.startswith("[ ok ]")]
    for name in (
        "versions",
        "CPU",
        "GPU",
        "kernels on cpu",
        *(f"coefficients {name}" for name in ("polar_express", "keller", "you")),
        "bf16 on CPU",
        "FSDP2 on 2 processes",
        "tensor parallel on 2 processes",
        "checkpoint 2 -> 1 -> 2",
    ):
        assert any(line.startswith(f"[ ok ] {name}: ") for line in lines), name
    text = " ".join(healthy[0].stdout.split())
    assert f"torch {torch.__version__}" in text and "bit for bit" in text and "products by torch" in text


def test_a_pipe_gets_no_colour_and_eighty_columns(healthy):
    assert "\x1b" not in healthy[0].stdout and healthy[0].stderr == ""
    assert max(map(len, healthy[0].stdout.splitlines())) <= 80


def examine(monkeypatch, *checks):
    monkeypatch.setattr(health, "CHECKS", {name: health.CHECKS[name] for name in checks})
    result = CliRunner().invoke(build_app(), ["doctor", "--json"])
    return result, {finding["name"]: finding for finding in json.loads(result.stdout)["findings"]}


def is_red(finding, words):
    return not finding["ok"] and words in finding["detail"] and finding["remedy"]


def test_a_wrong_rank_and_a_wrong_checkpoint_are_red(monkeypatch):
    monkeypatch.setattr(health, "exactness", sabotage.uneven_gradient)
    monkeypatch.setattr(health, "begin", sabotage.forgotten_momentum)
    result, found = examine(monkeypatch, "layouts", "checkpoints")
    assert result.exit_code == 1 and not json.loads(result.stdout)["ok"]
    for name in ("FSDP2 on 2 processes", "tensor parallel on 2 processes"):
        assert is_red(found[name], "differ from one process, first up.weight")
    assert is_red(found["checkpoint 2 -> 1 -> 2"], "down.weight")


def test_ranks_that_fail_are_red_with_their_traceback(monkeypatch):
    class Broken:
        def run(self, *_):
            raise RankError("rank 1:\nTraceback (most recent call last):\nRuntimeError: the wire is cut")

    monkeypatch.setattr(health.Site, "pool", Broken())
    result, found = examine(monkeypatch, "versions", "layouts")
    assert result.exit_code == 1 and found["versions"]["ok"]
    assert is_red(found["layouts"], "raised RankError: RuntimeError: the wire is cut")
    assert "most recent call last" in found["layouts"]["traceback"]


def test_a_kernel_that_is_off_is_red(monkeypatch):
    kernels = {
        "right": lambda device, dtype: (torch.ones(3), torch.ones(3)),
        "wrong": lambda device, dtype: (torch.ones(3), torch.ones(3) * 1.01),
        "nan": lambda device, dtype: (torch.full((3,), float("nan")), torch.ones(3)),
    }
    monkeypatch.setattr(health, "KERNELS", kernels)
    monkeypatch.setattr(self_check, "CHECKS", kernels)
    monkeypatch.setattr(health, "choose_kernels", lambda *_, **__: Dispatch("triton", True, "for this test"))
    result, found = examine(monkeypatch, "kernels")
    assert result.exit_code == 1 and "for this test" in found["kernels on cpu"]["detail"]
    assert found["kernel right"]["ok"]
    assert is_red(found["kernel wrong"], "off by") and is_red(found["kernel nan"], "off by nan")
    assert 'kernels="torch"' in found["kernel wrong"]["remedy"]


def test_small_matrices_are_told_of_in_their_own_dtype(monkeypatch):
    asked = {}

    def choose(choice, *, m, dtype, **_):
        asked[m] = dtype
        return Dispatch("torch", False, str(dtype))

    monkeypatch.setattr(health, "devices", lambda: [torch.device("cuda", 0)])
    monkeypatch.setattr(health.clusters, "is_available", lambda *_: False)
    monkeypatch.setattr(health, "choose_kernels", choose)
    assert len(list(health.kernels(None))) == 2
    assert asked == {128: torch.float32, 768: torch.float16, 4096: torch.float16}


def test_a_set_that_flips_a_sign_is_red(monkeypatch):
    monkeypatch.setattr(health, "SETS", ("keller", FLIPS_A_SIGN))
    result, found = examine(monkeypatch, "coefficients")
    assert result.exit_code == 1 and found["coefficients keller"]["ok"]
    assert is_red(found["coefficients"], "the update would flip its sign")


@pytest.mark.parametrize("change", [lambda x: -x, lambda x: x * 1.001, lambda x: x * float("nan")])
def test_an_orthogonalization_that_is_off_is_red(monkeypatch, change):
    right = health.orthogonalize
    monkeypatch.setattr(health, "orthogonalize", lambda x, **more: change(right(x, **more)))
    result, found = examine(monkeypatch, "coefficients")
    assert result.exit_code == 1 and all(is_red(finding, "singular values") for finding in found.values())


def test_an_old_torch_is_red_on_a_line_of_its_own(monkeypatch):
    monkeypatch.setattr(health.torch, "__version__", "2.4.1")
    monkeypatch.setattr(health, "CHECKS", {"versions": health.versions})
    result = CliRunner().invoke(build_app(), ["doctor"])
    assert result.exit_code == 1
    assert "[FAIL] versions" in result.output and "do: pip install -U 'torch>=2.11'" in result.output
    assert "1 of 1 FAILED" in result.output


@pytest.mark.parametrize(("slow", "words"), [(torch.bfloat16, "2.0x slower"), (torch.float32, "2.0x faster")])
def test_what_bf16_costs_or_would_bring_on_this_cpu(monkeypatch, slow, words):
    monkeypatch.setattr(processor, "_seconds", lambda x: 2.0 if x.dtype == slow else 1.0)
    result, found = examine(monkeypatch, "bf16")
    detail = found["bf16 on CPU"]["detail"]
    assert result.exit_code == 0 and words in detail and "fp32" in detail
    assert ('dtype="bfloat16"' in detail) == ("faster" in words)
