"""The same iterations, written down as a program of products that a Hopper GPU runs in one launch (clusters.cu).

The forms are written over six operations (operations.py), and one more for two steps at once (pairs.py). Here they
compute nothing: they note which product reads and writes what. So a program is what `newton_schulz` or
`gram_newton_schulz` does, line by line, with memory for intermediate results that is used again as soon as nobody needs
it any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, Literal
from weakref import WeakKeyDictionary

from torch import Tensor

from meshmuon.kernels import clusters
from meshmuon.kernels.agenda import Product, Second
from meshmuon.kernels.clusters import ClusterLaunch
from meshmuon.kernels.landing import Landing
from meshmuon.kernels.symmetric_launches import REST_SCALE
from meshmuon.kernels.tables import whereabouts
from meshmuon.polar.coefficients import Schedule, Triple
from meshmuon.polar.operations import Given, taken
from meshmuon.polar.pairs import Terms
from meshmuon.polar.ways import Way, evaluate

_MOST_BOUND = 256
Side = Literal["m", "n"]  # columns of a stack: m×m or m×n


@dataclass(frozen=True, eq=False)
class Program:
    """Products, and the stacks they work on; the first stack is x.

    Attributes:
        products: In order; their numbers are those of stacks.
        columns: Of each stack: its matrices are m×m or m×n.
        result: The stack in which the result is in the end.
    """

    products: tuple[Product, ...]
    columns: tuple[Side, ...]
    result: int

    @cached_property
    def result_apart(self) -> bool:
        """Whether the result's stack is there for the last product alone: a result that lands needs none then."""
        *others, last = self.products
        used = {stack for product in others for stack in (*_read(product), *product.results)}
        return self.result not in {0, *used, *_read(last)}

    def held(self, m: int, n: int) -> int:
        """Count the numbers that all stacks hold of one matrix.

        Args:
            m: Short side.
            n: Long side.

        Returns:
            How many.
        """
        return sum(m * (m if side == "m" else n) for side in self.columns)


@cache
def write_program(schedule: Schedule, way: Way) -> Program | None:
    """Write down the products of an iteration.

    Args:
        schedule: One triple per step.
        way: How it is evaluated; not by an SVD.

    Returns:
        The program, or None if it is too long for one launch.
    """
    writer = _Writer()
    operations: Any = writer  # its values are numbers, where others have tensors
    x: Any = writer.x
    result: Any = evaluate(x, way, schedule=schedule, operations=operations, pairs=operations)
    program = writer.finish(result)
    fits = len(program.products) <= clusters.MOST_PRODUCTS and len(program.columns) <= clusters.MOST_STACKS
    return program if fits else None


class _Writer:
    """The operations on numbers that stand for values; each value is written once."""

    def __init__(self) -> None:
        self._columns: list[Side] = ["n"]  # of the values
        self._products: list[Product] = []
        self._symmetric: set[int] = set()  # only their lower triangles are read and written
        self.x = 0

    def gram(self, x: int) -> int:
        return self._note(x, x, mirrored=True)

    def quadratic(self, gram: int, triple: Triple) -> int:
        a, b, c = triple
        return self._note(gram, gram, c=gram, mirrored=True, alpha=c, beta=b, gamma=a)

    def symmetric_product(self, left: int, right: int) -> int:
        return self._note(left, right, mirrored=True)

    def apply(self, factor: int, x: int, out: None = None) -> int:
        return self._note(factor, x)

    def gram_in_halves(self, x: int) -> tuple[int, int]:
        return self._note(x, x, mirrored=True), self._second({"alpha": REST_SCALE}, in_halves=True)

    def congruence(self, factor: int, halves: tuple[int, int]) -> int:
        high, rest = halves
        product = self._note(factor, high, c=self._note(factor, rest), beta=1.0 / REST_SCALE)
        return self._note(product, factor, mirrored=True)

    def combined(self, left: int, right: int, added: Sequence[int], wanted: Sequence[Terms]) -> list[int]:
        c, e = (*added, None)[:2]
        first = self._note(left, right, c=c, e=e, mirrored=True, **_factors(wanted[0]))
        return [first] if len(wanted) == 1 else [first, self._second(_factors(wanted[1]))]

    def _second(self, factors: dict[str, float], *, in_halves: bool = False) -> int:
        """One more result of the product that was noted last."""
        d = self._new("m")
        self._products[-1] = replace(self._products[-1], second=Second(d, **factors), in_halves=in_halves)
        self._symmetric.add(d)
        return d

    def _new(self, columns: Side) -> int:
        self._columns.append(columns)
        return len(self._columns) - 1

    def _note(self, a: int, b: int, *, c: int | None = None, mirrored: bool = False, **more: Any) -> int:
        d = self._new("m" if mirrored else self._columns[b])
        half_a, half_b = (value in self._symmetric for value in (a, b))
        product = Product(a, b, c, d, mirrored, half_a=half_a, half_b=half_b, half_d=mirrored, **more)
        self._products.append(product)
        if mirrored:
            self._symmetric.add(d)
        return d

    def finish(self, result: int) -> Program:
        """Give every value a stack: that of one added to it that nobody else needs, or one that is free."""
        last_read = {value: step for step, product in enumerate(self._products) for value in _read(product)}
        columns: list[Side] = []
        stacks: dict[int, int] = {}
        free: dict[Side, list[int]] = {"m": [], "n": []}

        def place(value: int) -> None:
            side = self._columns[value]
            if not free[side]:
                columns.append(side)
                free[side].append(len(columns) - 1)
            stacks[value] = free[side].pop()

        place(self.x)
        products = []
        for step, product in enumerate(self._products):
            done = {value for value in _read(product) if last_read[value] == step}
            for value in product.results:
                over = next((c for c in product.added if c in done and c not in product.operands), None)
                if over is not None:
                    stacks[value] = stacks[over]  # of its shape; a tile is added to before it is written
                    done.remove(over)
                else:
                    place(value)  # before those it reads are let go of
            products.append(_renamed(product, stacks))
            for value in sorted(done):
                free[self._columns[value]].append(stacks[value])
        return Program(tuple(products), tuple(columns), stacks[result])


