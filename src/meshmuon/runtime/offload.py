"""State in host memory, brought to the device bucket by bucket while a step runs.

[Note: two buffers]
While the momentum of one bucket is advanced in the first buffer, that of the next arrives in the second; results leave
while the bucket is orthogonalized. Three streams meet at events: arrivals, the step's own work, and departures.

    arrivals:    wait until the buffer has `departed` → copy host to buffer → `arrived`
    work:        wait until it has `arrived` → update in place
    departures:  wait for that work → copy buffer to host → `departed`

On a CPU the same copies happen, at once: what is tested there is what runs on a GPU, but for the waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from meshmuon.update.adamw import AdamWTensors

Allocate: TypeAlias = Callable[[int, torch.device], Tensor]

_ALIGNMENT = 256  # bytes: what the fastest copies and kernels like
_ADAMW_BYTES = 2**26  # of one moment, in one load: enough for full speed, and small beside a bucket of matrices


@dataclass(frozen=True, slots=True)
class Load:
    """What a step needs on a device at one time.

    Attributes:
        key: A name for it.
        device: Where it is needed.
        tensors: Where it lives; written when the step is done with it.
    """

    key: Hashable
    device: torch.device
    tensors: Sequence[Tensor]


class ResidentState:
    """State that is where it is used: nothing to bring."""

    @contextmanager
    def on_device(self, load: Load) -> Iterator[Sequence[Tensor]]:
        """Lend tensors for an update in place.

        Args:
            load: Which.

        Yields:
            The tensors themselves.
        """
        yield load.tensors

    def finish(self) -> None:
        """Wait until everything is back where it lives."""


def _bytes(size: int, device: torch.device) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device=device)


class StreamedState(ResidentState):
    """State in host memory, for the time of one step.

    Args:
        loads: What the step will ask for, in the order it probably will.
        allocate: Makes a buffer of so many bytes on a device.
    """

    def __init__(self, loads: Sequence[Load], allocate: Allocate = _bytes) -> None:
        devices = {load.device: None for load in loads}
        self._streams = {
            device: _Stream([load for load in loads if load.device == device], device, allocate) for device in devices
        }

    @contextmanager
    def on_device(self, load: Load) -> Iterator[Sequence[Tensor]]:
        """Lend copies on the device for an update in place.

        Args:
            load: Which; one of the loads that were announced.

        Yields:
            The copies; they go back when the context ends.
        """
        if not load.tensors:
            yield load.tensors
            return
        stream = self._streams[load.device]
        yield stream.borrow(load)
        stream.give_back(load)

    def finish(self) -> None:
        """Wait, on the host, until everything is back where it lives: whoever reads it next sees what is true."""
        for stream in self._streams.values():
            stream.finish()


class _Stream:
    """The two buffers of one device. See [Note: two buffers]."""

    def __init__(self, loads: Sequence[Load], device: torch.device, allocate: Allocate) -> None:
        self._device = device
        self._expected = {load.key: load for load in loads if load.tensors}
        largest = max((_size(load.tensors) for load in self._expected.values()), default=0)
        self._arrivals, self._departures = _Lane(device), _Lane(device)
        memory = [allocate(largest, device) for _ in range(2)]
        # The step's own stream may still be using this memory for what it did before.
        ready = _Lane.mark(device)
        self._slots = [_Slot(each, departed=ready) for each in memory]
        self._strided: list[tuple[Tensor, Tensor]] = []

    def borrow(self, load: Load) -> list[Tensor]:
        slot = self._slot_with(load.key)
        self._arrivals.hold_up_work(slot.arrived)
        if self._expected and self._free:
            self._send_for(next(iter(self._expected)), self._free[0])
        return slot.views

    def give_back(self, load: Load) -> None:
        slot = self._slot_with(load.key)
        pairs = self._way_back(load.tensors, slot.views)
        slot.departed = self._departures.copy(pairs, after=_Lane.mark(self._device))
        slot.key = None

    def finish(self) -> None:
        self._arrivals.wait()  # of a step that failed in between: its buffers must not be written any more
        self._departures.wait()
        for tensor, packed in self._strided:
            tensor.copy_(packed)
        self._strided.clear()

    @property
    def _free(self) -> list[_Slot]:
        return [slot for slot in self._slots if slot.key is None]

    def _slot_with(self, key: Hashable) -> _Slot:
        """The buffer in which a load is, or is on its way; usually it has been sent for already."""
        if not any(slot.key == key for slot in self._slots):
            self._send_for(key, self._free[0])
        return next(slot for slot in self._slots if slot.key == key)

    def _send_for(self, key: Hashable, slot: _Slot) -> None:
        tensors = self._expected.pop(key).tensors
        slot.key, slot.views = key, _cut(slot.memory, tensors)
        pairs = [(view, _packed(tensor)) for view, tensor in zip(slot.views, tensors, strict=True)]
        slot.arrived = self._arrivals.copy(pairs, after=slot.departed)

    def _way_back(self, tensors: Sequence[Tensor], views: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Where results go. torch would not wait before it spreads a strided tensor on the host: `finish` does it."""
        pairs = []
        for tensor, view in zip(tensors, views, strict=True):
            if tensor.is_contiguous():
                pairs.append((tensor, view))
            else:
                packed = _empty_packed(tensor)
                self._strided.append((tensor, packed))
                pairs.append((packed, view))
        return pairs


