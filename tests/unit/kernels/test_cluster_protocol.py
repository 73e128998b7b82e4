"""The hand-shakes of clusters.cu, played through in Python with loads that arrive in any order and threads in any turn.

What is checked: nothing waits for ever, and every product and every sum reads the operands that are meant for it, after
they were written. The model follows clusters.cu line by line; whoever changes one changes the other.
"""

import random
from dataclasses import dataclass, field
from importlib import resources
from typing import NamedTuple

import pytest

from meshmuon.kernels.agenda import Result, list_pairs, tiles_before

SLOTS, AHEAD, RANKS, GROUPS, BOXES = 6, 4, 2, 2, 2
READERS = RANKS * 4  # a loader, a scout, a group and one that stores


class Step(NamedTuple):
    """A product, as a tile of it goes through a block."""

    steps: int
    added: int = 0  # C, or C and E
    after: int = 0
    awaited: bool = False
    results: int = 1

    @property
    def slots(self):
        return self.steps + self.added


class Tile(NamedTuple):
    matrix: int = 0
    product: int = 0
    shared: bool = False
    idle: bool = False
    end: bool = False
    past_end: bool = False


class Item(NamedTuple):
    """A tile as it is sent: how many came before it, and where in the ring it begins."""

    number: int
    position: int
    tile: Tile


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
        self.sent = [Barrier(1) for _ in range(AHEAD)]
        self.received = [Barrier(READERS) for _ in range(AHEAD)]  # only the first block's count
        self.items = [None] * AHEAD
        self.progress = 0
        self.turns, self.free, self.staged = (Flags([0] * GROUPS) for _ in range(3))
        self.staging = [None] * GROUPS


class Flags(list):
    """Named barriers on which one side arrives and the other one waits: nobody may arrive twice before."""

    def __setitem__(self, place, value):
        assert 0 <= value <= 1, "arrived twice"
        super().__setitem__(place, value)


