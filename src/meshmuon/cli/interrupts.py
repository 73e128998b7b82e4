"""Ctrl-C as a question, not as an accident: the step under way ends, a checkpoint is saved, then the run stops."""

import signal
import sys
from types import FrameType, TracebackType
from typing import Any

# torchrun passes a Ctrl-C on to its processes as SIGTERM.
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Remembers a first signal instead of dying of it; a second one ends the process as usual."""

    def __init__(self) -> None:
        self._asked = False
        self._before: dict[int, Any] = {}

    def asked(self) -> bool:
        """Whether someone asked to stop."""
        return self._asked

    def __enter__(self) -> "Interrupts":
        self._before = {number: signal.signal(number, self._note) for number in _SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._asked:
            raise KeyboardInterrupt
        self._asked = True
        print("\nstopping after this step, then saving (again: stop at once)", file=sys.stderr, flush=True)
