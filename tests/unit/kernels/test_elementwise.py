"""The fused element-wise kernels in Triton's interpreter against plain torch. See conftest.py for where these run.

The interpreter truncates when it casts to bf16 and does not contract in tl.fma; both are checked exactly on a GPU, in
tests/gpu/test_kernels.py. Here fp32 is compared to one unit in the last place, bf16 to one of its own.
"""

from unittest import mock

import pytest
import torch

from meshmuon.kernels import elementwise
from meshmuon.kernels.tables import Slot, build_tables, count_partials
from meshmuon.polar.normalise import normalised

UNIT = {torch.float32: 2**-23, torch.float16: 2**-10, torch.bfloat16: 2**-7}


def random(*shape, dtype=torch.float32, seed=0, scale=1.0):
    return (scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def padded(size):
    return -(-size // 16) * 16


def bucket(shapes, *, param=torch.float32, buffer=torch.float32, grad=torch.float32, pad=True, make=None):
    """Slots for matrices of these stored shapes, in one stack of wide matrices; and the size of the workspace."""
    slots, offset = [], 0
    for seed, shape in enumerate(shapes):
        tensors = [
            (make or random)(*shape, dtype=dtype, seed=10 * seed + i) for i, dtype in enumerate((param, buffer, grad))
        ]
        rows, cols = sorted(shape[-2:])
        room = (padded(rows), padded(cols)) if pad else (rows, cols)
        slots.append(
            Slot(
                param=tensors[0],
                buffer=tensors[1],
                grad=tensors[2],
                input_offset=offset,
                direction_offset=offset,
                padded=room,
                turned=shape[-2] > shape[-1],
                scale=0.5 + seed,
            )
        )
        offset += (shape[0] if len(shape) == 3 else 1) * room[0] * room[1]
    return slots, offset


def stacked(slot, flat, offset):
    count = slot.param.shape[0] if slot.param.ndim == 3 else 1
    part = flat[offset : offset + count * slot.padded[0] * slot.padded[1]].view(count, *slot.padded)
    rows, cols = slot.param.shape[-2:]
    seen = part[:, :cols, :rows].mT if slot.turned else part[:, :rows, :cols]
    return seen.reshape(slot.param.shape)


def numbers(momentum, l2=0.0):
    return torch.tensor(elementwise.momentum_numbers(momentum, l2=l2), dtype=torch.float32)


def close(got, expected, dtype, units=1):
    """Within a unit in the last place of the largest number involved."""
    scale = expected.abs().clamp(min=1.0)
    return bool(((got.double() - expected.double()).abs() <= units * UNIT[dtype] * scale).all())


def expected_momentum(slot, *, momentum, nesterov, l2=0.0, unscale=1.0):
    grad = slot.grad.float() * unscale
    if l2:
        grad = grad + slot.param.float() * l2
    buffer = torch.lerp(slot.buffer.float(), grad, 1.0 - momentum)
    stored = buffer.to(slot.buffer.dtype)
    return stored, (torch.lerp(grad, stored.float(), momentum) if nesterov else stored.float())


SHAPES = {
    "one": [(48, 80)],
    "tall": [(80, 48)],
    "mixed": [(64, 144), (144, 64), (3, 64, 144)],
    "odd": [(7, 33), (33, 7)],
    "edge": [(65, 129)],
}


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_momentum_equals_torch(shapes, nesterov):
    slots, size = bucket(shapes)
    wanted = [expected_momentum(slot, momentum=0.95, nesterov=nesterov) for slot in slots]
    before = [(slot.param.clone(), slot.grad.clone()) for slot in slots]
    inputs = torch.full((size,), float("nan"))
    for table, _ in build_tables(slots):
        elementwise.update_momentum(table, inputs, numbers=numbers(0.95), nesterov=nesterov)
    assert torch.isfinite(inputs).all(), "padding included"
    for slot, (buffer, average), (param, grad) in zip(slots, wanted, before, strict=True):
        assert close(slot.buffer, buffer, torch.float32)
        assert close(stacked(slot, inputs, slot.input_offset), average, torch.float32)
        assert torch.equal(slot.param, param) and torch.equal(slot.grad, grad)
    outside = inputs.double().square().sum() - sum(
        stacked(slot, inputs, slot.input_offset).double().square().sum() for slot in slots
    )
    assert abs(float(outside)) < 1e-9


@pytest.mark.parametrize("momentum", [0.95, 0.5, 0.3, 0.0])
def test_both_branches_of_lerp(momentum):
    slots, size = bucket([(20, 40)])
    (buffer, average), inputs = expected_momentum(slots[0], momentum=momentum, nesterov=True), torch.empty(size)
    [(table, _)] = build_tables(slots)
    elementwise.update_momentum(table, inputs, numbers=numbers(momentum), nesterov=True)
    assert close(slots[0].buffer, buffer, torch.float32)
    assert close(stacked(slots[0], inputs, 0), average, torch.float32)


@pytest.mark.parametrize("state", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("grad", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shapes", [[(40, 24), (24, 40)], [(3, 33, 50), (50, 33)]], ids=["even", "odd, three at once"])
def test_other_dtypes_l2_and_unscale(shapes, grad, state):
    slots, size = bucket(shapes, param=grad, buffer=state, grad=grad)
    wanted = [expected_momentum(slot, momentum=0.9, nesterov=True, l2=0.1, unscale=0.25) for slot in slots]
    inputs = torch.empty(size, dtype=torch.bfloat16)
    [(table, positions)] = build_tables(slots)
    assert len(positions) == len(slots) and table.aligned == (len(shapes[0]) == 2)
    scale = torch.tensor(0.25, dtype=torch.float64)
    elementwise.update_momentum(table, inputs, numbers=numbers(0.9, 0.1), nesterov=True, l2=True, unscale=scale)
    for slot, (buffer, average) in zip(slots, wanted, strict=True):
        assert close(slot.buffer, buffer, state)
        assert close(stacked(slot, inputs, slot.input_offset), average, torch.bfloat16, units=2)


def test_views_and_gradients_with_other_strides():
    big = random(100, 90, seed=5)
    slot = Slot(
        param=random(30, 40),
        buffer=big[3:33, 1:81:2],
        grad=random(40, 30, seed=2).mT,
        input_offset=7,
        direction_offset=0,
        padded=(32, 48),
        turned=False,
    )
    outside = big.clone()
    outside[3:33, 1:81:2] = 0
    buffer, average = expected_momentum(slot, momentum=0.95, nesterov=True)
    inputs = torch.full((7 + 32 * 48,), float("nan"))
    [(table, _)] = build_tables([slot])
    assert not table.aligned
    elementwise.update_momentum(table, inputs, numbers=numbers(0.95), nesterov=True)
    assert close(slot.buffer, buffer, torch.float32)
    assert close(stacked(slot, inputs, 7), average, torch.float32)
    assert torch.isnan(inputs[:7]).all()
    big[3:33, 1:81:2] = 0
    assert torch.equal(big, outside)


def test_stored_transposed_is_read_along_its_rows():
    def transposed(rows, cols, *, dtype, seed):
        return random(cols, rows, dtype=dtype, seed=seed).mT

    slots, size = bucket([(48, 80), (80, 48)], make=transposed)
    wanted = [expected_momentum(slot, momentum=0.95, nesterov=True) for slot in slots]
    inputs = torch.empty(size)
    [(table, _)] = build_tables(slots)
    assert table.aligned
    elementwise.update_momentum(table, inputs, numbers=numbers(0.95), nesterov=True)
    for slot, (buffer, average) in zip(slots, wanted, strict=True):
        assert close(slot.buffer, buffer, torch.float32)
        assert close(stacked(slot, inputs, slot.input_offset), average, torch.float32)


def test_a_step_that_must_not_happen_changes_nothing():
    slots, size = bucket([(24, 40), (40, 24)])
    slots[0].grad[3, 4] = float("nan")
    slots[1].grad[3, 4] = float("inf")
    before = [(slot.param.clone(), slot.buffer.clone()) for slot in slots]
    stop, inputs = torch.tensor(False), torch.full((size,), float("nan"))
    [(table, _)] = build_tables(slots)
    elementwise.update_momentum(table, inputs, numbers=numbers(0.95), nesterov=True, proceed=stop)
    assert torch.isfinite(inputs).all()
    inputs.fill_(float("nan"))
    lr, decay = torch.tensor(0.1), torch.tensor(0.1)
    elementwise.apply_update(table, inputs, lr=lr, weight_decay=decay, mode="decoupled", proceed=stop)
    for slot, (param, buffer) in zip(slots, before, strict=True):
        assert torch.equal(slot.param, param) and torch.equal(slot.buffer, buffer)


def test_without_a_gradient_zeros_travel_and_nothing_changes():
    slots, size = bucket([(24, 40), (24, 40)])
    slots = [slots[0], Slot(**{**{f: getattr(slots[1], f) for f in Slot.__dataclass_fields__}, "grad": None})]
    before, inputs = slots[1].param.clone(), torch.full((size,), float("nan"))
    buffer = slots[1].buffer.clone()
    [(table, _)] = build_tables(slots)
    elementwise.update_momentum(table, inputs, numbers=numbers(0.95), nesterov=True)
    assert not stacked(slots[1], inputs, slots[1].input_offset).any()
    assert torch.equal(slots[1].buffer, buffer)
    directions, number = random(size), torch.tensor(0.1)
    elementwise.apply_update(table, directions, lr=number, weight_decay=number, mode="decoupled")
    assert torch.equal(slots[1].param, before)
    assert torch.isfinite(slots[0].param).all()


def test_an_input_another_replica_provides_is_not_written():
    slots, size = bucket([(24, 40)])
    slot = Slot(**{**{f: getattr(slots[0], f) for f in Slot.__dataclass_fields__}, "input_offset": None})
    buffer, _ = expected_momentum(slot, momentum=0.95, nesterov=True)
    inputs = torch.full((size,), float("nan"))
    [(table, _)] = build_tables([slot])
    elementwise.update_momentum(table, inputs, numbers=numbers(0.95), nesterov=True)
    assert torch.isnan(inputs).all()
    assert close(slot.buffer, buffer, torch.float32)


@pytest.mark.parametrize("mode", ["decoupled", "cautious", "l2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shapes", [SHAPES["mixed"], SHAPES["odd"]], ids=["mixed", "odd"])
def test_apply_equals_torch(shapes, dtype, mode):
    slots, size = bucket(shapes, param=dtype)
    directions = random(size, dtype=torch.float16, scale=0.1)
    lr, decay = torch.tensor(0.02), torch.tensor(0.1)
    wanted = []
    for slot in slots:
        direction, param = stacked(slot, directions, slot.direction_offset).float(), slot.param.float()
        factor = torch.ones_like(param) if mode == "l2" else torch.full_like(param, float(1 - lr * decay))
        if mode == "cautious":
            factor = torch.where(direction * param > 0, factor, 1.0)
        wanted.append((param * factor - direction * (lr * slot.scale)).to(dtype))
    for table, _ in build_tables(slots):
        elementwise.apply_update(table, directions, lr=lr, weight_decay=decay, mode=mode)
    for slot, param in zip(slots, wanted, strict=True):
        if dtype == torch.bfloat16:
            assert close(slot.param, param, dtype)
        else:
            assert torch.equal(slot.param, param)


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e-44, 1e30])
@pytest.mark.parametrize("out", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1, 16, 16), (3, 70, 150), (2, 7, 33)])
def test_norms_and_normalise_equal_torch(shape, out, scale):
    x = random(*shape, scale=scale)
    x[0, 0, 0] = 0.0
    norms = elementwise.find_norms(elementwise.measure(x), batch=shape[0])
    room = (shape[0], padded(shape[1]), padded(shape[2]))
    got = elementwise.normalise(x, norms, out=torch.full(room, float("nan"), dtype=out))
    expected = normalised(x.clone(), eps=1e-7)
    inside = got[:, : shape[1], : shape[2]]
    assert float((inside.double() - expected.double()).norm() / expected.double().norm()) < UNIT[out]
    assert torch.isfinite(got).all()
    assert float(got.double().square().sum()) == pytest.approx(float(inside.double().square().sum()))


def test_zero_stays_zero_and_in_place():
    x = torch.zeros(2, 32, 48)
    x[1] = random(32, 48)
    expected = normalised(x.clone(), eps=1e-7)
    norms = elementwise.find_norms(elementwise.measure(x), batch=2)
    assert elementwise.normalise(x, norms, out=x) is x
    assert torch.equal(x[0], expected[0])
    assert torch.allclose(x, expected, rtol=1e-6)


def test_sums_of_squares_on_the_way_in_equal_those_of_the_stack():
    slots, size = bucket([(144, 72), (72, 144), (2, 72, 144)])
    room = slots[0].padded
    inputs = torch.empty(size, dtype=torch.float16)
    partials = torch.full((count_partials(4, room),), float("nan"), dtype=torch.float64)
    [(table, _)] = build_tables(slots)
    elementwise.update_momentum(table, inputs, numbers=numbers(0.95), nesterov=True, partials=partials)
    stack = inputs.view(4, *room)
    assert torch.equal(partials, elementwise.measure(stack))
    assert torch.equal(partials, elementwise.measure(stack[:, :72, :144]))
    exact = stack.double().square().sum(dim=(1, 2))
    assert torch.allclose(partials.view(4, -1).sum(1), exact, rtol=1e-10)


def test_the_sum_of_a_tile_is_exact_in_any_order():
    """The same numbers, permuted inside a tile and over a huge range of magnitudes: the same bits."""
    x = random(1, 64, 64) * torch.logspace(-12, 8, 4096).view(1, 64, 64)
    shuffled = x.flatten()[torch.randperm(4096, generator=torch.Generator().manual_seed(1))].view(1, 64, 64)
    assert torch.equal(elementwise.measure(x), elementwise.measure(shuffled))


def test_a_table_follows_moving_gradients():
    slots, size = bucket([(24, 40)])
    [(table, _)] = build_tables(slots)
    memory = table.entries.data_ptr()
    assert table.is_current(slots)
    moved = [
        Slot(**{**{f: getattr(slots[0], f) for f in Slot.__dataclass_fields__}, "grad": slots[0].grad.clone() * 2})
    ]
    assert not table.is_current(moved)
    table.update(moved)
    assert table.is_current(moved) and table.entries.data_ptr() == memory
    buffer, _ = expected_momentum(moved[0], momentum=0.95, nesterov=True)
    elementwise.update_momentum(table, torch.empty(size), numbers=numbers(0.95), nesterov=True)
    assert close(moved[0].buffer, buffer, torch.float32)


def test_tables_split_by_dtype_and_refuse_what_does_not_fit():
    slots, _ = bucket([(24, 40), (24, 40)])
    half, _ = bucket([(24, 40)], grad=torch.float16)
    tables = build_tables([slots[0], half[0], slots[1]])
    assert [positions for _, positions in tables] == [[0, 2], [1]]
    with pytest.raises(ValueError, match="Build the tables anew"):
        tables[0][0].update([slots[0], half[0]])
    fields = {f: getattr(slots[0], f) for f in Slot.__dataclass_fields__}
    for change, error in (
        ({"grad": slots[0].grad.double()}, TypeError),
        ({"grad": slots[0].grad.mT}, ValueError),
        ({"padded": (24, 32)}, ValueError),
    ):
        with pytest.raises(error):
            build_tables([Slot(**{**fields, **change})])


@pytest.mark.parametrize("broken", ["_lerp", "_turned", "sum_of_squares"])
def test_sabotage_is_noticed(broken):
    from meshmuon.kernels import elementwise_tiles

    replacement = {
        "_lerp": lambda start, end, weight: end,
        "_turned": lambda tile, turned: tile,
        "sum_of_squares": lambda x: 1.0,
    }[broken]
    check = {
        "_lerp": lambda: test_momentum_equals_torch([(24, 40)], True),
        "_turned": lambda: test_apply_equals_torch([(40, 24)], torch.float32, "decoupled"),
        "sum_of_squares": lambda: test_norms_and_normalise_equal_torch((1, 16, 16), torch.float32, 1.0),
    }[broken]
    with mock.patch.object(elementwise_tiles, broken, replacement), pytest.raises(AssertionError):
        check()


def test_a_table_is_not_current_for_a_gradient_of_another_dtype_at_the_same_address():
    memory = torch.zeros(64, 64)
    param, buffer = torch.zeros(64, 64), torch.zeros(64, 64)
    settings = {"param": param, "buffer": buffer, "input_offset": 0, "direction_offset": 0, "turned": False}
    first = [Slot(grad=memory, padded=(64, 64), **settings)]
    ((table, _),) = build_tables(first)
    assert table.is_current(first)
    half = memory.view(-1)[: 64 * 32].view(torch.bfloat16).view(64, 64)
    assert half.data_ptr() == memory.data_ptr() and half.stride() == memory.stride()
    assert not table.is_current([Slot(grad=half, padded=(64, 64), **settings)])
