"""`sharded=` without a job: one process holds everything, and the same script runs."""

import copy
import pickle

import pytest
import torch
from torch import nn

from meshmuon import Muon, QKClip, Sharded, megatron_shards


def trained(**settings):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.ReLU(), nn.Linear(8, 4, bias=False))
    opt = Muon(model, lr=0.1, overrides={"*": "muon"}, **settings)
    for step in range(3):
        for i, param in enumerate(model.parameters()):
            param.grad = torch.full_like(param, 0.1 * (step + 1)) + torch.eye(*param.shape) * (i + 1)
        opt.step()
    return [param.detach() for param in model.parameters()], opt


@pytest.mark.parametrize(
    "sharded",
    [{"0.weight": Sharded(0, None)}, {"0.weight": Sharded(-1, None), "2.weight": Sharded(1, None)}, {}],
    ids=["no group", "whole", "nothing said"],
)
def test_without_a_job_a_shard_is_the_whole(sharded):
    expected, _ = trained()
    got, opt = trained(sharded=sharded)
    assert all(map(torch.equal, expected, got))
    copy.deepcopy(opt)
    if not sharded:
        pickle.dumps(opt)
    else:
        with pytest.raises(TypeError, match=r"state_dict"):
            pickle.dumps(opt)


@pytest.mark.parametrize(
    ("sharded", "error", "words"),
    [
        ({"0.weight": Sharded(2, None)}, ValueError, "0.weight.*dim 2"),
        ({"elsewhere": Sharded(0, None)}, ValueError, "elsewhere"),
        ({"0.weight": 0}, TypeError, "0.weight.*Sharded"),
        ([Sharded(0, None)], TypeError, "sharded"),
    ],
)
def test_wrong_declarations_are_refused(sharded, error, words):
    with pytest.raises(error, match=words):
        trained(sharded=sharded)


@pytest.mark.parametrize(("dim", "parts"), [("0", None), (True, None), (0, (0, 3)), (0, "ab"), (0, ())])
def test_shards_are_checked_where_they_are_written(dim, parts):
    with pytest.raises((TypeError, ValueError), match="Sharded"):
        Sharded(dim, None, parts)


def test_megatrons_attributes_are_read():
    model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Linear(8, 4, bias=False))
    model[0].weight.tensor_model_parallel, model[0].weight.partition_dim = True, 0
    found = megatron_shards(model, None, parts={"0.weight": (4, 4)})
    assert found == {"0.weight": Sharded(0, None, (4, 4))}


def test_grad_sync_of_one_process_is_the_plain_optimizer():
    expected, _ = trained()
    got, opt = trained(grad_sync="optimizer")
    assert all(map(torch.equal, expected, got))
    saved = opt.state_dict()
    assert saved["state"][0]["momentum_buffer"].shape == (8, 6)
    opt.load_state_dict(saved)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda opt: pickle.loads(pickle.dumps(opt))])
def test_a_copy_under_grad_sync_has_the_state(copied):
    _, opt = trained(grad_sync="optimizer")
    other = copied(opt)
    saved, again = opt.state_dict(), other.state_dict()
    assert saved["state"][0]["momentum_buffer"].any()
    for key, state in saved["state"].items():
        assert all(torch.equal(value, again["state"][key][name]) for name, value in state.items())
    assert saved["param_groups"] == again["param_groups"]


def test_a_refused_group_leaves_nothing_behind():
    first, second = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))
    opt = Muon([{"params": [("a", first)], "algorithm": "muon"}])
    bad = [("b", nn.Parameter(torch.randn(4)))]
    with pytest.raises(ValueError, match="'b'"):
        opt.add_param_group({"params": bad, "algorithm": "muon", "sharded": Sharded(0, None)})
    opt.add_param_group({"params": [("c", second)], "algorithm": "muon"})
    assert [group["param_names"] for group in opt.param_groups] == [["a"], ["c"]]


def test_a_group_that_cannot_be_planned_leaves_nothing_behind():
    q, k = (
        ("layers.0.q_proj.weight", nn.Parameter(torch.randn(8, 8))),
        ("layers.0.k_proj.weight", nn.Parameter(torch.randn(8, 8))),
    )
    clip = QKClip(head_dim=4, q="layers.{layer}.q_proj.weight", k="layers.{layer}.k_proj.weight")
    opt = Muon([{"params": [q, k], "algorithm": "muon"}], qk_clip=clip)
    lone = ("layers.1.q_proj.weight", nn.Parameter(torch.randn(8, 8)))
    with pytest.raises(ValueError, match=r"layers\.1"):
        opt.add_param_group({"params": [lone], "algorithm": "muon"})
    assert len(opt.param_groups) == 1
    for _, p in (q, k):
        p.grad = torch.randn_like(p)
    opt.step()


def test_shards_of_a_generator_are_declared():
    names = [(f"p{i}", nn.Parameter(torch.randn(4, 4))) for i in range(2)]
    layouts = []
    for params in (names, iter(names), (pair for pair in names)):
        opt = Muon([{"params": params, "algorithm": "muon", "sharded": Sharded(0, None)}])
        layouts.append(sorted(opt._layouts._sharded))
    assert layouts == [["p0", "p1"]] * 3


def test_parts_of_parameters_that_are_not_there_are_refused():
    model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Linear(8, 4, bias=False))
    model[0].weight.tensor_model_parallel, model[0].weight.partition_dim = True, 0
    assert megatron_shards(model, None, parts={"module.0.weight": (4, 4)})["0.weight"].parts == (4, 4)
    for name in ("typo.weight", "1.weight"):
        with pytest.raises(ValueError, match=f"parts: no parameter '{name}' that is marked as cut"):
            megatron_shards(model, None, parts={name: (4, 4)})
