"""Products are rounded as they say: neither autocast nor TF32 nor sums in fp16 come in from a user's settings."""

from functools import partial
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import meshmuon
from meshmuon import Muon, _compat
from meshmuon._compat import plain_arithmetic

GPU, CPU = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul


def settings():
    # "none" is torch's default, and means "ieee".
    precisions = (place.fp32_precision.replace("none", "ieee") for place in (GPU, CPU))
    return *precisions, GPU.allow_fp16_accumulation


PLAIN = ("ieee", "ieee", False)


# torch's own tests of optimizers, which others of ours import, freeze some of the settings.
FROZEN = (getattr(torch.backends, "m", torch.backends), "__allow_nonbracketed_mutation_flag")


def set_defaults():
    torch.backends.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")
    GPU.fp32_precision = CPU.fp32_precision = "none"
    GPU.allow_fp16_accumulation = False


@pytest.fixture(autouse=True)
def _as_before():
    with mock.patch.object(*FROZEN, True):
        set_defaults()
        yield
        set_defaults()


def by_precision(word):
    return lambda: torch.set_float32_matmul_precision(word)


def by_name(place, name, value):
    return lambda: setattr(place, name, value)


WAYS = {
    "high": by_precision("high"),
    "medium": by_precision("medium"),
    "allow_tf32": by_name(GPU, "allow_tf32", True),
    "on GPUs": by_name(GPU, "fp32_precision", "tf32"),
    "on CPUs": by_name(CPU, "fp32_precision", "bf16"),
    "everywhere": by_name(torch.backends, "fp32_precision", "tf32"),
    "fp16 sums": by_name(GPU, "allow_fp16_accumulation", True),
}


class Witness(TorchDispatchMode):
    """Remembers under which settings products were computed."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(word in str(function) for word in ("bmm", ".mm", "linear")):
            self.seen.add(settings())
        return function(*args, **(kwargs or {}))


def matrix(*shape):
    param = torch.randn(*shape, generator=torch.Generator().manual_seed(0)).requires_grad_()
    param.grad = torch.randn(*shape, generator=torch.Generator().manual_seed(1))
    return param


CALLS = {
    "step": lambda: Muon([matrix(24, 40), matrix(32, 32)]).step,
    "metrics": lambda: Muon([matrix(24, 40)]).metrics,
    "orthogonalize": lambda: partial(meshmuon.orthogonalize, torch.randn(24, 40)),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("way", WAYS)
def test_products_are_plain_whatever_was_set(way, call):
    WAYS[way]()
    theirs = settings()
    assert theirs != PLAIN
    work = CALLS[call]()
    with Witness() as witness:
        work()
    assert witness.seen == {PLAIN}
    assert settings() == theirs


@pytest.mark.parametrize("call", CALLS)
def test_the_witness_sees_what_would_happen_otherwise(call):
    WAYS["medium"]()
    work = CALLS[call]()
    with mock.patch.object(_compat, "_ROUNDING", ()), Witness() as witness:
        work()
    assert witness.seen == {("tf32", "bf16", False)}


def test_nothing_is_set_where_everything_is_plain():
    with plain_arithmetic():
        assert GPU.fp32_precision == CPU.fp32_precision == "none", "the default, and still inherited"


@pytest.mark.parametrize("way", WAYS)
def test_settings_come_back_after_an_error(way):
    WAYS[way]()
    theirs = settings()
    with pytest.raises(ZeroDivisionError), plain_arithmetic():
        1 / 0
    assert settings() == theirs


def test_what_was_inherited_is_inherited_again():
    WAYS["everywhere"]()
    with plain_arithmetic():
        pass
    torch.backends.fp32_precision = "ieee"
    assert GPU.fp32_precision == "ieee"


def test_torch_s_older_names_still_answer_afterwards():
    WAYS["high"]()
    with plain_arithmetic():
        pass
    assert GPU.allow_tf32 and torch.get_float32_matmul_precision() == "high"


def test_the_bits_of_a_step_do_not_depend_on_settings():
    def stepped(precision):
        torch.set_float32_matmul_precision(precision)
        param = matrix(192, 512)
        opt = Muon([param])
        for _ in range(3):
            opt.step()
        return param.detach()

    expected = stepped("highest")
    assert torch.equal(stepped("medium"), expected) and torch.equal(stepped("high"), expected)
