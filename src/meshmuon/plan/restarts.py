"""Whether the restarts a user chose keep the Gram form stable: known once a plan has decided forms and dtypes."""

from __future__ import annotations

from functools import partial

from meshmuon.errors import message, warn_user
from meshmuon.plan.bucket import Plan
from meshmuon.polar.gram import choose_restarts, split_at


def warn_of_sparse_restarts(plan: Plan) -> None:
    """Warn of restarts so far apart that rounding may grow to inf between them.

    Args:
        plan: What will be computed; only buckets in the Gram form restart.
    """
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
