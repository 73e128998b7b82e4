"""Whether this installation is sound: each check says what it found, and what to do if that is wrong."""

from __future__ import annotations

import os
import platform
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from meshmuon import __version__
from meshmuon.config import Orthogonalizer
from meshmuon.kernels import clusters
from meshmuon.kernels.availability import triton_version
from meshmuon.kernels.configs import VARIABLE, architecture_of, tuned_tiles
from meshmuon.kernels.dispatch import Dispatch, choose_kernels
from meshmuon.kernels.self_check import CHECKS as KERNELS
from meshmuon.kernels.self_check import check_kernel
from meshmuon.polar.coefficients import resolve_schedule
from meshmuon.polar.orthogonalize import orthogonalize
from meshmuon.polar.recipe import choose_recipe, compute_dtype
from meshmuon.testing.processor import bf16_in_fp32
from meshmuon.testing.rank_checks import begin, exactness, hand_over, resume
from meshmuon.testing.reference import plain_newton_schulz
from meshmuon.testing.site import RANKS, Site

LEAST_TORCH = (2, 11)
SETS = ("polar_express", "keller", "you")
# Short sides on both sides of every boundary of the dispatch.
SHORT_SIDES = (128, 768, 4096)
_REPORT = "Report this with the output of `meshmuon doctor -v`"


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found.

    Attributes:
        name: What was checked.
        ok: Whether it is as it should be.
        detail: What was found.
        remedy: What to do if it is not.
        traceback: Of a check that raised.
    """

    name: str
    ok: bool
    detail: str
    remedy: str = ""
    traceback: str = ""


def devices() -> list[torch.device]:
    """List where `Muon` may run here.

    Returns:
        The CPU, and the first GPU if there is one: all of them are alike as a rule.
    """
    return [torch.device("cpu"), *([torch.device("cuda", 0)] if torch.cuda.is_available() else [])]


def versions(site: Site) -> Iterator[Finding]:
    """Look at what is installed.

    Args:
        site: Where.

    Yields:
        One finding.
    """
    found = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    detail = (
        f"meshmuon {__version__}, torch {torch.__version__}, python {platform.python_version()}, "
        f"triton {triton_version()}, {platform.system()} {platform.machine()}"
    )
    least = ".".join(map(str, LEAST_TORCH))
    yield Finding("versions", found >= LEAST_TORCH, detail, f"pip install -U 'torch>={least}'")


def hardware(site: Site) -> Iterator[Finding]:
    """Look at the devices.

    Args:
        site: Where.

    Yields:
        One finding for each kind.
    """
    yield Finding("CPU", True, f"{torch.get_num_threads()} threads")
    if not torch.cuda.is_available():
        yield Finding("GPU", True, "none that torch can use; everything runs on the CPU")
        return
    memory = torch.cuda.get_device_properties(0).total_memory
    name = torch.cuda.get_device_name(0)
    kind = architecture_of(torch.device("cuda", 0))
    yield Finding("GPU", True, f"{torch.cuda.device_count()} x {name}, {memory / 1e9:.0f} GB, {kind}")


def kernels(site: Site) -> Iterator[Finding]:
    """Say which kernels each shape gets and why, and run those of ours against torch.

    Args:
        site: Where.

    Yields:
        One finding for each choice, one for each kernel of ours that is used.
    """
    for device in devices():
        choices: dict[Dispatch, list[int]] = {}
        dtypes = {m: compute_dtype("auto", m=m, device=device, dtype=torch.float32) for m in SHORT_SIDES}
        for m, dtype in dtypes.items():
            one_launch = clusters.is_available(device, dtype)
            choice = choose_kernels("auto", m=m, dtype=dtype, device=device, one_launch=one_launch)
            choices.setdefault(choice, []).append(m)
        dtype = dtypes[max(SHORT_SIDES)]  # of the products that most kernels take part in
        for choice, sides in choices.items():
            work = "element-wise in Triton" if choice.fused else "element-wise by torch"
            detail = f"short side {', '.join(map(str, sides))}: products by {choice.library}, {work}: {choice.reason}"
            yield Finding(f"kernels on {device.type}", True, detail)
        if os.environ.get(VARIABLE):
            yield Finding(VARIABLE, True, f"tiles of our own for {len(tuned_tiles())} shapes")
        if any(choice.products == "triton" for choice in choices):
            yield Finding(f"clusters on {device.type}", True, clusters.describe(device, dtype))
        if any(choice.fused for choice in choices):
            yield from (_one_kernel(name, device, dtype) for name in KERNELS)


def _one_kernel(name: str, device: torch.device, dtype: torch.dtype) -> Finding:
    remedy = f'Train with Muon(..., orthogonalizer=Orthogonalizer(kernels="torch")). {_REPORT}'
    try:
        share = check_kernel(name, device, dtype)
    except RuntimeError as error:
        return Finding(f"kernel {name}", False, str(error), remedy)
    return Finding(f"kernel {name}", True, f"equals torch; {share:.0%} of what rounding explains")


def coefficients(site: Site) -> Iterator[Finding]:
    """Orthogonalize with each set, and look at the singular values and the distance to the same steps in fp64.

    Args:
        site: Where.

    Yields:
        One finding for each set and device.
    """
    for device in devices():
        for name in SETS:
            yield _one_set(name, device)


def _one_set(name: str, device: torch.device) -> Finding:
    m, n = (128, 512) if device.type == "cpu" else (512, 2048)  # large enough to be given our products, on a GPU
    x = torch.randn(m, n, generator=torch.Generator().manual_seed(0)).to(device)
    schedule = resolve_schedule(name, 5)
    direction = orthogonalize(x, coefficients=name, steps=5)
    u, _, vh = torch.linalg.svd(x.double().cpu(), full_matrices=False)
    # Signed: a set that turns a direction around leaves the singular values as they should be.
    lifted = (u.mT @ direction.double().cpu() @ vh.mT).diagonal()
    recipe = choose_recipe(
        m,
        n,
        schedule=schedule,
        orthogonalizer=Orthogonalizer(),
        device=device,
        dtype=x.dtype,
        eps=1e-7,
    )
    exact = plain_newton_schulz(x.cpu(), schedule)
    distance = float((direction.double().cpu() - exact).norm() / exact.norm())
    low, high = float(lifted.min()), float(lifted.max())
    allowed = 1e-4 if recipe.dtype == torch.float32 else 2e-2
    ok = low >= 0.5 and high <= 1.35 and distance <= allowed  # NaN fails too
    detail = f"{device.type}, {recipe.describe()}: singular values {low:.2f}..{high:.2f}, {distance:.0e} from fp64"
    remedy = f"Do not train with it: install torch and meshmuon anew, or use another ns_coefficients. {_REPORT}"
    return Finding(f"coefficients {name}", ok, detail, remedy)


def half_precision(site: Site) -> Iterator[Finding]:
    """Measure what bf16 costs on this CPU: on most, the reason why `Muon` computes in fp32 there.

    Args:
        site: Where.

    Yields:
        One finding, a note.
    """
    ratio = bf16_in_fp32()
    if ratio > 1:
        words = f'products {ratio:.1f}x slower than fp32 here; dtype="auto" computes in fp32 on a CPU'
    else:
        faster = f"products {1 / ratio:.1f}x faster than fp32 here"
        words = f'{faster}: Orthogonalizer(dtype="bfloat16") takes that; "auto" is fp32, which rounds finer'
    yield Finding("bf16 on CPU", True, words)


def layouts(site: Site) -> Iterator[Finding]:
    """Train a small model on two processes, and replay each step on one.

    Args:
        site: Where.

    Yields:
        One finding for each kind of sharing.
    """
    remedy = f"Do not train on several ranks: results would depend on the layout. {_REPORT}"
    for kind, title in (("fsdp", "FSDP2"), ("tp", "tensor parallel")):
        found = site.pool.run(exactness, kind, site.device)[0]
        name = f"{title} on {RANKS} processes"
        if found.differences:
            few = ", ".join(found.differences[:3])
            detail = f"{len(found.differences)} of {found.compared} tensors differ from one process, first {few}"
            yield Finding(name, False, detail, remedy)
        elif found.unmoved or not found.travelling:
            detail = f"nothing to compare: {found.travelling} shared matrices, {len(found.unmoved)} unmoved parameters"
            yield Finding(name, False, detail, remedy)
        else:
            detail = f"{site.backend}: {found.compared} tensors equal one process's bit for bit after 5 steps"
            yield Finding(name, True, detail)


def checkpoints(site: Site) -> Iterator[Finding]:
    """Save on two ranks, load and save on one, load on two, and go on: as if nothing had happened.

    Args:
        site: Where.

    Yields:
        One finding.
    """
    name = f"checkpoint {RANKS} -> 1 -> {RANKS}"
    with tempfile.TemporaryDirectory(prefix="meshmuon-doctor-") as folder:
        first, second = Path(folder) / "from-ranks", Path(folder) / "from-one"
        expected = site.pool.run(begin, first, site.device)[0]
        alone = hand_over(first, second, site.device)
        resumed = site.pool.run(resume, second, site.device)[0]
    wrong = {where: _differing(expected, got) for where, got in (("1 process", alone), ("2 ranks", resumed))}
    if any(wrong.values()):
        where, names = next((place, found) for place, found in wrong.items() if found)
        detail = f"resumed on {where}, {len(names)} of {len(expected)} tensors differ, first {', '.join(names[:3])}"
        remedy = f"Do not rely on resuming from torch.distributed.checkpoint with these versions. {_REPORT}"
        yield Finding(name, False, detail, remedy)
        return
    yield Finding(name, True, f"{len(expected)} tensors bit for bit, 5 steps after resuming on 1 and on {RANKS}")


def _differing(expected: dict[str, Tensor], got: dict[str, Tensor]) -> list[str]:
    if expected.keys() != got.keys():
        return sorted(expected.keys() ^ got.keys())
    return [name for name, value in expected.items() if not torch.equal(value, got[name])]


Check = Callable[[Site], Iterator[Finding]]
CHECKS: dict[str, Check] = {
    "versions": versions,
    "devices": hardware,
    "kernels": kernels,
    "coefficients": coefficients,
    "bf16": half_precision,
    "layouts": layouts,
    "checkpoints": checkpoints,
}


def examine(site: Site, name: str) -> Iterator[Finding]:
    """Run a check; one that raises has failed.

    Args:
        site: Where.
        name: Of the check, in `CHECKS`.

    Yields:
        Its findings.
    """
    try:
        yield from CHECKS[name](site)
    except Exception as error:
        lines = str(error).strip().splitlines() or ["no message"]
        detail = f"raised {type(error).__name__}: {lines[-1]}"  # of a rank's traceback the last line says it
        yield Finding(name, False, detail, f"See the traceback with -v. {_REPORT}", traceback.format_exc())
