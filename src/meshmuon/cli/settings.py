"""What a training run is: model, optimizer, schedule, sizes. Plain data, made and read without torch."""

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from meshmuon.errors import message, one_of

if TYPE_CHECKING:  # it imports torch
    from meshmuon.config import LRRule

OptimizerName = Literal["muon", "adamw", "torch-muon", "reference"]
SizeName = Literal["tiny", "small", "base"]
Precision = Literal["float32", "bfloat16"]

# How the tables and figures call them.
LABELS: dict[OptimizerName, str] = {
    "muon": "meshmuon.Muon",
    "adamw": "torch.optim.AdamW",
    "torch-muon": "torch.optim.Muon",
    "reference": "reference Muon (fp64)",
}


def _check_positive(config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value < 1:
            raise ValueError(f"{name}: found {value}. Give a positive number.")


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTConfig:
    """Shape of the model.

    Attributes:
        width: Features of the residual stream.
        layers: Number of blocks.
        heads: Attention heads; `width / heads` must be even, because rotary positions turn pairs of features.
        context: Longest sequence in bytes.
        mlp_ratio: Hidden features of the MLP as a multiple of `width`.
        vocabulary: Token values: one for each byte.
    """

    width: int = 128
    layers: int = 4
    heads: int = 4
    context: int = 128
    mlp_ratio: int = 4
    vocabulary: int = 256

    def __post_init__(self) -> None:
        _check_positive(self, "width", "layers", "heads", "context", "mlp_ratio", "vocabulary")
        if self.width % (2 * self.heads):
            raise ValueError(f"width: found {self.width}. Give a multiple of 2 * heads = {2 * self.heads}.")

    @property
    def head_width(self) -> int:
        """Features of one attention head."""
        return self.width // self.heads


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """Which optimizer, and its numbers. Those not here are the same for all: see `optimizers`.

    Attributes:
        name: "muon" (ours), "adamw" (torch's, fused), "torch-muon" (torch.optim.Muon, AdamW for the rest) or
            "reference" (`meshmuon.testing`, in plain lines with fp64 products; AdamW for the rest).
        lr: Peak learning rate, of every parameter.
        adjust_lr_fn: How Muon's update is scaled by the shape of a matrix. AdamW does not read it.
        weight_decay: Decoupled; of every parameter with at least 2 dims, never of norms.
    """

    name: OptimizerName
    lr: float
    adjust_lr_fn: "LRRule" = "match_rms_adamw"
    weight_decay: float = 0.1

    def __post_init__(self) -> None:
        if self.name not in get_args(OptimizerName):
            known = one_of(get_args(OptimizerName))
            raise ValueError(message("optimizers", found=f"found {self.name!r}", do=f"Give {known}."))
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise ValueError(f"lr: found {self.lr}. Give a positive number.")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """Everything a run depends on, besides the corpus.

    Attributes:
        model: Shape of the GPT.
        optimizer: Which one, and its learning rate.
        steps: Optimizer steps.
        batch: Windows in one step, over all processes together.
        warmup_share: Share of the steps with a linearly growing rate.
        final_lr_share: The cosine ends at this share of the peak rate.
        seed: Decides initial weights, batches and the sample.
        device: Where to train, as torch names it.
        precision: What products are computed in; weights and optimizer state are always float32.
        compile: Whether blocks of the model go through `torch.compile`.
        validate_every: Steps between two measurements on held-out bytes.
        checkpoint_every: Steps between two checkpoints, where they are kept.
        validation_windows: Held-out windows in one measurement, at most.
        sample_bytes: Length of the text that the trained model writes.
    """

    model: GPTConfig
    optimizer: OptimizerConfig
    steps: int
    batch: int
    warmup_share: float = 0.1
    final_lr_share: float = 0.1
    seed: int = 0
    device: str = "cpu"
    precision: Precision = "float32"
    compile: bool = False
    validate_every: int = 25
    checkpoint_every: int = 100
    validation_windows: int = 128
    sample_bytes: int = 240

    def __post_init__(self) -> None:
        _check_positive(self, "steps", "batch", "validate_every", "checkpoint_every", "validation_windows")

    def lr_at(self, step: int) -> float:
        """Learning rate of a step: linear warmup, then a cosine.

        Args:
            step: Steps already done.

        Returns:
            The rate, at most the peak.
        """
        warmup = max(1, round(self.warmup_share * self.steps))
        if step < warmup:
            return self.optimizer.lr * (step + 1) / warmup
        progress = min(1.0, (step - warmup) / max(1, self.steps - warmup))
        cosine = 0.5 * (1 + math.cos(math.pi * progress))
        return self.optimizer.lr * (self.final_lr_share + (1 - self.final_lr_share) * cosine)

    def as_dict(self) -> dict[str, Any]:
        """The config as plain JSON types; `config_from` is the way back."""
        return dataclasses.asdict(self)


def config_from(stored: dict[str, Any]) -> TrainConfig:
    """Read what `TrainConfig.as_dict` wrote.

    Args:
        stored: Plain JSON types.

    Returns:
        An equal config.
    """
    model, optimizer = GPTConfig(**stored["model"]), OptimizerConfig(**stored["optimizer"])
    return TrainConfig(**{**stored, "model": model, "optimizer": optimizer})


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """One of the sizes a user can ask for by name.

    Attributes:
        name: The word.
        parameters: How many parameters, in words.
        model: Shape of the GPT.
        steps: Optimizer steps.
        batch: Windows in one step.
        lr: Peak learning rate of each optimizer: the best of its sweep in docs/results, where there is one.
        precision: On a GPU. A CPU always computes in float32: bf16 is many times slower there.
        compile: Whether to compile, on a GPU.
    """

    name: SizeName
    parameters: str
    model: GPTConfig
    steps: int
    batch: int
    lr: dict[OptimizerName, float]
    precision: Precision
    compile: bool


# Both Muons and the reference are scaled alike ("match_rms_adamw"), so Muon's rate is theirs.
_TINY_LR: dict[OptimizerName, float] = {"muon": 8e-3, "adamw": 4e-3}
# A test holds these to the sweeps in docs/results.
_SMALL_LR: dict[OptimizerName, float] = {"muon": 4e-3, "adamw": 2e-3}
_BASE_LR: dict[OptimizerName, float] = {"muon": 4e-3, "adamw": 2.5e-4}

SIZES: dict[SizeName, Size] = {
    "tiny": Size(
        name="tiny",
        parameters="0.9 M",
        model=GPTConfig(width=128, layers=4, heads=4, context=128),
        steps=600,
        batch=16,
        lr=_TINY_LR,
        precision="float32",
        compile=False,
    ),
    "small": Size(
        name="small",
        parameters="10.8 M",
        model=GPTConfig(width=384, layers=6, heads=6, context=256),
        steps=1000,
        batch=32,
        lr=_SMALL_LR,
        precision="bfloat16",
        compile=False,
    ),
    "base": Size(
        name="base",
        parameters="126.4 M",
        model=GPTConfig(width=1024, layers=10, heads=16, context=512),
        steps=300,  # once over the standard library: in 1000 steps it learns it by heart, and the held-out loss rises
        batch=64,
        lr=_BASE_LR,
        precision="bfloat16",
        compile=True,
    ),
}


def preset(size: SizeName, optimizer: OptimizerName = "muon", *, device: str = "cpu") -> TrainConfig:
    """The defaults of a size.

    Args:
        size: `tiny` is meant for two CPU cores, `small` and `base` for a GPU.
        optimizer: Which one to train with.
        device: Where to train, as torch names it.

    Returns:
        A config to adapt with `dataclasses.replace`.
    """
    if size not in SIZES:
        raise ValueError(message("size", found=f"found {size!r}", do=f"Give {one_of(SIZES)}."))
    chosen, on_gpu = SIZES[size], device != "cpu"
    return TrainConfig(
        model=chosen.model,
        optimizer=OptimizerConfig(name=optimizer, lr=default_lr(size, optimizer)),
        steps=chosen.steps,
        batch=chosen.batch,
        device=device,
        precision=chosen.precision if on_gpu else "float32",
        compile=chosen.compile and on_gpu,
    )


def default_lr(size: SizeName, optimizer: OptimizerName) -> float:
    """The peak learning rate of an optimizer at a size.

    Args:
        size: Which size.
        optimizer: Which optimizer.

    Returns:
        The rate; torch's Muon and the reference share ours.
    """
    rates = SIZES[size].lr
    return rates["adamw" if optimizer == "adamw" else "muon"]


def pick_device(word: Literal["auto", "cpu", "cuda"]) -> str:
    """Turn a word into a device that exists here.

    Args:
        word: `auto` takes CUDA if there is any.

    Returns:
        A name for `Tensor.to`.

    Raises:
        ValueError: `cuda` on a machine without it.
    """
    import torch

    available = torch.cuda.is_available()
    if word == "auto":
        return "cuda" if available else "cpu"
    if word == "cuda" and not available:
        raise ValueError("device: found cuda, but torch sees no CUDA device. Give cpu or auto.")
    return word
