"""The answer of the planner: numbers, and the table they make."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from meshmuon.errors import message, one_of
from meshmuon.plan.bucket import Plan
from meshmuon.plan.calibration import Work
from meshmuon.plan.hardware import Hardware
from meshmuon.plan.words import human

RouteWord = Literal["local", "owner", "split", "mixed", "gram", "gather"]

EXPLAINED: dict[RouteWord, str] = {
    "local": "every rank computes all it holds, whole; nothing travels",
    "owner": "pieces travel to one owner in each replica and back",
    "split": "as owner, and replicas share the matrices",
    "mixed": "each matrix on the route that the optimizer expects to pay",
    "gram": "m×m Gram matrices are reduced to owners, factors come back",
    "gather": "for comparison: whole matrices are gathered and computed on every rank",
}


@dataclass(frozen=True, slots=True)
class Spread:
    """A number that may differ between ranks: `each[rank]`."""

    each: tuple[float, ...]

    @property
    def max(self) -> float:
        """The largest."""
        return max(self.each)

    @property
    def mean(self) -> float:
        """The mean over all ranks."""
        return sum(self.each) / len(self.each)

    @property
    def balance(self) -> float:
        """The largest divided by the mean; 1 is perfect."""
        return self.max / self.mean if self.mean else 1.0


@dataclass(frozen=True, slots=True)
class RouteForecast:
    """What a step costs on one route. Times are in seconds, of the slowest rank.

    Attributes:
        route: The route's word.
        device: Products and exchanges, as far as they overlap.
        compute: Products and what belongs to them alone.
        exchange: The wire alone.
        elementwise: Momentum, update and AdamW.
        host: What Python takes to launch it all.
        exchanges: Collectives of a rank in a step, besides the small one that agrees on the step.
        work: What the slowest device does: with a measured time it is a sample to fit constants to.
        flops: Operations of each rank.
        loads: The same by the time they take: as operations in 16 bits.
        bytes_sent: Bytes that each rank sends.
        workspace: Bytes a step takes beyond parameters, gradients and state.
    """

    route: RouteWord
    device: float
    compute: float
    exchange: float
    elementwise: float
    host: float
    exchanges: int
    work: Work
    flops: Spread
    loads: Spread
    bytes_sent: Spread
    workspace: int

    @property
    def ms(self) -> float:
        """The predicted step: the device's time, or the host's where launching takes longer."""
        return max(self.device_ms, 1e3 * self.host)

    @property
    def device_ms(self) -> float:
        """The device's time alone: what is left once launching is made cheaper."""
        return 1e3 * (self.device + self.elementwise)

    @property
    def serial_ms(self) -> float:
        """The same if nothing overlaps."""
        return 1e3 * max(self.compute + self.exchange + self.elementwise, self.host)


@dataclass(frozen=True, slots=True)
class Forecast:
    """What an optimizer step of a job costs.

    Attributes:
        model: Its name.
        layout: Axes, sizes and rules, in words.
        ranks: Number of ranks.
        hardware: On what.
        parameters: How many numbers are trained.
        matrices: How many matrices take Muon.
        parameter_bytes: Of the parameters, on the rank that holds most; gradients take as much.
        state_bytes: Of momentum and AdamW's moments, on that rank.
        recipes: How polar factors are computed.
        chosen: The route `Muon` takes.
        routes: Every route there is for this layout, the chosen one first.
        plan: The plan that `Muon` makes on rank 0: each parameter's algorithm, reason and layout.
    """

    model: str
    layout: str
    ranks: int
    hardware: Hardware
    parameters: int
    matrices: int
    parameter_bytes: int
    state_bytes: int
    recipes: tuple[str, ...]
    chosen: RouteWord
    routes: tuple[RouteForecast, ...]
    plan: Plan

    def route(self, word: str | None = None) -> RouteForecast:
        """Look up a route.

        Args:
            word: Its word; None: the chosen one.

        Returns:
            Its forecast.

        Raises:
            ValueError: If this layout has no such route.
        """
        known = [route.route for route in self.routes]
        wanted = self.chosen if word is None else word
        if wanted not in known:
            raise ValueError(message("route", found=repr(word), do=f"This layout has {one_of(known)}"))
        return self.routes[[str(name) for name in known].index(wanted)]

    @property
    def fastest(self) -> RouteForecast:
        """The route with the shortest predicted step."""
        return min(self.routes, key=lambda route: route.ms)

    @property
    def bytes_needed(self) -> int:
        """Parameters, gradients, state and workspace, on the rank that needs most; activations come on top."""
        return 2 * self.parameter_bytes + self.state_bytes + self.route().workspace

    @property
    def fits(self) -> bool:
        """Whether that fits the memory of one GPU."""
        return self.bytes_needed <= self.hardware.memory

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def describe(self) -> str:
        """Give the table a user can paste into an issue."""
        return str(self)

    def _lines(self) -> Iterable[str]:
        machine = self.hardware
        yield f"{self.model}: {human(self.parameters)} parameters, {self.matrices} matrices, on {self.ranks} GPUs"
        yield f"{self.layout}; {machine.name} with {machine.inside.name} and {machine.across.name}"
        yield f"polar factors: {', '.join(self.recipes)}"
        yield (
            f"memory of the fullest rank: parameters {human(self.parameter_bytes, unit='B')}, gradients as much, "
            f"state {human(self.state_bytes, unit='B')}, workspace {human(self.route().workspace, unit='B')}"
            + ("" if self.fits else f": more than {human(machine.memory, unit='B')}")
        )
        yield ""
        yield (
            f"{'route':8s}{'ms':>9s}{'serial':>9s}{'compute':>9s}{'wire':>9s}{'element':>9s}{'host':>9s}"
            f"{'FLOP/rank':>13s}{'balance':>9s}{'sent/rank':>11s}"
        )
        for r in self.routes:
            times = (r.ms, r.serial_ms, *(1e3 * s for s in (r.compute, r.exchange, r.elementwise, r.host)))
            yield (
                f"{r.route:8s}" + "".join(f"{ms:9.1f}" for ms in times) + f"{human(r.flops.max, unit='FLOP'):>13s}"
                f"{r.loads.balance:9.2f}{human(r.bytes_sent.max, unit='B'):>11s}"
            )
        yield ""
        yield from (f"{r.route}: {EXPLAINED[r.route]}" for r in self.routes)
        fastest = self.fastest.route
        yield f"Muon takes {self.chosen}" + ("" if fastest == self.chosen else f"; by this model {fastest} is faster")
