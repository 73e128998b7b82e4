"""Small attentions with real weights, and the largest logit of each head from whole matrices: the oracle."""

import torch
from torch import nn
from torch.nn import functional as F

from meshmuon import QKClip

WIDTH, HEADS, KEYS, DIM = 24, 6, 2, 5
NOPE, ROPE, VALUE, LATENT = 4, 3, 6, 10


class Separate(nn.Module):
    """q and k by parameters of their own; with fewer k heads than q heads, or as many."""

    def __init__(self, keys, bias=False):
        super().__init__()
        self.keys = keys
        self.q = nn.Linear(WIDTH, HEADS * DIM, bias=bias)
        self.k = nn.Linear(WIDTH, keys * DIM, bias=bias)
        self.v = nn.Linear(WIDTH, keys * DIM, bias=bias)

    def heads(self, x):
        q, k, v = (each(x).unflatten(-1, (-1, DIM)).transpose(1, 2) for each in (self.q, self.k, self.v))
        return q, k, v

    def forward(self, x):
        q, k, v = self.heads(x)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).sum((1, 3))


class Fused(Separate):
    """q, k and v in one parameter: one after the other, or each group of heads by itself (Megatron)."""

    def __init__(self, keys, grouped):
        nn.Module.__init__(self)
        self.keys, self.grouped = keys, grouped
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * keys) * DIM)

    def heads(self, x):
        made, group = self.qkv(x), HEADS // self.keys
        if self.grouped:
            made = made.unflatten(-1, (self.keys, group + 2, DIM))
            q, k, v = made.split((group, 1, 1), dim=-2)
            q, k, v = (each.flatten(-3, -2) for each in (q, k, v))
        else:
            made = made.unflatten(-1, (-1, DIM))
            q, k, v = made.split((HEADS, self.keys, self.keys), dim=-2)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


class Latent(nn.Module):
    """Multi-head latent attention: k has a part without positions for each head, and one with, shared by all."""

    def __init__(self):
        super().__init__()
        self.q = nn.Linear(WIDTH, HEADS * (NOPE + ROPE), bias=False)
        self.down = nn.Linear(WIDTH, LATENT + ROPE, bias=False)
        self.up = nn.Linear(LATENT, HEADS * (NOPE + VALUE), bias=False)

    def heads(self, x):
        q = self.q(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        latent, shared = self.down(x).split((LATENT, ROPE), dim=-1)
        k, v = self.up(latent).unflatten(-1, (HEADS, -1)).transpose(1, 2).split((NOPE, VALUE), dim=-1)
        return q, torch.cat((k, shared[:, None].expand(-1, HEADS, -1, -1)), dim=-1), v

    def forward(self, x):
        return F.scaled_dot_product_attention(*self.heads(x), is_causal=True).sum((1, 3))


class Layers(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.layers = nn.ModuleList(make() for _ in range(2))

    def forward(self, x):
        return sum(layer(x).sum() for layer in self.layers)


def clip(q="q", k="k", **settings):
    settings = {"threshold": 3.0, "head_dim": DIM, **settings}
    return QKClip(q=f"layers.{{layer}}.{q}.weight", k=f"layers.{{layer}}.{k}.weight", **settings)


PLAIN = (HEADS * DIM, KEYS * DIM, KEYS * DIM)
GROUPED = (HEADS // KEYS * DIM, DIM, DIM)
# name → (one layer, what is said of it)
KINDS = {
    "mha": (lambda: Separate(HEADS), clip()),
    "mha, biases": (lambda: Separate(HEADS, bias=True), clip(q_heads=HEADS, k_heads=HEADS)),
    "gqa": (lambda: Separate(KEYS), clip(kind="gqa")),
    "mqa, biases": (lambda: Separate(1, bias=True), clip(kind="gqa", k_heads=1)),
    "mla": (Latent, clip(k="up", kind="mla", head_dim=NOPE, q_heads=HEADS)),
    "fused mha": (lambda: Fused(HEADS, grouped=False), clip("qkv", "qkv", fused_rows=(HEADS * DIM,) * 3)),
    "fused gqa": (lambda: Fused(KEYS, grouped=False), clip("qkv", "qkv", fused_rows=PLAIN, kind="gqa")),
    "grouped gqa": (lambda: Fused(KEYS, grouped=True), clip("qkv", "qkv", fused_rows=GROUPED, kind="gqa")),
}


def make_model(kind, seed=0):
    """Heads of different size: some are far over the threshold, some under, and one group of k is over as a whole."""
    torch.manual_seed(seed)
    model = Layers(KINDS[kind][0])
    with torch.no_grad():
        for layer in model.layers:
            weight = layer.qkv.weight if hasattr(layer, "qkv") else layer.q.weight
            weight.mul_(1.0 if hasattr(layer, "qkv") else 2.0)
            weight[: 3 * DIM].mul_(9.0)
    return model


def inputs():
    return torch.randn(2, 7, WIDTH, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits_of(model):
    """Layer → the largest scaled logit of each head, from the whole matrix of logits."""
    found = {}
    for index, layer in enumerate(model.layers):
        q, k, _ = layer.heads(inputs())
        k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        every = q @ k.mT / q.shape[-1] ** 0.5
        hidden = torch.ones(every.shape[-2:], dtype=torch.bool).triu(1)
        found[index] = every.masked_fill(hidden, -torch.inf).amax((0, 2, 3))
    return found
