"""When parameters take their steps where directions are computed. Torch plays the kernel; a GPU checks its bits."""

import dataclasses
import re
from contextlib import contextmanager
from unittest import mock
from weakref import WeakKeyDictionary

import pytest
import torch
from tests.emulator.by_torch import Kernel

from meshmuon import Muon, Orthogonalizer
from meshmuon.kernels import problems
from meshmuon.kernels.landing import Landing
from meshmuon.kernels.self_check import check_kernel
from meshmuon.kernels.tables import Slot, TensorTable
from meshmuon.plan.route import Route
from meshmuon.polar import orthogonalize as entry
from meshmuon.polar import program as programs
from meshmuon.polar import recipe as recipes
from meshmuon.polar.coefficients import resolve_schedule
from meshmuon.polar.ways import Way
from meshmuon.update.fused import BucketUpdates

SHAPES = {"wide": (48, 80), "wide too": (48, 80), "tall": (80, 48), "square": (48, 48)}


@contextmanager
def hopper(*, runs=True):
    """As if there were one. Gives what all launches land on; None for those that do not."""
    landings = []

    class Watched(Kernel):
        def __call__(self):
            landings.append(None)
            super().__call__()

        def onto(self, landing):
            landings.append(landing)
            super().onto(landing)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipes, "is_available", lambda *_, **__: True)
        patch.setattr(entry, "can_run", lambda *_: runs)
        patch.setattr(programs, "ClusterLaunch", Watched)
        patch.setattr(programs, "_known", WeakKeyDictionary())
        yield landings


def trained(shapes=SHAPES, *, steps=2, dtype=torch.float32, spoil=lambda params, step: None, **settings):
    generator = torch.Generator().manual_seed(0)
    params = [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes.values()]
    opt = Muon(list(zip(shapes, params, strict=True)), lr=0.02, orthogonalizer=KERNELS, **settings)
    with mock.patch.object(BucketUpdates, "apply", autospec=True, side_effect=BucketUpdates.apply) as applied:
        for step in range(steps):
            for param in params:
                param.grad = torch.randn(param.shape, generator=generator).to(dtype)
            spoil(params, step)
            opt.step()
    return [p.detach().clone() for p in params], applied.call_count


KERNELS = Orthogonalizer(dtype="float16", kernels="triton")


def both_ways(**how):
    landed = trained(**how)
    with mock.patch.object(BucketUpdates, "landing", return_value=None):
        return landed, trained(**how)


@pytest.mark.parametrize("mode", ["decoupled", "cautious", "l2"])
def test_steps_have_the_bits_of_those_from_memory(mode):
    with hopper() as landings:
        (landed, none), (applied, some) = both_ways(weight_decay=0.3, weight_decay_mode=mode)
        others, _ = trained(weight_decay=0.2, weight_decay_mode=mode)
    assert none == 0 and some > 0
    assert all(torch.equal(one, other) for one, other in zip(landed, applied, strict=True))
    assert not torch.equal(others[0], landed[0]), "all numbers count"
    taken = [landing for landing in landings if landing is not None]
    assert taken and {landing.cautious for landing in taken} == {mode == "cautious"}
    assert all((landing.weight_decay is None) == (mode == "l2") for landing in taken)


def test_a_missing_gradient_and_a_skipped_step_leave_parameters_alone():
    before, _ = trained(steps=0)

    def spoil(params, step):
        params[0].grad = None
        if step == 1:
            params[2].grad[3, 4] = float("nan")

    with hopper(), pytest.warns(UserWarning, match="skipped"):
        (landed, none), (applied, _) = both_ways(spoil=spoil)
    assert none == 0
    assert all(torch.equal(one, other) for one, other in zip(landed, applied, strict=True))
    assert torch.equal(landed[0], before[0]) and not torch.equal(landed[1], before[1])


@pytest.mark.parametrize("shape", [(36, 50), (48, 80)])
def test_rows_that_are_not_aligned_and_16_bits_take_steps_from_memory(shape):
    dtype = torch.float32 if shape == (36, 50) else torch.bfloat16
    with hopper() as landings:
        _, applied = trained({"w": shape}, dtype=dtype)
    assert applied == 2 and landings == [None, None]


def test_where_a_program_cannot_run_now_directions_are_applied():
    with hopper(runs=False) as landings:
        _, applied = trained({"wide": (48, 80)}, steps=1)
    assert applied == 1 and not landings


def test_without_a_program_nothing_lands():
    _, applied = trained({"wide": (48, 80)}, steps=1)
    assert applied == 1


def test_what_a_launch_was_bound_for_is_not_what_another_lands_on():
    """Two optimizers of equal shapes whose stacks have the same memory, and modes that take turns."""
    with hopper() as landings:
        for mode in ("decoupled", "cautious", "l2", "cautious", "decoupled"):
            (landed, none), (applied, _) = both_ways(shapes={"w": (48, 80)}, weight_decay=0.3, weight_decay_mode=mode)
            assert none == 0
            assert all(torch.equal(one, other) for one, other in zip(landed, applied, strict=True)), mode
    assert len({landing.table.entries.data_ptr() for landing in landings if landing}) > 1


class Flipped(Kernel):
    def _land(self, landing, directions):
        super()._land(landing, -directions)


class Undecayed(Kernel):
    def _land(self, landing, directions):
        super()._land(dataclasses.replace(landing, weight_decay=None), directions)


class Cautious(Kernel):
    def _land(self, landing, directions):
        super()._land(dataclasses.replace(landing, cautious=True), directions)


