"""The hand-shakes of clusters.cu, played through in Python with loads that arrive in any order and threads in any turn.

What is checked: nothing waits for ever, and every product and every sum reads the operands that are meant for it, after
they were written. The model follows clusters.cu line by line; whoever changes one changes the other.
"""

import random
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import pytest

from meshmuon.kernels.agenda import Result, share_out, tiles_before

SLOTS, RANKS, GROUPS, BOXES = 6, 2, 2, 2


class Step(NamedTuple):
    """A product, as a tile of it goes through a block."""

    steps: int
    add: bool = False
    after: int = 0
    awaited: bool = False


class Tile(NamedTuple):
    matrix: int = 0
    product: int = 0
    shared: bool = False
    idle: bool = False


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


class Block:
    def __init__(self):
        self.full = [Barrier(1) for _ in range(SLOTS)]
        self.empty = [Barrier(RANKS) for _ in range(SLOTS)]
        self.contents = [{} for _ in range(SLOTS)]
        self.progress = 0
        # Named barriers on which one side arrives and the other one waits.
        self.turns, self.free, self.staged = ([0] * GROUPS for _ in range(3))
        self.staging = [None] * GROUPS


class World:
    """Clusters of two blocks, each with a loader, a scout, two groups and two that store.

    They are generators that give up control wherever hardware may wait, with what they wait for.
    """

    def __init__(self, program, queues, *, seed, slow=(), late_wait=False, turns=True, scouts=True, early=False):
        self.program, self.queues = program, queues
        self.late_wait, self.turns, self.scouts, self.early = late_wait, turns, scouts, early
        self.slow = slow  # parts that arrive only when nothing else can happen
        self.random = random.Random(seed)
        self.flying = []  # loads and stores on their way
        self.read = 0
        self.counted, self.landed = {}, {}  # tiles of each matrix that are said to be written, and that are

    def run(self):
        actors = []
        for queue in self.queues:
            blocks = [Block() for _ in range(RANKS)]
            for rank in range(RANKS):
                mine = [pair[rank] for pair in queue]
                actors += [self.loader(blocks, rank, mine), self.scout(blocks[rank], mine)]
                for number in range(GROUPS):
                    actors += [self.group(blocks, rank, number, mine), self.storer(blocks[rank], number, mine)]
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

    def load(self, blocks, slot, part, tag):
        def land():
            for block in blocks:
                block.contents[slot][part] = tag
                block.full[slot].complete()

        self.flying.append((part, land))

    def loader(self, blocks, rank, tiles):
        block, position = blocks[rank], 0
        for index, tile in enumerate(tiles):
            product = self.program[tile.product]
            if self.scouts and not tile.idle:
                yield lambda index=index: block.progress > index
            if not tile.idle:
                assert self.landed.get(tile.matrix, 0) >= product.after, "read before it was written"
            for step in range(product.steps + product.add):
                slot, parity = position % SLOTS, position // SLOTS % 2
                yield lambda slot=slot, parity=parity: block.empty[slot].passed(parity ^ 1)
                position += 1
                if tile.idle:
                    block.full[slot].arrive()
                elif step == product.steps:
                    block.full[slot].arrive(expected=1)
                    self.load([block], slot, "c", (index, rank))
                else:
                    block.full[slot].arrive(expected=3)
                    self.load([block], slot, "a", (index, step, rank))
                    if tile.shared:
                        self.load(blocks, slot, f"b{rank}", (index, step))
                    else:
                        self.load([block], slot, "b0", (index, step))
                        self.load([block], slot, "b1", (index, step))

    def scout(self, block, tiles):
        for index, tile in enumerate(tiles):
            after = self.program[tile.product].after
            if after and not tile.idle:
                yield lambda tile=tile, after=after: self.counted.get(tile.matrix, 0) >= after
            block.progress = index + 1
            yield lambda: True

    def group(self, blocks, rank, number, tiles):
        block, following, last = blocks[rank], 0, len(tiles)
        for index, tile in enumerate(tiles):
            product, position = self.program[tile.product], following
            following += product.steps + product.add
            if index % GROUPS != number:
                continue
            if index and self.turns:
                yield lambda: block.turns[number] > 0
                block.turns[number] -= 1
            unread = []
            for step in range(product.steps + product.add if tile.idle else product.steps):
                slot, parity = position % SLOTS, position // SLOTS % 2
                yield lambda slot=slot, parity=parity: block.full[slot].passed(parity)
                position += 1
                if tile.idle:
                    self.release(blocks, slot)
                    continue
                self.check_operands(block, slot, index, step, rank)
                unread.append((slot, step))
                if len(unread) == 2:
                    yield lambda: True  # the products before are done at some later time
                    self.finish(blocks, *unread.pop(0), index, rank)
            slot, parity = position % SLOTS, position // SLOTS % 2
            adds = product.add and not tile.idle
            if adds and not self.late_wait:
                yield lambda slot=slot, parity=parity: block.full[slot].passed(parity)
            if index + 1 < last:
                block.turns[1 - number] += 1
            if tile.idle:
                continue
            yield lambda: True
            self.finish(blocks, *unread.pop(), index, rank)
            if adds:
                yield lambda slot=slot, parity=parity: block.full[slot].passed(parity)
                assert block.contents[slot].get("c") == (index, rank), "another tile's C"
                yield lambda: True  # it is read
                assert block.contents[slot].get("c") == (index, rank), "C was overwritten"
                self.release(blocks, slot)
            for box in range(BOXES):
                yield lambda: block.free[number] > 0
                block.free[number] -= 1
                block.staging[number] = (index, box)
                yield lambda: True
                block.staged[number] += 1
        yield lambda: block.free[number] > 0

    def storer(self, block, number, tiles):
        block.free[number] += 1
        for index in range(number, len(tiles), GROUPS):
            tile = tiles[index]
            product = self.program[tile.product]
            if tile.idle:
                continue
            stored = []
            for box in range(BOXES):
                yield lambda: block.staged[number] > 0
                block.staged[number] -= 1
                assert block.staging[number] == (index, box), "another box"
                self.flying.append(("d", lambda stored=stored, box=box: stored.append(box)))
                yield lambda: True  # it is read at some later time
                assert block.staging[number] == (index, box), "a box was overwritten"
                block.free[number] += 1
            if not self.early:
                yield lambda stored=stored: len(stored) == BOXES
            if product.awaited:
                self.landed[tile.matrix] = self.landed.get(tile.matrix, 0) + (len(stored) == BOXES)
                self.counted[tile.matrix] = self.counted.get(tile.matrix, 0) + 1

    def check_operands(self, block, slot, index, step, rank):
        found = block.contents[slot]
        assert found.get("a") == (index, step, rank), "operands of another step"
        assert found.get("b0") == found.get("b1") == (index, step), "operands of another step"

    def finish(self, blocks, slot, step, index, rank):
        self.check_operands(blocks[rank], slot, index, step, rank)
        self.read += 1
        self.release(blocks, slot)

    def release(self, blocks, slot):
        for block in blocks:
            block.empty[slot].arrive()


