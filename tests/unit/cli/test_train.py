"""`meshmuon train`: the command end to end on a few steps, its corpus, and the ways it ends early."""

import hashlib
import json
import math
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import meshmuon
from meshmuon.cli import corpus as corpus_module
from meshmuon.cli import train as train_module
from meshmuon.cli import training as training_module
from meshmuon.cli.checkpoints import Checkpoints
from meshmuon.cli.corpus import Corpus, batch_drawer, load_corpus, spread_windows
from meshmuon.cli.gpt import GPT, generate, next_byte_loss
from meshmuon.cli.main import build_app
from meshmuon.cli.optimizers import Optimizers
from meshmuon.cli.records import Finished, Started, Stepped, Validated
from meshmuon.cli.settings import SIZES, GPTConfig, OptimizerConfig, TrainConfig, preset
from meshmuon.cli.training import train

MODEL = GPTConfig(width=64, layers=2, heads=2, context=32)
MUON = OptimizerConfig(name="muon", lr=4e-3)
CONFIG = TrainConfig(model=MODEL, optimizer=MUON, steps=6, batch=4, validate_every=3, validation_windows=4)


def run(*arguments: str) -> Any:
    def smaller(size: Any, name: Any, device: str) -> TrainConfig:  # these tests run often
        few: dict[str, Any] = {
            "batch": 4,
            "validation_windows": 16,
            "validate_every": 10,
            "sample_bytes": 8,
            "checkpoint_every": 5,
        }
        return replace(preset(size, name, device=device), model=MODEL, **few)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_module, "preset", smaller)
        return CliRunner().invoke(build_app(), ["train", "--device", "cpu", *arguments])


def read_log(path: Path) -> list[dict[str, Any]]:
    # A kill may cut the last line short.
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.endswith("}")]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    # Beside another busy process, threads that wait for each other make these small products ten times slower.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def stdlib() -> Corpus:
    return load_corpus(window=129)


@pytest.fixture
def small_corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    for index in range(40):
        (folder / f"file{index:02}.txt").write_text(f"line {index} of a small corpus\n" * 40)
    return folder


def test_both_optimizers_are_trained_and_compared(tmp_path: Path) -> None:
    result = run("--steps", "20", "--out", str(tmp_path / "run"))
    assert result.exit_code == 0, result.output
    records = read_log(tmp_path / "run" / "log.jsonl")
    for name in ("muon-seed0", "adamw-seed0"):
        own = [r for r in records if r["run"] == name]
        ten = [*["step"] * 10, "validation"]
        assert [r["kind"] for r in own] == ["started", "validation", *ten, *ten, "finished"]
        assert [r["step"] for r in own if r["kind"] == "step"] == list(range(1, 21))
        # An untrained model knows nothing: about ln 256 nats for each byte.
        assert own[-1]["first_loss"] == pytest.approx(math.log(256), abs=0.3)
        assert own[-1]["last_loss"] < own[-1]["first_loss"] - 1.0
    started = [r for r in records if r["kind"] == "started"]
    assert len({r["weights_sha256"] for r in started}) == 1 and len({r["corpus"]["sha256"] for r in started}) == 1
    first_steps = [r["loss"] for r in records if r["kind"] == "step" and r["step"] == 1]
    assert first_steps[0] == first_steps[1], "the same weights and the same batch"
    assert "routed exactly once" in started[0]["routing"]
    shown = (started[0]["corpus"]["sha256"][:12], f"{started[0]['parameters']:,}", started[0]["weights_sha256"][:12])
    for text in (*shown, "tokens/s", "eta", "Validation loss: meshmuon.Muon", "One seed", str(tmp_path / "run")):
        assert text in result.output
    assert max(map(len, result.output.replace(str(tmp_path), "").splitlines())) <= 80
    assert "\x1b" not in result.output
    assert (tmp_path / "run" / "curve.png").read_bytes().startswith(b"\x89PNG")
    written = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert [r["loss"] for r in written["runs"]] == [r["last_loss"] for r in records if r["kind"] == "finished"]


def test_json_keeps_stdout_for_the_summary(tmp_path: Path, small_corpus: Path) -> None:
    folder = tmp_path / "run"
    result = run("--steps", "2", "--out", str(folder), "--corpus", str(small_corpus), "--json", "--seeds", "2")
    assert result.exit_code == 0, result.output
    written = json.loads(result.stdout)
    assert [(r["optimizer"], r["seed"]) for r in written["runs"]] == [
        ("muon", 0),
        ("adamw", 0),
        ("muon", 1),
        ("adamw", 1),
    ]
    assert written["folder"] == str(folder) and len(written["races"]) == 2
    assert "±" in written["verdict"][0] and "Validation loss" in result.stderr