class World:
    """Clusters of two blocks, each with a loader, a scout, two groups and two that store.

    They are generators that give up control wherever hardware may wait, with what they wait for.
    """

    def __init__(
        self,
        program,
        pairs,
        *,
        seed,
        clusters=1,
        slow=(),
        late_wait=False,
        turns=True,
        scouts=True,
        counts_early=False,
        hasty=False,
        in_turn=False,
    ):
        self.program, self.pairs, self.clusters = program, pairs, clusters
        self.late_wait, self.turns, self.scouts, self.counts_early = late_wait, turns, scouts, counts_early
        self.hasty, self.in_turn = hasty, in_turn
        self.slow = slow  # parts that arrive only when nothing else can happen
        self.random = random.Random(seed)
        self.flying = []  # loads and stores on their way
        self.read, self.taken = 0, 0
        self.counted, self.landed = {}, {}  # tiles of each matrix that are said to be written, and that are

    def run(self, *, absent=0):
        """Let all go on until nothing is left to do. Clusters that are absent never come."""
        actors, everything = [], []
        for cluster in range(self.clusters - absent):
            blocks = [Block() for _ in range(RANKS)]
            everything += blocks
            for rank in range(RANKS):
                actors += [self.loader(blocks, rank), self.scout(blocks, rank, cluster)]
                for number in range(GROUPS):
                    actors += [self.group(blocks, rank, number), self.storer(blocks, rank, number)]
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
        for block in everything:
            assert not any([*block.turns, *block.staged, *block.free]), "somebody arrived for nobody"

    def take(self, cluster, number):
        if self.in_turn:
            return cluster + number * self.clusters
        self.taken += 1
        return self.taken - 1

    def send(self, blocks, number, position, tiles):
        slot = number % AHEAD
        for block, tile in zip(blocks, tiles, strict=True):
            item = Item(number, position, tile)

            def land(block=block, item=item):
                block.items[slot] = item
                block.sent[slot].complete()

            self.flying.append(("expect", lambda block=block: block.sent[slot].arrive(expected=1)))
            self.flying.append(("item", land))

    def receive(self, blocks, rank, number):
        block, slot, parity = blocks[rank], number % AHEAD, number // AHEAD % 2
        yield lambda: block.sent[slot].passed(parity)
        if self.hasty:  # who says too early that it has read may be told the next thing
            blocks[0].received[slot].arrive()
            yield lambda: True
        item = block.items[slot]
        assert item.number == number, "another item"
        if not self.hasty:
            yield lambda: True
            assert block.items[slot] is item, "overwritten"
            blocks[0].received[slot].arrive()
        return item

    def load(self, blocks, slot, part, tag):
        def land():
            for block in blocks:
                block.contents[slot][part] = tag
                block.full[slot].complete()

        self.flying.append((part, land))

    def loader(self, blocks, rank):
        block, position, index = blocks[rank], 0, 0
        while not (tile := (yield from self.receive(blocks, rank, index)).tile).end:
            product = self.program[tile.product]
            if self.scouts and not tile.idle:
                yield lambda index=index: block.progress > index
            if not tile.idle:
                assert self.landed.get(tile.matrix, 0) >= product.after, "read before it was written"
            for step in range(product.slots):
                slot, parity = position % SLOTS, position // SLOTS % 2
                yield lambda slot=slot, parity=parity: block.empty[slot].passed(parity ^ 1)
                position += 1
                if tile.idle:
                    block.full[slot].arrive()
                elif step >= product.steps:
                    block.full[slot].arrive(expected=1)
                    self.load([block], slot, "c", (index, step, rank))
                else:
                    block.full[slot].arrive(expected=3)
                    self.load([block], slot, "a", (index, step, rank))
                    if tile.shared:
                        self.load(blocks, slot, f"b{rank}", (index, step))
                    else:
                        self.load([block], slot, "b0", (index, step))
                        self.load([block], slot, "b1", (index, step))
            index += 1

    def scout(self, blocks, rank, cluster):
        block, index, position = blocks[rank], 0, 0
        pair = self.take(cluster, 0) if rank == 0 else None
        while True:
            if rank == 0:
                yield self.all_have_received(block, index)
                if pair < len(self.pairs):
                    tiles = self.pairs[pair]
                    self.send(blocks, index, position, tiles)
                    product = self.program[tiles[0].product]
                    position = (position + product.slots) % (2 * SLOTS)
                    pair = self.take(cluster, index + 1)
                else:
                    self.send(blocks, index, 0, [Tile(end=True)] * RANKS)
                    yield self.all_have_received(block, index + 1)
                    self.send(blocks, index + 1, 0, [Tile(past_end=True)] * RANKS)
            tile = (yield from self.receive(blocks, rank, index)).tile
            if tile.end:
                return
            after = self.program[tile.product].after
            if after and not tile.idle:
                yield lambda tile=tile, after=after: self.counted.get(tile.matrix, 0) >= after
            index += 1
            block.progress = index
            yield lambda: True

    def all_have_received(self, block, index):
        slot, parity = index % AHEAD, index // AHEAD % 2
        return lambda: block.received[slot].passed(parity ^ 1)

    def group(self, blocks, rank, number):
        block, index = blocks[rank], number - GROUPS
        while True:
            index += GROUPS
            _, position, tile = yield from self.receive(blocks, rank, index)
            if index and self.turns and not tile.past_end:
                yield lambda: block.turns[number] > 0
                block.turns[number] -= 1
            if tile.end or tile.past_end:
                break
            product = self.program[tile.product]
            unread = []
            for step in range(product.slots if tile.idle else product.steps):
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
            behind = [(position + i, product.steps + i) for i in range(0 if tile.idle else product.added)]
            if not self.late_wait:
                for place, _ in behind:
                    yield from self.wait_full(block, place)
            block.turns[1 - number] += 1
            if tile.idle:
                continue
            yield lambda: True
            self.finish(blocks, *unread.pop(), index, rank)
            for place, step in behind:  # the upper halves of C and E, then the lower ones
                yield from self.wait_full(block, place)
                slot, meant = place % SLOTS, (index, step, rank)
                assert block.contents[slot].get("c") == meant, "another tile's C"
                yield lambda: True  # it is read
                assert block.contents[slot].get("c") == meant, "C was overwritten"
                self.release(blocks, slot)
            for box in range(product.results * BOXES):
                yield lambda: block.free[number] > 0
                block.free[number] -= 1
                block.staging[number] = (index, box)
                yield lambda: True
                block.staged[number] += 1
        yield lambda: block.free[number] > 0
        block.free[number] -= 1

    def wait_full(self, block, place):
        slot, parity = place % SLOTS, place // SLOTS % 2
        yield lambda: block.full[slot].passed(parity)

    def storer(self, blocks, rank, number):
        block, index = blocks[rank], number - GROUPS
        block.free[number] += 1
        while True:
            index += GROUPS
            tile = (yield from self.receive(blocks, rank, index)).tile
            if tile.end or tile.past_end:
                return
            product = self.program[tile.product]
            if tile.idle:
                continue
            stored, boxes = [], product.results * BOXES
            for box in range(boxes):
                yield lambda: block.staged[number] > 0
                block.staged[number] -= 1
                assert block.staging[number] == (index, box), "another box"
                self.flying.append(("d", lambda stored=stored, box=box: stored.append(box)))
                yield lambda: True  # it is read at some later time
                assert block.staging[number] == (index, box), "a box was overwritten"
                block.free[number] += 1
            if not self.counts_early:
                yield lambda stored=stored, boxes=boxes: len(stored) == boxes
            if product.awaited:
                self.landed[tile.matrix] = self.landed.get(tile.matrix, 0) + (len(stored) == boxes)
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


