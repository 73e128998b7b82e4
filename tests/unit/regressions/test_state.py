"""Section F: state, checkpoints, dtypes, and what a step may touch."""

import copy
import io
from typing import Any

import pytest
import torch
from tests.unit.regressions.tools import DTYPES, Holder, must_fail, parameter, randn, step, train
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from meshmuon import CheckpointError, Muon, Orthogonalizer, View


def reloaded(state: dict[str, Any]) -> dict[str, Any]:
    """What comes back from disk, read the safe way."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


@pytest.mark.parametrize(
    ("kept", "own"), [("float32", torch.bfloat16), ("float32", torch.float16), ("bfloat16", torch.float32)]
)
def test_momentum_is_cast_to_the_parameters_dtype_on_load(kept: str, own: torch.dtype) -> None:
    """#63: torch's load casts fp32 momentum of a bf16 parameter to bf16; the next step then crashed or drifted."""
    grads = [randn(6, 9, seed=s, dtype=own) for s in range(6)]
    p, opt = train(lambda ps: Muon(ps, lr=0.1, state_dtype=kept), grads[:3])
    saved = reloaded(opt.state_dict())
    q = nn.Parameter(p.detach().clone())
    other = Muon([q], lr=0.1, state_dtype=kept)
    other.load_state_dict(saved)

    def check(buffer: Tensor) -> None:
        assert buffer.dtype == getattr(torch, kept)
        assert torch.equal(buffer, opt.state[p]["momentum_buffer"])

    check(other.state[q]["momentum_buffer"])
    must_fail(check, opt.state[p]["momentum_buffer"].to(own))
    if kept == "float32":
        must_fail(check, opt.state[p]["momentum_buffer"].to(own).to(torch.float32))
    for g in grads[3:]:
        step(opt, [p], [g])
        step(other, [q], [g])
    assert torch.equal(p, q) and torch.equal(opt.state[p]["momentum_buffer"], other.state[q]["momentum_buffer"])


