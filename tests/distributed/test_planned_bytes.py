"""What the planner says without processes is what processes then send, counted at the collectives."""

import math

import pytest
import torch
from torch.distributed.tensor import Replicate

from meshmuon import plan_for
from meshmuon.config import Execution
from tests.distributed import counting

JOBS = ["even", "even in bf16", "mixed", "hsdp, repeated", "hsdp, shared", "experts beside", "local only"]


def planned(name):
    sizes, settings, table = counting.JOBS[name]
    axes = [f"axis {i}" for i in range(len(sizes))]
    rules = {
        axis: {
            key: "replicate" if isinstance(where[i], Replicate) else f"shard{where[i].dim}"
            for key, (_, _, where) in table.items()
        }
        for i, axis in enumerate(axes)
    }
    shapes = {key: shape if view == "adamw" else (shape, view) for key, (shape, view, _) in table.items()}
    execution = Execution(**settings)
    return plan_for(shapes, dict(zip(axes, sizes, strict=True)), rules, execution=execution, device=torch.device("cpu"))


@pytest.mark.parametrize("name", JOBS)
def test_planned_bytes_are_the_counted_ones(pool, name):
    said = planned(name).route()
    counted = pool(math.prod(counting.JOBS[name][0])).run(counting.count, name)
    launches = [[event for event in rank["events"] if event[0] == "launch"] for rank in counted]
    assert list(said.bytes_sent.each) == [sum(event[3] for event in events) for events in launches]
    assert {len(events) for events in launches} == {said.exchanges}
    polar = [sum(event[2] for event in rank["events"] if event[0] == "polar") for rank in counted]
    assert [bool(count) for count in polar] == [bool(flops) for flops in said.flops.each]