def test_a_seed_decides_every_loss_and_the_sample(stdlib: Corpus) -> None:
    def outcome(seed: int) -> list[object]:
        records = list(train(replace(CONFIG, seed=seed), stdlib))
        losses: list[object] = [r.loss for r in records if isinstance(r, Stepped | Validated)]
        return [*losses, records[-1].sample if isinstance(records[-1], Finished) else None]

    global_state = torch.get_rng_state()
    first = outcome(1)
    assert torch.equal(torch.get_rng_state(), global_state)
    torch.rand(3)  # what the caller drew in between must not matter
    assert outcome(1) == first
    assert outcome(2) != first


def test_validation_comes_first_at_intervals_and_last_without_repeats(stdlib: Corpus) -> None:
    records = list(train(replace(CONFIG, steps=7), stdlib))
    checks, last = [r for r in records if isinstance(r, Validated)], records[-1]
    assert [check.step for check in checks] == [0, 3, 6, 7]
    assert isinstance(records[0], Started) and isinstance(last, Finished)
    assert (last.first_loss, last.last_loss) == (checks[0].loss, checks[-1].loss)


def test_learning_rate_warms_up_then_follows_a_cosine() -> None:
    config = replace(CONFIG, steps=100, warmup_share=0.1, final_lr_share=0.1)
    assert config.lr_at(0) == pytest.approx(0.1 * MUON.lr)
    assert config.lr_at(9) == config.lr_at(10) == pytest.approx(MUON.lr)
    assert config.lr_at(55) == pytest.approx(0.55 * MUON.lr)
    assert config.lr_at(100) == pytest.approx(0.1 * MUON.lr)


def test_stdlib_corpus_is_deterministic(stdlib: Corpus) -> None:
    assert load_corpus(window=129) == stdlib
    assert list(stdlib.train_files) == sorted(stdlib.train_files)
    folders = {part for name in stdlib.train_files + stdlib.validation_files for part in name.split("/")[:-1]}
    assert not folders & {"test", "tests", "idlelib", "lib2to3", "encodings", "distutils", "site-packages"}
    assert not any("_sysconfigdata" in name for name in stdlib.train_files + stdlib.validation_files)


def test_split_is_disjoint_by_file_and_about_five_percent(stdlib: Corpus) -> None:
    assert not set(stdlib.train_files) & set(stdlib.validation_files)
    facts = stdlib.facts
    assert 0.05 <= facts.validation_bytes / (facts.train_bytes + facts.validation_bytes) < 0.07
    folder = Path(facts.source)
    for names, data in ((stdlib.train_files, stdlib.train), (stdlib.validation_files, stdlib.validation)):
        assert data == b"".join((folder / name).read_bytes() + b"\0" for name in names)


def test_hash_sees_names_contents_and_borders(tmp_path: Path) -> None:
    def digest(**files: bytes) -> str:
        folder = tmp_path / hashlib.sha256(repr(files).encode()).hexdigest()
        folder.mkdir()
        for name, data in files.items():
            (folder / name).write_bytes(data)
        return load_corpus(folder, window=1).facts.sha256

    others = {digest(a=b"xx", c=b"yy"), digest(a=b"xx", b=b"yz"), digest(a=b"xxy", b=b"y")}
    assert len({digest(a=b"xx", b=b"yy"), *others}) == 4


def test_a_few_large_files_still_leave_one_for_training(tmp_path: Path) -> None:
    for name, size in (("large", 5000), ("largest", 9000), ("crumb", 1), (".hidden", 99)):
        (tmp_path / name).write_bytes(b"x" * size)
    corpus = load_corpus(tmp_path, window=100)
    assert corpus.train_files == ("largest",)
    assert corpus.validation_files == ("crumb", "large")


def test_a_single_file_is_split_at_its_end(tmp_path: Path) -> None:
    data = bytes(range(256)) * 40
    (tmp_path / "one.bin").write_bytes(data)
    corpus = load_corpus(tmp_path / "one.bin", window=33)
    assert corpus.train == data[:9728] + b"\0"
    assert corpus.validation == data[9728:] + b"\0"


