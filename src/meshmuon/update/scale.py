"""How large an orthogonalized update is, by rule, and how to convert a learning rate between rules."""

from __future__ import annotations

import math
from typing import get_args

from meshmuon.checks import check_number, check_word
from meshmuon.config import LRRule
from meshmuon.errors import message


def scale_factor(shape: tuple[int, int], rule: LRRule | None) -> float:
    """Give the factor an lr rule puts on the polar factor of a matrix.

    Args:
        shape: (out, in): the logical shape, never a shard's.
        rule: "original" = sqrt(max(1, out/in)), Keller Jordan's and torch's default (alias "shape_scaling"; None means
            the same, as in torch); "match_rms_adamw" = 0.2·sqrt(max(out, in)), Moonlight's, which gives the update the
            RMS that AdamW's typically has; "spectral" = sqrt(max(out, in)); "unit_rms_norm" = sqrt(out/in); "none" = 1.

    Returns:
        The factor; 0 if a side is 0.

    Raises:
        ValueError: If the rule is unknown, or the shape is not that of a matrix.
    """
    if len(shape) != 2 or min(shape) < 0:
        raise ValueError(message("shape", found=f"{tuple(shape)}", do="Give (out, in), of the matrix as it is viewed"))
    rows, cols = shape
    word = "original" if rule is None else check_word("rule", rule, get_args(LRRule))
    if rows == 0 or cols == 0:
        return 0.0
    if word in ("original", "shape_scaling"):
        return math.sqrt(max(1.0, rows / cols))
    if word == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, cols))
    if word == "spectral":
        return math.sqrt(max(rows, cols))
    if word == "unit_rms_norm":
        return math.sqrt(rows / cols)
    return 1.0


def convert_lr(lr: float, shape: tuple[int, int], *, source: LRRule | None, target: LRRule | None) -> float:
    """Convert a learning rate so that a matrix moves exactly as far under another rule.

    Exact for one shape; for a model, use the shape that holds most of its parameters.

    Args:
        lr: The learning rate under `source`.
        shape: (out, in) of the matrix.
        source: The rule the rate was tuned with: "original" for Keller Jordan's Muon and torch.optim.Muon,
            "match_rms_adamw" for Moonlight, and for a rate that was tuned with AdamW.
        target: The rule it will be used with.

    Returns:
        The learning rate under `target`.

    Raises:
        ValueError: If a rule is unknown, a side is not positive, or lr is negative.
    """
    check_number("lr", lr, low=0.0)
    for side in shape:
        check_number("shape", side, low=1)
    return lr * scale_factor(shape, source) / scale_factor(shape, target)
