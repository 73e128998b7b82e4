"""Kernels are compared with torch before they are used: which, when, and on which tiles."""

import importlib
import sys
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from meshmuon import Muon, Orthogonalizer
from meshmuon.kernels import dispatch, elementwise, hopper, problems, self_check
from meshmuon.kernels.agenda import list_pairs
from meshmuon.kernels.configs import TileConfig, choose_config
from meshmuon.kernels.dispatch import Dispatch
from meshmuon.kernels.few_tiles import CUTS, choose_cut
from meshmuon.kernels.symmetric_launches import REST_SCALE
from meshmuon.kernels.symmetric_matmul import FEW, HALVES, POINTERS, QUADRATIC, TMA
from meshmuon.kernels.whole_matmul import WHOLE
from meshmuon.polar import recipe
from meshmuon.polar.coefficients import resolve_schedule

module = importlib.import_module("meshmuon.kernels.symmetric_matmul")  # not the function of that name
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def test_a_wrong_kernel_is_refused_by_name():
    self_check.check_kernels.__wrapped__(torch.device("cpu"), torch.float16)
    right = self_check.CHECKS["apply_update"]

    def wrong(device, dtype):
        got, expected = right(device, dtype)
        return got * 1.01, expected

    sabotaged = mock.patch.dict(self_check.CHECKS, {"apply_update": wrong})
    with sabotaged, pytest.raises(RuntimeError, match=r"kernel apply_update.*off by"):
        self_check.check_kernels.__wrapped__(torch.device("cpu"), torch.float16)


def test_a_rest_that_is_wrong_is_refused():
    assert self_check.check_kernel(HALVES, CPU, torch.float16) < 1.0
    with mock.patch.object(problems, "REST_SCALE", 1.0), pytest.raises(RuntimeError, match="in halves"):
        self_check.check_kernel(HALVES, CPU, torch.float16)


