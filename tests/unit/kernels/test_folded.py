"""A folded restart through our kernels, from the choice of the form to the polar factor."""

from dataclasses import replace

import torch

from meshmuon.config import Orthogonalizer
from meshmuon.kernels import symmetric_matmul as module
from meshmuon.polar.coefficients import resolve_schedule
from meshmuon.polar.newton_schulz import newton_schulz
from meshmuon.polar.normalise import normalised
from meshmuon.polar.operations import TorchOperations
from meshmuon.polar.orthogonalize import orthogonalize_stack
from meshmuon.polar.recipe import choose_recipe
from meshmuon.polar.ways import Way

SCHEDULE = resolve_schedule("polar_express", 5)


def recipe(m, n, **choices):
    orthogonalizer = Orthogonalizer(kernels="triton", dtype="float16", **choices)
    device = torch.device("cpu")
    return choose_recipe(
        m, n, schedule=SCHEDULE, orthogonalizer=orthogonalizer, device=device, dtype=torch.float32, eps=1e-7
    )


def decaying(m, n):
    """Two matrices whose singular values fall to a thousandth: what a careless restart loses."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.linalg.qr(torch.randn(2, side, m, generator=generator)).Q for side in (m, n))
    sigma = torch.logspace(0, -3, m)
    return (left * sigma) @ right.mT


def off(result, x):
    ideal = newton_schulz(normalised(x.double(), eps=1e-7), schedule=SCHEDULE, operations=TorchOperations())
    return float((result.double() - ideal).norm() / ideal.norm())


def folded():
    """What long matrices of more rows get, which would take the interpreter long."""
    return replace(recipe(48, 208), way=Way("gram", (2,), folded=True))


def test_long_matrices_are_folded_and_others_are_not():
    assert recipe(768, 3072).way.folded
    assert recipe(768, 3072).describe() == "gram folded 2 float16 triton kernels"
    assert not recipe(752, 3008).way.folded, "it would be further from the polar factor than fp32 by more than 0.01"
    assert not recipe(768, 1536).way.folded
    assert not recipe(768, 768).way.folded
    assert not recipe(768, 3072, restarts=(2, 4)).way.folded
    assert not recipe(768, 3072, form="standard").way.folded


def test_the_result_follows_the_polynomial():
    x = decaying(48, 208)
    assert off(orthogonalize_stack(x, folded()), x) < 0.05  # 0.035; a restart on x: 0.045


def test_without_what_rounding_took_it_would_not():
    x = decaying(48, 208)
    bind = module._bind

    def forgetful(config, stacks):
        launch = bind(config, stacks)

        def and_forget(*numbers):
            launch(*numbers)
            if stacks[-1] is not None:
                stacks[-1].zero_()

        return and_forget

    module._bind = forgetful
    try:
        assert off(orthogonalize_stack(x, folded()), x) > 0.1
    finally:
        module._bind = bind


def test_a_matrix_has_the_same_bits_alone_and_in_company():
    x = decaying(48, 208)
    together = orthogonalize_stack(x, folded())
    for i in range(2):
        assert torch.equal(orthogonalize_stack(x[i : i + 1], folded())[0], together[i])