def test_windows_are_cut_from_the_data() -> None:
    data = bytes(range(100))
    assert spread_windows(data, window=10, count=4)[:, 0].tolist() == [0, 25, 50, 75]
    assert spread_windows(data, window=40, count=4).shape == (2, 40)
    draw = batch_drawer(data, window=10, batch=5, seed=0)
    batch = draw(7)
    assert torch.equal(batch, batch[:, :1] + torch.arange(10))
    assert torch.equal(batch_drawer(data, window=10, batch=5, seed=0)(7), batch)
    assert not torch.equal(draw(8), batch)
    assert not torch.equal(batch_drawer(data, window=10, batch=5, seed=1)(7), batch)
    assert batch_drawer(data, window=100, batch=2, seed=0)(0).tolist() == [list(data)] * 2


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "no such file"), ("folder", "empty"), (b"", "empty"), (b"short", "too small")],
)
def test_bad_corpus_exits_with_two_and_names_the_path(tmp_path: Path, content: object, message: str) -> None:
    path = tmp_path / "given"
    if content == "folder":
        path.mkdir()
    elif isinstance(content, bytes):
        path.write_bytes(content)
    result = run("--corpus", str(path), "--out", str(tmp_path / "run"))
    assert result.exit_code == 2
    assert str(path) in result.stderr
    assert message in result.stderr
    assert not (tmp_path / "run").exists()