RESTS = {
    "right": lambda taken: taken * REST_SCALE,
    "nothing": lambda taken: 0 * taken,
    "unscaled": lambda taken: taken,
    "of the other sign": lambda taken: -taken * REST_SCALE,
    "of another tile": lambda taken: taken.roll(64, -1) * REST_SCALE,
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("mistake", RESTS)
def test_a_rest_is_checked_in_every_dtype_that_has_one(mistake, dtype):
    def multiply(x, *, rest):
        total = torch.bmm(x.float(), x.float().mT)
        rest.copy_(RESTS[mistake](total - total.to(dtype).float()))
        return total.to(dtype)

    with mock.patch.object(problems, "symmetric_matmul", multiply):
        if mistake == "right":
            assert self_check.check_kernel(HALVES, CPU, dtype) < 0.1
        else:
            with pytest.raises(RuntimeError, match="in halves"):
                self_check.check_kernel(HALVES, CPU, dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_result_that_is_not_finite_is_refused(dtype):
    """What rounding took is expected from the result: where that is infinite, so is the bound."""

    def multiply(x, *, rest):
        rest.zero_()
        return torch.bmm(x.float(), x.float().mT).to(dtype).fill_(float("inf"))

    with mock.patch.object(problems, "symmetric_matmul", multiply), pytest.raises(RuntimeError, match="in halves"):
        self_check.check_kernel(HALVES, CPU, dtype)


def test_in_fp32_rounding_takes_nothing():
    assert self_check.check_kernel(HALVES, CPU, torch.float32) < 1.0


@pytest.mark.parametrize(("name", "launch"), [(TMA, "TmaLaunch"), (POINTERS, "launch_pointers")])
def test_tiles_are_checked_where_other_kernels_would_be_chosen(name, launch):
    anything = TileConfig(64, 64, 4, 3, tensor_memory=True, clusters=True, few=True)
    with (
        mock.patch.object(problems, "choose_config", return_value=anything),
        mock.patch.object(module.clusters, "can_run", return_value=True),
        mock.patch.object(module.few_tiles, "can_run", return_value=True),
        mock.patch.object(module, launch, wraps=getattr(module, launch)) as launched,
    ):
        assert self_check.check_kernel(name, CPU, torch.float16) < 1.0
    kinds = {(call.args[1].stride(1) % 8 == 0, call.args[2] is None) for call in launched.mock_calls}
    assert kinds == {(True, True), (name == TMA, False)}, "Triton's code differs for all of them"


def test_tiles_through_tma_are_checked_in_both_sizes_of_the_table():
    large, small = (choose_config("hopper", *shape, torch.float16) for shape in (problems.STACK, problems.SMALL_TILES))
    assert (large.block, small.block) == (128, 64) and small.tensor_memory and not (small.few or small.clusters)


def checked_by(config, *, clusters=False, few=False, rest=False, aligned=True):
    """By which problem a product's kernel is compared before its first use on a GPU."""
    a = torch.empty(1, 72, 40 if aligned else 39, dtype=torch.float16)
    d = torch.empty(1, 72, 72, dtype=torch.float16)
    with (
        mock.patch.object(self_check, "runs_here", return_value=True),
        mock.patch.object(self_check, "check_alone") as checked,
        mock.patch.object(module.clusters, "can_run", return_value=clusters),
        mock.patch.object(module.few_tiles, "can_run", return_value=few),
        mock.patch.object(module.clusters, "ClusterLaunch"),
        mock.patch.object(module.few_tiles, "FewLaunch"),
    ):
        module._bind(config, (a, None, None, d, d.clone() if rest else None))
    ((name, device, dtype),) = (call.args for call in checked.mock_calls)
    assert (device, dtype) == (CPU, torch.float16)
    return name


def test_whatever_takes_a_product_has_been_checked():
    tma, pointers = TileConfig(64, 64, 4, 3, tensor_memory=True), TileConfig(64, 64, 4, 3)
    assert checked_by(pointers) == checked_by(tma, aligned=False) == POINTERS
    assert checked_by(tma) == TMA
    assert checked_by(replace(tma, few=True), few=True) == FEW
    assert checked_by(replace(tma, few=True), few=False) == TMA
    assert checked_by(replace(tma, clusters=True), clusters=True) == QUADRATIC
    assert checked_by(replace(tma, clusters=True, few=True), clusters=True, few=True, rest=True) == HALVES
    assert checked_by(pointers, rest=True) == HALVES
    assert {QUADRATIC, FEW, HALVES, TMA, POINTERS} <= set(self_check.CHECKS)


def launch_by_torch(products, stacks, written):
    """Stand in for a launch of several products."""
    assert written is not None

    def launch():
        for product in products:
            b = stacks[product.b].double()
            result = product.alpha * torch.bmm(stacks[product.a].double(), b.mT if product.mirrored else b)
            stacks[product.d].copy_(result)

    return launch


def test_of_products_that_follow_each_other_the_last_ones_count():
    name, device = "one product after the other", torch.device("cpu")
    as_on_a_gpu = mock.patch.object(problems, "SMALL_STACK", problems.STACK)
    with as_on_a_gpu, mock.patch.object(self_check.clusters, "can_run", return_value=True) as asked:
        with mock.patch.object(self_check.clusters, "ClusterLaunch", launch_by_torch):
            assert self_check.check_kernel(name, device, torch.float16) < 1.0
        pairs = list_pairs(problems.STACK[0], asked.call_args.kwargs["results"], 66)  # clusters of an H200
        assert len(pairs) > 8 * 66, "clusters take more than they know ahead"
        tired = mock.patch.object(self_check.clusters, "ClusterLaunch", lambda p, *rest: launch_by_torch(p[:-2], *rest))
        with tired, pytest.raises(RuntimeError, match="one product after the other"):
            self_check.check_kernel(name, device, torch.float16)


def test_a_kernel_that_is_first_used_in_a_captured_graph_is_refused_in_words():
    """Else CUDA says that an operation is not permitted, and not what to do."""
    capturing = mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True)
    with capturing, pytest.raises(RuntimeError, match=r"in halves.*CUDA graph.*Run what you capture once before"):
        self_check.check_before_use(HALVES, GPU, torch.float16)


def test_sums_of_squares_that_are_wrong_are_refused():
    name, right = "update_momentum (norms)", elementwise.update_momentum
    assert self_check.check_kernel(name, CPU, torch.float16) < 1.0

    def wrong(*arguments, partials, **keywords):
        right(*arguments, partials=partials, **keywords)
        partials.mul_(1.001)

    with mock.patch.object(elementwise, "update_momentum", wrong), pytest.raises(RuntimeError, match="norms"):
        self_check.check_kernel(name, CPU, torch.float16)


@pytest.mark.parametrize("rest", [False, True])
def test_products_are_checked_in_the_tiles_that_train(rest):
    checked = choose_config("hopper", *problems.STACK, torch.float16, rest=rest)
    assert checked.clusters
    for shape in ((24, 768, 3072), (32, 1408, 2048), (8, 2048, 2048)):
        assert choose_config("hopper", *shape, torch.float16, rest=rest) == checked
    assert choose_config("hopper", 48, 144, 208, torch.float16, rest=rest) != checked, "a smaller stack is no witness"


def test_products_of_few_tiles_are_checked_in_tiles_of_every_size():
    found = {rows: choose_cut(1, rows, same=True, multiprocessors=132) for rows in problems.FEW_TILES}
    assert {cut for cut, _ in found.values()} == set(CUTS)
    assert {block.paired for _, blocks in found.values() for block in blocks} == {False, True}
    assert all(choose_config("hopper", 1, rows, 208, torch.float16).few for rows in found)


def test_where_few_tiles_can_run_all_of_them_are_compared():
    seen = []

    def all_terms(x, c):
        seen.append(tuple(x.shape))
        return c, c.double()

    possible = mock.patch.object(problems, "why_impossible", return_value="")
    with possible, mock.patch.object(problems, "_all_terms", all_terms):
        got, expected = self_check.CHECKS[FEW](CPU, torch.float32)
    assert seen == [(1, rows, 208) for rows in problems.FEW_TILES]
    assert got.numel() == expected.numel() == sum(rows * rows for rows in problems.FEW_TILES)


def test_the_kernel_that_takes_longest_to_compile_is_begun_first_and_checked_last():
    happened = []
    begin = mock.patch.object(self_check.clusters, "begin_to_compile", side_effect=lambda *_: happened.append("begun"))
    check = mock.patch.object(self_check, "check_kernel", side_effect=lambda name, *_: happened.append(name))
    with begin, check:
        self_check.check_kernels.__wrapped__(GPU, torch.float16)
    by_clusters = ["a product in halves", "one product after the other", "steps where directions are computed"]
    assert happened[0] == "begun" and happened[-3:] == by_clusters
    assert set(happened[1:]) == set(self_check.CHECKS) - {"measure", FEW, HALVES, TMA, POINTERS, WHOLE}


def test_in_fp32_a_gpu_is_asked_for_whole_products_alone():
    with mock.patch.object(self_check, "check_kernel") as check:
        self_check.check_kernels.__wrapped__(GPU, torch.float32)
    elementwise = {"peaks", "update_momentum", "update_momentum (norms)", "normalise", "apply_update"}
    assert {call.args[0] for call in check.mock_calls} == elementwise
    with (
        mock.patch.object(recipe, "check_kernels_ahead") as ahead,
        mock.patch.object(recipe, "is_possible", return_value=False),
        mock.patch.object(dispatch, "architecture_of", return_value="hopper"),
        mock.patch.object(dispatch, "is_interpreted", return_value=False),
    ):
        small = choose(64, 256)
    assert (small.kernels.products, small.dtype, small.input_dtype) == ("whole", torch.float32, torch.float32)
    assert ahead.mock_calls == [mock.call(GPU, torch.float32), mock.call(GPU, torch.float32, alone=WHOLE)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_element_wise_kernels_are_checked_on_what_arrives(dtype):
    with mock.patch.object(elementwise, "update_momentum", wraps=elementwise.update_momentum) as update:
        assert self_check.check_kernel("update_momentum", CPU, dtype) < 1.0
    assert update.call_args.args[1].dtype == (torch.float32 if dtype == torch.float32 else torch.bfloat16)


def test_a_wrong_whole_product_is_refused():
    assert self_check.check_kernel(WHOLE, CPU, torch.float16) < 1.0, "in fp32 also where others are not"
    with (
        mock.patch.object(problems, "whole_matmul", lambda a, b, **_: torch.bmm(a, b)),
        pytest.raises(RuntimeError, match="whole_matmul"),
    ):
        self_check.check_kernel(WHOLE, CPU, torch.float32)


@pytest.mark.parametrize("alone", [None, FEW, HALVES])
def test_kernels_are_checked_ahead_on_a_gpu_alone(alone):
    with mock.patch.object(self_check, "check_kernels") as most, mock.patch.object(self_check, "check_alone") as one:
        self_check.check_kernels_ahead(CPU, torch.float16, alone=alone)
        with FakeTensorMode():
            self_check.check_kernels_ahead(GPU, torch.float16, alone=alone)
        assert not most.called and not one.called
        self_check.check_kernels_ahead(GPU, torch.float16, alone=alone)
    assert (most.mock_calls, one.mock_calls) == (
        ([mock.call(GPU, torch.float16)], []) if alone is None else ([], [mock.call(alone, GPU, torch.float16)])
    )


def compiled_for(params, **settings):
    """What is begun to be compiled for an optimizer of parameters on a GPU that is not here."""
    begun, torch_began = [], []
    add = torch.optim.Optimizer.add_param_group

    def add_group(self, group):
        torch_began.append(list(begun))
        add(self, group)

    with (
        mock.patch.object(recipe, "runs_here", return_value=True),
        mock.patch.object(recipe.clusters, "begin_to_compile", lambda device, dtype: begun.append((device, dtype))),
        mock.patch.object(torch.optim.Optimizer, "add_param_group", add_group),
    ):
        Muon(params, **settings)
    assert torch_began[0] == begun, "torch imports its compiler with the first group, for a second"
    return begun


def test_what_takes_longest_to_compile_is_begun_before_torch_is_given_a_group():
    matrix, vector = torch.zeros(8, 8, requires_grad=True), torch.zeros(8, requires_grad=True)
    assert compiled_for([matrix]) == [(CPU, torch.float32)]
    assert compiled_for([("blocks.up", matrix), ("norm", vector)]) == [(CPU, torch.float32)], "once"
    wide = Orthogonalizer(dtype="bfloat16")
    assert compiled_for([matrix, torch.zeros(8, 8)], orthogonalizer=wide) == [(CPU, torch.bfloat16)]
    assert compiled_for([matrix], orthogonalizer=Orthogonalizer(kernels="torch")) == []
    assert compiled_for([{"params": [vector], "algorithm": "adamw"}], allow_no_muon=True) == []


def test_it_is_begun_only_where_kernels_are_going_to_run():
    fake = on_a_gpu(256, 256)
    with mock.patch.object(recipe.clusters, "begin_to_compile") as begin:
        recipe.begin_to_compile([torch.zeros(8, 8)], Orthogonalizer())
        with FakeTensorMode():
            recipe.begin_to_compile([fake], Orthogonalizer())
        assert not begin.called
        recipe.begin_to_compile([fake], Orthogonalizer())
        begin.assert_called_once_with(GPU, torch.float16)
        recipe.begin_to_compile([on_a_gpu(12, 64, 64)], Orthogonalizer())
    assert begin.mock_calls[1:] == [mock.call(GPU, torch.float32)], "the small ones of a model alone wait for nothing"


def on_a_gpu(*shape):
    return mock.Mock(device=GPU, dtype=torch.float32, numel=torch.Size(shape).numel)


def test_a_gpu_without_triton_takes_torch():
    """Asking whether kernels are interpreted imported Triton, and that was the end of it."""
    without = [mock.patch.object(module, "has_triton", return_value=False) for module in (hopper, dispatch)]
    hidden = mock.patch.dict(sys.modules, {"triton": None})
    with without[0], without[1], hidden:
        hopper.is_interpreted.cache_clear()
        try:
            chosen = choose(1024, 2048, kernels="auto")
            recipe.begin_to_compile([on_a_gpu(256, 256)], Orthogonalizer())
        finally:
            hopper.is_interpreted.cache_clear()
    assert chosen.kernels == Dispatch("torch", False, "Triton is not installed")


def choose(m, n, *, steps=5, architecture=None, **wishes):
    return recipe.choose_recipe(
        m,
        n,
        schedule=resolve_schedule("polar_express", steps),
        orthogonalizer=Orthogonalizer(**wishes),
        device=GPU,
        dtype=torch.float32,
        eps=1e-7,
        architecture=architecture,
    )


def checked_for(m, *, n=None, steps=5, clusters=True, architecture=None, form="auto"):
    """What is checked when the recipe of m rows is chosen, on a GPU that is not here."""
    patches = (
        mock.patch.object(recipe, "choose_kernels", return_value=Dispatch("triton", True, "for this test")),
        mock.patch.object(recipe, "is_available", return_value=clusters),
    )
    with patches[0], patches[1], mock.patch.object(recipe, "check_kernels_ahead") as ahead:
        choose(m, n or 2 * m, steps=steps, architecture=architecture, form=form)
    assert all(call.args == (GPU, torch.float16) for call in ahead.mock_calls)
    return [call.kwargs.get("alone") for call in ahead.mock_calls]


def test_what_is_checked_follows_from_the_recipe():
    assert checked_for(1024) == [None]
    assert checked_for(4096) == [None], "never of few tiles"
    assert checked_for(1024, steps=14) == [None, FEW], "too long for a program"
    assert checked_for(1024, clusters=False) == [None, FEW], "no program"
    assert checked_for(1024, n=4096, clusters=False) == [None, FEW, HALVES], "folded"
    assert checked_for(4096, n=16384, clusters=False) == [None, HALVES]
    assert checked_for(1024, n=4096) == [None], "in a program"
    assert checked_for(1024, steps=14, architecture="hopper") == [], "a GPU that is elsewhere"
    assert checked_for(1024, form="svd") == [None], "no products at all"


# What a kernel can do wrong, given its own product, D as it should be, and what went in.
MISTAKES = {
    "nothing": lambda wide, x, terms: with_terms(wide, **terms),
    "no C": lambda wide, x, terms: with_terms(wide, **{**terms, "beta": 0.0}),
    "alpha is one": lambda wide, x, terms: with_terms(wide, **{**terms, "alpha": 1.0}),
    "no identity": lambda wide, x, terms: with_terms(wide, **{**terms, "gamma": 0.0}),
    "the end of k is left out": lambda wide, x, terms: with_terms(gram_of(x[..., :-16]), **terms),
    "one step of k": lambda wide, x, terms: with_terms(gram_of(x[..., :64]), **terms),
    "one tile is another": lambda wide, x, terms: with_tile_moved(with_terms(wide, **terms)),
    "tiles off the diagonal are zero": lambda wide, x, terms: with_tiles_on_diagonal(with_terms(wide, **terms)),
}


def gram_of(x):
    return torch.bmm(x.double(), x.double().mT)


def with_terms(product, *, alpha=1.0, beta=0.0, c=None, gamma=0.0):
    added = 0.0 if c is None else beta * c.double()
    return alpha * product + added + gamma * torch.eye(product.shape[-1], dtype=torch.float64)


def with_tile_moved(d):
    d[:, 64:128, :64] = d[:, 128:192, :64].clone() if d.shape[-1] > 256 else 0.0
    return d


def with_tiles_on_diagonal(d):
    tile = torch.arange(d.shape[-1]) // 64
    return d * (tile[:, None] == tile)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_every_mistake_of_a_product_is_larger_than_rounding(mistake, dtype):
    def multiply(x, **terms):
        return MISTAKES[mistake](gram_of(x), x, terms).to(x.dtype)

    possible = mock.patch.object(problems, "why_impossible", return_value="")
    as_on_a_gpu = mock.patch.object(problems, "SMALL_STACK", (2, *problems.STACK[1:]))
    in_tiles = mock.patch.object(problems, "symmetric_matmul_with", lambda config, x, b, **terms: multiply(x, **terms))
    with possible, as_on_a_gpu, in_tiles, mock.patch.object(problems, "symmetric_matmul", multiply):
        for name in (FEW, QUADRATIC, TMA, POINTERS):
            if mistake == "nothing":
                assert self_check.check_kernel(name, CPU, dtype) < 0.1
            else:
                with pytest.raises(RuntimeError, match="off by"):
                    self_check.check_kernel(name, CPU, dtype)


def test_a_check_under_autocast_is_one_without():
    possible = mock.patch.object(problems, "why_impossible", return_value="")
    with possible, mock.patch.object(problems, "FEW_TILES", (144,)), torch.autocast("cpu", torch.bfloat16):
        assert self_check.check_kernel(FEW, CPU, torch.float16) < 1.0
