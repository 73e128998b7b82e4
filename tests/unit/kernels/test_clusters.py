"""How products are shared out to pairs of thread blocks, and launched. The kernel itself is tested on a GPU."""

import ctypes
from importlib import resources
from unittest import mock

import pytest
import torch

from meshmuon.kernels import agenda, clusters, cuda, landing
from meshmuon.kernels.agenda import (
    Item,
    Product,
    Result,
    Second,
    even_sets,
    list_pairs,
    pair_up,
    set_size,
    tiles_before,
)
from meshmuon.kernels.configs import choose_config
from meshmuon.kernels.landing import Arguments, Landing
from meshmuon.kernels.tables import FIELDS, Slot, TensorTable

SHARED, IDLE, SHORT, SHIFT = 1, 2, 16, 8


def square(m):
    return Result(m, m, mirrored=True)


@pytest.mark.parametrize("batch", [1, 2, 3, 8])
@pytest.mark.parametrize("m", [8, 128, 136, 256, 1000, 1408, 2048])
def test_every_tile_of_the_lower_triangle_is_computed_once(batch, m):
    pairs = pair_up(range(batch), square(m))
    found = [item[:3] for pair in pairs for item in pair if not item.flags & IDLE]
    sides = -(-m // 128)
    wanted = {(z, 2 * i, 2 * j) for z in range(batch) for i in range(sides) for j in range(i + 1)}
    assert len(found) == len(wanted) == batch * square(m).tiles
    assert set(found) == wanted


@pytest.mark.parametrize("shape", [(8, 8), (128, 640), (200, 328), (1408, 2048)])
def test_every_tile_of_a_whole_product_is_computed_once(shape):
    result = Result(*shape, mirrored=False)
    found = [item[:3] for pair in pair_up(range(3), result) for item in pair if not item.flags & IDLE]
    rows, cols = (-(-side // 128) for side in shape)
    wanted = {(z, 2 * i, 2 * j) for z in range(3) for i in range(rows) for j in range(cols)}
    assert len(found) == len(wanted) == 3 * result.tiles
    assert set(found) == wanted


@pytest.mark.parametrize("result", [square(136), square(1408), square(2048), Result(768, 3072, False)], ids=str)
def test_pairs_that_share_have_the_same_columns(result):
    shared = [pair for pair in pair_up(range(3), result) if pair[0].flags & SHARED]
    assert shared
    for first, second in shared:
        assert second.flags == first.flags
        assert (first.matrix, first.col) == (second.matrix, second.col)
        assert first.row != second.row


def test_most_pairs_share():
    pairs = pair_up(range(4), square(2048))
    assert sum(first.flags & SHARED for first, _ in pairs) > 0.9 * len(pairs)


def test_at_most_one_block_idles():
    for batch in range(1, 5):
        idle = [item for pair in pair_up(range(batch), square(384)) for item in pair if item.flags & IDLE]
        assert len(idle) <= 1


def listed(*arguments):
    """The pairs of a table, as what they were made of."""
    rows = list_pairs(*arguments).reshape(-1, 4).tolist()
    items = [Item(matrix, place & 0xFFFF, place >> 16, flags) for matrix, place, flags, _ in rows]
    return list(zip(items[::2], items[1::2], strict=True))


def test_a_shape_is_cut_once_whatever_the_product_and_the_batch():
    first = listed(2, [square(648), square(648)], 5)
    before = agenda._pattern.cache_info().misses
    assert listed(3, [square(648)] * 4, 5) != first and agenda._pattern.cache_info().misses == before
    assert {item.flags >> SHIFT for pair in listed(3, [square(648)] * 4, 5) for item in pair} == {0, 1, 2, 3}


def test_places_that_have_no_room_in_a_table_are_not_asked_for():
    with mock.patch.object(clusters, "why_impossible", return_value=""):
        wide = Result(64, 2 * agenda.MOST_ROWS, mirrored=False)
        assert not clusters.can_run(torch.device("cuda", 0), torch.float16, batch=1, results=(wide,))
    pairs = listed(1, [Result(64, agenda.MOST_ROWS, mirrored=False)], 5)
    assert max(item.col for pair in pairs for item in pair) == 2**15 - 2


def test_a_table_lists_all_pairs_in_order():
    assert listed(4, [square(640)], 5) == pair_up(range(4), square(640))
    wide = Result(640, 9000, mirrored=False)
    assert listed(2, [wide], 66) == pair_up(range(2), wide)


def halves(item):
    """Where the boxes of 64 rows are that a thread block computes."""
    rows = 0 if item.flags & IDLE else 1 if item.flags & SHORT else 2
    return [(item.matrix, item.row + i, item.col) for i in range(rows)]


# Left for the last round of 66 clusters: 36 tiles, 36, 21, 21, 4, 12, 3, 66; in the only round 1, 9, 66.
HALVED = [(1, 3072), (1, 3000), (1, 2176), (1, 2088), (1, 2048), (4, 1000), (3, 1096), (33, 384)]
HALVED += [(1, 8), (3, 136), (11, 384)]
WHOLE = [(2, 1408), (12, 1408), (200, 8), (1, 2688)]  # none, none; 68 and 99, which is more than there are clusters


@pytest.mark.parametrize(("batch", "m"), [*HALVED, *WHOLE])
def test_every_half_of_a_tile_is_computed_once(batch, m):
    pairs = listed(batch, [square(m)], 66)
    found = [half for pair in pairs for item in pair for half in halves(item)]
    tiles = -(-m // 128)
    wanted = {(z, i, 2 * j) for z in range(batch) for j in range(tiles) for i in range(2 * j, 2 * tiles)}
    assert len(found) == len(wanted) == 2 * batch * square(m).tiles
    assert set(found) == wanted


@pytest.mark.parametrize(("batch", "m"), HALVED)
def test_a_last_round_of_few_tiles_takes_half_as_long(batch, m):
    pairs, rounds, left = listed(batch, [square(m)], 66), *divmod(batch * square(m).tiles, 132)
    assert len(pairs) == rounds * 66 + left
    full, last = pairs[: rounds * 66], pairs[rounds * 66 :]
    assert full == pair_up(range(batch), square(m))[: rounds * 66]
    assert not any(item.flags & (IDLE | SHORT) for pair in full for item in pair), "every block has a whole tile"
    for upper, lower in last:
        assert upper.flags == lower.flags == SHARED | SHORT
        assert lower == upper._replace(row=upper.row + 1)
        assert upper.row % 2 == 0


@pytest.mark.parametrize(("batch", "m"), WHOLE)
def test_a_last_round_of_none_or_many_tiles_has_whole_ones(batch, m):
    assert listed(batch, [square(m)], 66) == pair_up(range(batch), square(m))


def test_only_a_symmetric_product_alone_is_cut_in_halves():
    """What waits for others counts whole tiles, and takes boxes turned, as products that are not symmetric do."""
    for results in ([square(2048)] * 2, [Result(2048, 136, mirrored=False)]):
        assert not any(item.flags & SHORT for pair in listed(1, results, 66) for item in pair)


PROGRAM = [square(300), square(300), Result(300, 500, mirrored=False)] * 2


@pytest.mark.parametrize("clusters_at_once", [1, 3, 66])
@pytest.mark.parametrize("batch", [1, 2, 7, 100])
def test_nobody_waits_for_tiles_that_come_later(batch, clusters_at_once):
    """Or clusters could wait for each other for ever, who take pairs in the order of the list."""
    before = tiles_before(PROGRAM)
    written = dict.fromkeys(range(batch), 0)
    for pair in listed(batch, PROGRAM, clusters_at_once):
        real = [item for item in pair if not item.flags & IDLE]
        assert all(written[item.matrix] >= before[item.flags >> SHIFT] for item in real)
        for item in real:
            written[item.matrix] += 1
    assert set(written.values()) == {sum(result.tiles for result in PROGRAM)}


def test_both_blocks_of_a_pair_are_in_the_same_product():
    pairs = listed(7, PROGRAM, 3)  # they share the places in shared memory, and so have to need as many
    assert all(one.flags >> SHIFT == other.flags >> SHIFT for one, other in pairs)


def test_sets_are_as_small_as_the_distance_between_two_products_of_a_matrix_allows():
    squares = [square(768)] * 3
    size = set_size(48, squares, 66)
    assert (size - 1) * 21 >= 2.5 * 132 > (size - 2) * 21
    assert set_size(48, [square(2048)] * 3, 66) < size
    assert set_size(5, squares, 66) == 5, "too few: all of them"
    assert set_size(48, squares[:1], 66) == 48, "one product waits for nothing"


@pytest.mark.parametrize(("batch", "least", "sizes"), [(48, 7, [8] * 6), (50, 7, [7, 7, 7, 7, 7, 7, 8]), (5, 5, [5])])
def test_sets_are_of_one_size(batch, least, sizes):
    sets = even_sets(batch, least)
    assert sorted(map(len, sets)) == sizes
    assert [matrix for one in sets for matrix in one] == list(range(batch))


LONG = ((24, 768, 3072), (16, 512, 2048), (8, 2048, 8192), (4, 2048, 8192), (3, 4096, 14336), (24, 896, 4864))


def test_only_large_products_on_hopper_go_to_clusters():
    for shape in ((48, 1408, 1408), (12, 2048, 2048), (4, 4096, 4096), (3, 4096, 4096), (8, 2048, 8192)):
        assert choose_config("hopper", *shape, torch.float16).clusters
    assert not choose_config("hopper", 1, 1024, 1024, torch.float16).clusters
    few, more = (choose_config("hopper", 1, m, m, torch.float16) for m in (896, 1024))
    assert few.early and not more.early, "fewer tiles of 64x64 than multiprocessors"
    with_rest = {choose_config("hopper", *shape, torch.float16, rest=True) for shape in LONG}
    assert len(with_rest) == 1 < len({choose_config("hopper", *shape, torch.float16) for shape in LONG}), "one kernel"
    assert not choose_config("hopper", 8, 2048, 8192, torch.float32).clusters
    for architecture in ("blackwell", "ampere", "rocm", "other"):
        assert not choose_config(architecture, 8, 2048, 8192, torch.float16).clusters
    assert not clusters.can_run(torch.device("cpu"), torch.float16, batch=8, results=(square(2048),))
    assert clusters.describe(torch.device("cpu"), torch.float16).endswith(
        "stay with Triton and cuBLAS: not on a Hopper GPU"
    )


def test_a_kernel_may_begin_while_the_one_before_still_runs():
    """The launch says so, and the kernel waits before it touches anything that the one before may write or read."""
    driver = Recorder()
    arguments = (ctypes.c_void_p * 1)(0)
    launch = cuda.Launch(ctypes.c_void_p(5), 0, (132, 384, 1000), arguments)
    with mock.patch.object(cuda, "_driver", return_value=driver):
        launch(77)
    ((name, (config, function, given, extra)),) = driver.calls
    config = config._obj
    assert (name, function.value, given, extra) == ("cuLaunchKernelEx", 5, arguments, None)
    assert (list(config.sides), config.shared_bytes, config.stream) == ([132, 1, 1, 384, 1, 1], 1000, 77)
    assert config.attribute_count == 1
    assert (config.attributes[0].id, config.attributes[0].value[0]) == (6, 1)
    role = source().split("registers_give<40>")[1].split("registers_take<232>")[0]
    for touches in ("load_items(", "scout("):
        assert role.index("if (warp < 2) wait_for_kernel_before();") < role.index(touches)


def source():
    return resources.files("meshmuon.kernels").joinpath("clusters.cu").read_text(encoding="utf-8")


class Recorder:
    """A CUDA driver that does nothing but remember."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        def call(*arguments):
            self.calls.append((name, arguments))
            return 0

        return call


def in_words(product):
    """What the kernel reads of a product, by name."""
    words = {name: getattr(product, name) for name, _ in product._fields_ if name != "terms"}
    terms = [tuple(getattr(each, name) for name, _ in each._fields_) for each in product.terms]
    return {**words, "terms": terms[: 1 + product.twice]}


def told(product, *names):
    return tuple(product[name] for name in names)


def launched_programs(monkeypatch):
    """Stand in for the GPU; give what the kernel would read, at every launch."""
    driver, launched = Recorder(), []

    def bind(blocks, threads, arguments):
        def launch(stream):
            program = clusters._Program.from_address(arguments[0])
            kinds = (ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_int)
            *pointers, landing = list(arguments)[1:]
            numbers = [kind.from_address(address).value for kind, address in zip(kinds, pointers, strict=True)]
            products = [in_words(product) for product in program.products]
            landed_on = Arguments.from_address(landing)
            addresses = tuple(getattr(landed_on, name) for name in Arguments.NAMES)
            launched.append((blocks, threads, stream, products, numbers, arguments[0], addresses))

        return launch

    kernel = clusters._Kernel(mock.Mock(bind=bind), 5)
    monkeypatch.setattr(cuda, "_driver", lambda: driver)
    monkeypatch.setattr(clusters, "_kernel", lambda *_: kernel)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: mock.Mock(cuda_stream=7))
    return driver, launched


def test_a_launch_tells_the_kernel_sizes_coefficients_and_whether_to_add():
    with pytest.MonkeyPatch.context() as patch:
        driver, launched = launched_programs(patch)
        a, c = torch.zeros(2, 256, 500, dtype=torch.float16), torch.zeros(2, 256, 256, dtype=torch.float16)
        bound = clusters.ClusterLaunch([Product(0, 0, 1, 2, True)], [a, c, torch.empty_like(c)])
        bound.scaled(1.0, 2.0, 3.0)
        bound.scaled(4.0, 5.0, 6.0)
        clusters.ClusterLaunch([Product(0, 0, None, 1, True)], [a, torch.empty_like(c)]).scaled(1.0, 0.0, 0.0)
    assert launched[0][:3] == (10, 384, 7)
    first = launched[0][3][0]
    assert told(first, "a", "b", "c", "d", "mirrored", "added", "awaited", "twice") == (0, 0, 1, 2, 1, 1, 0, 0)
    assert told(first, "rows", "cols", "steps", "after") == (256, 256, 8, 0)
    assert told(first, "half_a", "half_b", "half_d") == (0, 0, 0)
    assert first["terms"] == [(1.0, 2.0, 0.0, 3.0)]
    assert launched[1][3][0] == {**first, "terms": [(4.0, 5.0, 0.0, 6.0)]}
    assert told(launched[2][3][0], "c", "d", "mirrored", "added") == (1, 1, 1, 0), "C's map is there, and not read"
    assert launched[0][4][1:] == [3, None, 2], "pairs, nothing that is counted for one product, matrices"
    boxes = [list(arguments[6]) for name, arguments in driver.calls if name == "cuTensorMapEncodeTiled"]
    assert boxes == [[64, 64, 1]] * 5
    addresses = [arguments[0].value for name, arguments in driver.calls if name == "cuTensorMapEncodeTiled"]
    assert not any(address % 64 for address in addresses)
    assert addresses[:3] == [launched[0][5] + 128 * i for i in range(3)]


def test_a_program_tells_what_each_product_waits_for():
    with pytest.MonkeyPatch.context() as patch:
        _, launched = launched_programs(patch)
        x = torch.zeros(3, 256, 640, dtype=torch.float16)
        r, product = x.new_empty(3, 256, 256), torch.empty_like(x)
        written = clusters.counters(x)
        products = [Product(0, 0, None, 1, True), Product(1, 0, None, 2, False), Product(2, 2, None, 1, True)]
        clusters.ClusterLaunch(products, [x, r, product], written)()
    _, _, _, described, pointers, _, landed_on = launched[0]
    assert not any(landed_on) and not any(product["lands"] for product in described)
    assert pointers[2:] == [written.data_ptr(), 3]
    assert written.tolist() == [0] * 4, "tiles of each matrix, and pairs"
    assert [told(one, "mirrored", "added", "awaited") for one in described[:3]] == [(1, 0, 1), (0, 0, 1), (1, 0, 0)]
    sizes = [told(one, "rows", "cols", "steps", "after") for one in described[:3]]
    assert sizes == [(256, 256, 10, 0), (256, 640, 4, 3), (256, 256, 10, 13)]


def test_a_product_tells_of_two_results_and_of_triangles():
    with pytest.MonkeyPatch.context() as patch:
        _, launched = launched_programs(patch)
        stacks = [torch.zeros(2, 256, 256, dtype=torch.float16) for _ in range(6)]
        second = Second(4, alpha=5.0, beta=6.0, delta=7.0, gamma=8.0)
        halves = {"half_a": True, "half_b": True, "half_d": True}
        terms = {"alpha": 1.0, "beta": 2.0, "delta": 3.0, "gamma": 4.0}
        products = [Product(0, 0, 1, 3, True, e=2, second=second, **terms, **halves), Product(3, 0, None, 5, False)]
        clusters.ClusterLaunch(products, stacks, clusters.counters(stacks[0]))()
    product = launched[0][3][0]
    assert told(product, "a", "b", "c", "e", "d", "second", "added", "twice") == (0, 0, 1, 2, 3, 4, 2, 1)
    assert told(product, "half_a", "half_b", "half_d") == (1, 1, 1)
    assert product["terms"] == [(1.0, 2.0, 3.0, 4.0), (5.0, 6.0, 7.0, 8.0)]


def table_for(batch, m, n, *, first=0, dtype=torch.float32):
    """A table of parameters whose directions stand one behind the other."""
    param = torch.zeros(batch, m, n, dtype=dtype)
    slot = Slot(
        param=param, buffer=param, grad=param, input_offset=0, direction_offset=first, padded=(m, n), turned=False
    )
    return TensorTable([slot])


@pytest.mark.parametrize(("cautious", "flag"), [(False, 1), (True, 2)])
def test_the_last_product_lands_on_parameters(cautious, flag):
    table, lr, decay = table_for(3, 256, 640), torch.ones(1), torch.ones(1)
    proceed = torch.ones((), dtype=torch.bool)
    with pytest.MonkeyPatch.context() as patch:
        _, launched = launched_programs(patch)
        x = torch.zeros(3, 256, 640, dtype=torch.float16)
        stacks = [x, x.new_empty(3, 256, 256), torch.empty_like(x)]
        products = [Product(0, 0, None, 1, True), Product(1, 0, None, 2, False)]
        launch = clusters.ClusterLaunch(products, stacks, clusters.counters(x), flag)
        for taker in (Landing(table, lr, decay, cautious, proceed), Landing(table, lr, None, cautious)):
            launch.onto(taker)
    assert [product["lands"] for product in launched[0][3][:3]] == [0, flag, 0]
    assert launched[0][-1] == tuple(tensor.data_ptr() for tensor in (table.entries, lr, decay, proceed))
    assert launched[1][-1] == (table.entries.data_ptr(), lr.data_ptr(), None, None), "nothing decays, nobody objects"


@pytest.mark.parametrize(
    ("product", "table"),
    [
        (Product(0, 1, None, 2, False), table_for(2, 256, 256)),
        (Product(0, 1, None, 2, False), table_for(3, 256, 256, first=8)),
        (Product(0, 1, None, 2, False), table_for(3, 256, 256, dtype=torch.bfloat16)),
        (Product(0, 1, None, 2, True), table_for(3, 256, 256)),
        (Product(0, 1, 1, 2, False), table_for(3, 256, 256)),
    ],
    ids=["too few", "not in order", "in 16 bits", "a triangle", "added to"],
)
def test_what_cannot_land_is_not_launched(product, table):
    taker = Landing(table, torch.ones(1), None)
    with pytest.MonkeyPatch.context() as patch:
        launched_programs(patch)
        stacks = [torch.zeros(3, 256, 256, dtype=torch.float16) for _ in range(3)]
        with pytest.raises(AssertionError):
            clusters.ClusterLaunch([product], stacks, lands=taker.flag).onto(taker)


def test_the_kernel_reads_the_table_as_it_is_written():
    fields = dict(pair.split(" = ") for pair in source().split("enum Field { ")[1].split(" }")[0].split(", "))
    fields = {name: int(number) for name, number in fields.items()}
    slot = Slot(
        param=torch.zeros(40, 64).mT[:24],
        buffer=torch.zeros(24, 40),
        grad=torch.zeros(24, 40),
        input_offset=0,
        direction_offset=0,
        padded=(24, 40),
        turned=True,
        scale=0.5,
    )
    (row,) = TensorTable([slot]).entries.tolist()
    assert fields["kFields"] == len(row) == FIELDS
    assert row[fields["kGradient"]] == slot.grad.data_ptr() and row[fields["kParameter"]] == slot.param.data_ptr()
    assert [row[fields[name]] for name in ("kRowStride", "kRows", "kCols", "kTurned")] == [1, 24, 40, 1]
    assert row[fields["kScale"]] == 0x3F000000, "the bits of 0.5"
    assert [name for name, _ in Arguments._fields_] == list(Arguments.NAMES)
    order = ["entries;", "*lr, *decay;", "proceed;"]
    assert sorted(order, key=source().split("struct Landing {")[1].index) == order
    assert f"kDecaysIfAgreed = {landing._LANDS_CAUTIOUSLY};" in source()


def test_a_product_tells_of_two_halves():
    with pytest.MonkeyPatch.context() as patch:
        _, launched = launched_programs(patch)
        x, high, rest = (torch.zeros(2, 256, 256, dtype=torch.float16) for _ in range(3))
        halves = Product(0, 0, None, 1, True, second=Second(2, alpha=2048.0), in_halves=True)
        clusters.ClusterLaunch([halves], [x, high, rest])()
    product = launched[0][3][0]
    assert told(product, "a", "b", "d", "second", "added", "twice") == (0, 0, 1, 2, 0, 2)
    assert [terms[0] for terms in product["terms"]] == [1.0, 2048.0]
    assert f"kTwoHalves = {clusters._TWO_HALVES};" in source()


@pytest.mark.parametrize(
    "wrong",
    [
        Product(0, 0, 1, 3, True, e=2, second=Second(4, 1.0, 1.0), in_halves=True),
        Product(0, 0, None, 3, True, second=Second(4, 1.0, gamma=1.0), in_halves=True),
        Product(0, 0, None, 3, True, gamma=1.0, second=Second(4, 1.0), in_halves=True),
        Product(0, 1, None, 3, False, second=Second(4, 1.0), in_halves=True),
        Product(0, 0, None, 3, True, in_halves=True),
        Product(0, 0, None, 3, True, e=2),
        Product(0, 0, 1, 3, True, second=Second(4, 1.0, 1.0, 0.0, 0.0)),
        Product(0, 0, 1, 3, False, e=2, second=Second(4, 1.0, 1.0, 0.0, 0.0)),
        Product(0, 1, None, 3, True, half_a=True),
        Product(0, 1, None, 3, False, half_d=True),
        Product(0, 1, None, 3, True, half_b=True),
        Product(0, 1, None, 3, True, half_d=True),
        Product(0, 1, 2, 3, False, e=4),
        Product(0, 1, None, 3, False, gamma=1.0),
        Product(0, 1, None, 1, True),
        Product(0, 0, 1, 3, True, e=2, second=Second(3, 1.0, 1.0, 0.0, 0.0)),
        Product(0, 0, 1, 3, True, e=2, second=Second(0, 1.0, 1.0, 0.0, 0.0)),
    ],
)
def test_what_the_kernel_cannot_do_is_not_launched(wrong):
    with pytest.MonkeyPatch.context() as patch:
        launched_programs(patch)
        stacks = [torch.zeros(2, 256, 256, dtype=torch.float16) for _ in range(5)]
        with pytest.raises(AssertionError):
            clusters.ClusterLaunch([wrong], stacks)


def test_the_program_has_the_same_size_here_and_there():
    lines = source()
    most = {
        name: int(lines.split(f"{name} = ")[1].split(";")[0].split(",")[0]) for name in ("kMostMaps", "kMostProducts")
    }
    assert most == {"kMostMaps": clusters.MOST_STACKS, "kMostProducts": clusters.MOST_PRODUCTS}
    assert f"kShared = {agenda._SHARED}, kIdle = {agenda._IDLE};" in lines
    assert f"kShort = {agenda._SHORT};" in lines
    taken = [int(lines.split(f"{name} = ")[1].split(";")[0].split(",")[0]) for name in ("kEnd", "kPastEnd")]
    assert len({agenda._SHARED, agenda._IDLE, agenda._SHORT, *taken}) == 5
    assert "(place & 0xFFFF) * 64, (place >> 16) * 64" in lines and agenda.TILE == 64 * agenda._BOXES
    assert f"kProductShift = {agenda._PRODUCT_SHIFT};" in lines
    slots, ahead = (int(lines.split(f"constexpr int {name} = ")[1].split(";")[0]) for name in ("kSlots", "kAhead"))
    ring, staging, mail, progress = slots * (2**15 + 16), 4 * 2**13, ahead * (16 + 16), 4
    assert ring + staging + mail + progress <= clusters._SHARED_BYTES <= 227 * 1024
    assert ctypes.sizeof(clusters._Described) == 64
    assert ctypes.sizeof(clusters._Program) == 128 * 12 + 64 * 39
    rest = 4 * 8 + ctypes.sizeof(Arguments)
    assert ctypes.sizeof(clusters._Program) + rest <= 4096, "what a kernel can be given by value"
