"""How other Muons write what we write: where their numbers lie in a checkpoint, and what they are in our words."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from meshmuon.importers.records import Settings

Group: TypeAlias = Mapping[str, Any]
Source: TypeAlias = Literal["torch", "keller", "keller_2024", "moonlight", "dion", "nanochat", "motif"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """One optimizer's way of writing its state.

    Attributes:
        word: What a user passes as `source`.
        title: What it is called.
        known_by: Tells it from the keys of its Muon groups.
        muon: Group → settings of a matrix, in our words.
        adamw: Group → settings of any other parameter, in our words.
        momentum: The key of a matrix's momentum.
        moments: The keys of AdamW's two moments.
        heavy_ball: Whether the momentum is a sum (buf = momentum·buf + g) instead of a moving average.
        notes: What a user should know beyond settings.
    """

    word: Source
    title: str
    known_by: Callable[[Collection[str]], bool]
    muon: Callable[[Group], Settings]
    adamw: Callable[[Group], Settings]
    momentum: str = "momentum_buffer"
    moments: tuple[str, str] = ("exp_avg", "exp_avg_sq")
    heavy_ball: bool = False
    notes: tuple[str, ...] = ()


def _picked(group: Group, **ours: str) -> Settings:
    """Our word → their key, for those that are there."""
    return {word: group[key] for word, key in ours.items() if key in group}


def _common(group: Group, *, decay: str = "weight_decay", momentum: str = "momentum") -> Settings:
    settings = _picked(group, lr="lr", weight_decay=decay, momentum=momentum, nesterov="nesterov", ns_steps="ns_steps")
    return {"extra_scale_factor": 1.0, "weight_decay_mode": "decoupled", "weight_decay": 0.0, **settings}


def _plain_adamw(group: Group) -> Settings:
    return _picked(group, lr="lr", weight_decay="weight_decay", betas="betas", eps="eps")


def _torch_muon(group: Group) -> Settings:
    found = _picked(group, ns_coefficients="ns_coefficients", adjust_lr_fn="adjust_lr_fn")
    return {**_common(group), **found, "adjust_lr_fn": found.get("adjust_lr_fn") or "original"}


def _keller_muon(group: Group) -> Settings:
    fixed = {"adjust_lr_fn": "original", "ns_coefficients": "keller", "nesterov": True, "ns_steps": 5}
    return {**fixed, **_common(group)}


def _keller_2024_adamw(group: Group) -> Settings:
    found = _picked(group, weight_decay="adamw_wd", betas="adamw_betas", eps="adamw_eps")
    ratio = group.get("adamw_lr_ratio")
    return found if ratio is None else {**found, "lr": group["lr"] * ratio}


def _moonlight_muon(group: Group) -> Settings:
    return {**_common(group, decay="wd"), "adjust_lr_fn": "match_rms_adamw", "ns_coefficients": "keller"}


def _moonlight_adamw(group: Group) -> Settings:
    return _picked(group, lr="lr", weight_decay="wd", betas="adamw_betas", eps="adamw_eps")


def _dion_muon(group: Group) -> Settings:
    rules = {"spectral_norm": "unit_rms_norm", "rms_norm": "match_rms_adamw", None: "none"}
    rule = group.get("adjust_lr", "spectral_norm")
    decay = {"weight_decay_mode": "cautious"} if group.get("cautious_wd") else {}
    return {**_common(group, momentum="mu"), **decay, "adjust_lr_fn": rules.get(rule, rule)}


def _dion_adamw(group: Group) -> Settings:
    found = _picked(group, lr="lr", weight_decay="weight_decay", eps="epsilon")
    return {**found, "betas": (group["beta1"], group["beta2"])} if "beta1" in group and "beta2" in group else found


def _nanochat_muon(group: Group) -> Settings:
    if "kind" not in group:  # the DistMuon of its first months
        return {**_keller_muon(group), "weight_decay": 0.0}
    return {**_common(group), "nesterov": True, "adjust_lr_fn": "original", "weight_decay_mode": "cautious"}


def _motif_muon(group: Group) -> Settings:
    return {**_common(group), "adjust_lr_fn": "match_rms_adamw"}


def _motif_adamw(group: Group) -> Settings:
    return _picked(group, lr="lr", weight_decay="weight_decay", betas="adamw_betas", eps="adamw_eps")


_UNRECORDED = (
    "its checkpoints do not say which Newton-Schulz coefficients it ran with: compare ns_coefficients yourself"
)
_BARE = frozenset({"lr", "momentum", "nesterov", "ns_steps"})  # of two authors, with two meanings of momentum

DIALECTS: dict[str, Dialect] = {
    dialect.word: dialect
    for dialect in (
        Dialect(
            word="torch",
            title="torch.optim.Muon",
            known_by=lambda keys: {"ns_coefficients", "adjust_lr_fn"} <= set(keys),
            muon=_torch_muon,
            adamw=_plain_adamw,
        ),
        Dialect(
            word="keller",
            title="Keller Jordan's Muon",
            known_by=lambda keys: (
                set(keys) - {"use_muon"} == {"lr", "momentum", "weight_decay"} or "update_buffer" in keys
            ),
            muon=_keller_muon,
            adamw=_plain_adamw,
        ),
        Dialect(
            word="keller_2024",
            title="Keller Jordan's Muon of 2024",
            known_by=lambda keys: {"adamw_wd", "adamw_lr_ratio"} <= set(keys) or set(keys) == _BARE,
            muon=_keller_muon,
            adamw=_keller_2024_adamw,
            moments=("moment1", "moment2"),
            heavy_ball=True,
        ),
        Dialect(
            word="moonlight",
            title="Moonlight's Muon",
            known_by=lambda keys: {"wd", "adamw_betas", "ns_steps"} <= set(keys),
            muon=_moonlight_muon,
            adamw=_moonlight_adamw,
            moments=("moment1", "moment2"),
            heavy_ball=True,
            notes=(
                "its AdamW adds eps before the bias correction, torch's and ours after: early steps differ by that",
            ),
        ),
        Dialect(
            word="dion",
            title="Microsoft dion's Muon",
            known_by=lambda keys: {"mu", "algorithm"} <= set(keys),
            muon=_dion_muon,
            adamw=_dion_adamw,
            momentum="momentum",
            moments=("momentum", "variance"),
            heavy_ball=True,
            notes=(_UNRECORDED,),
        ),
        Dialect(
            word="nanochat",
            title="nanochat's Muon",
            known_by=lambda keys: "kind" in keys or "zero_buffer" in keys or set(keys) == _BARE,
            muon=_nanochat_muon,
            adamw=_plain_adamw,
            notes=(_UNRECORDED, "its lr rule scales the weight decay of tall matrices as well, ours does not"),
        ),
        Dialect(
            word="motif",
            title="Motif's Muon",
            known_by=lambda keys: {"use_muon", "adamw_betas", "adamw_eps", "weight_decay"} <= set(keys),
            muon=_motif_muon,
            adamw=_motif_adamw,
            moments=("moment1", "moment2"),
            heavy_ball=True,
            notes=(_UNRECORDED,),
        ),
    )
}
