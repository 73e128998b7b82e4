"""save_checkpoint and load_checkpoint on one process: complete or not there, loaded whole or not at all."""

import copy
import enum
import pickle
import re
import threading
import time
import warnings
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

from meshmuon import CheckpointError, Muon, checkpoint_extra, latest_checkpoint, load_checkpoint, save_checkpoint
from meshmuon.saved_files import WholeOrNothing

# Said by the thread that writes with wait=False, where a warning cannot be kept back for that call alone.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def build(width=8, *, seed=0, dtype=torch.float32, layers=2, optimizer=Muon, **settings):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers))).to(dtype)
    opt = optimizer(model if optimizer is Muon else model.parameters(), lr=0.02, **settings)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    opt.step()
    return model, opt


def everything(model, opt):
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        values |= {f"{name}.{key}": value.clone() for key, value in opt.state[p].items()}
    return values


def same(a, b):
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("wait", [True, False])
def test_a_round_trip_with_extras(tmp_path, wait):
    model, opt = build()
    opt.param_groups[0]["lr"] = 0.5
    extra = {"step": 7, "rng": torch.get_rng_state(), "history": [1.5, 2.5]}
    pending = save_checkpoint(tmp_path / "step-7", model, opt, extra=extra, wait=wait)
    expected = everything(model, opt)
    if not wait:
        pending.result()
    other, again = build(seed=1)
    assert not same(everything(other, again), expected)
    found = load_checkpoint(tmp_path / "step-7", other, again)
    assert same(everything(other, again), expected)
    assert (found["step"], found["history"]) == (7, [1.5, 2.5]) and torch.equal(found["rng"], extra["rng"])
    assert again.param_groups[0]["lr"] == 0.5


def test_a_save_with_a_torch_that_completes_a_copy_of_the_metadata(tmp_path):
    """torch 2.11 does: every save failed there."""
    finish = dcp.FileSystemWriter.finish

    def of_a_copy(self, metadata, results):
        finish(self, copy.copy(metadata), results)

    model, opt = build()
    with mock.patch.object(dcp.FileSystemWriter, "finish", of_a_copy):
        save_checkpoint(tmp_path / "a", model, opt)
    other, again = build(seed=1)
    load_checkpoint(tmp_path / "a", other, again)
    assert same(everything(other, again), everything(model, opt))


def test_bf16_parameters_keep_their_fp32_momentum(tmp_path):
    model, opt = build(dtype=torch.bfloat16, state_dtype=torch.float32)
    save_checkpoint(tmp_path / "a", model, opt)
    other, again = build(seed=1, dtype=torch.bfloat16, state_dtype=torch.float32)
    load_checkpoint(tmp_path / "a", other, again)
    assert again.state[other[0].weight]["momentum_buffer"].dtype == torch.float32
    assert same(everything(model, opt), everything(other, again))


def test_offloaded_state_is_saved_and_loaded(tmp_path):
    model, opt = build(offload=True)
    save_checkpoint(tmp_path / "a", model, opt)
    for on in (True, False):
        other, again = build(seed=1, offload=on)
        load_checkpoint(tmp_path / "a", other, again)
        assert same(everything(model, opt), everything(other, again))


def _truncated(folder):
    file = next(folder.glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-100])
    return file.name


def _missing_file(folder):
    file = next(folder.glob("*.distcp"))
    file.unlink()
    return file.name


def _no_metadata(folder):
    (folder / ".metadata").unlink()
    return "metadata"


def _broken_metadata(folder):
    file = folder / ".metadata"
    file.write_bytes(file.read_bytes()[:100])
    return "metadata"


@pytest.mark.parametrize("damage", [_truncated, _missing_file, _no_metadata, _broken_metadata])
def test_a_damaged_checkpoint_names_the_file_and_changes_nothing(tmp_path, damage):
    save_checkpoint(tmp_path / "a", *build())
    name = damage(tmp_path / "a")
    model, opt = build(seed=1)
    before = everything(model, opt)
    with pytest.raises(CheckpointError, match=name):
        load_checkpoint(tmp_path / "a", model, opt)
    assert same(everything(model, opt), before)


