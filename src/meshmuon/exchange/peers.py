"""The ranks that must agree before anything is changed: all of each mesh that parameters lie on."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch import Tensor

from meshmuon.errors import BrokenOptimizerError, PlanMismatchError, message, some
from meshmuon.exchange.groups import Groups
from meshmuon.exchange.health import Health
from meshmuon.exchange.status import Alarms, Row, Told
from meshmuon.plan.bucket import Plan
from meshmuon.plan.fingerprint import digest, fingerprint, team_fingerprints

Ranks = tuple[int, ...]
_MESHES_IN_A_CHAIN = 4


class Peers:
    """Speaks for this rank with the ranks it shares parameters with.

    An *assembly* is the set of ranks of a mesh. Ranks of one mesh hold the same parameters in the same order: that is
    proven once, by comparing fingerprints; from then on, what they send each other depends on the plan alone.
    """

    def __init__(
        self,
        plan: Plan,
        groups: Groups,
        *,
        settings: Callable[[], Sequence[str]],
        health: Health,
        checksums: Callable[[], Tensor] | None = None,
        before: Peers | None = None,
    ) -> None:
        self._plan = plan
        self._groups = groups
        self._settings = settings
        self._checksums = checksums
        self._health = health
        self._met = False
        # Peers that have met under an older plan, and may still have it: they wait to be told.
        self._before: Peers | None = before if before is None or before._met else before._before
        self._everyone: Ranks = ()
        self._assemblies: dict[Ranks, list[int]] = {}
        for index, parameter in enumerate(plan.parameters):
            if parameter.layout is not None and len(parameter.layout.ranks) > 1 and plan.rank in parameter.layout.ranks:
                self._assemblies.setdefault(tuple(sorted(parameter.layout.ranks)), []).append(index)

    @property
    def alone(self) -> bool:
        """Whether there is nobody to agree with."""
        return not self._assemblies

    def refuse_if_broken(self) -> None:
        """Refuse to go on after a step ended in the middle. See `Health`."""
        self._health.refuse_if_broken()

    def together(self) -> AbstractContextManager[None]:
        """Do something that only makes sense if every peer does it too. See `Health`."""
        if not self.alone and self._groups.gone:
            found = "made in a job that has ended: its meshes and process groups are gone, though another job has begun"
            do = "Make model and optimizer anew in this job; state_dict() still gives the state"
            raise BrokenOptimizerError(message("optimizer", found=found, do=do))
        return self._health.together(self._plan.rank, None if self.alone else self._teams)

    def _teams(self) -> dict[str, Ranks]:
        """What each assembly shares, in letters, the same on all of its ranks → its ranks."""
        names = {ranks: [self._plan.parameters[i].name for i in indices] for ranks, indices in self._assemblies.items()}
        return {digest([str(ranks), *shared]).hex()[:16]: ranks for ranks, shared in names.items()}

    def settings_hashes(self) -> list[int]:
        """Give a number for each parameter that changes with its name, and with any hyper-parameter of its group.

        With its name: two optimizers of equal shapes, stepped in another order on some rank, would exchange each
        other's matrices.
        """
        groups = [zlib.crc32(words.encode()) for words in self._settings()]
        return [zlib.crc32(each.name.encode(), groups[each.group]) >> 1 for each in self._plan.parameters]

    def meet(self, *, again: bool = False) -> None:
        """Make the process groups; prove that all peers have the same plan, and replicas the same numbers. Once.

        Args:
            again: Whether to prove it once more, because a peer has said that it has a new plan or other settings.

        Raises:
            PlanMismatchError: Names the first parameter that differs and the ranks. Nothing was changed anywhere.
        """
        if self._met and not again:
            return
        if self._before is not None:
            self._before.announce_new_plan()
        self._groups.ensure(set(self._assemblies))
        settings = dict(enumerate(self._settings()))
        for ranks, indices in sorted(self._assemblies.items()):
            shared = [self._plan.parameters[i] for i in indices]
            self._compare(ranks, fingerprint(shared, settings=settings, execution=self._plan.execution))
        self._everyone = self._connected()
        teams = team_fingerprints(self._plan.buckets)
        self._groups.ensure(set(teams) | ({self._everyone} if self._everyone else set()))
        for team, lines in sorted(teams.items()):
            if len(team) > 1:
                self._compare(team, lines)
        self._before, self._met = None, True
        self._compare_values()

    def gather_round(self) -> None:
        """Begin something other than a step that all peers begin: those who have met may have to meet again.

        Raises:
            PlanMismatchError: As `meet` does, if a peer has made a plan anew.
        """
        if not self._met or self.alone:
            self.meet()
            return
        nothing = torch.zeros(len(Row), len(self._plan.parameters), dtype=torch.int32, device=self.device)
        if self._tell(nothing).new_plan:
            self.meet(again=True)

    def _connected(self) -> Ranks:
        """All ranks that several meshes connect with this one, through ranks they share; nobody for one mesh."""
        known = set(self._assemblies)
        for _ in range(_MESHES_IN_A_CHAIN):
            for ranks in sorted(self._assemblies):
                answers: list[set[Ranks]] = [set() for _ in ranks]
                dist.all_gather_object(answers, known, group=self._groups[ranks])
                known = known.union(*answers)
        return tuple(sorted({rank for ranks in known for rank in ranks})) if len(known) > 1 else ()

    def _compare(self, ranks: Ranks, lines: list[str]) -> None:
        group = self._groups[ranks]
        mine = torch.frombuffer(bytearray(digest(lines)), dtype=torch.uint8).to(self.device)
        every = [torch.empty_like(mine) for _ in ranks]
        dist.all_gather(every, mine, group=group)
        hashes = [bytes(each.tolist()) for each in every]
        if len(set(hashes)) == 1:
            return
        texts: list[list[str]] = [[] for _ in ranks]
        dist.all_gather_object(texts, lines, group=group)
        raise PlanMismatchError(_difference(ranks, texts))

    def _compare_values(self) -> None:
        """Prove that ranks that were said to hold the same tensors do."""
        if self.alone or self._checksums is None:
            return
        checksums = self._checksums().to(self.device)
        most, minus_least = self.combine(torch.stack([checksums, -checksums]))
        odd = [
            p.name for p, differs in zip(self._plan.parameters, (most != -minus_least).tolist(), strict=True) if differs
        ]
        if odd:
            self._met = False  # the next step asks again
            found = "it or its state is not the same on all ranks of process_group, which was said to hold replicas"
            do = (
                "Start all ranks from the same weights, and load the same state on each; "
                "make what is a rank's own (experts) DTensors, or leave it out"
            )
            raise PlanMismatchError(message(f"parameter {some(map(repr, odd))}", found=found, do=do))

    def announce_new_plan(self) -> None:
        """Tell peers that may still have the old plan, in the words they expect at the start of a step."""
        if self.alone:
            return
        status = torch.zeros(len(Row), len(self._plan.parameters), dtype=torch.int32, device=self.device)
        status[Row.NEW_PLAN] = 1
        self._tell(status)

    def _tell(self, status: Tensor) -> Alarms:
        """Tell peers something in the words they expect at the start of a step, and hear what they tell."""
        return self.anywhere(Told.of(self.combine(status)))

    @property
    def device(self) -> torch.device:
        """Where what ranks tell each other has to be."""
        if self.alone:
            return torch.device("cpu")
        return self._plan.parameters[next(iter(self._assemblies.values()))[0]].device

    @property
    def unshared(self) -> list[bool]:
        """For each parameter, whether nobody else is asked about it."""
        shared = {index for indices in self._assemblies.values() for index in indices}
        return [index not in shared for index in range(len(self._plan.parameters))]

    def combine(self, status: Tensor) -> Tensor:
        """Take the element-wise maximum over the ranks that hold each parameter.

        Args:
            status: (one `Row` each, parameters), int32, of this rank.

        Returns:
            The same shape, the same on all of them.
        """
        columns = list(status.unbind(1))
        for ranks, indices in sorted(self._assemblies.items()):
            part = torch.stack([columns[i] for i in indices], dim=1)
            dist.all_reduce(part, op=dist.ReduceOp.MAX, group=self._groups[ranks])
            for i, column in zip(indices, part.unbind(1), strict=True):
                columns[i] = column
        return torch.stack(columns, dim=1)

    def anywhere(self, told: Told) -> Alarms:
        """Tell for each of `Told.alarms` whether it is true of anything on any connected rank.

        Args:
            told: What the ranks of this rank's meshes have told.

        Returns:
            Bools of one element each, the same on all of them.
        """
        flags = torch.stack([row.any() for row in told.alarms]).to(torch.int32)
        if self._everyone:
            dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._groups[self._everyone])
        return Alarms(*flags.bool().split(1))

    def largest(self, ranks: Ranks, numbers: Tensor) -> Tensor:
        """Take the element-wise maximum over the ranks of a mesh. Every one of them must ask.

        Args:
            ranks: Global ranks, ascending; this one alone, or nobody: nothing is sent.
            numbers: What this rank has; written.

        Returns:
            The same on all of them.
        """
        if ranks in self._assemblies:
            dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=self._groups[ranks])
        return numbers

    def ranks_without(self, missing: Sequence[str]) -> dict[str, list[int]]:
        """Ask who has no gradient for which parameter. Every peer must ask.

        Args:
            missing: The parameters without a gradient here.

        Returns:
            Name → global ranks.
        """
        found: dict[str, list[int]] = {}
        for ranks in sorted(self._assemblies):
            answers: list[list[str]] = [[] for _ in ranks]
            dist.all_gather_object(answers, list(missing), group=self._groups[ranks])
            for rank, names in zip(ranks, answers, strict=True):
                for name in names:
                    if rank not in found.setdefault(name, []):
                        found[name].append(rank)
        return found


_NONE = "(no such parameter)"


def _difference(ranks: Ranks, texts: Sequence[Sequence[str]]) -> str:
    """Name the first line in which ranks differ from the lowest of them, and which ranks do."""
    longest = max(map(len, texts))
    for number in range(longest):
        lines = [text[number] if number < len(text) else _NONE for text in texts]
        odd = [(rank, line) for rank, line in zip(ranks, lines, strict=True) if line != lines[0]]
        if odd:
            subject = next((line for line in (lines[0], odd[0][1]) if line != _NONE), _NONE).split(" ", 1)[0]
            found = (
                f"parameter number {number} is not the same on all ranks; rank {ranks[0]} has [{lines[0]}], "
                f"rank {odd[0][0]} has [{odd[0][1]}] (ranks that differ: {some(str(rank) for rank, _ in odd)})"
            )
            do = "Build the model and the optimizer alike on every rank"
            return message(f"parameter {subject!r}", found=found, do=do)
    raise AssertionError("texts with different hashes differ somewhere")
