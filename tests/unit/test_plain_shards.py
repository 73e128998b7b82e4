"""`sharded=` without a job: one process holds everything, and the same script runs."""

import copy
import pickle

import pytest
import torch
from torch import nn

from meshmuon import Muon, Sharded, megatron_shards


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