def test_damaged_bytes_change_nothing(tmp_path):
    """Files of the right length with wrong bytes are noticed only while they are read."""
    save_checkpoint(tmp_path / "a", *build())
    file = next((tmp_path / "a").glob("*.distcp"))
    file.write_bytes(bytes(file.stat().st_size))
    model, opt = build(seed=1)
    before = everything(model, opt)
    with pytest.raises(CheckpointError, match="Load another one"):
        load_checkpoint(tmp_path / "a", model, opt)
    assert same(everything(model, opt), before)


@pytest.mark.parametrize(
    ("other", "word"),
    [
        ({"width": 9}, r"0\.weight.*\(8, 8\).*\(9, 9\)"),
        ({"layers": 3}, r"has no .*model\.2"),
        ({"layers": 1}, r"more than is wanted.*model\.1"),
        ({"optimizer": torch.optim.AdamW}, r"has no state\.0\.weight\.(step|exp_avg)"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_named(tmp_path, other, word):
    save_checkpoint(tmp_path / "a", *build())
    model, opt = build(seed=1, **other)
    before = everything(model, opt)
    with pytest.raises(CheckpointError, match=word):
        load_checkpoint(tmp_path / "a", model, opt)
    assert same(everything(model, opt), before)


def test_a_checkpoint_of_adamw_is_refused(tmp_path):
    save_checkpoint(tmp_path / "a", *build(optimizer=torch.optim.AdamW))
    with pytest.raises(CheckpointError, match="momentum_buffer"):
        load_checkpoint(tmp_path / "a", *build())


def test_a_plain_dcp_folder_without_our_extra_is_named(tmp_path):
    model, opt = build()
    a, b = get_state_dict(model, opt)
    dcp.save({"model": a, "state": b["state"]}, checkpoint_id=tmp_path / "a")
    with pytest.raises(CheckpointError, match="extra"):
        load_checkpoint(tmp_path / "a", model, opt)


def test_folders(tmp_path):
    model, opt = build()
    assert latest_checkpoint(tmp_path) is None
    save_checkpoint(tmp_path / "step-10", model, opt)
    save_checkpoint(tmp_path / "step-9", model, opt)
    (tmp_path / "step-12.unfinished").mkdir()
    (tmp_path / "step-12.unfinished" / ".metadata").write_bytes(b"")
    (tmp_path / "step-13").mkdir()
    assert latest_checkpoint(tmp_path) == tmp_path / "step-9", "the one completed last"
    with pytest.raises(CheckpointError, match="already there"):
        save_checkpoint(tmp_path / "step-9", model, opt)
    save_checkpoint(tmp_path / "step-12", model, opt)
    assert latest_checkpoint(tmp_path) == tmp_path / "step-12" and not (tmp_path / "step-12.unfinished").exists()
    with pytest.raises(CheckpointError, match="no folder"):
        load_checkpoint(tmp_path / "step-99", model, opt)


def test_an_extra_that_could_not_come_back_is_refused_at_once(tmp_path):
    for value in (tmp_path, lambda: None, threading.Lock()):
        with pytest.raises(CheckpointError, match=r"extra\['where'\]"):
            save_checkpoint(tmp_path / "a", *build(), extra={"step": 1, "where": value})
    assert list(tmp_path.iterdir()) == []


def test_steps_taken_meanwhile_do_not_get_into_a_checkpoint(tmp_path, monkeypatch):
    """The write is held up until the next step is taken; what comes after it waits until it is done."""
    go_on = threading.Event()
    write = dcp.FileSystemWriter.write_data

    def late(self, plan, planner):
        assert go_on.wait(30)
        return write(self, plan, planner)

    monkeypatch.setattr(dcp.FileSystemWriter, "write_data", late)
    model, opt = build()
    expected = everything(model, opt)
    pending = save_checkpoint(tmp_path / "a", model, opt, wait=False)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    opt.step()
    assert not (tmp_path / "a").exists()
    threading.Timer(0.2, go_on.set).start()
    with pytest.raises(CheckpointError, match="already there"):
        save_checkpoint(tmp_path / "a", model, opt)
    assert pending.done()
    pending.result()
    assert not same(everything(model, opt), expected)
    load_checkpoint(tmp_path / "a", model, opt)
    assert same(everything(model, opt), expected)


@pytest.mark.parametrize("wait", [True, False])
def test_what_cannot_be_written_ends_no_training_loop(tmp_path, wait):
    """torch's error is no Exception: `except Exception` around a save would let it through."""
    model, opt = build()
    (tmp_path / "no folder").write_text("")
    saved = everything(model, opt)

    def save(folder):
        pending = save_checkpoint(folder, model, opt, wait=wait)
        if not wait:
            pending.result()

    with pytest.raises(CheckpointError, match=r"no folder.step-1: it could not be written: rank 0: .*Error: .*go on"):
        save(tmp_path / "no folder" / "step-1")
    assert same(everything(model, opt), saved)
    save(tmp_path / "step-1")
    assert latest_checkpoint(tmp_path) == tmp_path / "step-1"


@pytest.mark.parametrize("wait", [True, False])
def test_an_interrupt_while_saving_stays_one(tmp_path, monkeypatch, wait):
    """torch hands it round like any error; as an Exception it would be logged, and training go on."""
    model, opt = build()

    def interrupted(self, metadata, results):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("meshmuon.saved_files.WholeOrNothing.finish", interrupted)
        with pytest.raises(KeyboardInterrupt):
            (save_checkpoint(tmp_path / "a", model, opt, wait=wait) or Done()).result()
    (save_checkpoint(tmp_path / "b", model, opt, wait=wait) or Done()).result()
    patched = mock.patch("meshmuon.resume.unpacked_extra", side_effect=KeyboardInterrupt)
    with patched, pytest.raises(KeyboardInterrupt):
        load_checkpoint(tmp_path / "b", model, opt)


class Done:
    """What a save that waited would have given."""

    def result(self):
        return None


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize(
    ("error", "words"),
    [(OSError("disk full"), "OSError: disk full. Make room"), (ValueError("x"), "x. Save again once")],
)
def test_a_disk_that_is_full_does_not_stay_full(tmp_path, monkeypatch, wait, error, words):
    """What could not be finished goes; but not where a rank may have been lost, and others still write."""
    model, opt = build()
    monkeypatch.setattr(WholeOrNothing, "finish", mock.Mock(side_effect=error))
    with pytest.raises(CheckpointError, match=re.escape(words)) as caught:
        (save_checkpoint(tmp_path / "a", model, opt, wait=wait) or Done()).result()
    assert "rank 0: " in str(caught.value) and caught.value.__cause__ is not None
    assert [path.name for path in tmp_path.iterdir()] == [[], ["a.unfinished"]][isinstance(error, ValueError)]


def test_a_background_save_cannot_be_cancelled_and_always_answers(tmp_path, monkeypatch):
    model, opt = build()
    may_end = threading.Event()
    finish = WholeOrNothing.finish

    def slow(self, metadata, results):
        may_end.wait(60)
        finish(self, metadata, results)

    class Silent(OSError):
        def __str__(self):
            raise RuntimeError("no words")

    def speechless(self, metadata, results):
        raise Silent

    with monkeypatch.context() as patch:
        patch.setattr(WholeOrNothing, "finish", slow)
        pending = save_checkpoint(tmp_path / "a", model, opt, wait=False)
        assert pending.running() and not pending.cancel()
        may_end.set()
        assert isinstance(pending.result(60), dcp.metadata.Metadata), "what torch gives"
        assert pending.done() and latest_checkpoint(tmp_path) == tmp_path / "a"
    monkeypatch.setattr(WholeOrNothing, "finish", speechless)
    pending = save_checkpoint(tmp_path / "b", model, opt, wait=False)
    with pytest.raises(RuntimeError, match="no words"):
        pending.result(60)


def test_the_next_save_waits_until_a_failed_one_is_cleared_away(tmp_path, monkeypatch):
    """It has the same name: what it writes may not be taken for what is left of the first."""
    model, opt = build()
    clear, begun = WholeOrNothing._abandoned, threading.Event()

    def fails(self, plans):
        begun.set()
        raise OSError("disk full")

    def slowly(self, error):
        time.sleep(0.5)
        return clear(self, error)

    monkeypatch.setattr(WholeOrNothing, "_abandoned", slowly)
    with monkeypatch.context() as patch:
        patch.setattr(WholeOrNothing, "prepare_global_plan", fails)
        pending = save_checkpoint(tmp_path / "a", model, opt, wait=False)
        assert begun.wait(60)
    save_checkpoint(tmp_path / "a", model, opt)
    assert pending.done() and latest_checkpoint(tmp_path) == tmp_path / "a"
    with pytest.raises(CheckpointError, match="disk full"):
        pending.result()


def test_a_background_save_that_could_not_begin_can_be_tried_again(tmp_path, monkeypatch):
    model, opt = build()
    with monkeypatch.context() as patch:
        patch.setattr(dcp, "async_save", lambda *_, **__: (_ for _ in ()).throw(OSError("no such disk")))
        with pytest.raises(CheckpointError, match="could not be written: OSError: no such disk"):
            save_checkpoint(tmp_path / "a", model, opt, wait=False)
    save_checkpoint(tmp_path / "a", model, opt, wait=False).result()
    assert latest_checkpoint(tmp_path) == tmp_path / "a"


@pytest.mark.parametrize("saved_by", ["float", "tensor"])
@pytest.mark.parametrize("scheduled", ["saved", "loaded"])
def test_hyper_parameters_are_judged_by_the_optimizer(tmp_path, saved_by, scheduled):
    """A tensor lr, or a scheduler's own key, on one side only."""
    model, opt = build()
    if saved_by == "tensor":
        for group in opt.param_groups:
            group["lr"] = torch.tensor(0.25)
    if scheduled == "saved":
        torch.optim.lr_scheduler.ConstantLR(opt)
    save_checkpoint(tmp_path / "a", model, opt)
    other, again = build(seed=1)
    if scheduled == "loaded":
        torch.optim.lr_scheduler.ConstantLR(again)
    load_checkpoint(tmp_path / "a", other, again)
    assert float(again.param_groups[0]["lr"]) == float(opt.param_groups[0]["lr"])
    assert same(everything(model, opt), everything(other, again))


def test_a_folder_of_something_else_is_named(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / ".metadata").write_bytes(pickle.dumps({"not": "metadata"}))
    with pytest.raises(CheckpointError, match="not that of a checkpoint"):
        load_checkpoint(tmp_path / "a", *build())
    (tmp_path / "a" / ".metadata").write_bytes(b"cnomodule\nNoClass\n.")
    with pytest.raises(CheckpointError, match="not readable"):
        load_checkpoint(tmp_path / "a", *build())
    assert latest_checkpoint(tmp_path) is None


def test_the_latest_is_the_latest_that_is_whole(tmp_path):
    model, opt = build()
    for step in (1, 2):
        save_checkpoint(tmp_path / f"step-{step}", model, opt)
    _truncated(tmp_path / "step-2")
    assert latest_checkpoint(tmp_path) == tmp_path / "step-1"


def test_one_process_is_not_warned_that_it_is_one(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save_checkpoint(tmp_path / "a", *build())
        load_checkpoint(tmp_path / "a", *build())
        checkpoint_extra(tmp_path / "a")


def test_extra_alone_can_be_read_without_a_model(tmp_path):
    save_checkpoint(tmp_path / "a", *build(), extra={"step": 3})
    assert checkpoint_extra(tmp_path / "a") == {"step": 3}
    _truncated(tmp_path / "a")
    with pytest.raises(CheckpointError, match="distcp"):
        checkpoint_extra(tmp_path / "a")


def test_several_optimizers_grouped_otherwise(tmp_path):
    """As `meshmuon train` does: AdamW's parameters are grouped by mesh, so by another layout otherwise."""

    def pair(seed, *groups):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
        params = dict(model.named_parameters())
        rest = [{"params": [params[name] for name in group], "weight_decay": 0.3} for group in groups]
        parts = (Muon([params["0.weight"]], lr=0.02), torch.optim.AdamW(rest, lr=0.01 * (seed + 1)))
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        for part in parts:
            part.step()
        return model, parts

    model, parts = pair(0, ["0.bias", "1.weight", "1.bias"])
    save_checkpoint(tmp_path / "a", model, parts)
    other, again = pair(1, ["1.bias"], ["0.bias", "1.weight"])
    load_checkpoint(tmp_path / "a", other, again)
    assert [group["lr"] for group in again[1].param_groups] == [0.01, 0.01]
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)
        mine, theirs = (next(part.state[x] for part in ps if x in part.state) for ps, x in ((parts, p), (again, q)))
        assert mine.keys() == theirs.keys() and all(torch.equal(mine[k], theirs[k]) for k in mine)


def test_one_group_of_what_had_different_rates_is_refused(tmp_path):
    def pair(*groups):
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
        named = dict(model.named_parameters())
        return model, torch.optim.AdamW([{"params": [named[n] for n in names], "lr": lr} for names, lr in groups])

    save_checkpoint(tmp_path / "a", *pair((["0.weight", "0.bias"], 0.1), (["1.weight", "1.bias"], 0.2)))
    model, opt = pair((["0.weight", "0.bias", "1.weight", "1.bias"], 0.3))
    with pytest.raises(CheckpointError, match=r"0.weight and 1.weight.*different lr"):
        load_checkpoint(tmp_path / "a", model, opt)
    assert opt.param_groups[0]["lr"] == 0.3


def test_what_the_second_of_two_optimizers_refuses_changes_neither(tmp_path):
    def pair(**second):
        model = torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8, bias=False))
        groups = [{"params": [("0.weight", model[0].weight)], "algorithm": "muon"}]
        groups.append({"params": [("1.weight", model[1].weight)], "algorithm": "muon", **second})
        parts = [Muon([group], lr=0.02) for group in groups]
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        for part in parts:
            part.step()
        return model, parts

    save_checkpoint(tmp_path / "a", *pair())
    model, parts = pair(view={"heads": 4})
    before = [
        t.clone()
        for t in (*model.parameters(), *(part.state[p]["momentum_buffer"] for part in parts for p in part.state))
    ]
    with pytest.raises(CheckpointError, match="view"):
        load_checkpoint(tmp_path / "a", model, parts)
    after = [*model.parameters(), *(part.state[p]["momentum_buffer"] for part in parts for p in part.state)]
    assert same(dict(enumerate(before)), dict(enumerate(after)))


def test_numpys_numbers_in_a_group_come_back_as_plain_ones(tmp_path):
    model, opt = build()
    torch.optim.lr_scheduler.LambdaLR(opt, lambda step: np.float64(0.5))
    opt.param_groups[0]["weight_decay"] = np.float32(0.25)
    assert type(opt.param_groups[0]["lr"]) is np.float64
    save_checkpoint(tmp_path / "a", model, opt)
    other, again = build(seed=1)
    load_checkpoint(tmp_path / "a", other, again)
    assert again.param_groups[0]["weight_decay"] == 0.25
    assert float(again.param_groups[0]["lr"]) == float(opt.param_groups[0]["lr"])


@pytest.mark.parametrize("key", [np.int64(3), enum.Enum("Kind", ["ONE"]).ONE])
def test_names_that_could_not_come_back_are_refused_at_once(tmp_path, key):
    with pytest.raises(CheckpointError, match="extra"):
        save_checkpoint(tmp_path / "a", *build(), extra={key: 1})
    assert not (tmp_path / "a").exists()


def test_extra_that_is_not_what_was_written_is_named(tmp_path):
    model, opt = build()
    save_checkpoint(tmp_path / "a", model, opt, extra={"step": 3})
    (file,) = (tmp_path / "a").glob("*.distcp")
    file.write_bytes(bytes(file.stat().st_size))
    for load in (lambda: checkpoint_extra(tmp_path / "a"), lambda: load_checkpoint(tmp_path / "a", model, opt)):
        with pytest.raises(CheckpointError, match="checkpoint "):
            load()
