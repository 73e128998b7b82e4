"""`meshmuon train`: the command end to end on a few steps, its corpus, and the ways it ends early."""

import hashlib
import json
import math
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
from meshmuon.cli.corpus import Corpus, batch_drawer, load_corpus, spread_windows
from meshmuon.cli.gpt import GPT, generate, next_byte_loss
from meshmuon.cli.main import build_app
from meshmuon.cli.records import Finished, Started, Stepped, Validated
from meshmuon.cli.settings import GPTConfig, OptimizerConfig, TrainConfig, preset
from meshmuon.cli.training import train

MODEL = GPTConfig(width=32, layers=1, heads=2, context=32)
MUON = OptimizerConfig(name="muon", lr=4e-3)
CONFIG = TrainConfig(model=MODEL, optimizer=MUON, steps=6, batch=4, validate_every=3, validation_windows=4)


def run(*arguments: str) -> Any:
    with pytest.MonkeyPatch.context() as patch:  # smaller batches than the command's own: these tests run often
        patch.setattr(train_module, "preset", lambda size: replace(preset(size), batch=4, validation_windows=16))
        return CliRunner().invoke(build_app(), ["train", "--device", "cpu", *arguments])


def read_log(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


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


def test_twenty_steps_write_a_log_a_curve_and_lower_the_loss(tmp_path: Path) -> None:
    result = run("--steps", "20", "--out", str(tmp_path / "run"))
    assert result.exit_code == 0, result.output
    records = read_log(tmp_path / "run" / "log.jsonl")
    assert [r["kind"] for r in records] == ["started", "validation", *["step"] * 20, "validation", "finished"]
    assert [r["step"] for r in records if r["kind"] == "step"] == list(range(1, 21))
    started, finished = records[0], records[-1]
    # An untrained model knows nothing: about ln 256 nats for each byte.
    assert finished["first_loss"] == pytest.approx(math.log(256), abs=0.3)
    assert finished["last_loss"] < finished["first_loss"] - 1.0
    shown = (started["corpus"]["sha256"][:12], f"{started['parameters']:,}", started["routing"])
    for text in (*shown, "validation loss fell from", str(tmp_path / "run" / "log.jsonl")):
        assert text in result.output
    assert (tmp_path / "run" / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_json_keeps_stdout_for_the_final_record(tmp_path: Path, small_corpus: Path) -> None:
    result = run("--steps", "2", "--out", str(tmp_path / "run"), "--corpus", str(small_corpus), "--json")
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert (record["kind"], record["steps"]) == ("finished", 2)
    assert record["log"] == str(tmp_path / "run" / "log.jsonl")
    assert "validation loss" in result.stderr


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
    (tmp_path / "log.jsonl").write_text("another run\n")
    taken = run("--steps", "1", "--corpus", str(small_corpus), "--out", str(tmp_path))
    assert (taken.exit_code, str(tmp_path / "log.jsonl") in taken.stderr) == (2, True)
    assert (tmp_path / "log.jsonl").read_text() == "another run\n"
    monkeypatch.setattr(corpus_module, "MAX_BYTES", 10)
    large = run("--corpus", str(small_corpus), "--out", str(tmp_path / "run"))
    assert (large.exit_code, "the limit is 10" in large.stderr) == (2, True)
    negative = run("--lr", "-1", "--corpus", str(small_corpus), "--out", str(tmp_path / "run"))
    assert (negative.exit_code, "lr: found -1.0" in negative.stderr) == (2, True)


def test_ctrl_c_leaves_a_valid_log_and_exits_130(
    tmp_path: Path, small_corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, calls = GPT.forward, 0

    def interrupted(self: GPT, tokens: Tensor) -> Tensor:
        nonlocal calls
        calls += torch.is_grad_enabled()
        if calls == 4:
            signal.raise_signal(signal.SIGINT)
        return forward(self, tokens)

    monkeypatch.setattr(GPT, "forward", interrupted)
    result = run("--steps", "50", "--corpus", str(small_corpus), "--out", str(tmp_path / "run"))
    assert result.exit_code == 130, result.output
    assert "interrupted after step 3" in result.stderr
    records = read_log(tmp_path / "run" / "log.jsonl")
    assert [r["kind"] for r in records] == ["started", "validation", "step", "step", "step", "stopped"]
    assert records[-1] == {"kind": "stopped", "step": 3, "reason": "interrupted"}


@pytest.mark.filterwarnings("ignore::meshmuon.NonFiniteGradientWarning")
@pytest.mark.parametrize("bad_call", [1, 2])  # the first and the second step's batch
def test_a_loss_that_is_not_finite_stops_the_run_with_exit_one(
    tmp_path: Path, small_corpus: Path, monkeypatch: pytest.MonkeyPatch, bad_call: int
) -> None:
    calls = 0

    def diverging(model: GPT, windows: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return next_byte_loss(model, windows) * (math.nan if calls >= bad_call else 1.0)

    monkeypatch.setattr(training_module, "next_byte_loss", diverging)
    result = run("--steps", "5", "--corpus", str(small_corpus), "--out", str(tmp_path / "run"))
    assert result.exit_code == 1, result.output
    assert "the loss is nan: try a learning rate below" in result.stderr
    assert read_log(tmp_path / "run" / "log.jsonl")[-1]["kind"] == "stopped"


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


@pytest.mark.parametrize("size", ["tiny", "small"])
def test_help_names_the_defaults_of_each_size(size: Any) -> None:
    config = preset(size)
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in GPT(config.model).parameters())
    assert f"{size} {config.steps}" in str(train_module._Steps.show_default)
    assert f"{size} {config.optimizer.lr:.0e}".replace("e-0", "e-") in str(train_module._Lr.show_default)
    assert f"{size}: {count / 1e6:.1f} M" in str(train_module._Size.help)
