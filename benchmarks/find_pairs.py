"""How the factors in `polar/pairs.py` were found: two steps of the iteration in four products.

python -m benchmarks.find_pairs --first 0 --most 1.02 [--coefficients polar_express] [--steps 5] [--seconds 120]

`--first` is the first of the two steps, `--most` the largest r they are given (with a little room). Random starts and
Levenberg-Marquardt find numbers with which four products have the values of two steps. Most starts end elsewhere; for
some coefficients none was found (You's). Of the exact ones, the least noisy is printed: see [Note: pairs].
"""

from __future__ import annotations

import argparse
import math
import time

import torch
from torch import Tensor

from meshmuon.polar.coefficients import Schedule, resolve_schedule

_POINTS = 48
_EXACT = 1e-10
_AT_ONCE = 512
_SIZES = (3, 4, 4, 4, 3)  # factors of s, u, v, w and q


def two_steps(r: Tensor, steps: Schedule) -> Tensor:
    """What x is multiplied with, step by step."""
    (a, b, c), (d, e, f) = steps
    z = a + b * r + c * r * r
    after = r * z * z
    return z * (d + e * after + f * after * after)


def values(numbers: Tensor, r: Tensor) -> tuple[Tensor, ...]:
    """s, u, v, w and q."""
    s_, u_, v_, w_, q_ = (part.unbind() for part in numbers.split(_SIZES))
    s = s_[0] * r * r + s_[1] * r + s_[2]
    u, v = (k[0] * s * s + k[1] * r + k[2] * s + k[3] for k in (u_, v_))
    w = w_[0] * u * u + w_[1] * s + w_[2] * v + w_[3]
    return s, u, v, w, q_[0] * v * w + q_[1] * u + q_[2]


def solve(numbers: Tensor, r: Tensor, wanted: Tensor, scale: Tensor, *, steps: int = 800) -> Tensor:
    """Levenberg-Marquardt from many starts at once; gives those that end at an exact solution."""

    def off(one: Tensor) -> Tensor:
        return (values(one, r)[-1] - wanted) / scale

    offs, slopes_of = torch.func.vmap(off), torch.func.vmap(torch.func.jacfwd(off))
    damping = torch.full((len(numbers), 1), 1e-2)
    error = offs(numbers)
    for _ in range(steps):
        slopes = slopes_of(numbers)
        square = slopes.mT @ slopes
        damped = square + torch.diag_embed(damping * square.diagonal(dim1=1, dim2=2) + 1e-14)
        step, _ = torch.linalg.solve_ex(damped, slopes.mT @ error[:, :, None])
        candidate = numbers - step[:, :, 0]
        after = offs(candidate)
        better = after.norm(dim=1, keepdim=True) < error.norm(dim=1, keepdim=True)  # not where it is NaN
        numbers, error = torch.where(better, candidate, numbers), torch.where(better, after, error)
        damping = torch.where(better, damping / 5, damping * 4).clamp(1e-15, 1e15)
    return numbers[error.abs().amax(dim=1) < _EXACT]


def noise(numbers: Tensor, r: Tensor) -> float:
    """By how much rounding s, u, v, w and q can move q, in units of the roundoff: slopes times sizes."""
    s, u, v, w, q = values(numbers, r)
    u_, v_, w_, q_ = (part.unbind() for part in numbers.split(_SIZES)[1:])
    by_w = q_[0] * v
    by_v = q_[0] * w + by_w * w_[2]
    by_u = q_[1] + by_w * 2 * w_[0] * u
    by_s = by_w * w_[1] + by_u * (2 * u_[0] * s + u_[2]) + by_v * (2 * v_[0] * s + v_[2])
    parts = ((by_s, s), (by_u, u), (by_v, v), (by_w, w), (torch.ones_like(q), q))
    return sum(float(slope.abs().max() * size.abs().max()) for slope, size in parts)


def shifted(numbers: Tensor, by: float) -> Tensor:
    """The same polynomial with another constant in s."""
    result = numbers.clone()
    result[2] += by
    for at in (3, 7):  # u and v, of s - by
        square, _, once, _ = numbers[at : at + 4]
        result[at + 2] -= 2 * square * by
        result[at + 3] += square * by * by - once * by
    result[14] -= numbers[12] * by
    return result


def scaled(numbers: Tensor, r: Tensor) -> Tensor:
    """The same polynomial with s, u, v and w at most 1 in size."""
    s, u, v, w = (float(x.abs().max()) * math.copysign(1.0, float(x[0])) for x in values(numbers, r)[:-1])
    factors = [1 / s] * 3
    for out in (u, v):
        factors += [s * s / out, 1 / out, s / out, 1 / out]
    factors += [u * u / w, s / w, v / w, 1 / w, v * w, u, 1.0]
    return numbers * torch.tensor(factors, dtype=numbers.dtype)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--coefficients", default="polar_express")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--first", type=int, required=True)
    parser.add_argument("--most", type=float, required=True)
    parser.add_argument("--seconds", type=float, default=120.0)
    given = parser.parse_args()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    pair = resolve_schedule(given.coefficients, given.steps)[given.first : given.first + 2]
    r = given.most * 0.5 * (1 - torch.cos(math.pi * (torch.arange(_POINTS) + 0.5) / _POINTS))
    wanted = two_steps(r, pair)
    scale = wanted.abs().clamp_min(0.02 * float(wanted.abs().max()))
    fine = torch.linspace(0.0, given.most, 2001)
    best, least, starts, found, until = None, math.inf, 0, 0, time.monotonic() + given.seconds
    while time.monotonic() < until:
        starts += _AT_ONCE
        sizes = torch.tensor([0.5, 1.0, 2.0])[torch.arange(_AT_ONCE) % 3]
        for numbers in solve(torch.randn(_AT_ONCE, sum(_SIZES)) * sizes[:, None], r, wanted, scale):
            found += 1
            size = float(values(numbers, fine)[0].abs().max())
            for by in torch.linspace(-1.5 * size, 1.5 * size, 121).tolist():
                candidate = shifted(numbers, by)
                if noise(candidate, fine) < least:
                    best, least = candidate, noise(candidate, fine)
    print(f"{starts} starts, {found} exact solutions")
    if best is not None:
        best = scaled(best, fine)
        error = (values(best, fine)[-1] - two_steps(fine, pair)).abs().max() / two_steps(fine, pair).abs().max()
        print(f"noise {least:.1f} units, error {float(error):.1e}")
        for name, part in zip("suvwq", best.split(_SIZES), strict=True):
            print(name, part.tolist())


if __name__ == "__main__":
    main()
