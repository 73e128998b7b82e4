"""Two steps in four products: exact, no noisier than step by step, and taken only where it is known."""

from collections import Counter
from functools import partial

import pytest
import torch

from meshmuon.polar import pairs as module
from meshmuon.polar.coefficients import resolve_schedule
from meshmuon.polar.gram import factor, folded_gram_newton_schulz, gram_newton_schulz
from meshmuon.polar.newton_schulz import newton_schulz
from meshmuon.polar.operations import TorchOperations, in_halves
from meshmuon.polar.pairs import Terms, find_pair

SCHEDULE = resolve_schedule("polar_express", 5)
# A pair of steps, and the largest r it is given: the square of what the steps before leave at most.
PAIRS = [(SCHEDULE[:2], 1.0), (SCHEDULE[3:], 3.4810)]


class Numbers:
    """The operations on single numbers: a matrix of 1×1 has no identity but 1."""

    def combined(self, left, right, added, wanted):
        return [
            terms.product * left * right
            + sum(factor * term for factor, term in zip(terms.added, added, strict=True))
            + terms.identity
            for terms in wanted
        ]


def step_by_step(r, steps):
    """The product of two steps' polynomials."""
    (a, b, c), (d, e, f) = steps
    z = a + b * r + c * r * r
    after = r * z * z
    return z * (d + e * after + f * after * after)


def evaluated(pair, r):
    return module.two_steps(r, pair, Numbers())


@pytest.mark.parametrize(("steps", "most"), PAIRS)
def test_four_products_have_the_values_of_two_steps(steps, most):
    r = torch.linspace(0.0, 1.05 * most, 5001, dtype=torch.float64)
    expected = step_by_step(r, steps)
    pair = find_pair(steps)
    assert ((evaluated(pair, r) - expected).abs() <= 2e-14 * expected.abs().max()).all()
    for name in pair._fields:  # every factor counts
        terms = getattr(pair, name)
        numbers = [terms.product, *terms.added, terms.identity]
        for i in range(len(numbers)):
            product, *added, identity = (x * (1 + 1e-6 * (i == j)) for j, x in enumerate(numbers))
            wrong = pair._replace(**{name: Terms(product, tuple(added), identity)})
            assert ((evaluated(wrong, r) - expected).abs() > 1e-9 * expected.abs().max()).any()


@pytest.mark.parametrize(("steps", "most"), PAIRS)
def test_it_is_the_same_polynomial_everywhere(steps, most):
    """Thirteen coefficients: equal at more than thirteen points, also far outside."""
    r = torch.linspace(-most, 2 * most, 40, dtype=torch.float64)
    expected = step_by_step(r, steps)
    assert ((evaluated(find_pair(steps), r) - expected).abs() <= 1e-12 * expected.abs().max()).all()


@pytest.mark.parametrize(("steps", "most"), PAIRS)
def test_what_is_stored_is_of_size_one(steps, most):
    sizes = []

    class Watching(Numbers):
        def combined(self, *arguments):
            found = super().combined(*arguments)
            sizes.extend(float(x.abs().max()) for x in found)
            return found

    module.two_steps(torch.linspace(0.0, most, 5001, dtype=torch.float64), find_pair(steps), Watching())
    assert all(size <= 1.0 + 1e-3 for size in sizes[:-1]), "in fp16 nothing overflows or is lost"


@pytest.mark.parametrize("most", [most for _, most in PAIRS])
def test_the_range_is_that_of_the_steps_before(most):
    x = torch.linspace(0.0, 1.0, 200001, dtype=torch.float64)
    reached = [1.0]
    for a, b, c in SCHEDULE:
        x = x * (a + b * x**2 + c * x**4)
        reached.append(float(x.max()) ** 2)
    assert most in (reached[0], pytest.approx(reached[3], rel=1e-4))


def test_only_what_is_known_is_done_at_once():
    assert find_pair(SCHEDULE[:2]) is not None
    assert find_pair(resolve_schedule("polar_express", 8)[:2]) == find_pair(SCHEDULE[:2])
    assert find_pair(SCHEDULE[2:]) == find_pair(SCHEDULE[3:])
    assert find_pair(SCHEDULE[2:], whole=True) == find_pair(SCHEDULE[3:])
    assert find_pair(SCHEDULE[3:], whole=True) is None, "its last product is the pair's own"
    assert find_pair(SCHEDULE[1:3]) is None
    assert find_pair(SCHEDULE[:1]) is None
    for name in ("keller", "you"):
        assert find_pair(resolve_schedule(name, 5)) is None


def test_triples_of_another_machine_are_known_as_well():
    nearly = tuple(tuple(x * (1 + 1e-13) for x in triple) for triple in SCHEDULE[:2])
    assert find_pair(nearly) == find_pair(SCHEDULE[:2])
    other = tuple(tuple(x * (1 + 1e-6) for x in triple) for triple in SCHEDULE[:2])
    assert find_pair(other) is None


