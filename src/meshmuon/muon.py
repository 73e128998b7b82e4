"""Muon: one torch.optim.Optimizer for a whole model. Start reading at `step`, then `meshmuon.step`."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from meshmuon._compat import ToldToScalers, plain_arithmetic, run_eagerly
from meshmuon.checkpoint import CheckValues, check_state_dict, load_checked
from meshmuon.checks import check_lr
from meshmuon.config import (
    Execution,
    GradSync,
    LRRule,
    NonFinite,
    Orthogonalizer,
    QKClip,
    Sharing,
    WeightDecayMode,
    check_offload,
)
from meshmuon.errors import CheckpointError
from meshmuon.exchange.agreement import Agreement, Verdict
from meshmuon.exchange.groups import global_rank
from meshmuon.groups import (
    MUON_ARGUMENTS,
    check_group_parameters,
    check_values,
    complete_group,
    declare_shards,
    group_defaults,
    read_once,
    refuse_keywords,
    unnamed,
)
from meshmuon.layout.homes import Homes
from meshmuon.layout.plain import Sharded, plain_layouts
from meshmuon.measure import Measurement
from meshmuon.plan.bucket import Plan
from meshmuon.plan.concerns import warn_of_concerns
from meshmuon.plan.describe_groups import describe_groups
from meshmuon.polar.recipe import begin_to_compile
from meshmuon.preparation import Preparation, Ready, leave_empty_
from meshmuon.routing import Overrides, route_params
from meshmuon.runtime.graphs import Signals, StepGraphs
from meshmuon.runtime.local_tensors import LocalTensors
from meshmuon.state import complete_state_
from meshmuon.step import Step

logger = logging.getLogger("meshmuon")

# What a copy or a pickle takes along, besides torch's own.
_OURS = ("_group_defaults", "_execution", "_routings", "_frozen", "_layouts", "_offloaded")


class Muon(Optimizer):
    """Trains a whole model: hidden matrices with Muon, everything else with AdamW.

    Muon (https://kellerjordan.github.io/posts/muon/) steps along the orthogonalized momentum of each matrix.
    `print(opt)` shows which parameter takes which algorithm, and why.

    The first nine arguments are torch.optim.Muon's, in name, order and meaning. Two defaults differ on purpose: the
    coefficients, and the lr rule, which lets you keep your AdamW learning rate. For torch's own behaviour write
    `ns_coefficients="keller", adjust_lr_fn="original"`.

    Args:
        params: A model (the normal way), (name, tensor) pairs, group dicts with `algorithm="muon"|"adamw"`, or a list
            of matrices.
        lr: Learning rate, a number or a tensor. Each group keeps a tensor of its own: to change it, fill `group["lr"]`.
        weight_decay: Weight decay of the matrices, and of AdamW's parameters with at least 2 dims.
        momentum: Weight of the past in the moving average of the gradient.
        nesterov: Whether to orthogonalize the average of gradient and new momentum instead of the momentum.
        ns_coefficients: "polar_express", "keller", "you", one triple, or `ns_steps` triples.
        eps: Guards 0/0 in the normalisation. Unlike torch's it never shrinks the update of a small gradient.
        ns_steps: Number of iteration steps, 1 to 20.
        adjust_lr_fn: How the update is scaled by the shape of the matrix; see `scale_factor`.
        extra_scale_factor: One more factor on Muon's updates.
        weight_decay_mode: "decoupled", "cautious" (only where update and weight agree in sign) or "l2".
        orthogonalizer: Form, dtype and restarts of the orthogonalization.
        betas: AdamW's decay rates.
        adamw_eps: AdamW's eps.
        adamw_lr_ratio: AdamW's learning rate is `lr` times this, so that one scheduler serves all.
        adamw_weight_decay: AdamW's weight decay, for all of its parameters. None: `weight_decay` for those with at
            least 2 dims, 0 for vectors, norms and biases.
        overrides: Pattern of names → "muon", "adamw" or `View(...)`; or a function (name, parameter) → the same.
        expert_keys: Words in the names of stacks of experts.
        state_dtype: Dtype of the momentum; None: the parameter's own.
        non_finite: What to do about NaN or inf in a gradient: "skip" the step and warn, "raise", or "ignore".
        release_grads: Whether gradients are set to None once they have been read: the peak falls at least by those of
            the buckets under way.
        layout_invariant: Whether a matrix must get the same bits in every batch on a GPU too, also where that costs.
        process_group: The ranks that hold the same plain tensors and have averaged their gradients; they share the
            matrices. A `DistributedDataParallel` model supplies its own.
        grad_sync: Who averages gradients over ranks. "none": not the optimizer (DDP and FSDP do). "optimizer": the
            optimizer itself, exactly. "reduce_scatter": likewise, faster, but bits depend on the number of ranks. With
            the last two, state lives on owners.
        max_grad_norm: With grad_sync: bound on the norm of the averaged gradients.
        sharded: Name → `Sharded(dim, group)`, for plain tensors that are shards (tensor parallelism without DTensor).
        share_replicas: Whether HSDP replicas each compute a part of the matrices and exchange the results: "always",
            "never", or "auto", where it pays.
        max_in_flight: How many buckets may be between gather and scatter at a time.
        workspace_bytes: Bound on the memory a step takes beyond parameters, gradients and state.
        offload: Whether state lives in host memory, and is brought to the device bucket by bucket while a step runs.
            `offload_state` changes it at any time.
        qk_clip: Which parameters make q and k heads, and how large their logits may become; see `step`.
        cuda_graph: Whether the launches of a step are replayed as one CUDA graph, for small models, which are bound by
            the host. The graph keeps its workspace. lr, weight decay and momentum stay live.
        allow_no_muon: Whether to accept a model in which nothing takes Muon.
        **unknown: Anything else is refused, with a suggestion.
    """

    _step_supports_amp_scaling = ToldToScalers()
    _last: Signals

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Any = "polar_express",
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: LRRule | None = "match_rms_adamw",
        *,
        extra_scale_factor: float = 1.0,
        weight_decay_mode: WeightDecayMode = "decoupled",
        orthogonalizer: Orthogonalizer = Orthogonalizer(),  # noqa: B008 (frozen)
        betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        adamw_lr_ratio: float = 1.0,
        adamw_weight_decay: float | None = None,
        overrides: Overrides = None,
        expert_keys: Sequence[str] = ("experts",),
        state_dtype: torch.dtype | str | None = None,
        non_finite: NonFinite = "skip",
        release_grads: bool = False,
        layout_invariant: bool | None = None,
        process_group: Any = None,
        grad_sync: GradSync = "none",
        max_grad_norm: float | None = None,
        sharded: Mapping[str, Sharded] | None = None,
        share_replicas: Sharing = "auto",
        max_in_flight: int = 2,
        workspace_bytes: int = 2**30,
        offload: bool = False,
        qk_clip: QKClip | None = None,
        cuda_graph: bool = False,
        allow_no_muon: bool = False,
        **unknown: Any,
    ) -> None:
        lr = check_lr("lr", lr)
        given = dict(locals())  # every argument under its own name
        refuse_keywords(unknown, known=Muon.__init__)
        self._group_defaults = group_defaults(given)
        self._execution = Execution(**{field.name: given[field.name] for field in dataclasses.fields(Execution)})
        self._offloaded = check_offload(offload, self._execution)
        self._layouts = plain_layouts(params, sharded=sharded, process_group=process_group, syncs=self._execution.syncs)
        routed = route_params(params, expert_keys=expert_keys, overrides=overrides)
        self._routings, self._frozen = routed.routings, routed.frozen
        super().__init__(routed.groups, {key: given[key] for key in MUON_ARGUMENTS})
        self._start(Homes(params))
        self._announce()

    def _announce(self) -> None:
        warn_of_concerns(self.plan, frozen=self._frozen)
        if global_rank() == 0:
            logger.info("%s", self)

    @run_eagerly
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, qk_logits: Mapping[Any, Tensor] | None = None) -> Any:
        """Take one optimization step.

        Args:
            closure: Re-evaluates the model and returns the loss, as in torch.optim.
            qk_logits: With `qk_clip`: layer → the largest scaled logit (softmax input) of each of its heads, or of this
                rank's. Heads over the threshold on any rank are scaled down to it after the update.

        Returns:
            What the closure returned, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        not_yet = torch.zeros((), dtype=torch.bool, device="cpu")
        self._last = Signals(proceed=not_yet, unscale=self._unscale())
        ready = self._ready()
        with ready.peers.together(), plain_arithmetic():
            ready.peers.meet()  # before the first exchange of a plan: all ranks must have the same
            logits = ready.heads.read(qk_logits)
            verdict = self._agreement.check(
                logits.told(ready.watch.look(self.param_groups)),
                peers=ready.peers,
                found_inf=getattr(self, "found_inf", None),
                unscale=self._last.unscale,
                fused=ready.plan.fused,
            )
            if verdict.go:
                self._last = Signals(verdict.flag, self._last.unscale)
                self._take_step(ready, verdict)
                ready.heads.scale_(logits, self.param_groups, verdict.flag)
        if self._execution.release_grads:
            self.zero_grad(set_to_none=True)
        return loss

    def _take_step(self, ready: Ready, verdict: Verdict) -> None:
        self._tensors.settle_gradients(ready.plan)
        step = Step(ready, self._tensors, self.param_groups, self._last.unscale, verdict.flag, self._offloaded)
        if ready.owned is not None:
            step.take_synced(ready.owned, self._tensors.presence(ready.plan, verdict.present))
        elif self._execution.cuda_graph:
            step.take_by_graph(self._graphs)
        else:
            step.take()

    def _unscale(self) -> Tensor | None:
        """The inverse of the scale GradScaler put on the loss, if it has not taken it off the gradients itself."""
        scale = getattr(self, "grad_scale", None)
        return None if scale is None else scale.double().reciprocal()

    @property
    def _tensors(self) -> LocalTensors:
        return LocalTensors(self.param_groups, self.state)

    @property
    def plan(self) -> Plan:
        """All decisions: print it to see routes, reasons and costs."""
        return self._ready().plan

    def _ready(self) -> Ready:
        return self._preparation.ready(self.param_groups, self.state)

    def _start(self, homes: Homes) -> None:
        """What a new, copied or unpickled optimizer needs that is not part of its state."""
        self._agreement = Agreement(self._execution.non_finite)
        self._graphs = StepGraphs()
        self._last = Signals(None, None)
        self._preparation = Preparation(self._execution, self._routings, homes, self._layouts, on_host=self._offloaded)
        self._ready()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, checked like those of the constructor.

        Args:
            param_group: `params` and, optionally, `algorithm` and any hyper-parameter of that algorithm.

        Raises:
            TypeError: If a value is of the wrong type.
            ValueError: If a value is out of range, or a parameter does not fit or is already there.
        """
        index = len(self.param_groups)
        orthogonalizer = self._execution.orthogonalizer
        param_group = read_once(param_group)
        group = complete_group(param_group, self._group_defaults, orthogonalizer=orthogonalizer, index=index)
        with self._layouts.undone_on_error():
            declare_shards(param_group, self._layouts, index=index)
            check_group_parameters(group, self.param_groups, layouts=self._layouts, index=index)
            if group["algorithm"] == "muon":  # now: with its first group torch imports its compiler, for a second
                begin_to_compile(unnamed(group["params"]), orthogonalizer)
            allowed = set(group)
            super().add_param_group(group)
            for key in set(self.defaults) - allowed:  # torch fills in every default; these belong to the other one
                self.param_groups[-1].pop(key, None)
            if hasattr(self, "_preparation"):  # not while the constructor adds its own
                self._ready_with_last_group()

    def _ready_with_last_group(self) -> None:
        """Plan with a group that was just added, or be as before."""
        try:
            self._ready()
        except Exception:
            del self.param_groups[-1]
            raise

    def state_dict(self) -> dict[str, Any]:
        """Give the state in torch's form: `momentum_buffer` for Muon; `step`, `exp_avg`, `exp_avg_sq` for AdamW.

        Under `grad_sync` it is put together from its owners: every rank must call, and gets the whole of it.
        """
        with self._ready().whole_state_in(self.state):
            return super().state_dict()

    @torch.inference_mode(False)  # state made there could not be written outside it
    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what `state_dict` gave; refused as a whole, by name, if it does not fit.

        Args:
            state_dict: The saved state. Where both sides have names, parameters are found by name.

        Raises:
            CheckpointError: Names what does not fit; nothing was changed.
        """
        if self._ready().owned is not None:
            # Until owners have taken their parts.
            complete_state_(self.state, self.param_groups, on_host=self._offloaded)
        try:
            load_checked(
                self, state_dict, check=self._check_values, load=super().load_state_dict, on_host=self._offloaded
            )
        except CheckpointError:
            if self._ready().owned is not None:
                leave_empty_(self.state)
            raise
        self._preparation.state_was_loaded()
        self._ready()

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Refuse what `load_state_dict` would refuse, and change nothing.

        Args:
            state_dict: The saved state.

        Raises:
            CheckpointError: Names what does not fit.
        """
        check_state_dict(state_dict, self.param_groups, check=self._check_values)

    @property
    def _check_values(self) -> CheckValues:
        return partial(check_values, orthogonalizer=self._execution.orthogonalizer)

    def offload_state(self, on: bool = True) -> None:
        """Move all state to host memory, or back to the parameters' devices, now. Repeating it does nothing.

        Results do not change by a bit. Each rank may choose for itself.

        Args:
            on: Whether state lives in host memory from now on.

        Raises:
            ValueError: If steps are replayed as a CUDA graph, which needs its state in place.
        """
        on = check_offload(on, self._execution)
        self._preparation.move_state(self.param_groups, self.state, on_host=on)
        self._offloaded = on  # last: a move that ran out of memory has not happened

    @torch.no_grad()
    def metrics(self) -> dict[str, float]:
        """Give plain numbers for any logger, found when asked. It takes about as long as a step: ask now and then.

        Every rank must ask. Call it between `step` and `zero_grad` to see the last directions exactly; once gradients
        are gone, after a skipped step, and always under `grad_sync`, directions are those of the momentum alone.

        Returns:
            Over all ranks, as `muon/...` and `adamw/...`; where there are several groups of a kind, also of each, with
            its number (`muon.0/...`): `weight_rms`; `update_rms` of a step at the present lr, without weight decay;
            `update_ratio` of the two; `momentum_norm`; and for Muon `orthogonality_error`, the root mean square of
            |X·Xᵀ - I| / sqrt(m), without matrices on the Gram route.
            Under "l2" decay the directions are those at the weights as they are now, not as they were.
            For all: `dead`, parameters that have no momentum at all; `non_finite`, those that hold a NaN or inf; and of
            this rank, `bytes_sent` and `exchanges` (all-to-alls) of a step.
            Counted since this object was made: `steps`, skipped ones included; `skipped_non_finite` and
            `skipped_grad_scaler`, of these, how many changed nothing, and why. With `qk_clip`: `qk_clipped_heads` and
            `qk_max_logit` of the last step.
        """
        ready = self._ready()
        with ready.peers.together(), plain_arithmetic():
            ready.peers.gather_round()
            if ready.owned is not None:
                ready.owned.catch_up(ready.contributions.together)
            measured = Measurement(ready, self._tensors, self.param_groups, self.state, self._last).take()
        return {**measured, **self._agreement.counts(), **ready.heads.metrics()}

    def __getstate__(self) -> dict[str, Any]:
        self._layouts.refuse_to_leave_the_job()
        return self._everything()

    def __deepcopy__(self, memo: dict[int, Any]) -> Muon:
        """Copy it, with its state. Under `grad_sync` every rank must do so."""
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__setstate__(copy.deepcopy(self._everything(), memo))
        return copied

    def _everything(self) -> dict[str, Any]:
        with self._ready().whole_state_in(self.state):  # under grad_sync it is with its owners
            ours = {name: self.__dict__[name] for name in _OURS}
            return {**super().__getstate__(), **ours, "state": copy.copy(self.state)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_execution" in state:  # a copy or an unpickled optimizer; torch's load_state_dict comes by here as well
            self._start(Homes())

    def __repr__(self) -> str:
        where = "\nstate: in host memory, brought to the device bucket by bucket" if self._offloaded else ""
        return f"Muon\n{self.plan}{where}\n\n{describe_groups(self.param_groups, frozen=self._frozen)}"
