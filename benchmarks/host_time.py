"""Host time of a step in jobs of many ranks: rank 0 of 64, 512 and 4096 really plans, packs, launches and unpacks.

torch's fake process group takes part in every collective and moves nothing, so results are garbage and times are those
of one rank's Python. The matrices are those of Llama-3-70B with all their rows, which are what is cut into pieces, and
few columns, so that a CPU can hold and orthogonalize them; the time of the polar factors is taken off.

python -m benchmarks.host_time [--ranks 64 512 4096] [--steps 5]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import meshmuon.step
from meshmuon import Muon
from meshmuon.exchange.transfer import transfer_of
from meshmuon.plan.models import known_model

COLUMNS = 8


def shard(shape: tuple[int, ...], mesh: DeviceMesh) -> DTensor:
    """What rank 0 holds: the first of torch.chunk's parts."""
    rows = -(-shape[0] // mesh.size())
    local = torch.full((min(rows, shape[0]), *shape[1:]), 0.01)
    strides = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=strides)


def parameters(mesh: DeviceMesh) -> list[tuple[str, nn.Parameter]]:
    shapes = {n: s for n, s in known_model("llama-3-70b").items() if n.endswith("proj.weight")}
    narrow = {name: (rows, COLUMNS) for name, (rows, _) in shapes.items()}
    return [(name, nn.Parameter(shard(shape, mesh))) for name, shape in narrow.items()]


class Clock:
    """Adds up the time spent in polar factors."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def watching(self) -> Iterator[None]:
        original = meshmuon.step.orthogonalize_onto

        def timed(*arguments: object, **more: object) -> Tensor | None:
            start = time.perf_counter()
            result = original(*arguments, **more)  # type: ignore[arg-type]
            self.seconds += time.perf_counter() - start
            return result

        with mock.patch.object(meshmuon.step, "orthogonalize_onto", timed):
            yield


@contextmanager
def nothing_to_send() -> Iterator[None]:
    """torch's fake group refuses to receive from a rank that sends nothing: give it something of the same size."""
    original = dist.all_to_all_single

    def lenient(received: Tensor, sent: Tensor, to_receive: list[int], to_send: list[int], **more: object) -> object:
        if sent.numel() == 0 or received.numel() == 0:
            full, splits = (received, to_receive) if sent.numel() == 0 else (sent, to_send)
            return original(torch.empty_like(full), full, splits, splits, **more)  # type: ignore[arg-type]
        return original(received, sent, to_receive, to_send, **more)  # type: ignore[arg-type]

    with mock.patch.object(dist, "all_to_all_single", lenient):
        yield


def measure(ranks: int, *, steps: int) -> dict[str, float]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=(f"of {ranks}",))
        params = parameters(mesh)
        start = time.perf_counter()
        opt = Muon(params)
        planning = time.perf_counter() - start
        times = []
        for _ in range(steps + 1):
            for _, param in params:
                param.grad = torch.full_like(param, 0.01)
            clock = Clock()
            with clock.watching(), nothing_to_send():
                start = time.perf_counter()
                opt.step()
                times.append(time.perf_counter() - start - clock.seconds)
        with nothing_to_send():
            assert opt.metrics()["skipped_non_finite"] == 0
        buckets = [bucket for bucket in opt.plan.buckets if bucket.team]
        tables = [transfer_of(bucket, rank=0) for bucket in buckets]
        pieces = sum(len(table.out.stops) + len(table.back.stops) for table in tables)
        return {
            "planning s": planning,
            "first step s": times[0],
            "ms / step": statistics.median(times[1:]) * 1e3,
            "buckets": len(buckets),
            "pieces": pieces,
        }
    finally:
        dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 512, 4096], help="sizes of the job")
    parser.add_argument("--steps", type=int, default=5, help="timed steps")
    arguments = parser.parse_args()
    header = None
    for ranks in arguments.ranks:
        result = measure(ranks, steps=arguments.steps)
        if header is None:
            header = "ranks".rjust(6) + "".join(key.rjust(14) for key in result)
            print(header)
        print(f"{ranks:6d}" + "".join(f"{value:14.2f}" for value in result.values()), flush=True)


if __name__ == "__main__":
    main()