SHARED, APART = (Tile(shared=True),) * 2, (Tile(),) * 2
PAIRS = [SHARED, SHARED, APART, SHARED, APART, SHARED, SHARED, (Tile(), Tile(idle=True))]


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("steps", [1, 4, 5, 6, 7, 13])
@pytest.mark.parametrize("count", [1, 2, 8])
def test_everything_is_read_once_and_in_time(steps, add, count):
    for seed, slow in enumerate([(), (), (), ("c",), ("a",), ("b0",), ("b1",), ("b0", "c"), ("d",)]):
        world = World([Step(steps, add)], [PAIRS[-count:]], seed=seed, slow=slow)
        world.run()
        assert world.read == (RANKS * count - 1) * steps


def test_the_turn_may_not_go_on_before_c_is_there():
    with pytest.raises(AssertionError, match="of another step"):
        World([Step(7, add=True)], [PAIRS], seed=0, slow=["c"], late_wait=True).run()


def test_without_turns_slots_are_taken_twice():
    with pytest.raises(AssertionError, match="of another step"):
        World([Step(7, add=True)], [PAIRS], seed=0, turns=False).run()


def program_of(batch, clusters):
    """A standard step and a half on matrices of 3x5 tiles, as the agenda shares it out."""
    results = [Result(384, 384, True), Result(384, 384, True), Result(384, 640, False), Result(384, 384, True)]
    kinds = [(10, False), (6, True), (6, False), (10, False)]
    after = tiles_before(results)
    program = [Step(*kind, after[i], awaited=i < len(kinds) - 1) for i, kind in enumerate(kinds)]
    items, starts = (table.tolist() for table in share_out(batch, results, clusters))
    tiles = [Tile(matrix, f >> 8, bool(f & 1), bool(f & 2)) for pair in items for matrix, _, _, f in pair]
    pairs = list(zip(tiles[::2], tiles[1::2], strict=True))
    products = sum(batch * result.tiles * kind[0] for result, kind in zip(results, kinds, strict=True))
    return program, [pairs[start:end] for start, end in pairwise(starts)], products


@pytest.mark.parametrize(("batch", "clusters"), [(1, 1), (1, 3), (2, 2), (3, 4), (5, 3)])
def test_products_that_follow_each_other_wait_for_each_other_and_not_for_ever(batch, clusters):
    program, queues, products = program_of(batch, clusters)
    for seed, slow in enumerate([(), (), (), ("d",), ("a",), ("b0", "d")]):
        world = World(program, queues, seed=seed, slow=slow)
        world.run()
        assert world.read == products


def test_without_a_scout_products_are_read_too_early():
    program, queues, _ = program_of(3, 4)
    with pytest.raises(AssertionError, match="before it was written"):
        World(program, queues, seed=0, scouts=False).run()


def test_a_tile_may_not_be_counted_before_it_is_stored():
    program, queues, _ = program_of(3, 4)
    with pytest.raises(AssertionError, match="before it was written"):
        World(program, queues, seed=0, slow=["d"], early=True).run()


def test_who_waits_for_a_later_tile_waits_for_ever():
    program, queues, _ = program_of(3, 4)
    with pytest.raises(AssertionError, match="everybody waits"):
        World(program, [queue[::-1] for queue in queues], seed=0).run()
