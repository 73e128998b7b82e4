"""The hand-shakes of clusters.cu, played through in Python with loads that arrive in any order and threads in any turn.

What is checked: nothing waits for ever, and every product and every sum reads the operands that are meant for it. The
model follows clusters.cu line by line; whoever changes one changes the other.
"""

import random
from dataclasses import dataclass, field

import pytest

SLOTS, RANKS, GROUPS = 6, 2, 2


@dataclass
class Barrier:
    """A barrier in shared memory: a phase is over when all have arrived and all bytes are there."""

    count: int
    phase: int = 0
    missing: int = field(init=False)
    bytes: int = 0

    def __post_init__(self):
        self.missing = self.count

    def arrive(self, expected=0):
        self.missing -= 1
        self.bytes += expected
        self._settle()

    def complete(self, count=1):
        self.bytes -= count
        self._settle()

    def _settle(self):
        assert self.missing >= 0, "more arrivals than a phase has"
        if self.missing == 0 and self.bytes == 0:
            self.phase += 1
            self.missing = self.count

    def passed(self, parity):
        return self.phase % 2 != parity


@dataclass
class Turn:
    """A named barrier on which one group arrives and the other one waits."""

    given: int = 0


class Block:
    def __init__(self):
        self.full = [Barrier(1) for _ in range(SLOTS)]
        self.empty = [Barrier(RANKS) for _ in range(SLOTS)]
        self.contents = [{} for _ in range(SLOTS)]
        self.turns = [Turn() for _ in range(GROUPS)]


class Cluster:
    """Two blocks, each with a loader and two groups, as generators that give up control wherever hardware may wait."""

    def __init__(self, items, *, steps, add, seed, slow=(), late_wait=False, turns=True):
        self.items, self.steps, self.add = items, steps, add
        self.late_wait, self.turns = late_wait, turns
        self.slow = slow  # parts that arrive only when nothing else can happen
        self.random = random.Random(seed)
        self.blocks = [Block() for _ in range(RANKS)]
        self.flying = []  # loads on their way
        self.read = 0

    def run(self):
        actors = [self.loader(rank) for rank in range(RANKS)]
        actors += [self.group(rank, number) for rank in range(RANKS) for number in range(GROUPS)]
        waiting = {}
        while actors or self.flying:
            ready = [actor for actor in actors if waiting.get(actor, lambda: True)()]
            fast = [load for load in self.flying if load[0] not in self.slow]
            chosen = self.random.choice([*ready, *fast] or self.flying or [None])
            assert chosen is not None, "everybody waits"
            if chosen in self.flying:
                self.flying.remove(chosen)
                chosen[1]()
                continue
            waiting[chosen] = next(chosen, None)
            if waiting[chosen] is None:
                actors.remove(chosen)

    def load(self, ranks, slot, part, tag):
        def land():
            for rank in ranks:
                self.blocks[rank].contents[slot][part] = tag
                self.blocks[rank].full[slot].complete()

        self.flying.append((part, land))

    def loader(self, rank):
        block, position = self.blocks[rank], 0
        for index, pair in enumerate(self.items):
            for step in range(self.steps + self.add):
                slot, parity = position % SLOTS, position // SLOTS % 2
                yield lambda slot=slot, parity=parity: block.empty[slot].passed(parity ^ 1)
                position += 1
                if pair == "idle" and rank == 1:
                    block.full[slot].arrive()
                elif step == self.steps:
                    block.full[slot].arrive(expected=1)
                    self.load([rank], slot, "c", (index, rank))
                else:
                    block.full[slot].arrive(expected=3)
                    self.load([rank], slot, "a", (index, step, rank))
                    if pair == "shared":
                        self.load([0, 1], slot, f"b{rank}", (index, step))
                    else:
                        self.load([rank], slot, "b0", (index, step))
                        self.load([rank], slot, "b1", (index, step))

    def group(self, rank, number):
        block, slots, last = self.blocks[rank], self.steps + self.add, len(self.items)
        for index in range(number, last, GROUPS):
            position = index * slots
            if index and self.turns:
                yield lambda: block.turns[number].given > 0
                block.turns[number].given -= 1
            idle = self.items[index] == "idle" and rank == 1
            unread = []
            for step in range(slots if idle else self.steps):
                slot, parity = position % SLOTS, position // SLOTS % 2
                yield lambda slot=slot, parity=parity: block.full[slot].passed(parity)
                position += 1
                if idle:
                    self.release(slot)
                    continue
                self.check_operands(block, slot, index, step, rank)
                unread.append((slot, step))
                if len(unread) == 2:
                    yield lambda: True  # the products before are done at some later time
                    self.finish(block, *unread.pop(0), index, rank)
            slot, parity = position % SLOTS, position // SLOTS % 2
            adds = self.add and not idle
            if adds and not self.late_wait:
                yield lambda slot=slot, parity=parity: block.full[slot].passed(parity)
            if index + 1 < last:
                block.turns[1 - number].given += 1
            if idle:
                continue
            yield lambda: True
            self.finish(block, *unread.pop(), index, rank)
            if adds:
                yield lambda slot=slot, parity=parity: block.full[slot].passed(parity)
                assert block.contents[slot].get("c") == (index, rank), "another tile's C"
                yield lambda: True  # it is read
                assert block.contents[slot].get("c") == (index, rank), "C was overwritten"
                self.release(slot)

    def check_operands(self, block, slot, index, step, rank):
        found = block.contents[slot]
        assert found.get("a") == (index, step, rank), "operands of another step"
        assert found.get("b0") == found.get("b1") == (index, step), "operands of another step"

    def finish(self, block, slot, step, index, rank):
        self.check_operands(block, slot, index, step, rank)
        self.read += 1
        self.release(slot)

    def release(self, slot):
        for block in self.blocks:
            block.empty[slot].arrive()


ITEMS = ["shared", "shared", "apart", "shared", "apart", "shared", "shared", "idle"]


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("steps", [1, 4, 5, 6, 7, 13])
@pytest.mark.parametrize("count", [1, 2, 8])
def test_everything_is_read_once_and_in_time(steps, add, count):
    for seed, slow in enumerate([(), (), (), ("c",), ("a",), ("b0",), ("b1",), ("b0", "c")]):
        cluster = Cluster(ITEMS[-count:], steps=steps, add=add, seed=seed, slow=slow)
        cluster.run()
        assert cluster.read == (RANKS * count - 1) * steps


def test_the_turn_may_not_go_on_before_c_is_there():
    with pytest.raises(AssertionError, match="of another step"):
        Cluster(ITEMS, steps=7, add=True, seed=0, slow=["c"], late_wait=True).run()


def test_without_turns_slots_are_taken_twice():
    with pytest.raises(AssertionError, match="of another step"):
        Cluster(ITEMS, steps=7, add=True, seed=0, turns=False).run()
