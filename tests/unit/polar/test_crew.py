"""Several matrices at a time on a CPU, each by one thread: who does what may not show in any bit."""

import functools
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from tests.distributed.memory import LiveBytes
from tests.libraries import using_library
from tests.threads import using
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshmuon import Muon, Orthogonalizer, View, orthogonalize
from meshmuon.kernels import crew
from meshmuon.kernels.crew import share
from meshmuon.polar import cpu_operations, sharded_gram
from meshmuon.polar import orthogonalize as whole
from meshmuon.polar.coefficients import resolve_schedule
from meshmuon.polar.cpu_operations import PANELS_FROM, CpuOperations
from meshmuon.polar.operations import TorchOperations
from meshmuon.polar.recipe import choose_recipe

CPU = torch.device("cpu")
GRAIN = 32768  # numbers from which torch gives element-wise work to several threads


@pytest.fixture(params=[1, 2, 3])
def threads(request):
    with using(request.param):
        yield request.param


@pytest.fixture
def python_handles_ctrl_c():
    """As in a terminal: a suite that a script starts in the background was told to ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def random(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=dtype)


@pytest.mark.parametrize("large", [True, False])
def test_results_come_in_the_order_of_the_items(threads, large):
    def slow_if_first(i):
        time.sleep(0.01 if i == 0 else 0)
        return i * i

    assert share(slow_if_first, range(20), device=CPU, large=large) == [i * i for i in range(20)]
    assert share(slow_if_first, [], device=CPU, large=large) == []


@pytest.mark.parametrize("large", [True, False])
def test_work_is_done_by_one_thread_each_and_torch_keeps_its_own_number(threads, large):
    inside = share(lambda _: torch.get_num_threads(), range(4), device=CPU, large=large)
    assert set(inside) == {1}
    assert torch.get_num_threads() == threads
    seen = []
    other = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    other.start()
    other.join()
    assert seen == [threads], "threads to come use as many as before"


def test_several_threads_do_take_part():
    meet = threading.Barrier(2)
    with using(2):
        names = share(lambda _: (meet.wait(timeout=10), threading.current_thread().name)[1], range(2), device=CPU)
    assert len(set(names)) == 2
    assert all(name.startswith("meshmuon") for name in names)


def test_work_within_work_stays_with_its_thread():
    def outer(i):
        here = threading.current_thread()
        return share(lambda j: (i, j, threading.current_thread() is here), range(3), device=CPU)

    with using(2):
        assert share(outer, range(2), device=CPU) == [[(i, j, True) for j in range(3)] for i in range(2)]


@pytest.mark.parametrize("large", [True, False])
def test_an_error_is_raised_when_nobody_works_any_more(threads, large):
    working, done = [], []

    def work(i):
        working.append(i)
        if i == 1:
            raise ValueError("the second one")
        time.sleep(0.02)
        done.append(i)

    with pytest.raises(ValueError, match="the second one"):
        share(work, range(50), device=CPU, large=large)
    assert sorted([*done, 1]) == sorted(working), "what was begun was finished"
    assert len(working) <= 10, "and the rest was not begun"
    assert torch.get_num_threads() == threads
    assert share(abs, [-1], device=CPU) == [1], "and it goes on"


@pytest.mark.parametrize(
    "interrupt",
    [
        lambda: signal.pthread_kill(threading.main_thread().ident, signal.SIGINT),
        lambda: signal.raise_signal(signal.SIGINT),  # here: as if the main thread had just missed it
    ],
    ids=["waiting", "about to wait"],
)
@pytest.mark.usefixtures("python_handles_ctrl_c")
def test_ctrl_c_waits_for_what_was_begun(interrupt):
    ended = []

    def work(i):
        if i == 1:
            interrupt()
        time.sleep(0.05)
        ended.append(i)

    with using(2):
        with pytest.raises(KeyboardInterrupt):
            share(work, range(100), device=CPU)
        count = len(ended)
        time.sleep(0.15)
        assert len(ended) == count < 100


@pytest.mark.usefixtures("python_handles_ctrl_c")
def test_ctrl_c_at_any_moment_waits_for_nobody_who_has_ended():
    """The interrupt may come when the last one has just ended: nothing is left to be told then."""
    for after in (0.0, 0.001, 0.002, 0.005):

        def work(i, after=after):
            if i == 3:
                time.sleep(after)
                signal.raise_signal(signal.SIGINT)  # noticed by the main thread when it runs again

        def shared(work=work):
            share(work, range(4), device=CPU)
            time.sleep(0.5)  # at the latest here

        with using(2), pytest.raises(KeyboardInterrupt):
            shared()


def test_a_thread_that_outlives_the_main_one_goes_on():
    program = """
