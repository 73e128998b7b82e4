"""What a run tells as it goes: `train()` yields these, `log.jsonl` keeps them. Plain data, without torch."""

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

from meshmuon.cli.corpus import CorpusFacts
from meshmuon.cli.settings import TrainConfig, config_from

# The reason of a stop that was asked for: such a run can go on.
INTERRUPTED = "interrupted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """What the run is, known before its first step.

    Attributes:
        kind: Its word in the log.
        torch_version: Of the torch that trains.
        layout: How the model is spread over processes, in words.
        parameters: How many.
        weights_sha256: Of the initial weights: runs that are compared begin with the same.
        routing: The optimizer's own table, or its name and numbers.
        corpus: What is learned.
        config: Everything else.
        resumed_at: Steps already done when this process began.
    """

    kind: ClassVar[str] = "started"
    torch_version: str
    layout: str
    parameters: int
    weights_sha256: str
    routing: str
    corpus: CorpusFacts
    config: TrainConfig
    resumed_at: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped:
    """One optimizer step.

    Attributes:
        kind: Its word in the log.
        step: Steps done.
        loss: Of the batch, before the update.
        lr: Learning rate of the step.
        tokens_per_second: Over all processes.
        optimizer_share: Share of the step's time that the optimizer took.
        elapsed: Seconds of training so far, without validation.
    """

    kind: ClassVar[str] = "step"
    step: int
    loss: float
    lr: float
    tokens_per_second: float
    optimizer_share: float
    elapsed: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Validated:
    """Loss on held-out bytes after `step` steps and `elapsed` seconds of training."""

    kind: ClassVar[str] = "validation"
    step: int
    loss: float
    elapsed: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The end: validation loss in nats per byte, before the first step and after the last."""

    kind: ClassVar[str] = "finished"
    steps: int
    first_loss: float
    last_loss: float
    elapsed: float
    sample: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    """The run ended early; `reason` says why."""

    kind: ClassVar[str] = "stopped"
    step: int
    reason: str


Record = Started | Stepped | Validated | Finished | Stopped
_KINDS: dict[str, type[Record]] = {each.kind: each for each in (Started, Stepped, Validated, Finished, Stopped)}


def as_dict(record: Record) -> dict[str, Any]:
    """A record as plain JSON types.

    Args:
        record: Anything `train` yields.

    Returns:
        Its fields, with `kind` in front.
    """
    return {"kind": record.kind, **dataclasses.asdict(record)}


def record_from(stored: dict[str, Any]) -> Record:
    """Read what `as_dict` gave.

    Args:
        stored: Plain JSON types.

    Returns:
        An equal record.
    """
    fields = {key: value for key, value in stored.items() if key != "kind"}
    if stored["kind"] == Started.kind:
        fields["corpus"], fields["config"] = CorpusFacts(**fields["corpus"]), config_from(fields["config"])
    return _KINDS[stored["kind"]](**fields)
