"""Kernels are compiled once for each kind of arguments, and then run directly."""

from types import SimpleNamespace

import pytest
import torch

from meshmuon.kernels import launching


class Compiled:
    """What Triton gives after a first launch."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, events):
        self.events = events

    def run(self, x, y, z, stream, function, metadata, launch_metadata, enter, leave, *arguments):
        assert (y, z, stream, function, metadata) == (1, 1, "stream", "function", "metadata")
        assert (launch_metadata, enter, leave) == (None, None, None)
        self.events.append(("run", x, arguments))

    def __getitem__(self, grid):
        return lambda *arguments: self.events.append(("told", grid[0], arguments))


class Kernel:
    def __init__(self, events):
        self.events = events

    def __getitem__(self, grid):
        def compile_and_run(*arguments, **options):
            self.events.append(("compiled", grid[0], arguments, options))
            return Compiled(self.events)

        return compile_and_run


@pytest.fixture
def hooks(monkeypatch):
    hooks = SimpleNamespace(launch_enter_hook=SimpleNamespace(calls=[]), launch_exit_hook=None)
    driver = SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda device: "stream"))
    monkeypatch.setattr(launching, "_triton", lambda: (hooks, driver))
    monkeypatch.setattr(launching, "is_interpreted", lambda: False)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(launching, "_compiled", {})
    return hooks


def kinds(events):
    return [event[0] for event in events]


@pytest.mark.usefixtures("hooks")
def test_the_second_launch_runs_what_the_first_compiled():
    events = []
    kernel, x, y = Kernel(events), torch.zeros(64), torch.ones(64)
    launching.launch(kernel, 7, (x, None, 3, (64, 1)), ("a", 16), num_warps=4)
    launching.launch(kernel, 9, (y, None, 5, (128, 1)), ("a", 16), num_warps=4)
    assert kinds(events) == ["compiled", "run"]
    assert events[0][2][0] is x
    assert events[0][3] == {"num_warps": 4}
    assert events[1][1:] == (9, (y.data_ptr(), None, 5, (128, 1), "a", 16)), "addresses, and the numbers of this launch"


@pytest.mark.usefixtures("hooks")
@pytest.mark.parametrize(
    ("other", "constants"),
    [
        ((torch.zeros(64, dtype=torch.float16), None, 3, (64, 1)), (16,)),
        ((torch.zeros(64)[1:], None, 3, (64, 1)), (16,)),
        ((torch.zeros(64), torch.zeros(1), 3, (64, 1)), (16,)),
        ((torch.zeros(64), None, 32, (64, 1)), (16,)),
        ((torch.zeros(64), None, 1, (64, 1)), (16,)),
        ((torch.zeros(64), None, 2**31 + 1, (64, 1)), (16,)),
        ((torch.zeros(64), None, 3, (65, 1)), (16,)),
        ((torch.zeros(64), None, 3, (64, 2)), (16,)),
        ((torch.zeros(64), None, 3.5, (64, 1)), (16,)),
        ((torch.zeros(64), None, 3, (64, 1)), (32,)),
    ],
    ids=["dtype", "alignment", "tensor for None", "a multiple of 16", "one", "64 bits", "a stride", "not one", "float",
         "constant"],
)  # fmt: skip
def test_what_triton_specializes_on_is_compiled_anew(other, constants):
    events = []
    kernel = Kernel(events)
    for _ in range(2):
        launching.launch(kernel, 7, (torch.zeros(64), None, 3, (64, 1)), (16,), num_warps=4)
        launching.launch(kernel, 7, other, constants, num_warps=4)
    assert kinds(events) == ["compiled", "compiled", "run", "run"]


@pytest.mark.usefixtures("hooks")
def test_two_kernels_and_no_programs():
    events = []
    first, second = Kernel(events), Kernel(events)
    launching.launch(first, 0, (torch.zeros(4),), ())
    assert events == []
    launching.launch(first, 1, (torch.zeros(4),), ())
    launching.launch(second, 1, (torch.zeros(4),), ())
    assert kinds(events) == ["compiled", "compiled"]


def test_a_profiler_that_listens_is_told(hooks):
    events = []
    kernel = Kernel(events)
    launching.launch(kernel, 1, (torch.zeros(4),), ())
    hooks.launch_enter_hook.calls.append(print)
    launching.launch(kernel, 1, (torch.zeros(4),), ())
    hooks.launch_enter_hook.calls.clear()
    hooks.launch_exit_hook = print
    launching.launch(kernel, 1, (torch.zeros(4),), ())
    hooks.launch_exit_hook = None
    launching.launch(kernel, 1, (torch.zeros(4),), ())
    assert kinds(events) == ["compiled", "told", "told", "run"]