import threading, time, torch
from meshmuon.kernels.crew import share
torch.set_num_threads(2)

def late():
    threading.main_thread().join()
    print(share(abs, [-1, -2, -3], device=torch.device("cpu")))

threading.Thread(target=late).start()
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stdout.strip()) == (0, "[1, 2, 3]"), ran.stderr


def test_a_thread_that_cannot_be_started_is_an_error_and_leaves_nothing_changed(monkeypatch):
    plain, started = threading.Thread.start, []

    def start(self):
        if self.name.startswith("meshmuon-") and len(started) == 2:
            raise RuntimeError("can't start new thread")
        started.append(self.name)
        plain(self)

    with using(4), monkeypatch.context() as patch:
        patch.setattr(crew, "_crew", functools.cache(crew._crew.__wrapped__))
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(RuntimeError, match="can't start"):
            share(abs, [1, 2], device=CPU)
        patch.undo()
        seen = []
        other = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        other.start()
        other.join()
        assert seen == [4]


def test_work_that_changes_the_number_of_threads_does_not_wait_for_itself():
    def outer(i):
        torch.set_num_threads(2)
        try:
            return share(abs, [-i, -1], device=CPU)
        finally:
            torch.set_num_threads(1)

    with using(2):
        assert share(outer, range(3), device=CPU) == [[0, 1], [1, 1], [2, 1]]


@pytest.mark.parametrize("large", [True, False])
@pytest.mark.parametrize("recorded", [True, False])
def test_what_is_recorded_for_backward_is_the_callers_choice(threads, large, recorded):
    weight = torch.ones(2, requires_grad=True)
    with torch.set_grad_enabled(recorded):
        results = share(lambda _: weight * 2, range(2), device=CPU, large=large)
    assert [result.requires_grad for result in results] == [recorded] * 2


def test_tensors_of_inference_mode_may_be_written():
    x = random(4, 200, 300)
    with using(2), torch.inference_mode():
        found = orthogonalize(x)
    assert torch.equal(found, orthogonalize(x))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_has_threads_of_its_own():
    with using(2):
        share(abs, [1, 2], device=CPU)
        child = os.fork()
        if child == 0:  # a data loader's worker, say
            os._exit(0 if share(abs, [-1, -2], device=CPU) == [1, 2] else 1)
        for _ in range(500):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                break
            time.sleep(0.02)
        else:
            os.kill(child, 9)
            os.waitpid(child, 0)
            pytest.fail("it waits for threads that it does not have")
    assert os.waitstatus_to_exitcode(status) == 0


LONG = [(128, 1024), (224, 1216), (400, 1008), (64, 2000)]  # whose X·Xᵀ MKL cuts between threads
PANELS = [(384, 384), (392, 800), (520, 520), (768, 768)]


IN_FP32 = [(shape, torch.float32) for shape in (*LONG, *PANELS)]
IN_FP64 = [(shape, torch.float64) for shape in (LONG[0], LONG[3], PANELS[0], PANELS[1])]


@pytest.mark.parametrize(("shape", "dtype"), [*IN_FP32, *IN_FP64])
def test_bits_do_not_depend_on_the_number_of_threads(shape, dtype):
    x = random(3, *shape, dtype=dtype)
    for form in ("standard", "gram"):
        with using(1):
            alone = [orthogonalize(matrix, form=form) for matrix in x]
        for number, batches in ((2, (1, 2, 3)), (3, (1, 2)), (4, (1, 3))):
            with using(number):
                for batch in batches:
                    for found, wanted in zip(orthogonalize(x[:batch], form=form), alone, strict=False):
                        assert torch.equal(found, wanted), (form, number, batch)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("shape", [(64, 1216), (128, 1024), (384, 384)])
def test_nor_do_those_of_16_bits(shape, dtype):
    x = random(2, *shape)
    for form in ("standard", "gram"):
        with using(1):
            alone = [orthogonalize(matrix, form=form, dtype=dtype) for matrix in x]
        for number in (2, 3):
            with using(number):
                for batch in (1, 2):
                    for found, wanted in zip(orthogonalize(x[:batch], form=form, dtype=dtype), alone, strict=False):
                        assert torch.equal(found, wanted), (form, number, batch)


def test_steps_do_not_depend_on_the_number_of_threads():
    def trained(number):
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(s)) for s in [(128, 1024), (1024, 128), (400, 1008), (40, 24)]]
        optimizer = Muon(params, lr=0.02)
        with using(number):
            for _ in range(3):
                for p in params:
                    p.grad = torch.randn(p.shape)
                optimizer.step()
        return [*params, *(optimizer.state[p]["momentum_buffer"] for p in params)]

    for found, wanted in zip(trained(3), trained(1), strict=True):
        assert torch.equal(found, wanted)


