"""The Triton kernels on a GPU: exactness that the interpreter cannot show. Run with `pytest -m gpu`."""

import importlib.util
import math
from dataclasses import replace
from unittest import mock

import pytest
import torch

from meshmuon.kernels import elementwise, few_tiles, symmetric_launches
from meshmuon.kernels.configs import TileConfig, architecture_of, choose_config
from meshmuon.kernels.peaks import PeakFinder
from meshmuon.kernels.symmetric_launches import REST_SCALE
from meshmuon.kernels.symmetric_matmul import symmetric_matmul, symmetric_matmul_with
from meshmuon.kernels.tables import Slot, build_tables, count_partials
from meshmuon.kernels.whole_matmul import whole_matmul
from meshmuon.polar.normalise import normalised

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
]

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
SIDES = [8, 136, 768, 1000, 1408, 2048, 4097]
BOUND = {torch.float32: 2e-6, torch.float16: 6e-4, torch.bfloat16: 5e-3}


def random(*shape, dtype=torch.float32, seed=0, scale=1.0):
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return (torch.randn(*shape, generator=generator, device="cuda") * scale).to(dtype)


def commuting(batch, m, dtype, seed=0):
    r = random(batch, m, m, seed=seed)
    r = (r + r.mT) / (4 * m**0.5)
    return r.to(dtype), (torch.bmm(r, r) - 0.3 * r).to(dtype)


def distance(got, expected):
    assert torch.isfinite(got).all(), "not every element was written"
    return float((got.double() - expected).norm() / expected.norm())


# ---------------------------------------------------------------- symmetric products


@pytest.mark.parametrize("dtype", list(BOUND), ids=str)
@pytest.mark.parametrize("m", SIDES)
def test_gram_is_right_symmetric_and_the_same_again(m, dtype):
    x = random(3, m, m + 24, dtype=dtype)
    out = torch.full((3, m, m), float("nan"), dtype=dtype, device="cuda")
    got = symmetric_matmul(x, out=out).clone()
    assert distance(got, x.double() @ x.double().mT) < BOUND[dtype]
    assert torch.equal(got, got.mT)
    for _ in range(3):
        assert torch.equal(got, symmetric_matmul(x))
    for i in range(3):
        assert torch.equal(got[i], symmetric_matmul(x[i])), "alone as in a batch"
    many = symmetric_matmul(x.repeat(20, 1, 1)) if m <= 1408 else got  # enough for another configuration
    assert torch.equal(many[-3:], got)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("m", [136, 1000, 2048])
def test_both_halves_together_have_twice_the_digits(m, dtype):
    x = random(3, m, 4 * m, dtype=dtype, scale=1e-2)
    rest = torch.full((3, m, m), float("nan"), dtype=dtype, device="cuda")
    high = symmetric_matmul(x, rest=rest)
    assert torch.equal(high, symmetric_matmul(x))
    assert torch.equal(rest, rest.mT)
    # Off the diagonal: on it all terms are positive, and tensor cores cut off instead of rounding when they add, which
    # costs 3e-5 at k = 8192.
    off = 1.0 - torch.eye(m, dtype=torch.float64, device="cuda")
    expected = off * (x.double() @ x.double().mT)
    both = high.double() + rest.double() / REST_SCALE
    assert distance(off * both, expected) < 0.1 * distance(off * high.double(), expected)


@pytest.mark.parametrize("dtype", list(BOUND), ids=str)
@pytest.mark.parametrize("m", SIDES)
def test_two_that_commute_with_all_terms(m, dtype):
    a, b = commuting(2, m, dtype)
    c, _ = commuting(2, m, dtype, seed=1)
    out = torch.full((2, m, m), float("nan"), dtype=dtype, device="cuda")
    got = symmetric_matmul(a, b, alpha=-1.5, beta=0.75, c=c, gamma=3.0, out=out)
    eye = torch.eye(m, dtype=torch.float64, device="cuda")
    # What was rounded does not commute exactly any more: the lower triangle is what is promised.
    expected = (-1.5 * (a.double() @ b.double()) + 0.75 * c.double() + 3.0 * eye).tril()
    assert distance(got.tril(), expected) < BOUND[dtype]
    assert torch.equal(got, got.mT)
    assert torch.equal(got, symmetric_matmul(a, b, alpha=-1.5, beta=0.75, c=c, gamma=3.0, out=c))


