"""What `meshmuon plan` prints: the routing, the routes, the load of each GPU, and what a step will take."""

import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from meshmuon.cli.common import WIDTH, table

if TYPE_CHECKING:
    from meshmuon.plan.bucket import Plan
    from meshmuon.plan.outlook import Forecast, RouteForecast

# What training reaches of the rate of large products: an assumption, about 40 % of the data sheet's peak.
TRAINING_RATE = 0.6
_MOST_BARS = 16
_BAR = 28


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """Forward and backward, estimated by 6 operations per parameter and token.

    Attributes:
        tokens: For each GPU of the job.
        parameters: Those a token passes through.
        seconds: The estimate.
    """

    tokens: int
    parameters: float
    seconds: float


def estimate_training(forecast: "Forecast", *, tokens: int, experts_per_token: int | None) -> TrainingStep | None:
    """Estimate a training step without its optimizer.

    Args:
        forecast: What was planned.
        tokens: For each GPU of the job.
        experts_per_token: How many experts a token passes through.

    Returns:
        The estimate; None if there are experts, and nobody said how many take part.
    """
    active = 0.0
    for parameter in forecast.plan.parameters:
        share = 1.0
        if parameter.routing.view.experts:
            if experts_per_token is None:
                return None
            share = min(1.0, experts_per_token / parameter.shape[0])
        active += share * parameter.numel
    rate = TRAINING_RATE * forecast.hardware.calibration.rates[0]
    return TrainingStep(tokens, active, 6.0 * active * tokens / rate)


def report(forecast: "Forecast", training: TrainingStep | None) -> str:
    """Put a forecast into words, 80 columns wide.

    Args:
        forecast: What was planned.
        training: The training step beside it, if it can be told.

    Returns:
        Lines of plain text.
    """
    sections = (_title, _routing, _batches, _memory, _routes, _load)
    lines = [line for section in sections for line in (*section(forecast), "")]
    return "\n".join([*lines, *_verdict(forecast, training)])


def _title(forecast: "Forecast") -> Iterator[str]:
    from meshmuon.plan.words import human

    machine, several = forecast.hardware, forecast.ranks > 1
    yield f"{forecast.model}: {human(forecast.parameters)} parameters, {forecast.matrices} matrices"
    yield f"on {forecast.ranks} {machine.name.upper()}{'s' if several else ''}" + (
        f", {machine.node} in a node, {machine.inside.name}, {machine.across.name}" if several else ""
    )
    if several:
        yield from (_wrapped(f"  {axis}") for axis in forecast.layout.split(", "))
    yield "predicted, nothing was run: counts are exact, times come from a simple model"


def _routing(forecast: "Forecast") -> Iterator[str]:
    """Rows under the algorithm and reason they have in common."""
    from meshmuon.plan.describe import cuts_of, rows_of
    from meshmuon.plan.words import human

    total = max(1, forecast.parameters)
    rows = [(row.parameters[0].routing.algorithm, row.reason, row) for row in rows_of(forecast.plan.parameters)]
    several = forecast.ranks > 1
    yield "ROUTING"
    for (algorithm, reason), members in groupby(sorted(rows, key=lambda r: (r[0] != "muon", r[1])), lambda r: r[:2]):
        listed = [row for _, _, row in members]
        numel = sum(row.numel for row in listed)
        yield _wrapped(f"{algorithm}, {reason}: {human(numel)}, {numel / total:.1%}")
        shapes, names = (max(map(len, words)) for words in zip(*((row.shape, row.name) for row in listed), strict=True))
        for row in listed:
            cuts = f"  {cuts_of(row.parameters[0])}" if several else ""
            head = f"{len(row.parameters):6d} x {row.shape:<{shapes}s}  "
            room = min(names, WIDTH - len(head) - len(cuts))
            yield (head + _shortened(row.name, room).ljust(room) + cuts).rstrip()


def _wrapped(text: str) -> str:
    return textwrap.fill(text, WIDTH, subsequent_indent="    ")


def _shortened(name: str, width: int) -> str:
    """A name that ends with what tells it from others."""
    return name if len(name) <= width else f"...{name[3 - width :]}"


def _batches(forecast: "Forecast") -> Iterator[str]:
    yield f"BATCHES{' of rank 0' if forecast.ranks > 1 else ''}"
    rows = [tuple(map(str, row.values())) for row in batches_of(forecast.plan)]
    yield table(("matrix", "count", "parts", "route", "ranks", "computed as"), rows, left=frozenset({0, 3, 5}))


