"""Compile our Triton kernels for a GPU that is not here: nothing is run. For a process of its own.

python -m tests.compile_for cuda:80:32 ampere

Writes a line of JSON for each launch: the kernel's name, the shared memory it takes, what it was compiled to, the hash
of that, and whether a product rounds to TF32.
"""

import importlib
import json
import sys
from contextlib import ExitStack, nullcontext
from types import SimpleNamespace
from unittest import mock

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from meshmuon.kernels import configs, elementwise, launching, peaks, problems, symmetric_launches
from meshmuon.kernels.symmetric_matmul import symmetric_matmul_with
from meshmuon.kernels.whole_matmul import WHOLE

whole = importlib.import_module("meshmuon.kernels.whole_matmul")  # not the function of that name
CPU = torch.device("cpu")
COEFFICIENTS = ((1.0, 1.0, 0.0), (0.5, -2.0, 1.0), (1e-3, 16.0, 1e3))
SINGLE = (WHOLE, "peaks", "measure", "update_momentum", "normalise", "apply_update")


def pretend_to_be(target: GPUTarget) -> None:
    """Let Triton take this machine for one with such a GPU."""
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: target,
            get_current_device=lambda: 0,
            get_current_stream=lambda device=None: 0,
            get_active_torch_device=lambda: CPU,
        )
    )


def compile_all(architecture: configs.Architecture) -> None:
    """Launch whatever there is, with tensors of this machine; `run` compiles and launches nothing."""
    for name in SINGLE:
        problems.CHECKS[name](CPU, torch.float16)
    for dtype in (torch.float16, torch.float32):
        x = torch.zeros(2, 256, 256, dtype=dtype)
        chosen = {configs.choose_config(architecture, 2, m, k, dtype) for m in (256, 8192) for k in (256, 8192)}
        for config in sorted(chosen, key=str):
            for alpha, beta, gamma in COEFFICIENTS:
                symmetric_launches._compiled.clear()  # what was compiled is known, and would be launched
                symmetric_matmul_with(config, x, alpha=alpha, beta=beta, c=x.clone(), gamma=gamma)


def main() -> None:
    backend, architecture, warp = sys.argv[1].split(":")
    target = GPUTarget(backend, int(architecture) if architecture.isdigit() else architecture, int(warp))
    pretend_to_be(target)
    run = JITFunction.run

    def compile_only(self, *args, grid, warmup, **options):
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        rounds = "inputPrecision = tf32" in kernel.asm["ttir"]
        said = [self.fn.__name__, kernel.metadata.shared, sorted(kernel.asm), kernel.hash, rounds]
        sys.stdout.write(json.dumps(said) + "\n")
        return kernel

    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(JITFunction, "run", compile_only))
        for module in (elementwise, peaks, whole):
            patches.enter_context(mock.patch.object(module, "check_runnable"))
        patches.enter_context(mock.patch.object(whole, "run"))  # launches what was compiled
        for module in (launching, symmetric_launches, whole):
            patches.enter_context(mock.patch.object(module, "is_interpreted", return_value=False))
            patches.enter_context(mock.patch.object(module, "launching_on", return_value=nullcontext()))
        compile_all(sys.argv[2])


if __name__ == "__main__":
    main()