def test_state_made_at_the_first_step_is_dropped_from_checkpoints() -> None:
    """#64: the checkpoint of a new optimizer has all of its state, and asking for it takes no hidden step."""
    model = Holder(norm=nn.LayerNorm(6), hidden=nn.Linear(6, 4), frozen=nn.Linear(6, 4))
    model.frozen.requires_grad_(False)
    opt = Muon(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    assert set(opt.state) == set(trained)
    for group in opt.param_groups:
        for p in group["params"]:
            keys = {"momentum_buffer"} if group["algorithm"] == "muon" else {"step", "exp_avg", "exp_avg_sq"}
            assert set(opt.state[p]) == keys and all(value.count_nonzero() == 0 for value in opt.state[p].values())
    before = [p.detach().clone() for p in model.parameters()]
    state = get_optimizer_state_dict(model, opt)["state"]
    assert len(state) == len(trained) and all(float(v.sum()) == 0 for entry in state.values() for v in entry.values())
    assert all(map(torch.equal, model.parameters(), before))
    # A parameter that never had a gradient is in the checkpoint too, and so is one that joins later.
    step(opt, [model.hidden.weight], [randn(4, 6)])
    late = parameter(3, 5)
    opt.add_param_group({"params": [("late", late)], "algorithm": "muon"})
    assert len(opt.state_dict()["state"]) == len(trained) + 1 and opt.state[late]["momentum_buffer"].shape == (3, 5)


def test_the_second_groups_learning_rate_is_lost_by_the_checkpoint() -> None:
    """#68: torch's set_optimizer_state_dict stripped lr from every group but the first."""
    model = Holder(a=nn.Linear(6, 4, bias=False), b=nn.Linear(4, 6, bias=False), norm=nn.LayerNorm(6))

    def make(scale: float) -> Muon:
        names = dict(model.named_parameters())
        groups = [
            {"params": [("a.weight", names["a.weight"])], "algorithm": "muon", "lr": 0.5 * scale},
            {"params": [("b.weight", names["b.weight"])], "algorithm": "muon", "lr": 0.25 * scale, "weight_decay": 0.0},
            {"params": [(n, p) for n, p in names.items() if "norm" in n], "algorithm": "adamw", "lr": 0.125 * scale},
        ]
        return Muon(groups)

    opt = make(1.0)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    opt.step()
    saved = get_optimizer_state_dict(model, opt)
    other = make(7.0)
    assert [g["lr"] for g in other.param_groups] != [g["lr"] for g in opt.param_groups]
    set_optimizer_state_dict(model, other, saved)
    for ours, theirs in zip(other.param_groups, opt.param_groups, strict=True):
        assert {k: v for k, v in ours.items() if k != "params"} == {k: v for k, v in theirs.items() if k != "params"}
    for p in model.parameters():
        assert all(torch.equal(other.state[p][key], opt.state[p][key]) for key in opt.state[p])


def check_unchanged(opt: Muon, before: dict[str, Any]) -> None:
    after = opt.state_dict()
    assert after["param_groups"] == before["param_groups"]
    assert after["state"].keys() == before["state"].keys()
    for key, entry in before["state"].items():
        assert all(torch.equal(after["state"][key][name], value) for name, value in entry.items())


@pytest.mark.parametrize("named", [True, False])
def test_a_checkpoint_of_adamw_is_taken_and_fails_at_the_next_step(named: bool) -> None:
    """#69: KeyError 'momentum' at the step after. It is refused at load, by name, and nothing has changed."""
    p = parameter(4, 6)
    adamw = torch.optim.AdamW([("layer.weight", p)] if named else [p])
    p.grad = randn(4, 6)
    adamw.step()
    opt = Muon([("layer.weight", p)] if named else [p])
    opt.step()
    before = copy.deepcopy(opt.state_dict())
    with pytest.raises(CheckpointError, match=r"AdamW.*layer\.weight" if named else r"AdamW.*\[0\]"):
        opt.load_state_dict(adamw.state_dict())
    check_unchanged(opt, before)
    opt.step()
    with pytest.raises(AssertionError):
        check_unchanged(opt, before)


def spoiled(state: dict[str, Any], kind: str) -> dict[str, Any]:
    state = copy.deepcopy(state)
    matrix, bias = state["state"][0], state["state"][1]
    if kind == "momentum of another shape":
        matrix["momentum_buffer"] = matrix["momentum_buffer"].T.contiguous()
    elif kind == "momentum missing":
        del matrix["momentum_buffer"]
    elif kind == "a parameter missing":
        del state["state"][0]
    elif kind == "moment of another shape":
        bias["exp_avg_sq"] = torch.zeros(7)
    elif kind == "step of another shape":
        bias["step"] = torch.tensor([3.0, 3.0])
    elif kind == "another algorithm":
        state["param_groups"][0]["algorithm"] = "adamw"
    elif kind == "another name":
        state["param_groups"][0]["param_names"] = ["other.weight"]
    elif kind == "a group missing":
        del state["param_groups"][1]
    else:
        state["param_groups"][0]["params"] = [0, 5]
    return state


KINDS = {
    "momentum of another shape": r"layer\.weight",
    "momentum missing": r"layer\.weight",
    "a parameter missing": r"layer\.weight",
    "moment of another shape": r"layer\.bias",
    "step of another shape": r"layer\.bias",
    "another algorithm": r"param_groups\[0\]",
    "another name": r"layer\.weight",
    "a group missing": "groups",
    "one parameter more": r"param_groups\[0\]",
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_that_does_not_fit_is_taken_and_fails_at_the_next_step(kind: str) -> None:
    """#69: a momentum of the wrong shape failed only at the step. Refused at load, by name; nothing has changed."""
    model = Holder(layer=nn.Linear(6, 4))
    opt = Muon(model)
    step(opt, [model.layer.weight, model.layer.bias], [randn(4, 6), randn(4)])
    before = copy.deepcopy(opt.state_dict())
    with pytest.raises(CheckpointError, match=KINDS[kind]):
        opt.load_state_dict(spoiled(opt.state_dict(), kind))
    check_unchanged(opt, before)
    opt.load_state_dict(before)
    check_unchanged(opt, before)


LATE: dict[str, tuple[dict[str, Any], str]] = {
    "a vector": ({"params": [parameter(4)], "algorithm": "muon"}, "params.1.0"),
    "three dims": ({"params": [parameter(2, 4, 6)], "algorithm": "muon"}, "params.1.0"),
    "no algorithm": ({"params": [parameter(4)]}, "algorithm"),
    "a bad value": ({"params": [parameter(4, 6)], "lr": -1.0}, "lr"),
    "an unknown key": ({"params": [parameter(4, 6)], "nestrov": True}, "nesterov"),
    "a view that does not fit": ({"params": [parameter(4, 6)], "view": {"heads": 3}}, "heads"),
    "an integer": ({"params": [torch.ones(4, 6, dtype=torch.int64)]}, "params.1.0"),
    "restarts beyond its steps": ({"params": [parameter(4, 6)], "ns_steps": 2}, "restarts"),
}


@pytest.mark.parametrize("kind", LATE)
def test_a_group_added_later_is_not_checked(kind: str) -> None:
    """#69: add_param_group skipped the 2-D check. Refused as in the constructor, and the optimizer is as before."""
    group, name = LATE[kind]
    p = parameter(4, 6)
    opt = Muon([p], orthogonalizer=Orthogonalizer(form="gram", restarts=(3,)))
    before = copy.deepcopy(opt.state_dict())
    with pytest.raises((ValueError, TypeError)) as caught:
        opt.add_param_group(group)
    assert name in str(caught.value)
    assert len(opt.param_groups) == 1, "a refused group must not stay"
    check_unchanged(opt, before)
    step(opt, [p], [randn(4, 6)])


def test_a_parameter_added_later_a_second_time_is_trained_twice() -> None:
    """#69: a parameter belongs to one group; a new one is trained from its first step on."""
    p, late, alone = parameter(4, 6), parameter(5, 7), parameter(5, 7)
    opt = Muon([p], lr=0.1)
    with pytest.raises(ValueError, match="already"):
        opt.add_param_group({"params": [p]})
    opt.add_param_group({"params": [late], "lr": 0.2})
    single = Muon([alone], lr=0.2)
    for seed in range(3):
        step(opt, [p, late], [randn(4, 6, seed=seed), randn(5, 7, seed=seed)])
        step(single, [alone], [randn(5, 7, seed=seed)])
    assert torch.equal(late, alone)


def check_same_bits(grads: list[Tensor], before: list[Tensor]) -> None:
    for g, b in zip(grads, before, strict=True):
        assert torch.equal(g, b)


def is_scaled(opt: Muon) -> None:
    """As torch.amp.GradScaler leaves an optimizer that unscales by itself."""
    opt.grad_scale = torch.tensor(8.0)
    opt.found_inf = torch.tensor(0.0)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("mode", ["decoupled", "cautious", "l2"])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_step_writes_into_the_gradients(dtype: torch.dtype, nesterov: bool, mode: str, scaled: bool) -> None:
    """#72: lerp_, div_ or mul_ in place on p.grad. The tensor stays the same one, with the same bits."""
    torch.manual_seed(0)
    model = Holder(hidden=nn.Linear(6, 4, dtype=dtype), fused=nn.Linear(5, 6, bias=False, dtype=dtype))
    overrides = {"fused.weight": View(split_rows=(4, 2))}
    opt = Muon(model, lr=0.1, nesterov=nesterov, weight_decay_mode=mode, overrides=overrides)
    params = list(model.parameters())
    for seed in range(2):
        for i, p in enumerate(params):
            p.grad = randn(*p.shape, seed=10 * seed + i, dtype=dtype)
        grads = [p.grad for p in params]
        copies, weights = [g.clone() for g in grads], [p.detach().clone() for p in params]
        if scaled:
            is_scaled(opt)
        opt.step()
        assert all(p.grad is g for p, g in zip(params, grads, strict=True))
        check_same_bits(grads, copies)
        assert not any(map(torch.equal, params, weights)), "every parameter was trained"
    faulty = copies[0].clone()
    faulty.bfloat16().div_(7.0) if dtype == torch.bfloat16 else faulty.lerp_(torch.zeros_like(faulty), 0.05)
    must_fail(check_same_bits, [faulty], copies[:1])


def test_a_closure_runs_without_gradients() -> None:
    """#72: under no_grad its backward raises. It runs once, with gradients, and its loss comes back."""
    model = nn.Linear(6, 4)
    opt = Muon(model, lr=0.1)
    seen: list[bool] = []

    def closure() -> Tensor:
        seen.append(torch.is_grad_enabled())
        opt.zero_grad()
        loss: Tensor = (model(randn(3, 6)) ** 2).mean()
        loss.backward()
        return loss

    losses = []
    for _ in range(5):
        with torch.no_grad():
            losses.append(float(opt.step(closure)))
            assert not torch.is_grad_enabled()
    assert seen == [True] * 5 and losses[-1] < losses[0]


def test_a_learning_rate_from_numpy_makes_the_checkpoint_unreadable() -> None:
    """Found here: np.float64 is a float, and stays one in the group; weights_only=True then refuses the file."""
    np = pytest.importorskip("numpy")
    triple = (3.4445, -4.7750, 2.0315)
    choices: list[dict[str, Any]] = [
        {"lr": np.float64(1e-3)},
        {"weight_decay": np.float64(0.1), "momentum": np.float64(0.9)},
        {"ns_coefficients": [tuple(np.array(triple))] * 5},
        {"ns_coefficients": np.array(triple)},
    ]
    for arguments in choices:
        try:
            opt = Muon([parameter(4, 6)], **arguments)
        except (ValueError, TypeError) as refused:
            assert next(iter(arguments)) in str(refused)  # noqa: PT017
            continue
        assert "Parameter Group 0" in str(opt)
        opt.load_state_dict(reloaded(opt.state_dict()))