def test_a_library_that_cuts_sums_between_its_threads_cannot_change_a_bit(monkeypatch):
    """As MKL does on some processors. The sabotage, products left to the library's threads, has other bits."""
    plain = torch.bmm

    def by_threads(left, right, out=None):
        number = torch.get_num_threads()
        halves = zip(left.chunk(number, dim=-1), right.chunk(number, dim=-2), strict=True)
        total = functools.reduce(torch.add, (plain(*half) for half in halves))
        return total if out is None else out.copy_(total)

    x = random(128, 1024)
    monkeypatch.setattr(torch, "bmm", by_threads)
    with using_library("mkl"), using(1):
        alone = orthogonalize(x)
    with using_library("mkl"), using(2):
        assert torch.equal(orthogonalize(x), alone)
        monkeypatch.setattr(whole, "share", lambda work, items, *, device, large=True: list(map(work, items)))
        assert not torch.equal(orthogonalize(x), alone)


@pytest.mark.parametrize("m", [48, PANELS_FROM, PANELS_FROM + 16, 640])
@pytest.mark.parametrize("batch", [1, 3])
def test_panels_make_the_products_they_stand_for(m, batch, threads):
    x = random(batch, m, m + 32, dtype=torch.float64) / m
    ours, plain = CpuOperations(), TorchOperations()
    rounded = plain.gram(x).bfloat16()
    for triple in [(3.4445, -4.7750, 2.0315), (1.5, -0.5, 0.0)]:
        found, wanted = ours.quadratic(rounded, triple), plain.quadratic(rounded.double(), triple)
        torch.testing.assert_close(found.double(), wanted, rtol=8e-3, atol=1e-3)
    gram, triple = plain.gram(x), (3.4445, -4.7750, 2.0315)
    pairs = [
        (ours.gram(x), gram),
        (ours.quadratic(gram, triple), plain.quadratic(gram, triple)),
        (ours.quadratic(gram, (1.5, -0.5, 0.0)), plain.quadratic(gram, (1.5, -0.5, 0.0))),
        (ours.symmetric_product(gram, gram), gram @ gram),
        (ours.apply(gram, x), gram @ x),
        (ours.apply(gram, x, torch.full_like(x, torch.nan)), gram @ x),
    ]
    for found, wanted in pairs:
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14)
    for symmetric in (pairs[0][0], pairs[1][0]):
        if m >= PANELS_FROM:
            blocks = symmetric.tril() + symmetric.tril(-1).mT
            torch.testing.assert_close(symmetric, blocks, rtol=1e-12, atol=1e-14)


def test_a_panel_begins_at_the_diagonal(monkeypatch):
    """Five eighths of the multiplications at four panels, counted."""
    counted = []
    plain = torch.bmm

    def counting(left, right, out=None):
        counted.append(left.shape[1] * left.shape[2] * right.shape[2])
        return plain(left, right, out=out) if out is not None else plain(left, right)

    monkeypatch.setattr(torch, "bmm", counting)
    x = random(1, 512, 512)
    with using_library("mkl"), using(1):
        CpuOperations().gram(x)
    assert sum(counted) == 512**3 * 5 // 8
    counted.clear()
    with using(1):
        CpuOperations().gram(x.bfloat16())
    assert sum(counted) == 512**3 * 3 // 4, "two panels in 16 bits"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_gram_route_has_its_bits_on_any_number_of_threads_too(dtype):
    how = Orthogonalizer(form="gram", dtype=dtype)
    schedule = resolve_schedule("polar_express", 5)
    recipe = choose_recipe(
        96, 1000, schedule=schedule, orthogonalizer=how, device=CPU, dtype=torch.float32, eps=1e-7
    ).in_gram_space()
    x = random(2, 96, 1000)

    def found(number):
        with using(number):
            gram, exponent = sharded_gram.local_gram(x)
            factors, inverse = sharded_gram.find_factors(gram.double(), recipe)
            return [gram, *factors, sharded_gram.apply_factors(x, factors, inverse=inverse, exponent=exponent)]

    for number in (2, 3):
        for ours, alone in zip(found(number), found(1), strict=True):
            assert torch.equal(ours, alone)


