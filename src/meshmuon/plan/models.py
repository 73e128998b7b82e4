"""Shapes of well-known models, made from a few numbers each. Names are those of their Hugging Face checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from meshmuon.errors import message, one_of

Shape = tuple[int, ...]
Shapes = dict[str, Shape]


def _layers(count: int, each: Callable[[int], dict[str, Shape]], *, prefix: str = "model.layers") -> Shapes:
    return {f"{prefix}.{i}.{name}": shape for i in range(count) for name, shape in each(i).items()}


def _gpt2(*, width: int, layers: int, vocabulary: int, positions: int) -> Shapes:
    """Linear layers as (out, in)."""
    block: dict[str, Shape] = {
        "attn.c_attn.weight": (3 * width, width),
        "attn.c_proj.weight": (width, width),
        "mlp.c_fc.weight": (4 * width, width),
        "mlp.c_proj.weight": (width, 4 * width),
        **dict(_vectors({"attn.c_attn.bias": 3 * width, "mlp.c_fc.bias": 4 * width})),
        **dict(_vectors(dict.fromkeys(("attn.c_proj.bias", "mlp.c_proj.bias"), width))),
        **dict(_vectors(dict.fromkeys(("ln_1.weight", "ln_1.bias", "ln_2.weight", "ln_2.bias"), width))),
    }
    ends: Shapes = {"wte.weight": (vocabulary, width), "wpe.weight": (positions, width)}
    return ends | _layers(layers, lambda _: block, prefix="h") | {"ln_f.weight": (width,), "ln_f.bias": (width,)}


def _vectors(sizes: dict[str, int]) -> Iterator[tuple[str, Shape]]:
    return ((name, (size,)) for name, size in sizes.items())


def _attention(width: int, *, heads: int, kv_heads: int, head: int) -> dict[str, Shape]:
    return {
        "self_attn.q_proj.weight": (heads * head, width),
        "self_attn.k_proj.weight": (kv_heads * head, width),
        "self_attn.v_proj.weight": (kv_heads * head, width),
        "self_attn.o_proj.weight": (width, heads * head),
    }


def _mlp(width: int, inner: int, name: str = "mlp") -> dict[str, Shape]:
    up: Shape = (inner, width)
    return {f"{name}.gate_proj.weight": up, f"{name}.up_proj.weight": up, f"{name}.down_proj.weight": (width, inner)}


def _experts(width: int, inner: int, experts: int) -> dict[str, Shape]:
    """Stacks (E, out, in), as training frameworks hold experts."""
    return {key: (experts, *shape) for key, shape in _mlp(width, inner, "mlp.experts").items()}


def _norms(width: int) -> dict[str, Shape]:
    return {"input_layernorm.weight": (width,), "post_attention_layernorm.weight": (width,)}


def _ends(width: int, vocabulary: int, *, tied: bool) -> Shapes:
    head: Shapes = {} if tied else {"lm_head.weight": (vocabulary, width)}
    return {"model.embed_tokens.weight": (vocabulary, width), **head, "model.norm.weight": (width,)}


def _llama(
    *,
    width: int,
    inner: int,
    layers: int,
    heads: int,
    kv_heads: int,
    head: int,
    vocabulary: int,
    tied: bool = False,
    qkv_bias: bool = False,
    experts: int = 0,
) -> Shapes:
    block = _attention(width, heads=heads, kv_heads=kv_heads, head=head) | _norms(width)
    if qkv_bias:
        sizes = {"q": heads * head, "k": kv_heads * head, "v": kv_heads * head}
        block |= dict(_vectors({f"self_attn.{name}_proj.bias": size for name, size in sizes.items()}))
    if experts:
        block |= {"mlp.gate.weight": (experts, width)} | _experts(width, inner, experts)
    else:
        block |= _mlp(width, inner)
    return _ends(width, vocabulary, tied=tied) | _layers(layers, lambda _: block)


def _kimi_k2() -> Shapes:
    """Latent attention, one dense layer, then experts with a shared one."""
    width, heads, nope, rope, value = 7168, 64, 128, 64, 128
    attention: dict[str, Shape] = {
        "self_attn.q_a_proj.weight": (1536, width),
        "self_attn.q_b_proj.weight": (heads * (nope + rope), 1536),
        "self_attn.kv_a_proj_with_mqa.weight": (512 + rope, width),
        "self_attn.kv_b_proj.weight": (heads * (nope + value), 512),
        "self_attn.o_proj.weight": (width, heads * value),
        "self_attn.q_a_layernorm.weight": (1536,),
        "self_attn.kv_a_layernorm.weight": (512,),
        **_norms(width),
    }
    moe: dict[str, Shape] = {"mlp.gate.weight": (384, width)}
    moe |= _experts(width, 2048, 384) | _mlp(width, 2048, "mlp.shared_experts")
    layers = _layers(61, lambda i: attention | (moe if i else _mlp(width, 18432)))
    return _ends(width, 163840, tied=False) | layers


# From config.json of each checkpoint.
MODELS: dict[str, Callable[[], Shapes]] = {
    "gpt2": partial(
        _gpt2, width=768, layers=12, vocabulary=50257, positions=1024
    ),  # https://huggingface.co/openai-community/gpt2
    "llama-3-8b": partial(  # https://huggingface.co/meta-llama/Meta-Llama-3-8B
        _llama, width=4096, inner=14336, layers=32, heads=32, kv_heads=8, head=128, vocabulary=128256
    ),
    "llama-3-70b": partial(  # https://huggingface.co/meta-llama/Meta-Llama-3-70B
        _llama, width=8192, inner=28672, layers=80, heads=64, kv_heads=8, head=128, vocabulary=128256
    ),
    "qwen2-0.5b": partial(  # https://huggingface.co/Qwen/Qwen2-0.5B
        _llama,
        width=896,
        inner=4864,
        layers=24,
        heads=14,
        kv_heads=2,
        head=64,
        vocabulary=151936,
        tied=True,
        qkv_bias=True,
    ),
    "mixtral": partial(  # https://huggingface.co/mistralai/Mixtral-8x7B-v0.1
        _llama, width=4096, inner=14336, layers=32, heads=32, kv_heads=8, head=128, vocabulary=32000, experts=8
    ),
    "kimi-k2": _kimi_k2,  # https://huggingface.co/moonshotai/Kimi-K2-Base
}

# How many experts a token passes through, of the same sources: `num_experts_per_tok`.
EXPERTS_PER_TOKEN = {"mixtral": 2, "kimi-k2": 8}


def known_model(name: str) -> Shapes:
    """Give the shapes of a well-known model.

    Args:
        name: Its name in `MODELS`.

    Returns:
        Parameter → shape.

    Raises:
        ValueError: If it is not known.
    """
    if name not in MODELS:
        do = f"Use {one_of(MODELS)}; or pass a model, or a dict of name → shape"
        raise ValueError(message("model", found=repr(name), do=do))
    return MODELS[name]()
