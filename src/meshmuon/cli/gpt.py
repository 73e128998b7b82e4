"""A small GPT over bytes: pre-norm blocks, rotary positions, separate q, k, v, o matrices, no biases."""

import ctypes
import hashlib

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshmuon.cli.settings import GPTConfig

INIT_STD = 0.02
ROTARY_BASE = 10_000.0


class Rotary(nn.Module):
    """Rotary positions: turns each pair of features of q and k by an angle that grows with the position."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        frequencies = ROTARY_BASE ** (-torch.arange(0, config.head_width, 2) / config.head_width)
        angles = torch.outer(torch.arange(config.context), frequencies)
        # Not persistent: they follow from the config, and a checkpoint should hold only what was learned.
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Turn the features.

        Args:
            x: (batch, heads, length, head_width).

        Returns:
            A tensor of the same shape.
        """
        cos, sin = self.cos[: x.shape[-2]], self.sin[: x.shape[-2]]
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_width = config.head_width
        self.q = nn.Linear(config.width, config.width, bias=False)
        self.k = nn.Linear(config.width, config.width, bias=False)
        self.v = nn.Linear(config.width, config.width, bias=False)
        self.o = nn.Linear(config.width, config.width, bias=False)
        self.rotary = Rotary(config)

    def forward(self, x: Tensor) -> Tensor:
        """Let each position read the ones before it.

        Args:
            x: (batch, length, width).

        Returns:
            A tensor of the same shape.
        """
        # By the width of a head, not by their number: under tensor parallelism only some of them are here.
        heads = (-1, self.head_width)
        q, k, v = (project(x).unflatten(-1, heads).transpose(1, 2) for project in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(self.rotary(q), self.rotary(k), v, is_causal=True)
        return self.o(mixed.transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    """Two matrices with a GELU between them."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, config.mlp_ratio * config.width, bias=False)
        self.down = nn.Linear(config.mlp_ratio * config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each position on its own.

        Args:
            x: (batch, length, width).

        Returns:
            A tensor of the same shape.
        """
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """Attention and MLP, each with its norm in front and added to the residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.width)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block.

        Args:
            x: (batch, length, width).

        Returns:
            A tensor of the same shape.
        """
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """The model: bytes in, logits of the next byte out."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        self.lm_head = nn.Linear(config.width, config.vocabulary, bias=False)
        self._initialize()

    def _initialize(self) -> None:
        # The matrices that write to the residual stream start smaller, or its size would grow with depth.
        residual_std = INIT_STD / (2 * self.config.layers) ** 0.5
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                writes_residual = name.endswith(("attention.o.weight", "mlp.down.weight"))
                nn.init.normal_(parameter, std=residual_std if writes_residual else INIT_STD)

    def forward(self, tokens: Tensor) -> Tensor:
        """Predict the next byte at each position.

        Args:
            tokens: (batch, length) of int64, length at most `config.context`.

        Returns:
            Logits, (batch, length, vocabulary).
        """
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.norm(x))


def fingerprint(model: nn.Module) -> str:
    """Hash all weights, to show that two runs begin alike.

    Args:
        model: Any model with plain tensors.

    Returns:
        The sha256 over names and values.
    """
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(name.encode())
        values = parameter.detach().cpu().contiguous()
        # By address: torch alone has no other fast way from a tensor to bytes, and numpy is no dependency.
        digest.update((ctypes.c_char * values.nbytes).from_address(values.data_ptr()))
    return digest.hexdigest()


def next_byte_loss(model: nn.Module, windows: Tensor) -> Tensor:
    """Mean cross entropy of each window's bytes given those before them.

    Args:
        model: Maps tokens to logits.
        windows: (batch, context + 1) of int64.

    Returns:
        A scalar in nats per byte.
    """
    logits = model(windows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())


@torch.no_grad()
def mean_loss(model: nn.Module, windows: Tensor, *, batch: int) -> float:
    """`next_byte_loss` over many windows, in portions that fit in memory.

    Args:
        model: Maps tokens to logits.
        windows: (count, context + 1) of int64.
        batch: Windows in one portion.

    Returns:
        The mean in nats per byte.
    """
    total = sum(next_byte_loss(model, part).item() * len(part) for part in windows.split(batch))
    return total / len(windows)


@torch.no_grad()
def generate(model: GPT, prompt: bytes, *, length: int, temperature: float, seed: int) -> bytes:
    """Continue a text byte by byte.

    Args:
        model: A trained model.
        prompt: The beginning, at least one byte.
        length: Bytes to add.
        temperature: Divides the logits; small values give likelier text.
        seed: The same seed gives the same text.

    Returns:
        The prompt and its continuation.
    """
    # Drawn on the CPU: a CUDA generator gives other numbers for the same seed.
    generator = torch.Generator().manual_seed(seed)
    device = model.lm_head.weight.device
    text = bytearray(prompt)
    for _ in range(length):
        tokens = torch.tensor([list(text[-model.config.context :])], device=device)
        logits = model(tokens)[0, -1].float().cpu()
        probabilities = (logits / temperature).softmax(dim=-1)
        text.append(int(torch.multinomial(probabilities, 1, generator=generator)))
    return bytes(text)