@pytest.mark.parametrize(
    ("form", "shape"), [("gram", (1, 384, 3072)), ("standard", (1, 384, 3072)), ("gram", (4, 384, 768))]
)
def test_panels_stay_within_the_planned_memory(form, shape, monkeypatch):
    """Counted in every thread: a dispatch mode does not come along by itself."""
    _, m, n = shape
    how = Orthogonalizer(form=form, restarts=(2,) if form == "gram" else "auto")
    schedule = resolve_schedule("polar_express", 5)
    recipe = choose_recipe(m, n, schedule=schedule, orthogonalizer=how, device=CPU, dtype=torch.float32, eps=1e-7)
    counter, lock, counting = LiveBytes(), threading.RLock(), threading.local()

    def counted(work, items, **options):
        def watched(item):
            if getattr(counting, "here", False):
                return work(item)
            counting.here = True
            try:
                with counter:
                    return work(item)
            finally:
                counting.here = False

        return share(watched, items, **options)

    plain, forget = LiveBytes.__torch_dispatch__, LiveBytes._forget

    def dispatched(self, *given, **named):
        with lock:
            return plain(self, *given, **named)

    def forgotten(self, *given):
        with lock:
            return forget(self, *given)

    monkeypatch.setattr(LiveBytes, "__torch_dispatch__", dispatched)
    monkeypatch.setattr(LiveBytes, "_forget", forgotten)
    for module in (cpu_operations, whole):
        monkeypatch.setattr(module, "share", counted)
    with using(4), counter:
        counting.here = True
        whole.orthogonalize_stack([torch.ones(shape)], recipe)
        counting.here = False
    assert 0 < counter.peak <= shape[0] * recipe.workspace_bytes(m, n)


def test_few_large_matrices_share_their_panels(monkeypatch):
    calls = []
    plain = cpu_operations.share

    def watching(work, items, *, device, large=True):
        calls.append((threading.current_thread() is threading.main_thread(), torch.get_num_threads()))
        return plain(work, items, device=device, large=large)

    monkeypatch.setattr(cpu_operations, "share", watching)
    with using(2):
        orthogonalize(random(1, PANELS_FROM, PANELS_FROM))
        assert set(calls) == {(True, 2)}, "one matrix: the threads share its panels"
        calls.clear()
        orthogonalize(random(2, PANELS_FROM, PANELS_FROM))
        assert set(calls) == {(False, 1)}, "one for each: every thread has panels of its own"
    calls.clear()
    with using(4):
        orthogonalize(random(2, PANELS_FROM, PANELS_FROM))
        assert set(calls) == {(True, 4)}, "two are fewer than the panels of one"
        calls.clear()
        orthogonalize(random(3, PANELS_FROM, PANELS_FROM))
        assert set(calls) == {(False, 1)}, "three are not"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(192, 192), (192, 768), (768, 192), (400, 400), (3, 192, 200)])
def test_no_part_of_an_update_is_left_to_the_threads_of_torch(shape, dtype):
    """They would go on spinning on the cores that ours need: a quarter of a step was lost to that."""
    left = []

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            numbers = max((t.numel() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)), default=0)
            computes = not func.is_view and "empty" not in str(func)
            if computes and numbers > GRAIN and torch.get_num_threads() > 1:
                left.append((str(func), numbers))
            return func(*args, **(kwargs or {}))

    params = [torch.nn.Parameter(torch.ones(shape, dtype=dtype)) for _ in range(5)]
    optimizer = Muon([{"params": params, "algorithm": "muon", "view": View(experts=len(shape) == 3)}])
    for p in params:
        p.grad = random(*shape).to(dtype)
    with using(2), Watching():
        optimizer.step()
        torch.ones(2 * GRAIN) + 1
    assert left == [("aten.add.Tensor", 2 * GRAIN)], "the last is not of the step, and shows that somebody looks"


@pytest.mark.parametrize("threads", [1, 2, 3, 16])
@pytest.mark.parametrize("count", [0, 1, 2, 7, 12, 18, 100])
@pytest.mark.parametrize("most", [1, 5, 1000])
def test_threads_get_the_same_share(count, most, threads):
    parts = whole._even_parts(count, most=most, threads=threads)
    assert sorted(i for part in parts for i in range(count)[part]) == list(range(count)), "each matrix once"
    sizes = [part.stop - part.start for part in parts]
    assert sizes == sorted(sizes, reverse=True) and max(sizes, default=0) <= most
    if count:
        assert max(sizes) - min(sizes) <= 1
        assert len(parts) % threads == 0 or len(parts) == count


def test_small_work_wakes_nobody(monkeypatch):
    def woken(threads):
        raise AssertionError("a thread was asked")

    params = [torch.nn.Parameter(torch.ones(s)) for s in [(8, 8), (16, 4)]]
    optimizer = Muon(params, lr=0.1)
    for p in params:
        p.grad = torch.ones_like(p)
    monkeypatch.setattr(crew, "_crew", woken)
    with using(4):
        optimizer.step()