def test_the_model_is_as_large_as_the_kernel():
    source = resources.files("meshmuon.kernels").joinpath("clusters.cu").read_text(encoding="utf-8")
    for line in (f"kSlots = {SLOTS};", f"kAhead = {AHEAD};", f"barrier_init(ring.empty + 8 * i, {RANKS});"):
        assert line in source


SHARED, APART = (Tile(shared=True),) * 2, (Tile(),) * 2
PAIRS = [SHARED, SHARED, APART, SHARED, APART, SHARED, SHARED, (Tile(), Tile(idle=True))]


@pytest.mark.parametrize(("added", "results"), [(0, 1), (1, 1), (2, 1), (2, 2)])
@pytest.mark.parametrize("steps", [1, 4, 5, 6, 7, 13])
@pytest.mark.parametrize("count", [0, 1, 2, 8])
@pytest.mark.parametrize("in_turn", [False, True])
def test_everything_is_read_once_and_in_time(steps, added, results, count, in_turn):
    slows = [(), (), (), ("c",), ("a",), ("b0",), ("b1",), ("b0", "c"), ("d",), ("item",), ("expect",)]
    for seed, slow in enumerate(slows):
        pairs = PAIRS[len(PAIRS) - count :]
        world = World(
            [Step(steps, added, results=results)], pairs, seed=seed, slow=slow, clusters=1 + seed % 3, in_turn=in_turn
        )
        world.run()
        assert world.read == max(0, RANKS * count - 1) * steps


@pytest.mark.parametrize("added", [1, 2])
def test_the_turn_may_not_go_on_before_c_is_there(added):
    with pytest.raises(AssertionError, match="of another step"):
        World([Step(7, added=added)], PAIRS, seed=0, slow=["c"], late_wait=True).run()


@pytest.mark.parametrize("added", [1, 2])
def test_without_turns_slots_are_taken_twice(added):
    with pytest.raises(AssertionError, match="of another step"):
        World([Step(7, added=added)], PAIRS, seed=0, turns=False).run()


def test_who_says_too_early_that_it_has_read_misses_an_item():
    """As a load from shared memory does that waits for the tensor cores."""
    with pytest.raises(AssertionError, match="another item"):
        World([Step(1)], PAIRS * 100, seed=0, hasty=True).run()


def program_of(batch, clusters):
    """A standard step and a half on matrices of 3x5 tiles, in the order of the agenda."""
    results = [Result(384, 384, True), Result(384, 384, True), Result(384, 640, False), Result(384, 384, True)]
    kinds = [(10, 0), (6, 2), (6, 0), (10, 1)]
    after = tiles_before(results)
    program = [Step(*kind, after[i], awaited=i < 3, results=1 + (i == 1)) for i, kind in enumerate(kinds)]
    rows = list_pairs(batch, results, clusters).tolist()
    pairs = [tuple(Tile(matrix, f >> 8, bool(f & 1), bool(f & 2)) for matrix, _, f, _ in row) for row in rows]
    products = sum(batch * result.tiles * kind[0] for result, kind in zip(results, kinds, strict=True))
    return program, pairs, products


@pytest.mark.parametrize(("batch", "clusters"), [(1, 1), (1, 3), (2, 2), (3, 4), (5, 3)])
def test_products_that_follow_each_other_wait_for_each_other_and_not_for_ever(batch, clusters):
    program, pairs, products = program_of(batch, clusters)
    for seed, slow in enumerate([(), (), (), ("d",), ("a",), ("b0", "d"), ("item",)]):
        world = World(program, pairs, clusters=clusters, seed=seed, slow=slow)
        world.run()
        assert world.read == products


@pytest.mark.parametrize("absent", [1, 3])
def test_clusters_that_never_come_are_not_missed(absent):
    """Something else may hold their part of the GPU until we are done."""
    program, pairs, products = program_of(3, 4)
    for seed in range(3):
        world = World(program, pairs, clusters=4, seed=seed)
        world.run(absent=absent)
        assert world.read == products
    with pytest.raises(AssertionError, match="everybody waits"):
        World(program, pairs, clusters=4, seed=0, in_turn=True).run(absent=absent)


def test_without_a_scout_products_are_read_too_early():
    program, pairs, _ = program_of(3, 4)
    with pytest.raises(AssertionError, match="before it was written"):
        World(program, pairs, clusters=4, seed=0, scouts=False).run()


def test_a_tile_may_not_be_counted_before_it_is_stored():
    program, pairs, _ = program_of(3, 4)
    with pytest.raises(AssertionError, match="before it was written"):
        World(program, pairs, clusters=4, seed=0, slow=["d"], counts_early=True).run()


def test_who_waits_for_a_later_tile_waits_for_ever():
    program, pairs, _ = program_of(3, 4)
    with pytest.raises(AssertionError, match="everybody waits"):
        World(program, pairs[::-1], clusters=4, seed=0).run()