class Lazy(Kernel):
    """Leaves out the second half of the matrices, which lie across."""

    def _land(self, landing, directions):
        later = landing.table.entries[len(directions) // 2 :]
        later[:, 0] = 0
        super()._land(landing, directions)


class Restless(Kernel):
    """Forgets what rounding takes."""

    def _write(self, product):
        super()._write(product)
        self.stacks[product.second.d].zero_()


STEPS, IN_HALVES = "steps where directions are computed", "a product in halves"
WRONG = [(STEPS, wrong, dtype) for wrong in (Flipped, Undecayed, Cautious, Lazy) for dtype in ("float16", "bfloat16")]


@pytest.mark.parametrize(("name", "wrong", "dtype"), [*WRONG, (IN_HALVES, Restless, "float16")])
def test_the_self_check_refuses_a_wrong_one(name, wrong, dtype):
    dtype = getattr(torch, dtype)
    there = mock.patch.object(problems.clusters, "can_run", return_value=True)
    with there, mock.patch.object(problems.clusters, "ClusterLaunch", Kernel):
        assert check_kernel(name, torch.device("cpu"), dtype) < 0.5
    refused = pytest.raises(RuntimeError, match=re.escape(name))
    with there, mock.patch.object(problems.clusters, "ClusterLaunch", wrong), refused:
        check_kernel(name, torch.device("cpu"), dtype)


def test_a_launch_is_bound_for_one_kind_of_step():
    program = programs.write_program(resolve_schedule("polar_express", 5), Way("gram", (2,)))
    stacks = [torch.zeros(2, 48, 48 if side == "m" else 80, dtype=torch.float16) for side in program.columns]
    written = torch.zeros(3, dtype=torch.int32)
    with mock.patch.object(programs, "ClusterLaunch", Kernel):
        bound = [programs._bind(program, stacks, written, lands=lands) for lands in (0, 1, 2, 0, 1, 2)]
    assert [launch.lands for launch in bound] == [0, 1, 2] * 2 and len(set(map(id, bound))) == 3


def test_a_bucket_in_two_tables_takes_steps_from_memory_and_all_of_them():
    """One gradient is not aligned. What lands is all of a bucket, or nothing."""
    before, _ = trained(steps=0)

    def spoil(params, step):
        grad = params[2].grad  # the last of its bucket: what is before it could land
        params[2].grad = torch.empty(grad.numel() + 1)[1:].view(grad.shape).copy_(grad)

    with hopper():
        (landed, some), (applied, _) = both_ways(spoil=spoil)
    assert some > 0
    assert all(torch.equal(one, other) for one, other in zip(landed, applied, strict=True))
    assert not any(torch.equal(one, start) for one, start in zip(landed, before, strict=True))


def test_whether_a_step_happens_is_told_where_it_lands():
    """A CPU knows before it begins; a GPU reads the flag in the launch."""
    seen, go = [], torch.zeros((), dtype=torch.bool)

    def looked_at(updates, bucket, rule):
        seen.append(landing(updates, bucket, dataclasses.replace(rule, proceed=go)))
        return seen[-1]

    landing, before = BucketUpdates.landing, trained({"w": (48, 80)}, steps=0)[0]
    with hopper(), mock.patch.object(BucketUpdates, "landing", looked_at):
        after, _ = trained({"w": (48, 80)}, steps=1)
    assert seen[0].proceed.data_ptr() == go.data_ptr() and torch.equal(after[0], before[0])


def test_what_comes_from_other_ranks_does_not_land():
    seen = []

    def looked_at(updates, bucket, rule):
        seen.append(landing(updates, bucket, rule))
        seen.append(landing(updates, dataclasses.replace(bucket, route=Route.OWNED), rule))
        return seen[0]

    landing = BucketUpdates.landing
    with hopper(), mock.patch.object(BucketUpdates, "landing", looked_at):
        trained({"w": (48, 80)}, steps=1)
    assert seen[0] is not None and seen[1] is None


def test_a_result_that_lands_has_no_memory_of_its_own():
    schedule, seen = resolve_schedule("polar_express", 5), []

    def launch(program, stacks, written, **_):
        seen.append({stack.data_ptr() for stack in stacks})
        return mock.MagicMock()

    table = TensorTable([slot_of(torch.zeros(2, 48, 80))])
    for way, apart in ((Way("gram", ()), True), (Way("gram", (2,)), False), (Way("gram", (2, 3)), False)):
        program = programs.write_program(schedule, way)
        assert program.result_apart is apart
        for landing in (None, Landing(table, torch.ones(1), None)):
            known = {program: programs._Known()}
            with mock.patch.object(programs, "_bind", launch), mock.patch.object(programs, "_known", known):
                programs.run_program(program, [torch.zeros(2, 48, 80, dtype=torch.float16)], landing)
            assert len(seen.pop()) == len(program.columns) - (apart and landing is not None)


def slot_of(param, *, first=0):
    rows, cols = param.shape[-2:]
    return Slot(
        param=param,
        buffer=param,
        grad=param,
        input_offset=0,
        direction_offset=first,
        padded=(rows, cols),
        turned=False,
    )


def test_a_table_knows_whether_it_can_be_landed_on():
    one, other = torch.zeros(2, 16, 24), torch.zeros(16, 24)
    slots = [slot_of(one), slot_of(other, first=2 * 16 * 24)]
    table = TensorTable(slots)
    assert table.can_be_landed_on
    swapped = [slot_of(one, first=16 * 24), slot_of(other)]
    assert not TensorTable(swapped).can_be_landed_on, "directions stand in another order than the table's"
    table.update(swapped)
    assert not table.can_be_landed_on
    assert not TensorTable([slot_of(torch.zeros(16, 20))]).can_be_landed_on, "rows that are not aligned"
    assert not TensorTable([slot_of(other.bfloat16())]).can_be_landed_on