@dataclass
class _Slot:
    """One buffer on the device. `key` names what is in it, or None."""

    memory: Tensor
    key: Hashable | None = None
    views: list[Tensor] = field(default_factory=list)
    arrived: torch.cuda.Event | None = None
    departed: torch.cuda.Event | None = None


class _Lane:
    """Copies in one direction: on a stream of its own where the device has streams, else at once."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._sources: list[Tensor] = []

    def copy(
        self, pairs: Sequence[tuple[Tensor, Tensor]], *, after: torch.cuda.Event | None
    ) -> torch.cuda.Event | None:
        """Begin copies (to, from) once an event has happened, and give the event of their end."""
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            if self._stream is not None and after is not None:
                self._stream.wait_event(after)
            for to, source in pairs:
                to.copy_(source, non_blocking=True)
        self._sources += [source for _, source in pairs]  # packed ones must live until they have been read
        return None if self._stream is None else self._stream.record_event()

    def hold_up_work(self, event: torch.cuda.Event | None) -> None:
        """Make the step's own stream wait for an event."""
        if self._stream is not None and event is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(event)

    def wait(self) -> None:
        """Wait on the host for everything that was begun."""
        if self._stream is not None:
            self._stream.synchronize()
        self._sources.clear()

    @staticmethod
    def mark(device: torch.device) -> torch.cuda.Event | None:
        """Give the event at which everything asked of the step's own stream so far will be done."""
        return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def batches(tensors: Sequence[AdamWTensors]) -> Iterator[list[AdamWTensors]]:
    """Cut AdamW's tensors into loads of a bounded size; a larger one goes alone.

    Args:
        tensors: Parameters and their state.

    Yields:
        Parts of it, in order.
    """
    part: list[AdamWTensors] = []
    for item in tensors:
        if part and sum(each.exp_avg.nbytes for each in part) + item.exp_avg.nbytes > _ADAMW_BYTES:
            yield part
            part = []
        part.append(item)
    if part:
        yield part


def _aligned(tensor: Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT


def _size(tensors: Sequence[Tensor]) -> int:
    return sum(_aligned(tensor) for tensor in tensors)


def _cut(memory: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Places in a buffer for tensors of these shapes and dtypes, contiguous."""
    views, start = [], 0
    for tensor in tensors:
        views.append(memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
        start += _aligned(tensor)
    return views


def _empty_packed(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_pinned())


def _packed(tensor: Tensor) -> Tensor:
    """The tensor, or a contiguous copy of it in host memory of the same kind."""
    return tensor if tensor.is_contiguous() else _empty_packed(tensor).copy_(tensor)
