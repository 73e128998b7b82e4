"""Models for `meshmuon plan pkg.module:build`, good and bad."""

import torch
from torch import nn


def build():
    model = nn.Sequential(nn.Embedding(1000, 64), nn.Linear(64, 256), nn.Linear(256, 64), nn.Linear(64, 1000))
    assert model[1].weight.device.type == "meta", "the command builds on the meta device"
    return model


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(32, 48), nn.Linear(48, 32))


def far_too_large():
    return nn.Sequential(*(nn.Linear(100_000, 100_000) for _ in range(100)))  # 4 TB


def on_the_cpu():
    return torch.empty(1 << 50, device="cpu")


def no_module():
    return {"weight": 3}


def raises():
    raise KeyError("width")


def no_matrix():
    return nn.LayerNorm(8)


def with_experts():
    experts = nn.Module()
    experts.w = nn.Parameter(torch.empty(4, 16, 8))
    return nn.ModuleDict({"experts": experts})


def stack():
    model = nn.Module()
    model.w = nn.Parameter(torch.empty(4, 16, 8))
    return model
