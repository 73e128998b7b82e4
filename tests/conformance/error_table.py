"""What `Muon` must refuse, in the form of torch's table of error inputs: the error names the argument or parameter."""

from typing import Any

import torch
from torch.nn import Parameter
from torch.testing._internal.common_optimizers import ErrorOptimizerInput, OptimizerErrorEnum, OptimizerInput

TORCH_FLAGS = ("maximize", "foreach", "fused", "capturable", "differentiable")
TRIPLE = (3.4445, -4.7750, 2.0315)


def _bad(error: Any, regex: str, params: Any = None, *, on_step: bool = False, **kwargs: Any) -> ErrorOptimizerInput:
    when = OptimizerErrorEnum.STEP_ERROR if on_step else OptimizerErrorEnum.CONSTRUCTION_ERROR
    given = OptimizerInput(params=params, kwargs=kwargs, desc=f"{regex} {kwargs}")
    return ErrorOptimizerInput(given, error_on=when, error_type=error, error_regex=regex)


def optim_error_inputs(device: str, dtype: torch.dtype) -> list[ErrorOptimizerInput]:
    w, w2 = (Parameter(torch.rand(3, 4, device=device, dtype=dtype)) for _ in range(2))
    bias = Parameter(torch.rand(3, device=device, dtype=dtype))
    cube = Parameter(torch.rand(2, 3, 4, device=device, dtype=dtype))
    embed = Parameter(torch.rand(3, 4, device=device, dtype=dtype))
    embed.grad = torch.rand(3, 4, device=device, dtype=dtype).to_sparse()
    nan = Parameter(torch.rand(3, 4, device=device, dtype=dtype))
    nan.grad = torch.full_like(nan, torch.nan)
    values = [
        _bad(ValueError, "^lr: -1", lr=-1),
        _bad(ValueError, "^lr: nan", lr=float("nan")),
        _bad(TypeError, "^lr: 'fast'", lr="fast"),
        _bad(ValueError, "^lr: a tensor of shape", lr=torch.tensor([0.001, 0.001])),
        _bad(ValueError, "^lr: -0.5", lr=torch.tensor(-0.5)),
        _bad(ValueError, "^weight_decay: -0.1", weight_decay=-0.1),
        _bad(TypeError, "^weight_decay: True", weight_decay=True),
        _bad(ValueError, "^momentum: 1.0", momentum=1.0),
        _bad(ValueError, "^momentum: -0.1", momentum=-0.1),
        _bad(TypeError, "^nesterov: 1", nesterov=1),
        _bad(ValueError, "ns_coefficients.*newton", ns_coefficients="newton"),
        _bad(ValueError, "ns_coefficients.*2", ns_coefficients=(TRIPLE, TRIPLE), ns_steps=3),
        _bad(ValueError, "ns_coefficients", ns_coefficients=(9.0, 9.0, 9.0)),
        _bad(ValueError, "^ns_steps: 0", ns_steps=0),
        _bad(ValueError, "^ns_steps: 21", ns_steps=21),
        _bad(TypeError, "^ns_steps: 2.5", ns_steps=2.5),
        _bad(ValueError, "^eps: 0", eps=0.0),
        _bad(ValueError, "^adjust_lr_fn: 'arbitrary'", adjust_lr_fn="arbitrary"),
        _bad(ValueError, "^weight_decay_mode: 'adam'", weight_decay_mode="adam"),
        _bad(ValueError, "^state_dtype: 'int32'", state_dtype=torch.int32),
        _bad(ValueError, "^extra_scale_factor: 0", extra_scale_factor=0),
        _bad(ValueError, r"^betas\[1\]: 1.0", betas=(0.9, 1.0)),
        _bad(TypeError, "^betas", betas=(0.9,)),
        _bad(ValueError, "^adamw_eps: 0", adamw_eps=0),
        _bad(ValueError, "^adamw_weight_decay: -1", adamw_weight_decay=-1),
        _bad(ValueError, "^adamw_lr_ratio: -1", adamw_lr_ratio=-1),
        _bad(ValueError, "^non_finite: 'warn'", non_finite="warn"),
        _bad(TypeError, "^release_grads", release_grads="yes"),
        _bad(ValueError, "^max_in_flight: 0", max_in_flight=0),
        _bad(ValueError, "^workspace_bytes: 0", workspace_bytes=0),
        _bad(TypeError, "^orthogonalizer: 'svd'", orthogonalizer="svd"),
        _bad(TypeError, "'warmup_step': unknown.*'max_in_flight'", warmup_step=3),
        _bad(TypeError, "'num_ns_steps': unknown.*'ns_steps'", num_ns_steps=3),
        _bad(TypeError, "'momentun': unknown.*'momentum'", momentun=0.9),
        *(_bad(TypeError, f"'{flag}': not supported", **{flag: True}) for flag in TORCH_FLAGS),
    ]
    params = [
        _bad(TypeError, "params: a Parameter", w),
        _bad(TypeError, "set", {w}),
        _bad(ValueError, "empty", []),
        _bad(ValueError, "same parameter twice", [w, w]),
        _bad(ValueError, "already in another", [{"params": [w]}, {"params": [w]}]),
        _bad(ValueError, "same tensor as 'a'", [("a", w), ("b", w)]),
        _bad((TypeError, ValueError), "tuple|names", [("weight", w), w2]),
        _bad(ValueError, "with/without names", [{"params": [w]}, {"params": [("weight", w2)]}]),
        _bad(TypeError, r"position 1: \(3,\).*Muon\(model", [w, bias]),
        _bad(ValueError, "'cube'.*3-D.*View", [("cube", cube)]),
        _bad(ValueError, 'algorithm="muon" or algorithm="adamw"', [{"params": [w, bias]}]),
        _bad(ValueError, "contradict", [{"params": [w], "algorithm": "adamw", "use_muon": True}]),
        _bad(TypeError, "'momentun'.*'momentum'", [{"params": [w], "momentun": 0.9}]),
        _bad(TypeError, "'betas'.*no hyper-parameter of muon", [{"params": [w], "betas": (0.9, 0.9)}]),
        _bad(ValueError, "none of 1 parameters takes Muon", [("bias", bias)]),
        _bad(ValueError, "overrides.*matches no parameter", [("w", w)], overrides={"v*": "adamw"}),
        _bad(ValueError, "non-leaf", [w * 2]),
        _bad(TypeError, "'w'.*complex64", [("w", torch.rand(2, 3, dtype=torch.complex64, requires_grad=True))]),
        _bad(TypeError, r"'params.0.0'.*int64", [{"params": [torch.zeros(2, 3, dtype=torch.int64)]}]),
        _bad(TypeError, "'w'.*sparse", [("w", torch.eye(3).to_sparse().requires_grad_())]),
        _bad(RuntimeError, "gradient of w", [("w", nan)], on_step=True, non_finite="raise"),
        _bad((RuntimeError, TypeError, ValueError), "'w'.*sparse", [("w", embed)], on_step=True),
    ]
    return [*values, *params]