class Paired(TorchOperations):
    """With the seventh operation; results are rounded to a dtype, and mirrored, as kernels do."""

    def __init__(self, rounded=None):
        self.rounded = rounded

    def gram(self, x):
        return self._stored(torch.bmm(x, x.mT))

    def quadratic(self, gram, triple):
        a, b, c = triple
        return self.combined(gram, gram, [gram], [Terms(c, (b,), a)])[0]

    def symmetric_product(self, left, right):
        return self._stored(torch.bmm(left, right.mT))

    def apply(self, factor, x, out=None):
        return self._rounded(torch.bmm(factor, x))

    def gram_in_halves(self, x):
        return in_halves(torch.bmm(x, x.mT), torch.float32)

    def combined(self, left, right, added, wanted):
        product, eye = torch.bmm(left, right.mT), torch.eye(left.shape[-1], dtype=left.dtype)
        return [
            self._stored(
                terms.product * product
                + sum(factor * term for factor, term in zip(terms.added, added, strict=True))
                + terms.identity * eye
            )
            for terms in wanted
        ]

    def _stored(self, x):
        return self._rounded(x.tril() + x.tril(-1).mT)

    def _rounded(self, x):
        return x if self.rounded is None else x.to(self.rounded).to(x.dtype)


def matrices(m=48, n=80, dtype=torch.float64):
    x = torch.randn(2, m, n, generator=torch.Generator().manual_seed(0), dtype=dtype)
    return x / x.norm(dim=(1, 2), keepdim=True)


@pytest.mark.parametrize("restarts", [(), (2,), (2, 3), (1,)])
@pytest.mark.parametrize("whole", [False, True])
def test_the_gram_form_in_pairs_is_the_standard_form(restarts, whole):
    x = matrices()
    expected = newton_schulz(x, schedule=SCHEDULE, operations=TorchOperations())
    iterate = partial(gram_newton_schulz, x, schedule=SCHEDULE, restarts=restarts, whole=whole)
    got = iterate(operations=Paired(), pairs=Paired())
    assert torch.linalg.vector_norm(got - expected) <= 1e-9 * torch.linalg.vector_norm(expected)
    assert not torch.equal(got, iterate(operations=Paired())), "it was the same as step by step"


def test_the_folded_form_in_pairs_is_the_standard_form():
    x = matrices(32, 128, torch.float32)
    expected = newton_schulz(x.double(), schedule=SCHEDULE, operations=TorchOperations())
    got = folded_gram_newton_schulz(x, schedule=SCHEDULE, restarts=(2,), operations=Paired(), pairs=Paired())
    assert torch.linalg.vector_norm(got - expected) <= 1e-3 * torch.linalg.vector_norm(expected)


class Counting(Paired):
    """Counts what it is asked for."""

    def __init__(self):
        super().__init__()
        self.asked = Counter()

    def combined(self, left, right, added, wanted):
        self.asked["combined"] += 1
        return super().combined(left, right, added, wanted)

    def symmetric_product(self, left, right):
        self.asked["symmetric_product"] += 1
        return super().symmetric_product(left, right)

    def apply(self, factor, x, out=None):
        self.asked["square" if x.shape[-1] == x.shape[-2] else "apply"] += 1
        return super().apply(factor, x, out)

    def products(self):
        return self.asked["combined"] + self.asked["symmetric_product"]


@pytest.mark.parametrize("segment", [SCHEDULE[:2], SCHEDULE[2:]])
def test_a_segment_takes_one_product_less(segment):
    gram = torch.bmm(matrices(), matrices().mT)
    plain, paired = Counting(), Counting()
    factor(gram, segment, plain)
    factor(gram, segment, paired, pairs=paired)
    assert plain.products() == 4 * len(segment) - 3
    assert paired.products() == 4 * len(segment) - 4


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize(("restarts", "last"), [((2,), 3), ((2, 3), 2)])
def test_whole_is_the_last_product_of_three_polynomials_and_no_other(pairs, restarts, last):
    found = {}
    for whole in (False, True):
        counting = Counting()
        how = {"whole": whole, "pairs": counting if pairs else None}
        gram_newton_schulz(matrices(), schedule=SCHEDULE, restarts=restarts, operations=counting, **how)
        found[whole] = counting.asked
    assert found[False]["square"] == 0
    assert found[True]["square"] == (1 if last > 2 else 0)
    assert found[True]["symmetric_product"] + found[True]["square"] == found[False]["symmetric_product"]


def test_both_segments_of_the_folded_form_are_paired():
    counting = Counting()
    x = matrices(32, 128, torch.float32)
    folded_gram_newton_schulz(x, schedule=SCHEDULE, restarts=(2,), operations=counting, pairs=counting)
    assert counting.asked["combined"] == 4 + 1 + 4, "a pair; a step, and a pair"


@pytest.mark.parametrize("kind", ["gaussian", "power law", "low rank"])
def test_in_fp16_it_is_as_near_to_the_polynomial_as_step_by_step(kind):
    torch.manual_seed(0)
    m, n = 192, 280
    left, right = (torch.linalg.qr(torch.randn(side, m, dtype=torch.float64)).Q for side in (m, n))
    sizes = torch.logspace(0, -3, m, dtype=torch.float64)
    if kind == "low rank":
        sizes[m // 8 :] = 0.0
    x = torch.randn(m, n, dtype=torch.float64) if kind == "gaussian" else (left * sizes) @ right.mT
    x = (x / x.norm()).half().double()[None]
    expected = newton_schulz(x, schedule=SCHEDULE, operations=TorchOperations())

    def off(pairs):
        rounding = Paired(torch.float16)
        got = gram_newton_schulz(
            x, schedule=SCHEDULE, restarts=(2,), operations=rounding, pairs=rounding if pairs else None
        )
        return float(torch.linalg.vector_norm(got - expected) / torch.linalg.vector_norm(expected))

    assert off(pairs=True) <= 1.15 * off(pairs=False) + 1e-3
