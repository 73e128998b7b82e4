"""Predicted optimizer steps of large jobs, by route, written to docs/planning.md.

python -m benchmarks.planning [--hardware h200] [--network infiniband] [--out docs/planning.md]
"""

from __future__ import annotations

import argparse
import datetime
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.calibrate import polar_samples, step_samples, table
from meshmuon import plan_for
from meshmuon.plan.hardware import known_hardware
from meshmuon.plan.outlook import EXPLAINED, Forecast
from meshmuon.plan.placement import Rule
from meshmuon.plan.words import human

SIZES = (64, 512, 4096)
ROUTES = ("local", "owner", "split", "mixed", "gram", "gather")
EXPERTS = "*.experts.*"


@dataclass(frozen=True)
class Setup:
    """A model on a mesh whose shape follows from the number of GPUs."""

    title: str
    model: str
    mesh: Callable[[int], dict[str, int]]
    placements: dict[str, Rule]


SETUPS = [
    Setup("8B, FSDP", "llama-3-8b", lambda n: {"dp": n}, {"dp": "shard0"}),
    Setup(
        "8B, HSDP in shards of 64",
        "llama-3-8b",
        lambda n: {"replicas": n // 64, "shards": 64},
        {"replicas": "replicate", "shards": "shard0"},
    ),
    Setup("70B, FSDP", "llama-3-70b", lambda n: {"dp": n}, {"dp": "shard0"}),
    Setup(
        "70B, FSDP × TP 8",
        "llama-3-70b",
        lambda n: {"dp": n // 8, "tp": 8},
        {"dp": "shard0", "tp": "tensor"},
    ),
    Setup(
        "70B, HSDP in shards of 64",
        "llama-3-70b",
        lambda n: {"replicas": n // 64, "shards": 64},
        {"replicas": "replicate", "shards": "shard0"},
    ),
    Setup(
        "1T MoE (Kimi K2), EP 64, experts cut by rows",
        "kimi-k2",
        lambda n: {"efsdp": n // 64, "ep": 64},
        {"efsdp": {EXPERTS: "shard1", "*": "shard0"}, "ep": {EXPERTS: "experts", "*": "shard0"}},
    ),
    Setup(
        "1T MoE (Kimi K2), EP 64, whole experts",
        "kimi-k2",
        lambda n: {"efsdp": n // 64, "ep": 64},
        {"efsdp": "shard0", "ep": {EXPERTS: "experts", "*": "shard0"}},
    ),
]


def forecasts(hardware: str, network: str) -> Iterator[tuple[Setup, Forecast, float]]:
    for setup in SETUPS:
        for size in SIZES:
            start = time.perf_counter()
            said = plan_for(setup.model, setup.mesh(size), setup.placements, hardware, network=network)
            yield setup, said, time.perf_counter() - start


def by_route(rows: list[tuple[Setup, Forecast, float]]) -> Iterator[str]:
    shown = [route for route in ROUTES if any(route in (r.route for r in said.routes) for _, said, _ in rows)]
    yield f"| job | GPUs | {' | '.join(shown)} | host | Muon takes | by the model |"
    yield "|---|---|" + "---|" * (len(shown) + 3)
    for setup, said, _ in rows:
        times = {route.route: f"{route.device_ms:.1f}" for route in said.routes}
        times[said.chosen] = f"**{times[said.chosen]}**"
        fastest = min(said.routes, key=lambda route: route.device_ms).route
        cells = [times.get(route, "-") for route in shown]  # type: ignore[call-overload]
        host = f"{said.route().host * 1e3:.1f}"
        yield f"| {setup.title} | {said.ranks} | {' | '.join(cells)} | {host} | {said.chosen} | {fastest} |"


def details(rows: list[tuple[Setup, Forecast, float]]) -> Iterator[str]:
    yield (
        "| job | GPUs | products ms | wire ms | element-wise ms | sent / GPU, most (mean) | FLOP / GPU, most | balance "
        "| state / GPU | workspace / GPU | fits 141 GB | planned in s |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|---|---|"
    for setup, said, seconds in rows:
        r = said.route()
        sent = f"{human(r.bytes_sent.max, unit='B')} ({human(r.bytes_sent.mean, unit='B')})"
        cells = [
            setup.title,
            str(said.ranks),
            *(f"{1e3 * each:.1f}" for each in (r.compute, r.exchange, r.elementwise)),
            sent,
            human(r.flops.max, unit="FLOP"),
            f"{r.loads.balance:.2f}",
            human(said.state_bytes, unit="B"),
            human(r.workspace, unit="B"),
            "yes" if said.fits else f"**no**: {human(said.bytes_needed, unit='B')}",
            f"{seconds:.2f}",
        ]
        yield "| " + " | ".join(cells) + " |"


TEXT = """# Planning a run of any size

<!-- Written by `make planning`. Edit benchmarks/planning.py, not this file. -->

**These are predictions. No run on more than one GPU was made.** Bytes, operations, memory and balance are counted from
the plan that `Muon` really makes; milliseconds come from a simple model with the constants below.

```python
from meshmuon import plan_for

forecast = plan_for(
    "llama-3-70b",                      # or your model (on the meta device if you like), or {{name: shape}}
    {{"dp": 512, "tp": 8}},               # the mesh, outermost axis first
    {{"dp": "shard0", "tp": "tensor"}},   # what each axis does to the parameters
    "h200",                             # or "h100", "b200"; network="infiniband" or "ethernet"
)
print(forecast)
forecast.route().bytes_sent.each[7]     # what rank 7 sends in a step, exactly
```

## Predicted optimizer step by route, ms

{hardware}, {date}.

What the device takes, exchanges overlapped with products; **bold**: the route `Muon` takes on that layout. *host*: what
Python takes to launch it on the slowest rank of each bucket, on a slow core; the step takes whichever is longer.
"-": not a route of that layout.

{routes}

{explained}

## What the chosen route is made of

{details}

Parameters, gradients and state are counted in fp32. "fits" adds up parameters, gradients, state and workspace of the
fullest GPU; activations come on top. The last column is the time `plan_for` took, on one slow core.

## How to read it

- `gather` is what `full_tensor()` on every rank costs: each GPU computes everything. The others avoid that.
- `owner` gets faster with more GPUs until there are more GPUs than matrices: then one matrix is the floor (its way to
  one GPU, its polar factor, and its way back), and *balance*, the largest load over the mean, says how many GPUs wait.
- `split` lets replicas share the matrices. An owner then sends its results to every replica: with many replicas and few
  matrices that takes longer than computing them again.
- Where *host* is larger than the device's time, the step is bound by launching small copies: an owner takes every piece
  out of the received buffer one by one, twice a matrix and GPU.
- Experts that lie whole on a GPU (`local`, or the expert part of `owner`) cost no exchange at all.

## How it is computed

1. Every parameter is routed as in `Muon`, and laid out by the rules of the mesh. `"tensor"` follows Megatron:
   projections into a block are cut by outputs, those out of it by inputs. Where FSDP and TP cut one dim, FSDP's cut is
   strided.
2. `build_plan`, the function `Muon` calls, makes the plan of one rank of each kind (ranks differ where experts do not
   divide evenly). From it the bytes and operations of all ranks are added up. Tests compare them with the plans of real
   optimizers on every rank, and with bytes counted at the collectives of real gloo jobs: they are equal.
3. Products: operations / rate of the size class. Other work of the device: bytes / bandwidth + calls × launch. Each
   bucket takes as long as its slowest owner.
4. All-to-all: launch + hops + messages + the busiest rank's bytes over its share of NVLink and its one network card.
   All-gather and reduce-scatter: rings that use all network cards of a node.
5. Of products and exchanges of a team the longer counts whole, of the shorter the first bucket's share.

The constants stand in `plan/hardware.py`, `plan/calibration.py` and `plan/timing.py`, each with its source. `fit` in
`plan/calibration.py` fits those of a device to measurements; `python -m benchmarks.calibrate` holds the measurements.
With today's constants, on one H200: polar factors with torch's products (measured 2026-11-15), and whole steps:

{calibration}

## Limits

- Rates of our own kernels are rough, by size class; whole steps on one H200 are within 8 % of what was measured
  (`python -m benchmarks.calibrate`). H100 and B200 are scaled from the H200 by their data sheets.
- Efficiencies of links, the cost of a message and of a hop are assumptions. Contention, congestion and stragglers are
  not in the model. Products and collectives compete for the same SMs, so less may overlap than assumed: the sum of
  products and wire in the second table is the other bound.
- With more than 64 × 6 GPUs, whole experts of Kimi K2 leave GPUs without any: see *balance*.
- `gram` is a formula; `gather` is for comparison. `grad_sync=` is not planned yet.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hardware", default="h200")
    parser.add_argument("--network", default="infiniband")
    parser.add_argument("--out", type=Path, default=Path("docs/planning.md"))
    arguments = parser.parse_args()
    machine = known_hardware(arguments.hardware, arguments.network)
    rows = list(forecasts(arguments.hardware, arguments.network))
    text = TEXT.format(
        hardware=f"{machine.name.upper()}, {machine.node} in a node, {machine.inside.name}, {machine.across.name} each",
        date=datetime.date.today(),
        routes="\n".join(by_route(rows)),
        explained="\n".join(f"- `{word}`: {meaning}" for word, meaning in EXPLAINED.items()),
        details="\n".join(details(rows)),
        calibration="\n".join(table([*polar_samples(), *step_samples()], known_hardware("h200").calibration)),
    )
    arguments.out.write_text(text, encoding="utf-8")
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
