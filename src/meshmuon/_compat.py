"""Every difference between torch versions and between kinds of devices. The only place that asks what is there."""

from __future__ import annotations

import atexit
import functools
import platform
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

_Result = TypeVar("_Result")


def has_fused_adamw(device: torch.device) -> bool:
    """Tell whether torch has a fused AdamW kernel for a device.

    Args:
        device: The device.

    Returns:
        True on CPU, CUDA and a few others.
    """
    return device.type in _get_fused_kernels_supported_devices()


def outside_transforms(tensor: Tensor) -> Tensor | None:
    """Give what `torch.func.grad` has wrapped, so that it can be kept when that is over.

    Args:
        tensor: Any.

    Returns:
        The plain tensor; None inside `torch.func.vmap`, where it is one of many, and `functionalize`.
    """
    of_torch: Any = torch._C._functorch
    while of_torch.is_gradtrackingtensor(tensor):
        tensor = of_torch.get_unwrapped(tensor)
    return None if of_torch.is_functorch_wrapped_tensor(tensor) else tensor


@functools.cache
def let_threads_finish_at_exit() -> None:
    """Have the process wait a moment before it ends, so that gloo's threads can let go of the last collective.

    For that they need the interpreter's lock. A thread that asks for it too late is ended by the interpreter, which
    aborts the process: exit code -6 in up to every other run (torch 2.11 and 2.13, Python 3.11), and torchrun calls a
    job failed that had finished. Destroying the groups would wait, but a script's optimizer or model still holds them.
    """
    atexit.register(time.sleep, 0.05)


def run_eagerly(method: Callable[..., _Result]) -> Callable[..., _Result]:
    """Keep torch.compile out of a method: what it would fuse has other bits, and nothing to gain.

    `torch.compile(opt.step)`, or of a whole training step, then works and changes nothing about the method itself.

    Args:
        method: The method.

    Returns:
        The same; the compiler is not imported for it.
    """
    disabled: list[Callable[..., _Result]] = []

    @functools.wraps(method)
    def run(*arguments: Any, **keywords: Any) -> _Result:
        dynamo = sys.modules.get("torch._dynamo")
        if dynamo is None or not hasattr(dynamo, "disable"):  # still being imported
            return method(*arguments, **keywords)
        if not disabled:
            disabled.append(dynamo.disable(method))
        return disabled[0](*arguments, **keywords)

    return run


class ToldToScalers:
    """A class attribute that is True for all but Lightning.

    torch.amp.GradScaler reads `_step_supports_amp_scaling`: it then hands over `found_inf` and `grad_scale` instead of
    deciding on the host, and copes with gradients that were unscaled before, to be clipped. Lightning takes it to mean
    that they cannot be, and refuses to clip in any mixed precision, with a scaler or without. Told otherwise, it has
    GradScaler unscale them first.
    """

    def __get__(self, instance: object, owner: type) -> bool:
        """Answer by who asks. Not a property: who sets the attribute on an optimizer has the last word."""
        asker = sys._getframe(1).f_globals.get("__name__", "")
        return not str(asker).startswith(("lightning.", "lightning_fabric.", "pytorch_lightning."))


# What may round a product, or its sum, to fewer bits than its dtype has, and what keeps it from doing so.
_BACKENDS: Any = torch.backends
_ROUNDING = (
    (_BACKENDS.cuda.matmul, "fp32_precision", "ieee"),  # TF32
    (_BACKENDS.mkldnn.matmul, "fp32_precision", "ieee"),  # bf16 or TF32, on CPUs that have it
    (_BACKENDS.cuda.matmul, "allow_fp16_accumulation", False),
)


@contextmanager
def without_autocast() -> Iterator[None]:
    """Keep autocast out: it would round products to 16 bits behind our back. Can be compiled."""
    with ExitStack() as stack:
        for device_type in ("cpu", "cuda", "mps", "xpu"):
            if torch.is_autocast_enabled(device_type):
                stack.enter_context(torch.autocast(device_type, enabled=False))
        yield


@contextmanager
def plain_arithmetic() -> Iterator[None]:
    """Keep out all that would round products behind our back: autocast, and settings such as TF32.

    They are meant for a model's products. Newton-Schulz amplifies what they take: in TF32 the Gram form ends up to 0.9
    from where it should (relative, on power laws), and bits would depend on settings.
    """
    with without_autocast(), ExitStack() as stack:
        for place, name, plain in _ROUNDING:
            if (theirs := getattr(place, name)) not in (plain, "none"):
                setattr(place, name, plain)
                stack.callback(_put_back, place, name, theirs)
        yield


def _put_back(place: Any, name: str, theirs: Any) -> None:
    """Put a setting back; one that was inherited from `torch.backends.fp32_precision` is inherited again."""
    if isinstance(theirs, str):
        setattr(place, name, "none")
    if getattr(place, name) != theirs:
        setattr(place, name, theirs)


@contextmanager
def groups_of_members(name: str) -> Iterator[None]:
    """Let process groups be made by their members alone, without the rest of the job.

    torch would name one by its ranks and by how many groups this process is in. Where members are in different numbers
    of groups (node leaders, embeddings shared by pipeline stages), each would wait for the others under another name:
    https://github.com/pytorch/pytorch/issues/190396. Its later versions count otherwise.

    In a job that is bound to devices (`init_process_group(device_id=)`) torch would split the job's communicator, which
    takes all of its ranks: members would wait for those that are not.

    Args:
        name: What groups are called that are made meanwhile, the same on every member.

    Yields:
        While they are.
    """
    replaced = {"_hash_ranks_to_str": lambda *_, **__: name, "_get_split_source": lambda *_, **__: None}
    with ExitStack() as stack:
        for function, ours in replaced.items():
            stack.callback(setattr, distributed_c10d, function, getattr(distributed_c10d, function))
            setattr(distributed_c10d, function, ours)
        yield


def job_timeout() -> timedelta | None:
    """Give how long collectives of the job may take, which groups do not take over by themselves; None: not known."""
    world: Any = dist.group.WORLD
    for device in world._device_types:
        options = getattr(world._get_backend(device), "options", None)  # a fake backend has none
        if (timeout := getattr(options, "_timeout", None)) is not None:
            found: timedelta = timeout
            return found
    return None


@functools.cache
def linear_by_onednn() -> Callable[[Tensor, Tensor], Tensor] | None:
    """Give the operation that torch's compiler has for linear layers on a CPU, x·wᵀ by oneDNN; None: there is none."""
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return None
    operation = torch.ops.mkldnn._linear_pointwise.default

    def linear(x: Tensor, w: Tensor) -> Tensor:
        product: Tensor = operation(x, w, None, "none", [], "")
        return product

    whole = torch.arange(128, dtype=torch.float32, device="cpu").view(16, 8)
    try:  # it is torch's own, and may mean something else in another version
        as_expected = torch.equal(linear(whole, whole), whole @ whole.mT)
    except (RuntimeError, TypeError):
        as_expected = False
    return linear if as_expected else None


@functools.cache
def has_wide_registers_of_amd() -> bool:
    """Tell whether this is a processor of AMD's with AVX-512, and torch uses it."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    described = platform.processor()  # on Windows
    if sys.platform == "linux":
        with suppress(OSError):  # not every sandbox shows it
            described = Path("/proc/cpuinfo").read_text(errors="ignore")[:4096]
    return "AuthenticAMD" in described


def reduce_scatter() -> Callable[..., Any]:
    """Give torch's reduce-scatter of one tensor, under the name that this version does not warn of."""
    found: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return found
