"""The public function: right numbers in every form and dtype, no scale, no surprises at the edges."""

import warnings

import pytest
import torch
from benchmarks.numerics import DTYPES, FORMS, measure, spectra

from meshmuon import Muon, Orthogonalizer, orthogonalize
from meshmuon.polar import orthogonalize as entry
from meshmuon.polar.coefficients import resolve_schedule
from meshmuon.polar.gram import choose_restarts, gram_newton_schulz
from meshmuon.polar.normalise import normalised
from meshmuon.polar.operations import TorchOperations
from meshmuon.polar.recipe import choose_recipe
from meshmuon.testing import plain_newton_schulz, svd_polar


def distance(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("name", "steps"), [("polar_express", 5), ("keller", 5), ("you", 5), ("polar_express", 10)])
def test_no_set_diverges_flips_a_sign_or_exceeds_the_bound(name, steps, form, dtype):
    for shape in ((48, 48), (32, 128)):
        for kind, x in spectra(*shape, seed=1):
            got = measure(x, coefficients=name, steps=steps, form=form, dtype=dtype)
            assert got.is_sound, (kind, shape, got)


def test_a_step_in_16_bits_takes_in_bf16_as_the_page_on_numerics_says():
    x = dict(spectra(32, 128, seed=1))["rank 16"].float()
    for dtype, seen in (("float16", x.bfloat16().float()), ("float32", x)):
        param = torch.zeros_like(x, requires_grad=True)
        param.grad = x.clone()
        settings = {"lr": 1.0, "weight_decay": 0.0, "momentum": 0.0, "nesterov": False, "adjust_lr_fn": "none"}
        Muon([param], **settings, orthogonalizer=Orthogonalizer(dtype=dtype)).step()
        assert torch.equal(-param.detach(), orthogonalize(seen, dtype=dtype))
        assert torch.equal(seen, x) == (dtype == "float32"), "rounding changes something here"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_gram_form_without_its_restarts_would_diverge(dtype):
    """The sabotage of the test above: the restarts are what keeps it sound."""
    x = dict(spectra(32, 128, seed=1))["power law 1e5"]
    start = (x / x.norm()).to(getattr(torch, dtype)).unsqueeze(0)
    schedule = resolve_schedule("polar_express", 10)
    wild = gram_newton_schulz(start, schedule=schedule, restarts=(), operations=TorchOperations())
    assert not (torch.isfinite(wild).all() and torch.linalg.matrix_norm(wild[0].double(), 2) < 1.35)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["polar_express", "keller", "you"])
@pytest.mark.parametrize("shape", [(24, 24), (16, 70), (70, 16), (1, 9), (9, 1), (1, 1)])
def test_equals_the_iteration_as_papers_write_it(shape, name, form):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    truth = plain_newton_schulz(x, resolve_schedule(name, 5))
    assert distance(orthogonalize(x, coefficients=name, form=form, dtype="float32"), truth) < 5e-5  # 6e-8 lifted ~1e3x
    assert distance(orthogonalize(x.double(), coefficients=name, form=form), truth) < 1e-11


def test_svd_form_is_exact():
    x = torch.randn(20, 33, dtype=torch.float64)
    assert distance(orthogonalize(x, form="svd"), svd_polar(x)) < 1e-12
    low_rank = torch.randn(20, 2, dtype=torch.float64) @ torch.randn(2, 33, dtype=torch.float64)
    assert torch.linalg.matrix_rank(orthogonalize(low_rank, form="svd")) == 2


def with_spectrum(values, n, dtype):
    """A matrix with these singular values, rounded to a dtype."""
    m, generator = len(values), torch.Generator().manual_seed(3)
    u, v = (torch.linalg.qr(torch.randn(s, m, generator=generator, dtype=torch.float64)).Q for s in (m, n))
    return ((u * torch.tensor(values, dtype=torch.float64)) @ v.T).to(dtype)


