"""What a plan will do that its user may not want: told once, when the optimizer is made."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from meshmuon.errors import message, warn_user
from meshmuon.layout.heads import attention_layers
from meshmuon.plan.bucket import Plan
from meshmuon.polar.gram import choose_restarts, split_at


def warn_of_concerns(plan: Plan, *, frozen: Sequence[str]) -> None:
    """Warn of restarts that are too sparse, and of biases that QK-clip leaves alone.

    Args:
        plan: What will be computed.
        frozen: Names of the model's other parameters, which are not trained.
    """
    _warn_of_sparse_restarts(plan)
    _warn_of_unscaled_biases(plan, frozen)


def _warn_of_sparse_restarts(plan: Plan) -> None:
    """Between restarts that are far apart rounding may grow to inf. Only buckets in the Gram form restart."""
    for bucket in plan.buckets:
        recipe = bucket.recipe
        segments = split_at(recipe.schedule, recipe.restarts)
        mirrored, side = recipe.kernels.products == "triton", bucket.wide_shape[0]
        needed_in = partial(choose_restarts, dtype=recipe.dtype, mirrored=mirrored, side=side)
        if recipe.form == "gram" and any(needed_in(segment) for segment in segments):
            dtype = str(recipe.dtype).removeprefix("torch.")
            needed = needed_in(recipe.schedule)
            found = f"{recipe.restarts} for {len(recipe.schedule)} steps in {dtype}, which needs {needed}"
            do = 'Rounding may grow until the update is inf: use these or more, or restarts="auto"'
            warn_user(message("restarts", found=found, do=do))
            return


def _warn_of_unscaled_biases(plan: Plan, frozen: Sequence[str]) -> None:
    clip = plan.execution.qk_clip
    if clip is None:
        return
    vectors = [parameter.name for parameter in plan.parameters if len(parameter.shape) == 1]
    for layer in attention_layers(plan.parameters, clip, may_lack=True):
        for name in filter(layer.may_need, [*vectors, *frozen]):
            subject = f"qk_clip, layer {layer.name!r}"
            if name in frozen:
                found = f"{name!r} is frozen, so it is not scaled along, and may be a part of its logits"
                do = f"Train it, or logits of this layer may stay above {clip.threshold:g}"
            else:
                found = f"{name!r} is not scaled along, and may be a part of its logits"
                do = "Where it is, logits stay above the threshold: give q and k biases of their own (`q.bias`)"
            warn_user(message(subject, found=found, do=do))
