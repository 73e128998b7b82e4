"""Ctrl-C as a question, not as an accident: the step under way ends, a checkpoint is saved, then the run stops."""

import os
import signal
import sys
import time
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# A Ctrl-C under torchrun arrives twice, from the terminal and from torchrun itself: that is one wish.
_ONE_WISH_SECONDS = 2.0


class Interrupts:
    """Remembers a first signal instead of dying of it; a second one ends the process as usual."""

    def __init__(self) -> None:
        self._first: float | None = None
        self._before: dict[int, Any] = {}

    def asked(self) -> bool:
        """Whether someone asked to stop."""
        return self._first is not None

    def __enter__(self) -> "Interrupts":
        self._before = {number: signal.signal(number, self._note) for number in _SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._first is None:
            self._first = now
            if os.environ.get("RANK", "0") == "0":
                print("\nstopping after this step, then saving (again: stop at once)", file=sys.stderr, flush=True)
        elif now - self._first > _ONE_WISH_SECONDS:
            raise KeyboardInterrupt
