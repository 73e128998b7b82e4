"""Whether an optimizer that shares its work with other ranks may go on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from meshmuon.errors import (
    BrokenOptimizerError,
    GradientMismatchError,
    NonFiniteGradientError,
    PlanMismatchError,
    message,
    some,
)
from meshmuon.exchange.roll_call import RollCall, is_about_peers

_RELOAD = "Parameters may be half updated: reload a checkpoint on all ranks"


class AgreedRefusalError(Exception):
    """Carries an error of this rank that every peer has heard of: nothing was changed, nothing is broken."""


@dataclass(slots=True)
class Health:
    """Whether a step ended in the middle, and how. Outlives plans; a loaded checkpoint heals it."""

    broken: str | None = None

    def refuse_if_broken(self) -> None:
        """Refuse to go on after a step ended in the middle.

        Raises:
            BrokenOptimizerError: If one did.
        """
        if self.broken is not None:
            found = f"an earlier step ended in the middle ({self.broken})"
            raise BrokenOptimizerError(message("optimizer", found=found, do=_RELOAD))

    @contextmanager
    def together(self, rank: int, teams: Callable[[], Mapping[str, Sequence[int]]] | None) -> Iterator[None]:
        """Do something that only makes sense if every peer does it too.

        Args:
            rank: This one.
            teams: Gives those that take part, by what they share; None: this rank is alone, and its errors are its own.

        Raises:
            BrokenOptimizerError: If it failed, for a reason the peers have not agreed on, now or before.
        """
        self.refuse_if_broken()
        try:
            yield
        except (PlanMismatchError, GradientMismatchError, NonFiniteGradientError):
            raise  # every peer raises too, and nothing was changed
        except AgreedRefusalError as refusal:
            raise refusal.args[0] from None
        except BaseException as error:
            if teams is None:
                raise
            self.broken = ": ".join([type(error).__name__, *str(error).splitlines()[:1]])
            if not isinstance(error, Exception):  # Ctrl-C: who wants to leave does not wait for a roll call
                raise
            found = f"a step failed on rank {rank}, {self._who(error, teams())} ({self.broken})"
            raise BrokenOptimizerError(message("optimizer", found=found, do=_RELOAD)) from error

    def _who(self, error: Exception, teams: Mapping[str, Sequence[int]]) -> str:
        """Say whose fault it was: this rank's own, that of one that says so, or of one that does not answer."""
        roll_call = RollCall(teams)
        if not is_about_peers(error):  # the others still wait for this one, and will ask
            roll_call.answer(str(self.broken))
            return "by an error of its own"
        roll_call.answer()
        failed, silent = roll_call.hear()
        found = [f"rank {rank} failed by an error of its own, {words}" for rank, words in sorted(failed.items())]
        found += [f"no answer yet from rank {some(map(str, silent))}"] if silent else []
        return "; ".join(found) or "a peer is gone or failed"