@pytest.mark.parametrize(("m", "n"), [(8, 8), (24, 40), (16, 300), (128, 128)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_svd_form_takes_the_rounding_of_its_input_for_a_signal_or_a_signal_for_rounding(dtype, m, n):
    """Rounding fills the missing ranks of a matrix with noise of about eps / sqrt(m); ten times that is a signal."""
    noise = torch.finfo(dtype).eps / m**0.5 if dtype != torch.float64 else n * torch.finfo(dtype).eps
    low, full = (
        with_spectrum([1.0] * 3 + [0.0] * (m - 3), n, dtype),
        with_spectrum([1.0] * (m - 1) + [10 * noise], n, dtype),
    )
    for x, rank in ((low, 3), (full, m)):
        values = torch.linalg.svdvals(orthogonalize(x, form="svd", dtype="float64").double())
        assert int((values > 0.5).sum()) == rank and int((values > 0.1).sum()) == rank


@pytest.mark.parametrize("form", ["auto", "standard", "gram", "svd"])
@pytest.mark.parametrize("factor", [1e-30, 1e-12, 3.7, 1e12, 1e30])
def test_scale_does_not_matter(factor, form):
    x = torch.randn(24, 40, generator=torch.Generator().manual_seed(0))
    assert distance(orthogonalize(x * factor, form=form), orthogonalize(x, form=form)) < 1e-5


@pytest.mark.parametrize("exponent", [-100, -60, -1, 1, 50, 100])
@pytest.mark.parametrize("form", ["standard", "gram"])
def test_powers_of_two_do_not_change_a_bit(exponent, form):
    x = torch.randn(24, 40, generator=torch.Generator().manual_seed(0))
    assert torch.equal(orthogonalize(x * 2.0**exponent, form=form), orthogonalize(x, form=form))


@pytest.mark.parametrize("factor", [1e-45, 1e-42, 1e-38, 3e37])
@pytest.mark.parametrize("form", ["standard", "gram", "svd"])
def test_beyond_the_range_it_stays_finite_and_bounded(factor, form):
    x = torch.randn(24, 40, generator=torch.Generator().manual_seed(0)) * factor
    y = orthogonalize(x, form=form)
    assert torch.isfinite(y).all()
    assert torch.linalg.matrix_norm(y, 2) <= 1.35


@pytest.mark.parametrize("form", ["auto", "standard", "gram", "svd"])
def test_zero_gives_zero_and_empty_gives_empty(form):
    assert torch.equal(orthogonalize(torch.zeros(7, 5), form=form), torch.zeros(7, 5))
    for shape in ((0, 5), (5, 0), (0, 0), (3, 0, 4), (0, 3, 4)):
        assert orthogonalize(torch.zeros(shape), form=form).shape == shape


@pytest.mark.parametrize("form", ["standard", "gram", "svd"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_with_its_matrix(form, bad):
    x = torch.randn(3, 16, 24)
    expected = orthogonalize(x[0::2], form=form)
    x[1, 2, 3] = bad
    got = orthogonalize(x, form=form)
    assert torch.equal(got[0::2], expected)
    assert got[1].isnan().all()


def test_one_decomposition_of_a_whole_batch_loses_one_matrix_alone():
    """As on a GPU; a CPU decomposes them one by one."""
    x = torch.randn(3, 16, 24)
    expected = entry._svd_polar(x, eps=1e-7)
    x[1, 2, 3] = torch.nan
    got = entry._svd_polar(x, eps=1e-7)
    assert torch.equal(got[0::2], expected[0::2]) and got[1].isnan().all()


@pytest.mark.parametrize("company", [torch.zeros(16, 16), 1e-30 * torch.randn(16, 16), 1e30 * torch.randn(16, 16)])
def test_subnormal_numbers_do_not_see_their_company(company):
    """A power of two takes bits from them, so whether there is one may not depend on other matrices."""
    x = 100 * torch.randn(16, 16)
    x[:, ::2] *= 1e-41
    together = normalised(torch.stack([x, company]), eps=1e-7)  # with several threads each may have one of them
    for i, each in enumerate((x, company)):
        assert torch.equal(normalised(each[None], eps=1e-7)[0], together[i])
        assert torch.equal(orthogonalize(each), orthogonalize(torch.stack([x, company]))[i])
    assert (orthogonalize(x)[:, ::2] != 0).any(), "they are there"


def test_leading_dims_are_batches_and_dtype_and_shape_come_back():
    x = torch.randn(2, 3, 8, 12)
    y = orthogonalize(x)
    assert torch.equal(y[1, 2], orthogonalize(x[1, 2]))
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        assert orthogonalize(x.to(dtype)).dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", ["standard", "gram", "svd"])
def test_the_input_is_never_written(dtype, form):
    x = torch.randn(16, 32).to(dtype)  # 16-aligned: no padding copy to hide behind
    before = x.clone()
    orthogonalize(x, form=form, dtype=str(dtype).removeprefix("torch."))
    assert torch.equal(x, before)


def test_auto_restarts_are_those_measured_to_be_needed():
    five = resolve_schedule("polar_express", 5)
    assert choose_restarts(five, torch.float16) == (2,)
    assert choose_restarts(five, torch.bfloat16) == (2, 4)
    assert choose_restarts(five, torch.float32) == choose_restarts(five, torch.float32, side=1024) == ()
    assert choose_restarts(five, torch.float32, side=1025) == (2,), "see [Note: large matrices in fp32]"
    assert choose_restarts(five, torch.float64, side=4096) == ()
    assert choose_restarts(resolve_schedule("polar_express", 10), torch.float16) == (2, 5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("name", "steps"), [("polar_express", 5), ("polar_express", 8), ("keller", 8), ("keller", 20)])
def test_auto_restarts_survive_a_fuzz_of_low_ranks(name, steps, dtype):
    generator = torch.Generator().manual_seed(5)
    for rank in (1, 2, 4, 16):
        x = torch.randn(8, 32, rank, generator=generator) @ torch.randn(8, rank, 64, generator=generator)
        y = orthogonalize(x, coefficients=name, steps=steps, form="gram", dtype=str(dtype).removeprefix("torch."))
        assert torch.linalg.matrix_norm(y.double(), 2).max() <= 1.35


def test_many_keller_steps_in_the_gram_form_stay_bounded_in_fp32():
    u, v = (torch.linalg.qr(torch.randn(s, 96, generator=torch.Generator().manual_seed(s))).Q for s in (96, 160))
    x = (u * torch.logspace(0, -9, 96)) @ v.T
    y = orthogonalize(x, coefficients="keller", steps=20, form="gram")
    assert torch.linalg.matrix_norm(y.double(), 2) <= 1.35


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_cubic_step_is_right_in_every_dtype(dtype):
    x = torch.randn(32, 48, generator=torch.Generator().manual_seed(0))
    got = orthogonalize(x, coefficients=(1.5, -0.5, 0.0), dtype=dtype)
    assert distance(got, plain_newton_schulz(x, ((1.5, -0.5, 0.0),) * 5)) < 5e-2


def test_auto_takes_the_cheaper_form_and_fp32_on_a_cpu():
    def recipe(m, n):
        return choose_recipe(
            m,
            n,
            schedule=resolve_schedule("polar_express", 5),
            orthogonalizer=Orthogonalizer(),
            device=torch.device("cpu"),
            dtype=torch.bfloat16,
            eps=1e-7,
        )

    assert (recipe(64, 64).form, recipe(64, 64).dtype) == ("standard", torch.float32)
    assert recipe(64, 256).form == "gram"
    assert recipe(64, 256).flops(64, 256) < recipe(64, 64).flops(64, 256)
    assert (recipe(1024, 4096).restarts, recipe(2048, 8192).restarts) == ((), (2,))


@pytest.mark.parametrize(
    ("x", "error"),
    [
        (torch.randn(3), ValueError),
        (torch.ones(2, 2, dtype=torch.int64), TypeError),
        (torch.ones(2, 2).to(torch.float8_e4m3fn), TypeError),
        ([[1.0]], TypeError),
    ],
)
def test_wrong_inputs_are_refused(x, error):
    with pytest.raises(error, match="x:"):
        orthogonalize(x)


SPARSE = [((), "bfloat16", 5, "(2, 4)"), ((2,), "bfloat16", 5, "(2, 4)"), ((4,), "float16", 5, "(2,)")]
DENSE = [
    ((2, 4), "bfloat16", 5),
    ((1, 3), "float16", 5),
    ((2,), "float16", 5),
    ((), "float32", 5),
    ((1, 2, 3, 4), "bfloat16", 5),
]


def with_restarts(restarts, dtype, steps, form="gram"):
    orthogonalizer = Orthogonalizer(form=form, dtype=dtype, restarts=restarts)
    return Muon([torch.nn.Parameter(torch.ones(8, 32))], ns_steps=steps, orthogonalizer=orthogonalizer)


@pytest.mark.parametrize(("restarts", "dtype", "steps", "needed"), SPARSE)
def test_restarts_too_few_for_the_dtype_diverge_in_silence(restarts, dtype, steps, needed):
    with pytest.warns(UserWarning, match="restarts") as caught:
        with_restarts(restarts, dtype, steps)
    (warning,) = caught
    assert str(restarts) in str(warning.message) and needed in str(warning.message) and dtype in str(warning.message)
    assert warning.filename == __file__


@pytest.mark.parametrize(("restarts", "dtype", "steps"), DENSE)
def test_enough_restarts_are_no_reason_to_warn(restarts, dtype, steps):
    """Also where they are others than ours: what counts is how far rounding can grow between two of them."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with_restarts(restarts, dtype, steps)
        with_restarts((), "bfloat16", 5, form="standard")
        with_restarts("auto", dtype, steps)


@pytest.mark.parametrize("restarts", [(5,), (0,), (2, 2), (3, 1), "never", 2])
def test_wrong_restarts_are_refused(restarts):
    with pytest.raises((ValueError, TypeError), match="restarts"):
        choose_recipe(
            4,
            4,
            schedule=resolve_schedule("keller", 5),
            orthogonalizer=Orthogonalizer(restarts=restarts),
            device=torch.device("cpu"),
            dtype=torch.float32,
            eps=1e-7,
        )


@pytest.mark.parametrize("scale", [1e-300, 1e-150, 1e150, 1e300])
def test_fp64_has_a_range_of_its_own(scale):
    x = torch.randn(6, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(orthogonalize(x * scale), orthogonalize(x), rtol=1e-9, atol=1e-12)