def _factors(terms: Terms) -> dict[str, float]:
    beta, delta = (*terms.added, 0.0)[:2]
    return {"alpha": terms.product, "beta": beta, "delta": delta, "gamma": terms.identity}


def _read(product: Product) -> tuple[int, ...]:
    return (*product.operands, *product.added)


def _renamed(product: Product, names: dict[int, int]) -> Product:
    c, e = (None if value is None else names[value] for value in (product.c, product.e))
    second = None if product.second is None else product.second._replace(d=names[product.second.d])
    return replace(product, a=names[product.a], b=names[product.b], c=c, e=e, d=names[product.d], second=second)


class _Known:
    """What was asked or prepared before for a program: an optimizer does the same again in every step."""

    def __init__(self) -> None:
        self.runnable: set[tuple[Any, ...]] = set()
        self.launches: dict[tuple[Any, ...], ClusterLaunch] = {}


_known: WeakKeyDictionary[Program, _Known] = WeakKeyDictionary()


def can_run(program: Program, x: Tensor) -> bool:
    """Say whether a program can run on a stack of matrices now.

    Args:
        program: The program.
        x: (batch, m, n).

    Returns:
        Whether. Not while a CUDA graph is captured that would be the first to ask.
    """
    if _kind(x) in _known.setdefault(program, _Known()).runnable:
        return True
    results = clusters.results_of(program.products, _shapes(program, x))
    return clusters.can_run(x.device, x.dtype, batch=len(x), results=results)


def run_program(program: Program, x: Given, landing: Landing | None = None) -> Tensor:
    """Run a program.

    Args:
        program: What `can_run`.
        x: (batch, m, n), contiguous, in 16 bits, sides multiples of 16; given away in a list: it is overwritten.
        landing: What takes the result as a step, instead of having it written; or None.

    Returns:
        The result; if it has landed, memory of its shape with anything in it.
    """
    x = taken(x)
    unused = program.result if landing is not None and program.result_apart else None  # any memory of its shape will do
    shapes = enumerate(_shapes(program, x))
    stacks = [x if number in (0, unused) else x.new_empty(shape) for number, shape in shapes]
    written = clusters.counters(x)  # kept until the launch: it is known by its address
    if landing is None:
        _bind(program, stacks, written)()
    else:
        _bind(program, stacks, written, lands=landing.flag).onto(landing)
    _known[program].runnable.add(_kind(x))
    return stacks[program.result]


def _kind(x: Tensor) -> tuple[Any, ...]:
    return x.shape, x.dtype, x.device


def _shapes(program: Program, x: Tensor) -> list[tuple[int, ...]]:
    batch, m, n = x.shape
    return [(batch, m, m if side == "m" else n) for side in program.columns]


def _bind(program: Program, stacks: list[Tensor], written: Tensor, *, lands: int = 0) -> ClusterLaunch:
    """The launch on this memory."""
    key = (stacks[0].shape, *map(whereabouts, stacks), written.data_ptr(), lands)
    known = _known.setdefault(program, _Known()).launches
    if key not in known:
        if len(known) >= _MOST_BOUND:
            known.clear()
        known[key] = ClusterLaunch(program.products, stacks, written, lands)
    return known[key]