def test_other_bad_input_exits_with_two(tmp_path: Path, small_corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    common = ("--steps", "1", "--corpus", str(small_corpus))
    (tmp_path / "config.json").write_text("another run\n")
    taken = run(*common, "--out", str(tmp_path))
    assert (taken.exit_code, str(tmp_path / "config.json") in taken.stderr) == (2, True)
    assert (tmp_path / "config.json").read_text() == "another run\n"
    for arguments, text in (
        (("--lr", "-1"), "lr: found -1.0"),
        (("--optimizers", "muon,adam"), "optimizers: found 'muon,adam'"),
        (("--optimizers", "muon,muon"), "at most once"),
        (("--parallel", "tp"), "torchrun --nproc-per-node 2 -m meshmuon train --parallel tp"),
    ):
        result = run(*common, "--out", str(tmp_path / "run"), *arguments)
        assert (result.exit_code, text in result.stderr) == (2, True), result.stderr
        assert result.stderr.count("\n") == 1 and "Traceback" not in result.stderr
    assert not (tmp_path / "run").exists()
    nothing = run("--resume", str(tmp_path / "run"))
    assert (nothing.exit_code, "no run to go on with" in nothing.stderr) == (2, True)
    for arguments, text in (
        (("--resume", str(tmp_path / "run"), "--lr", "1"), "--lr: not read beside --resume"),
        (("--sweep", "--seeds", "2", "--adamw-lr", "1"), "--adamw-lr, --seeds: not read beside an experiment"),
        (("--jobs", "2"), "--jobs: not read beside a single comparison"),
    ):
        mixed = run(*arguments)
        assert (mixed.exit_code, text in mixed.stderr) == (2, True), mixed.stderr
    monkeypatch.setattr(corpus_module, "MAX_BYTES", 10)
    large = run("--corpus", str(small_corpus), "--out", str(tmp_path / "run"))
    assert (large.exit_code, "the limit is 10" in large.stderr) == (2, True)
    traced = run("--corpus", str(small_corpus), "--out", str(tmp_path / "run"), "-v")
    assert "Traceback" in traced.stderr


def test_out_of_memory_and_the_unexpected_exit_with_one(
    tmp_path: Path, small_corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(text: str) -> Any:
        def fail(model: GPT, windows: Tensor) -> Tensor:
            raise RuntimeError(text)

        return fail

    for name, text, expected in (
        (
            "a",
            "CUDA out of memory. Tried to allocate 2 GiB",
            "out of memory (CUDA out of memory. Tried to allocate 2 GiB). Close",
        ),
        ("b", "something new\nand its details", "unexpected RuntimeError: something new. Run it again with --verbose"),
    ):
        monkeypatch.setattr(training_module, "next_byte_loss", failing(text))
        result = run("--steps", "1", "--corpus", str(small_corpus), "--out", str(tmp_path / name))
        assert (result.exit_code, expected in result.stderr) == (1, True), result.stderr


def losses_of(folder: Path) -> dict[tuple[str, str, int], float]:
    records = read_log(folder / "log.jsonl")
    found = [(r["run"], r["kind"], r["step"], r["loss"]) for r in records if r["kind"] in ("step", "validation")]
    assert len({entry[:3] for entry in found}) == len(found), "no step twice"
    return {(run, kind, step): loss for run, kind, step, loss in found}


def test_ctrl_c_saves_and_resuming_gives_the_same_losses(
    tmp_path: Path, small_corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, calls = GPT.forward, 0

    def interrupted(self: GPT, tokens: Tensor) -> Tensor:
        nonlocal calls
        calls += torch.is_grad_enabled()
        if calls == 24:  # the fourth step of the second run
            calls += 1
            signal.raise_signal(signal.SIGINT)
        return forward(self, tokens)

    common = ("--steps", "20", "--corpus", str(small_corpus), "--out")
    assert run(*common, str(tmp_path / "whole")).exit_code == 0
    with monkeypatch.context() as patch:
        patch.setattr(GPT, "forward", interrupted)
        result = run(*common, str(tmp_path / "cut"))
    assert result.exit_code == 130, result.output
    assert f"meshmuon train --resume {tmp_path / 'cut'}" in result.stderr
    assert read_log(tmp_path / "cut" / "log.jsonl")[-1] == {
        "run": "adamw-seed0",
        "kind": "stopped",
        "step": 4,
        "reason": "interrupted",
    }
    result = run("--resume", str(tmp_path / "cut"))
    assert result.exit_code == 0, result.output
    assert losses_of(tmp_path / "cut") == losses_of(tmp_path / "whole")
    assert "Validation loss: meshmuon.Muon" in result.output
    again = run("--resume", str(tmp_path / "cut"))  # nothing left to do: the verdict once more
    assert again.exit_code == 0 and "Validation loss: meshmuon.Muon" in again.output
    (small_corpus / "file00.txt").write_text("other words")
    changed = run("--resume", str(tmp_path / "cut"))
    assert (changed.exit_code, "has changed since the run began" in changed.stderr) == (2, True)


KILLED_AT_STEP_14 = """
import os, signal, sys
import torch
from dataclasses import replace
from meshmuon.cli import train as command
from meshmuon.cli.gpt import GPT
from meshmuon.cli.main import build_app

torch.set_num_threads(1)
forward, preset, steps = GPT.forward, command.preset, 0

def deadly(self, tokens):
    global steps
    steps += torch.is_grad_enabled()
    if steps == 14:
        os.kill(os.getpid(), signal.SIGKILL)
    return forward(self, tokens)

from meshmuon.cli.settings import GPTConfig
few = {"model": GPTConfig(width=64, layers=2, heads=2, context=32)}
few |= {"batch": 4, "validation_windows": 16, "validate_every": 10, "sample_bytes": 8, "checkpoint_every": 5}
command.preset = lambda size, name, device: replace(preset(size, name, device=device), **few)
GPT.forward = deadly
build_app()(["train", "--device", "cpu", *sys.argv[1:]])
"""


def load_and_forget(self: Checkpoints, model: GPT, optimizers: Optimizers, *, load: Any = Checkpoints.load) -> None:
    load(self, model, optimizers)
    for part in optimizers.parts:
        for state in part.state.values():
            for value in state.values():
                value.zero_()


def test_a_killed_run_resumes_to_the_same_losses(tmp_path: Path, small_corpus: Path) -> None:
    whole, cut, forgetful = (tmp_path / name for name in ("whole", "cut", "forgetful"))
    common = ["--steps", "20", "--corpus", str(small_corpus), "--out"]
    assert run(*common, str(whole)).exit_code == 0
    command = [sys.executable, "-c", KILLED_AT_STEP_14, *common, str(cut)]
    assert subprocess.run(command, capture_output=True, check=False).returncode == -signal.SIGKILL
    assert read_log(cut / "log.jsonl")[-1]["step"] == 13
    with (cut / "log.jsonl").open("a") as file:
        file.write('{"run": "muon-se')  # a line that the kill cut short
    shutil.copytree(cut, forgetful)
    result = run("--resume", str(cut))
    assert result.exit_code == 0, result.output
    resumed = [r["resumed_at"] for r in read_log(cut / "log.jsonl") if r["kind"] == "started"]
    assert resumed == [0, 10, 0]
    assert losses_of(cut) == losses_of(whole)
    with pytest.MonkeyPatch.context() as patch:  # sabotage: without the optimizer's state the losses are others
        patch.setattr(Checkpoints, "load", load_and_forget)
        assert run("--resume", str(forgetful)).exit_code == 0
    assert losses_of(forgetful) != losses_of(whole)


@pytest.mark.parametrize("left", ["nothing", "an empty file", "another run's"])
def test_a_run_that_is_over_and_has_lost_its_log_is_not_summed_up(
    tmp_path: Path, small_corpus: Path, left: str
) -> None:
    folder = tmp_path / "run"
    assert (
        run("--steps", "2", "--optimizers", "muon", "--corpus", str(small_corpus), "--out", str(folder)).exit_code == 0
    )
    log = folder / "log.jsonl"
    lines = log.read_text(encoding="utf-8").replace("muon-seed0", "muon-seed1")
    log.unlink()
    if left != "nothing":
        log.write_text(lines if left == "another run's" else "", encoding="utf-8")
    result = run("--resume", str(folder))
    assert result.exit_code == 2, result.output
    assert "log.jsonl: no measurements of muon-seed0, which is over. Restore it" in result.stderr


@pytest.mark.filterwarnings("ignore::meshmuon.NonFiniteGradientWarning")
@pytest.mark.parametrize("bad_call", [1, 2])  # the first and the second step's batch
def test_a_loss_that_is_not_finite_stops_the_run_with_exit_one(
    tmp_path: Path, small_corpus: Path, monkeypatch: pytest.MonkeyPatch, bad_call: int
) -> None:
    calls = 0

    def diverging(model: GPT, windows: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return next_byte_loss(model, windows) * (math.nan if bad_call <= calls < 10 else 1.0)

    monkeypatch.setattr(training_module, "next_byte_loss", diverging)
    result = run("--steps", "9", "--corpus", str(small_corpus), "--out", str(tmp_path / "run"))
    assert result.exit_code == 1, result.output
    assert "the loss is nan: try a learning rate below" in result.stderr
    assert "did not finish" in result.output
    ends = [(r["run"], r["kind"]) for r in read_log(tmp_path / "run" / "log.jsonl") if r["kind"] != "step"]
    assert ("muon-seed0", "stopped") in ends


def test_without_typer_main_says_what_to_install() -> None:
    # In a fresh interpreter, because typer is already imported here.
    script = (
        "import sys, importlib.util as u; real = u.find_spec; sys.modules['typer'] = None\n"
        "u.find_spec = lambda name, *rest: None if name == 'typer' else real(name, *rest)\n"
        "from meshmuon.cli.main import main; main()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "pip install 'meshmuon[cli]'" in done.stderr


def test_version_is_the_packages() -> None:
    result = CliRunner().invoke(build_app(), ["--version"])
    assert (result.exit_code, result.output) == (0, f"meshmuon {meshmuon.__version__}\n")


def test_gpt_is_causal_and_depends_on_order() -> None:
    torch.manual_seed(0)
    model = GPT(MODEL)
    for parameter in model.parameters():  # the small initial weights would hide a leak
        torch.nn.init.normal_(parameter, std=0.5)
    tokens = torch.randint(256, (1, 16))
    changed = tokens.clone()
    changed[0, 10] = (changed[0, 10] + 1) % 256
    same, other = model(tokens), model(changed)
    assert torch.equal(same[:, :10], other[:, :10])
    assert not torch.allclose(same[:, 10:], other[:, 10:])
    # Without positions, swapping two earlier bytes would leave a later prediction unchanged.
    swapped = tokens[:, [1, 0, *range(2, 16)]]
    assert not torch.allclose(model(swapped)[:, 15], same[:, 15], atol=1e-3)


def test_loss_is_the_mean_negative_log_probability_of_the_next_byte() -> None:
    torch.manual_seed(0)
    model, windows = GPT(MODEL), torch.randint(256, (3, 9))
    log_probabilities = model(windows[:, :-1]).log_softmax(-1)
    expected = -sum(log_probabilities[b, t, windows[b, t + 1]] for b in range(3) for t in range(8)) / 24
    torch.testing.assert_close(next_byte_loss(model, windows), expected)


def test_generation_goes_past_the_context_and_repeats_with_its_seed() -> None:
    torch.manual_seed(0)
    model = GPT(MODEL)
    text = generate(model, b"def ", length=40, temperature=1.0, seed=3)
    assert len(text) == 44 and text.startswith(b"def ")
    assert generate(model, b"def ", length=40, temperature=1.0, seed=3) == text
    assert generate(model, b"def ", length=40, temperature=1.0, seed=4) != text


@pytest.mark.parametrize("size", ["tiny", "small", "base"])
def test_sizes_say_how_many_parameters_they_have(size: Any) -> None:
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in GPT(preset(size).model).parameters())
    assert SIZES[size].parameters == f"{count / 1e6:.1f} M"