@pytest.mark.parametrize("m", [136, 768, 2048])
def test_pointers_and_tma_and_every_tile_give_the_same_bits(m):
    """So the choice of a configuration never changes a result on Hopper. See [Note: bits and batches]."""
    if architecture_of(torch.device("cuda", 0)) != "hopper":
        pytest.skip("measured on Hopper only")
    x = random(2, m, 1024, dtype=torch.float16)
    expected = symmetric_matmul(x)
    for config in (
        TileConfig(64, 64, 4, 3),
        TileConfig(64, 128, 4, 4),
        TileConfig(128, 64, 8, 3),
        TileConfig(64, 64, 4, 6, 8, True),
        TileConfig(64, 128, 4, 4, 8, True, early=True),
        TileConfig(128, 64, 4, 3, 4, True),
        TileConfig(128, 64, 4, 4, 8, True),
    ):
        assert torch.equal(symmetric_matmul_with(config, x), expected)


def test_more_than_two_to_the_31_elements():
    for m, k, batch in ((4096, 64, 132), (4097, 8, 130)):  # through TMA, and through pointers
        x = random(batch, m, k, dtype=torch.float16)
        got = symmetric_matmul(x)
        assert got.numel() > 2**31
        for i in (0, batch // 2, batch - 1):
            assert torch.equal(got[i], symmetric_matmul(x[i]))
        del got
    x = random(1, 64, 2**20, dtype=torch.float16).expand(33, 64, 2**20).contiguous()
    assert x.numel() > 2**31
    got = symmetric_matmul(x)
    assert torch.equal(got[0], got[32])


def test_the_coefficients_compile_nothing():
    from meshmuon.kernels import symmetric_tiles

    x = random(1, 256, 256, dtype=torch.float16, scale=1 / 16)
    c = symmetric_matmul(x)
    eye = torch.eye(256, dtype=torch.float64, device="cuda")
    ways = {
        TileConfig(64, 64, 4, 3, tensor_memory=True): symmetric_tiles.tensor_memory_kernel,
        TileConfig(64, 64, 4, 3): symmetric_tiles.pointer_kernel,
    }
    for config, kernel in ways.items():
        compiled = []
        for alpha, beta, gamma in ((0.5, 0.25, 1.0), (1.0, 2.0, 0.0), (-3.5, -0.5, 2.0), (1e-3, 1.0, 1e3)):
            with mock.patch.dict(symmetric_launches._compiled, clear=True):  # so that Triton is asked again
                got = symmetric_matmul_with(config, x, alpha=alpha, beta=beta, c=c, gamma=gamma)
            expected = alpha * x.double() @ x.double().mT + beta * c.double() + gamma * eye
            assert distance(got, expected) < BOUND[x.dtype]
            compiled.append(sum(len(caches[0]) for caches in kernel.device_caches.values()))
        assert compiled == compiled[:1] * 4 and compiled[0] > 0


def test_a_graph_replays_on_new_data():
    x = random(2, 768, 1024, dtype=torch.float16)
    symmetric_matmul(x)
    graph, out = torch.cuda.CUDAGraph(), torch.empty(2, 768, 768, dtype=torch.float16, device="cuda")
    with torch.cuda.graph(graph):
        symmetric_matmul(x, out=out)
    x.copy_(random(2, 768, 1024, dtype=torch.float16, seed=9))
    graph.replay()
    assert torch.equal(out, symmetric_matmul(x))


def test_every_configuration_of_the_table_runs():
    architecture = architecture_of(torch.device("cuda", 0))
    for m in (256, 1024, 3072, 8192):
        for k in (256, 8192):
            x = random(1, m, k, dtype=torch.bfloat16)
            config = choose_config(architecture, 1, m, k, x.dtype)
            assert distance(symmetric_matmul_with(config, x), x.double() @ x.double().mT) < BOUND[x.dtype]


# ---------------------------------------------------------------- element-wise


def padded(size):
    return -(-size // 16) * 16


FEW = [(1, 40, 72), (2, 144, 208), (1, 256, 256), (132, 64, 64), (3, 512, 512), (4, 512, 1000), (1, 1000, 264)]
FEW += [
    (1, 512, 512),
    (1, 680, 1800),
    (1, 768, 768),
    (1, 1024, 1024),
    (1, 1032, 520),
    (1, 1408, 64),
    (1, 1472, 520),
    (1, 1496, 320),
    (1, 1536, 1536),
    (2, 1400, 72),
    (1, 1912, 2048),
]


@pytest.mark.skipif(not HOPPER, reason="few_tiles.cu is for Hopper")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", FEW, ids=str)
def test_few_tiles_have_the_bits_of_many(shape, dtype):
    """Every size of tiles, single and paired, at edges, with everything that can be added; memory is full of NaN."""
    few = TileConfig(128, 64, 4, 3, tensor_memory=True, few=True)
    plain = replace(few, few=False)
    x = random(*shape, dtype=dtype, scale=shape[-1] ** -0.5)
    for same in (True, False):
        assert few_tiles.can_run(x.device, dtype, batch=shape[0], m=shape[1], same=same) or not same
        b = None if same else 2 * x
        expected = symmetric_matmul_with(plain, x, b)
        for terms in ({}, {"alpha": 1.5, "beta": -2.5, "c": expected, "gamma": 3.0}):
            out = torch.full_like(expected, float("nan"))
            with mock.patch.object(few_tiles, "FewLaunch", wraps=few_tiles.FewLaunch) as launched:
                symmetric_matmul_with(few, x, b, out=out, **terms)
            assert launched.called == few_tiles.can_run(x.device, dtype, batch=shape[0], m=shape[1], same=same)
            assert torch.equal(out, symmetric_matmul_with(plain, x, b, **terms))
            assert torch.equal(out, out.mT)


@pytest.mark.skipif(not HOPPER, reason="few_tiles.cu is for Hopper")
@pytest.mark.parametrize("m", [256, 512, 704, 768, 1024, 1536])
def test_few_tiles_follow_each_other_in_a_graph(m):
    """Each product reads what the one before it wrote: they may begin early, and have to wait."""
    x = random(1, m, m, dtype=torch.float16, scale=1 / 64)
    stacks = [x, torch.empty_like(x), torch.empty_like(x)]

    def chain():
        for i in range(30):
            symmetric_matmul(stacks[i and 1 + i % 2], out=stacks[1 + (i + 1) % 2], alpha=0.5, gamma=0.25)

    chain()
    expected = stacks[1].clone(), stacks[2].clone()
    assert all(torch.isfinite(each).all() and each.any() for each in expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    for _ in range(20):
        stacks[1].fill_(float("nan")), stacks[2].fill_(float("nan"))
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(stacks[1:], expected, strict=True))
    plain = TileConfig(128, 64, 4, 3, tensor_memory=True)
    for i in range(30):
        symmetric_matmul_with(plain, stacks[i and 1 + i % 2], out=stacks[1 + (i + 1) % 2], alpha=0.5, gamma=0.25)
    assert all(torch.equal(a, b) for a, b in zip(stacks[1:], expected, strict=True)), "as by other tiles"


def bucket(shapes, *, param=torch.float32, buffer=torch.float32, grad=torch.float32):
    slots, offset = [], 0
    for seed, shape in enumerate(shapes):
        p, b, g = (random(*shape, dtype=d, seed=10 * seed + i) for i, d in enumerate((param, buffer, grad)))
        rows, cols = sorted(shape[-2:])
        room = (padded(rows), padded(cols))
        turned = shape[-2] > shape[-1]
        slots.append(
            Slot(
                param=p,
                buffer=b,
                grad=g,
                input_offset=offset,
                direction_offset=offset,
                padded=room,
                turned=turned,
                scale=0.5 + seed,
            )
        )
        offset += math.prod(shape[:-2]) * room[0] * room[1]
    return slots, offset


def stacked(slot, flat):
    count = slot.param.shape[0] if slot.param.ndim == 3 else 1
    part = flat[slot.input_offset :][: count * math.prod(slot.padded)].view(count, *slot.padded)
    rows, cols = slot.param.shape[-2:]
    seen = part[:, :cols, :rows].mT if slot.turned else part[:, :rows, :cols]
    return seen.reshape(slot.param.shape)


def numbers(momentum, l2=0.0):
    return torch.tensor(elementwise.momentum_numbers(momentum, l2=l2), dtype=torch.float32, device="cuda")


SHAPES = [(768, 1024), (1024, 768), (3, 768, 1024), (1000, 700), (33, 57)]
FLOATS = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("momentum", [0.95, 0.5, 0.1])
@pytest.mark.parametrize("buffer", FLOATS, ids=str)
@pytest.mark.parametrize("grad", [torch.float32, torch.bfloat16], ids=str)
def test_momentum_and_inputs_are_torch_lerp_bit_for_bit(grad, buffer, momentum):
    slots, size = bucket(SHAPES, buffer=buffer, grad=grad)
    wanted = []
    for slot in slots:
        gradient = slot.grad.float()
        stored = torch.lerp(slot.buffer.float(), gradient, 1.0 - momentum).to(buffer)
        wanted.append((stored, torch.lerp(gradient, stored.float(), momentum).bfloat16()))
    inputs = torch.full((size,), float("nan"), dtype=torch.bfloat16, device="cuda")
    for table, _ in build_tables(slots):
        elementwise.update_momentum(table, inputs, numbers=numbers(momentum), nesterov=True)
    assert torch.isfinite(inputs).all()
    for slot, (stored, average) in zip(slots, wanted, strict=True):
        assert torch.equal(slot.buffer, stored)
        assert torch.equal(stacked(slot, inputs), average)


def test_l2_and_unscale_bit_for_bit():
    slots, size = bucket(SHAPES[:3], param=torch.bfloat16, grad=torch.float16)
    unscale, l2 = torch.tensor(1 / 3, dtype=torch.float64, device="cuda"), 0.1
    wanted = []
    for slot in slots:
        gradient = slot.grad.float() * unscale.float() + slot.param.float() * l2
        wanted.append(torch.lerp(slot.buffer, gradient, 0.05))
    [(table, _)] = build_tables(slots)
    inputs = torch.empty(size, device="cuda")
    elementwise.update_momentum(table, inputs, numbers=numbers(0.95, l2), nesterov=False, l2=True, unscale=unscale)
    for slot, stored in zip(slots, wanted, strict=True):
        assert torch.equal(slot.buffer, stored)
        assert torch.equal(stacked(slot, inputs), stored)


@pytest.mark.parametrize("mode", ["decoupled", "cautious", "l2"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_apply_rounds_as_separate_torch_operations_do(dtype, mode):
    slots, size = bucket(SHAPES, param=dtype)
    directions = random(size, dtype=torch.float16, scale=0.05)
    lr, decay = torch.tensor(0.02, device="cuda"), torch.tensor(0.1, device="cuda")
    wanted = []
    for slot in slots:
        direction, param = stacked(slot, directions).float(), slot.param.float()
        if mode != "l2":
            decayed = param * (1.0 - lr * decay)
            param = torch.where(direction * param > 0, decayed, param) if mode == "cautious" else decayed
        wanted.append((param - direction * (lr * slot.scale)).to(dtype))
    for table, _ in build_tables(slots):
        elementwise.apply_update(table, directions, lr=lr, weight_decay=decay, mode=mode)
    for slot, param in zip(slots, wanted, strict=True):
        assert torch.equal(slot.param, param)


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
def test_normalise_equals_torch(scale):
    x = random(4, 1000, 3000, scale=scale).bfloat16()
    norms = elementwise.find_norms(elementwise.measure(x), batch=4)
    out = torch.full((4, 1008, 3008), float("nan"), dtype=torch.float16, device="cuda")
    elementwise.normalise(x, norms, out=out)
    expected = normalised(x.float(), eps=1e-7).half()
    # The norm itself may differ in its last bit: then a few elements round the other way.
    assert (out[:, :1000, :3000].float() - expected.float()).abs().max() <= 2**-11 * expected.abs().max()
    assert not out[:, 1000:].any() and not out[:, :, 3000:].any()
    packed = torch.zeros(4, 1008, 3008, dtype=torch.bfloat16, device="cuda")
    packed[:, :1000, :3000] = x
    same = elementwise.find_norms(elementwise.measure(packed), batch=4)
    assert torch.equal(norms, same)
    assert torch.equal(elementwise.normalise(packed, same, out=packed.view(torch.float16)), out), "in place"


def test_sums_of_squares_do_not_depend_on_the_way():
    """On the way in (straight and turned), from the padded stack, from a slice, from another memory order."""
    slots, size = bucket([(1000, 712), (712, 1000), (2, 712, 1000)])
    inputs = torch.empty(size, dtype=torch.bfloat16, device="cuda")
    room = slots[0].padded
    partials = torch.full((count_partials(4, room),), float("nan"), dtype=torch.float64, device="cuda")
    for table, positions in build_tables(slots):
        assert positions == [0, 1, 2]
        elementwise.update_momentum(table, inputs, numbers=numbers(0.95), nesterov=True, partials=partials)
    stack = inputs.view(4, *room)
    assert torch.equal(partials, elementwise.measure(stack))
    assert torch.equal(partials, elementwise.measure(stack[:, :712, :1000]))
    assert torch.equal(partials, elementwise.measure(stack.mT.contiguous().mT))
    assert torch.equal(partials[: partials.numel() // 4], elementwise.measure(stack[:1]))


def test_nothing_happens_without_proceed():
    slots, size = bucket(SHAPES)
    slots[0].grad[1, 1] = float("nan")
    before = [(slot.param.clone(), slot.buffer.clone()) for slot in slots]
    flat, stop = torch.full((size,), float("nan"), device="cuda"), torch.tensor(False, device="cuda")
    number = torch.tensor(0.1, device="cuda")
    for table, _ in build_tables(slots):
        elementwise.update_momentum(table, flat, numbers=numbers(0.95), nesterov=True, proceed=stop)
    assert torch.isfinite(flat).all()
    flat.fill_(float("nan"))
    for table, _ in build_tables(slots):
        elementwise.apply_update(table, flat, lr=number, weight_decay=number, mode="decoupled", proceed=stop)
    for slot, (param, buffer) in zip(slots, before, strict=True):
        assert torch.equal(slot.param, param) and torch.equal(slot.buffer, buffer)


def test_a_graph_replays_with_live_numbers_and_moved_gradients():
    slots, size = bucket([(256, 384), (384, 256)])
    others, _ = bucket([(256, 384), (384, 256)])
    [(table, _)], [(plain, _)] = build_tables(slots), build_tables(others)
    live, lr, decay = numbers(0.9), torch.tensor(0.1, device="cuda"), torch.tensor(0.1, device="cuda")
    inputs = torch.empty(size, dtype=torch.bfloat16, device="cuda")

    def step(table):
        elementwise.update_momentum(table, inputs, numbers=live, nesterov=True)
        elementwise.apply_update(table, inputs, lr=lr, weight_decay=decay, mode="decoupled")

    step(plain)
    step(table)  # compiles, and keeps both in step
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(table)
    for round_, momentum in enumerate((0.95, 0.5)):
        live.copy_(numbers(momentum))
        lr.fill_(0.01 * (round_ + 1))
        fresh = [random(*slot.grad.shape, seed=77 + round_ + i) for i, slot in enumerate(slots)]
        slots = [_with_grad(slot, grad) for slot, grad in zip(slots, fresh, strict=True)]
        others = [_with_grad(slot, grad) for slot, grad in zip(others, fresh, strict=True)]
        assert not table.is_current(slots)
        table.update(slots)
        plain.update(others)
        graph.replay()
        step(plain)
        for a, b in zip(slots, others, strict=True):
            assert torch.equal(a.param, b.param) and torch.equal(a.buffer, b.buffer)


def _with_grad(slot, grad):
    return Slot(**{**{name: getattr(slot, name) for name in Slot.__dataclass_fields__}, "grad": grad})


def test_no_launch_waits_for_the_device():
    slots, size = bucket([(256, 384)])
    [(table, _)] = build_tables(slots)
    inputs, live, lr = torch.empty(size, device="cuda"), numbers(0.9), torch.tensor(0.1, device="cuda")
    for mode in ("default", "error"):
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode(mode)
        try:
            table.update([_with_grad(slots[0], slots[0].grad.clone())])
            elementwise.update_momentum(table, inputs, numbers=live, nesterov=True)
            stack = inputs.view(1, *slots[0].padded)
            norms = elementwise.find_norms(elementwise.measure(stack), batch=1)
            elementwise.normalise(stack, norms, out=stack)
            symmetric_matmul(stack.half())
            elementwise.apply_update(table, inputs, lr=lr, weight_decay=lr, mode="l2")
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_element_wise_with_more_than_two_to_the_31_elements():
    bf16 = torch.bfloat16
    slots, size = bucket([(36, 8192, 8192)], param=bf16, buffer=bf16, grad=bf16)
    assert size > 2**31
    slot = slots[0]
    stored = torch.lerp(slot.buffer[-1].float(), slot.grad[-1].float(), 1.0 - 0.95).to(bf16)
    inputs = torch.empty(size, dtype=bf16, device="cuda")
    [(table, _)] = build_tables(slots)
    elementwise.update_momentum(table, inputs, numbers=numbers(0.95), nesterov=False)
    assert torch.equal(slot.buffer[-1], stored) and torch.equal(stacked(slot, inputs)[-1], stored)
    param, lr = slot.param[-1].float(), torch.tensor(0.1, device="cuda")
    elementwise.apply_update(table, inputs, lr=lr, weight_decay=lr, mode="l2")
    assert torch.equal(slot.param[-1], (param - stored.float() * (lr * slot.scale)).to(bf16))
    stack = inputs.view(36, 8192, 8192)
    norms = elementwise.find_norms(elementwise.measure(stack), batch=36)
    last = elementwise.find_norms(elementwise.measure(stack[-1:]), batch=1)
    assert torch.equal(norms[-1:], last)
    expected = elementwise.normalise(stack[-1:], last, out=torch.empty_like(stack[-1:]))
    assert torch.equal(elementwise.normalise(stack, norms, out=stack)[-1:], expected)


# ---------------------------------------------------------------- whole products in fp32


@pytest.mark.parametrize(
    ("batch", "m", "k", "n"), [(1, 16, 16, 16), (3, 80, 48, 144), (7, 240, 960, 240), (300, 128, 128, 512)]
)
def test_whole_products_in_fp32(batch, m, k, n):
    a, b, c = random(batch, m, k), random(batch, k, n, seed=1), random(batch, m, n, seed=2)
    for left, right in ((a, b), (a, b.mT.contiguous().mT)):
        found = whole_matmul(left, right, alpha=0.5, beta=-2.0, c=c, gamma=3.0)
        expected = 0.5 * a.double() @ b.double() - 2.0 * c.double()
        expected.diagonal(dim1=1, dim2=2).add_(3.0)
        assert (found.double() - expected).abs().max() / expected.abs().max() < 2e-6
        alone = whole_matmul(left[-1:], right[-1:], alpha=0.5, beta=-2.0, c=c[-1:], gamma=3.0)
        assert torch.equal(alone[0], found[-1]), "the same bits alone"
        assert torch.equal(whole_matmul(left, right, alpha=0.5, beta=-2.0, c=c, gamma=3.0), found)


def test_whole_products_do_not_follow_torchs_settings():
    a = torch.full((1, 64, 64), 1.0 + 2.0**-12, device="cuda")  # in TF32: 1
    torch.set_float32_matmul_precision("high")
    try:
        assert whole_matmul(a, a)[0, 0, 0].item() == pytest.approx(64.0 * (1.0 + 2.0**-11), rel=1e-6)
    finally:
        torch.set_float32_matmul_precision("highest")


# ---------------------------------------------------------------- peaks


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_peaks_of_many_and_of_large_tensors(dtype):
    tensors = [random(n, dtype=dtype, seed=n, scale=10.0 ** (n % 3)) for n in (1, 100, 4097, 10**6, 10**7, *range(64))]
    tensors = [tensor for tensor in tensors if tensor.numel()]
    finder = PeakFinder()
    for _ in range(2):
        assert torch.equal(finder.find(tensors), torch.stack([t.float().abs().max() for t in tensors]))
    for value in (float("nan"), float("inf"), -float("inf")):
        tensors[4][-1] = value
        found = finder.find(tensors)
        assert not found[4].isfinite() and found[4].isnan() == (value != value)
        assert found[[0, 1, 2, 3, 5]].isfinite().all()


def test_a_peak_beyond_two_to_the_31_numbers():
    large = torch.zeros(2**31 + 5000, dtype=torch.float16, device="cuda")
    large[-7] = -3.0
    assert PeakFinder().find([large]).item() == 3.0