def batches_of(plan: "Plan") -> list[dict[str, Any]]:
    """Put the buckets of a plan together that differ in nothing but their number.

    Args:
        plan: The plan.

    Returns:
        One dict for each kind: matrix, count, batches, route, ranks, recipe.
    """
    found: dict[tuple[Any, ...], list[int]] = {}
    for bucket in plan.buckets:
        short, long = bucket.wide_shape
        count = bucket.computed_by(None) if not bucket.team else len(bucket.matrices)
        key = (f"{short}x{long}", bucket.route.value, max(1, len(bucket.team)), bucket.recipe.describe())
        found.setdefault(key, []).append(count)
    return [
        {"matrix": key[0], "count": sum(counts), "batches": len(counts), "route": key[1], "ranks": key[2], "as": key[3]}
        for key, counts in found.items()
    ]


def _memory(forecast: "Forecast") -> Iterator[str]:
    from meshmuon.plan.words import human

    parts = {
        "parameters": forecast.parameter_bytes,
        "gradients": forecast.parameter_bytes,
        "state": forecast.state_bytes,
        "workspace": forecast.route().workspace,
    }
    yield f"MEMORY of the fullest GPU, of {human(forecast.hardware.memory, unit='B')}; activations come on top"
    yield "  ".join(f"{name} {human(size, unit='B')}" for name, size in parts.items())
    if not forecast.fits:
        yield f"DOES NOT FIT: {human(forecast.bytes_needed, unit='B')}"


def _routes(forecast: "Forecast") -> Iterator[str]:
    from meshmuon.plan.outlook import EXPLAINED
    from meshmuon.plan.words import human

    header = ("route", "ms", "products", "wire", "element", "host", "sent/GPU", "balance")
    rows = []
    for r in forecast.routes:
        times = (r.ms, *(1e3 * seconds for seconds in (r.compute, r.exchange, r.elementwise, r.host)))
        name = f"{r.route}{' <-' if r.route == forecast.chosen else ''}"
        sent = human(r.bytes_sent.max, unit="B")
        rows.append((name, *(f"{ms:.1f}" for ms in times), sent, f"{r.loads.balance:.2f}"))
    yield "ROUTES: ms of one step (<- taken; host: Python's launches, beside the rest)"
    yield table(header, rows)
    yield from (f"  {r.route}: {EXPLAINED[r.route]}" for r in forecast.routes)


def _load(forecast: "Forecast") -> Iterator[str]:
    from meshmuon.plan.words import human

    loads = forecast.route().loads
    title = f"LOAD of each GPU, {human(loads.max, unit='FLOP')} at most, {human(loads.mean, unit='FLOP')} on average"
    yield f"{title} (balance {loads.balance:.2f})"
    if loads != forecast.route().flops:
        yield "  as operations in 16 bits: those of small matrices, in fp32, count more"
    ranks = len(loads.each)
    size = -(-ranks // min(ranks, _MOST_BARS))
    digits = len(str(ranks - 1))
    for first in range(0, ranks, size):
        each = loads.each[first : first + size]
        last = first + len(each) - 1
        place = f"{first:>{digits}d}" if size == 1 else f"{first:>{digits}d}-{last:<{digits}d}"
        mean = sum(each) / len(each)
        yield f"  {place}  {_bar(mean / loads.max if loads.max else 0.0)} {_words(each)}"


def _words(loads: Sequence[float]) -> str:
    from meshmuon.plan.words import human

    idle = sum(not load for load in loads)
    if idle == len(loads):
        return "idle"
    most = human(max(loads), unit="FLOP") + ("" if len(loads) == 1 else " at most")
    return f"{most}, {idle} idle" if idle else most


def _bar(part: float) -> str:
    full = round(part * _BAR)
    solid, empty = ("█", "·") if _can_draw() else ("#", ".")
    return solid * full + empty * (_BAR - full)


def _can_draw() -> bool:
    try:
        "█·".encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True


def _verdict(forecast: "Forecast", training: TrainingStep | None) -> Iterator[str]:
    from meshmuon.plan.words import human

    chosen, fastest = forecast.route(), forecast.fastest
    yield f"optimizer step: {chosen.ms:.1f} ms on route {chosen.route}" + (
        "" if fastest.route == chosen.route else f" (by this model {fastest.route} takes {fastest.ms:.1f} ms)"
    )
    if training is None:
        yield "training step: unknown; say --experts-per-token to estimate it"
        return
    rate = human(TRAINING_RATE * forecast.hardware.calibration.rates[0], unit="FLOP/s")
    ms = 1e3 * training.seconds
    yield (
        f"training step: about {ms:,.{0 if ms >= 10 else 2}f} ms before it "
        f"({training.tokens:,} tokens / GPU, 6 FLOP x {human(training.parameters)}"
    )
    yield f"  parameters each, at {rate}): the optimizer adds {_percent(chosen, training)}"


def _percent(chosen: "RouteForecast", training: TrainingStep) -> str:
    return f"{chosen.ms / (1e3 * training.seconds):.1%}"
