"""`meshmuon bench --tune` with the real kernel, in Triton's interpreter: what it may choose keeps every bit."""

import torch

from meshmuon.bench import tune
from meshmuon.kernels.configs import TileConfig
from meshmuon.kernels.symmetric_matmul import symmetric_matmul_with


def test_other_tiles_give_the_same_bits_and_can_be_chosen():
    table, other = (TileConfig(block, 16, 4, 2, group=2) for block in (16, 32))
    times = iter([1.0, 0.5])

    def time_of(work):
        work()
        return next(times)

    product = tune.Product(2, 40, 48)
    # Whole numbers, whose sums are exact: interpreted products are NumPy's, whose BLAS adds as it likes on some CPUs.
    operand = torch.randint(-99, 100, (2, 40, 48), generator=torch.Generator().manual_seed(0)).float()
    best = tune.best_tiles(product, iter([table, other]), make=lambda _: operand, time_of=time_of)
    assert best == tune.Best(other, 0.5, 1.0, 0)
    assert torch.equal(symmetric_matmul_with(best.config, operand), operand @ operand.mT)


def test_a_kernel_that_fails_or_differs_is_not_chosen():
    table, wrong, broken = (TileConfig(16, 16, 4, stages, group=2) for stages in (2, 3, 4))

    def compute(config, x, *, out):
        if config == broken:
            raise RuntimeError("out of resource")
        symmetric_matmul_with(config, x, out=out)
        return out.mul_(1.5) if config == wrong else out

    product = tune.Product(1, 16, 16)
    configs = iter([table, wrong, broken])
    best = tune.best_tiles(
        product, configs, make=lambda _: torch.ones(1, 16, 16), time_of=lambda _: 1.0, compute=compute
    )
    assert best == tune.Best(table, 1.0, 1.0, 2)
