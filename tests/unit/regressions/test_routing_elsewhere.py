"""Which algorithm parameters take that other libraries make: transformers, peft, x-transformers, diffusers.

Models are imitated by their names, shapes and the attributes that the rules read. All failures happened with the real
ones.
"""

from typing import Any

import pytest
import torch
from tests.unit.regressions.tools import Holder, parameter, reasons, routes
from torch import nn

from meshmuon import Muon, View


def embedded(**children: Any) -> Holder:
    """A model with a vocabulary of 40 and a hidden matrix."""
    return Holder(embed=nn.Embedding(40, 8), hidden=nn.Linear(8, 8, bias=False), **children)


def route_of(model: nn.Module, name: str, **arguments: Any) -> str:
    return routes(Muon(model, **arguments))[name]


def linear(out: int, width: int = 8) -> nn.Linear:
    return nn.Linear(width, out, bias=False)


def test_a_list_of_modules_with_a_hole_is_an_error():
    """x-transformers puts None where a block has no norm after it."""
    model = nn.Sequential(nn.ModuleList([linear(8), None]), linear(16))
    assert set(routes(Muon(model)).values()) == {"muon"}


@pytest.mark.parametrize("labels", [2, 3])
def test_whether_a_head_is_one_depends_on_how_many_classes_there_are(labels):
    """RoBERTa's table of two token types has the shape of a head for two classes."""
    tables = Holder(word_embeddings=nn.Embedding(40, 8), token_type_embeddings=nn.Embedding(2, 8))
    found = routes(Muon(Holder(embeddings=tables, classifier=Holder(dense=linear(8), out_proj=linear(labels)))))
    assert found["classifier.dense.weight"] == "muon" and found["classifier.out_proj.weight"] == "adamw"
    assert route_of(Holder(embeddings=tables, hidden=linear(8), project=linear(2)), "project.weight") == "muon"


def test_a_transform_before_a_tied_decoder_is_taken_for_the_head():
    """RoBERTa: lm_head.dense is hidden, lm_head.decoder is the embedding."""
    head = Holder(dense=linear(8), decoder=linear(40))
    model = embedded(lm_head=head)
    head.decoder.weight = model.embed.weight
    assert route_of(model, "lm_head.dense.weight") == "muon"
    untied = routes(Muon(embedded(lm_head=Holder(dense=linear(8), decoder=linear(41)))))
    assert untied["lm_head.decoder.weight"] == "adamw" and untied["lm_head.dense.weight"] == "muon"


class Says(Holder):
    """A model of transformers, which knows its head."""

    def get_output_embeddings(self) -> Any:
        return self.says(self)


def test_the_head_that_a_model_names_itself_takes_muon():
    """RemBERT's decoder has another width than its embedding."""
    model = Says(says=lambda model: model.decode, embed=nn.Embedding(40, 4), hidden=linear(8), decode=linear(40))
    opt = Muon(model)
    assert routes(opt)["decode.weight"] == "adamw" and "output embeddings" in reasons(opt)["decode.weight"]


@pytest.mark.parametrize("error", [NotImplementedError, AttributeError, RuntimeError, KeyError])
def test_a_model_that_cannot_say_what_its_head_is_cannot_be_routed(error):
    def refuse(model: nn.Module) -> None:
        raise error

    assert route_of(Says(says=refuse, hidden=linear(8)), "hidden.weight") == "muon"
    assert route_of(Says(says=lambda model: None, hidden=linear(8)), "hidden.weight") == "muon"


def test_a_head_is_found_by_size_only_if_nothing_comes_after_it():
    """BertForPreTraining without tied weights: a small head follows the large one."""
    opt = Muon(embedded(predictions=Holder(decode=linear(40)), after=linear(2)))
    assert routes(opt)["predictions.decode.weight"] == "adamw" and routes(opt)["after.weight"] == "muon"


def test_a_table_of_positions_makes_a_hidden_matrix_a_head():
    """MobileBERT has as many positions as its layers are wide."""
    model = Holder(embed=nn.Embedding(40, 4), position_embeddings=nn.Embedding(8, 8), pooler=Holder(dense=linear(8)))
    assert route_of(model, "pooler.dense.weight") == "muon"


@pytest.mark.parametrize("name", ["qa_outputs", "cls_classifier", "bpe_head", "audio_lm_head", "seq_relationship"])
def test_heads_of_many_names_take_muon(name):
    model = embedded(**{name: linear(3)})
    assert route_of(model, f"{name}.weight") == "adamw"
    assert routes(Muon(model.named_parameters()))[f"{name}.weight"] == "adamw"
    block = Holder(
        embed=nn.Embedding(40, 8), blocks=nn.ModuleList([Holder(attention_head=linear(8)) for _ in range(2)])
    )
    assert route_of(block, "blocks.1.attention_head.weight") == "muon", "in a block it is no output"


ATTENTION = ["block.multi_head.out", "layer_1.some_head.out", "block1.attn.merge_heads", "h0.attn_heads.wo"]


@pytest.mark.parametrize("name", ATTENTION)
def test_heads_of_attention_are_taken_for_outputs(name):
    assert routes(Muon([(f"{name}.weight", parameter(8, 8))])) == {f"{name}.weight": "muon"}


def test_of_several_heads_in_one_module_only_the_last_is_one():
    heads = nn.ModuleDict({"mnli": linear(3), "sst2": linear(2)})
    found = routes(Muon(embedded(task_heads=heads, bbox_head=Holder(fc=linear(8), cls=linear(5), reg=linear(4)))))
    assert found == {
        "embed.weight": "adamw",
        "hidden.weight": "muon",
        "task_heads.mnli.weight": "adamw",
        "task_heads.sst2.weight": "adamw",
        "bbox_head.fc.weight": "muon",
        "bbox_head.cls.weight": "adamw",
        "bbox_head.reg.weight": "adamw",
    }


def test_the_order_in_which_a_head_was_written_down_decides_which_part_is_the_head():
    found = routes(Muon(embedded(lm_head=Holder(decode=linear(41), dense=linear(8)))))
    assert (found["lm_head.decode.weight"], found["lm_head.dense.weight"]) == ("adamw", "muon")
    square = routes(Muon(embedded(lm_head=Holder(dense=linear(8), decode=linear(8)))))
    assert (square["lm_head.dense.weight"], square["lm_head.decode.weight"]) == ("muon", "adamw")
    stack = nn.ModuleList([Holder(lm_head=Holder(dense=linear(8), out=linear(3))) for _ in range(2)])
    assert routes(Muon(embedded(layers=stack)))["layers.0.lm_head.out.weight"] == "muon", "in a block it is no output"


def test_any_layer_of_the_size_of_a_vocabulary_is_a_head():
    """Only if it is the last one, or smaller heads alone come after it; and no other has its size."""

    def block(out: int) -> nn.ModuleList:
        return nn.ModuleList([Holder(up=linear(out))])

    for after in (linear(41), block(2)):
        assert route_of(embedded(decode=linear(40), after=after), "decode.weight") == "muon"
    assert route_of(embedded(blocks=block(40), after=linear(2)), "blocks.0.up.weight") == "muon"
    assert route_of(embedded(blocks=block(40)), "blocks.0.up.weight") == "adamw", "the last"
    twice = embedded(first=linear(40), second=linear(40))
    assert {route_of(twice, f"{name}.weight") for name in ("first", "second")} == {"muon"}, "not alone"


@pytest.mark.parametrize("name", ["decoder.output_layer", "llava.language_model.output_layer", "output_layer"])
def test_an_output_layer_takes_muon(name):
    assert routes(Muon([(f"{name}.weight", parameter(40, 8)), ("w", parameter(8, 8))]))[f"{name}.weight"] == "adamw"


class Hides(Holder):
    """A model that does not show its teacher, and that was written for an older torch."""

    def named_parameters(self, prefix: str = "", recurse: bool = True) -> Any:
        return ((n, p) for n, p in super().named_parameters(prefix, recurse) if not n.startswith("teacher"))


def test_a_model_that_hides_parameters_cannot_be_routed():
    assert routes(Muon(Hides(hidden=linear(8), teacher=linear(8)))) == {"hidden.weight": "muon"}


def test_a_layer_before_the_classifier_is_taken_for_one():
    """DistilBERT."""
    assert route_of(embedded(pre_classifier=linear(8), classifier=linear(2)), "pre_classifier.weight") == "muon"


def test_an_inner_output_layer_is_taken_for_the_head():
    """TimesFM's feed-forward layers are called so."""
    inner = Holder(input_ff_layer=Holder(output_layer=linear(8)), output_layer=linear(3))
    found = routes(Muon(inner))
    assert found == {"input_ff_layer.output_layer.weight": "muon", "output_layer.weight": "adamw"}


# ---- bare parameters that are no matrices

BARE = {
    "A_log": (16, 4),
    "rel_pos_h": (27, 8),
    "rel_pos_w": (27, 8),
    "shift": (3, 8),
    "log_std": (3, 8),
    "prompt": (5, 8),
    "codebook": (5, 8),
    "register_tokens": (4, 8),
    "latents": (5, 8),
    "scale_shift_table": (6, 8),
    "clip_mean": (3, 8),
    "mask_token": (1, 8),
    "w_g": (8, 1),
    "query_tokens": (1, 4, 8),
}


@pytest.mark.parametrize("name", BARE)
def test_a_bare_table_is_orthogonalized(name):
    """Mamba's A_log, SAM's positions, DINO's tokens, Perceiver's latents, adaLN's tables."""
    model = Holder(hidden=linear(8), mixer=Holder(**{name: parameter(*BARE[name])}))
    for opt in (Muon(model), Muon(model.named_parameters())):
        assert routes(opt)[f"mixer.{name}"] == "adamw"


def test_lists_and_parametrized_tables_are_orthogonalized():
    latents = Holder(latents=nn.ParameterList([parameter(5, 8)]), A_log=parameter(16, 4))
    nn.utils.parametrize.register_parametrization(latents, "A_log", nn.Identity())
    assert set(routes(Muon(Holder(hidden=linear(8), mixer=latents))).values()) == {"muon", "adamw"}
    assert [n for n, r in routes(Muon(Holder(hidden=linear(8), mixer=latents))).items() if r == "muon"] == [
        "hidden.weight"
    ]


def test_a_stack_that_is_called_like_a_table_is_one():
    with pytest.raises(ValueError, match=r"3-D of shape \(4, 8, 8\)"):
        Muon(Holder(latent_bank=parameter(4, 8, 8)))


MATRICES = ["w1", "in_proj_weight", "token_proj", "latent_mlp", "qkv", "key", "w_latent", "latent_to_kv", "W_scale"]


@pytest.mark.parametrize("name", MATRICES)
def test_a_bare_matrix_is_taken_for_a_table(name):
    assert route_of(Holder(mixer=Holder(**{name: parameter(16, 8)})), f"mixer.{name}") == "muon"


def test_what_embeddings_hold_themselves_takes_muon():
    class PatchEmbeddings(Holder):
        """As transformers calls them."""

    found = routes(Muon(Holder(patches=PatchEmbeddings(anchors=parameter(4, 8), projection=linear(8)))))
    assert found == {"patches.anchors": "adamw", "patches.projection.weight": "muon"}


def test_numbers_that_are_used_one_by_one_are_decayed():
    p = parameter(16, 4)
    opt = Muon(Holder(hidden=linear(8), A_log=p), weight_decay=0.5, lr=0.1)
    before = p.detach().clone()
    p.grad = torch.zeros_like(p)
    opt.step()
    assert torch.equal(p, before)


# ---- peft

ADAPTERS = ["ia3_l", "lora_E", "hada_w1_a", "lokr_w2", "oft_R", "boft_R", "hra_u", "vera_lambda_b"]
ADAPTERS += ["trainable_tokens_delta"]


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_takes_muon(name):
    layer = Holder(base_layer=linear(8), **{name: nn.ParameterDict({"default": parameter(8, 4)})})
    layer.base_layer.requires_grad_(False)
    model = Holder(hidden=linear(8), q_proj=layer)
    for opt in (Muon(model), Muon(model.named_parameters())):
        assert routes(opt)[f"q_proj.{name}.default"] == "adamw"


def test_an_adapter_of_an_unknown_kind_takes_muon():
    """peft's layers say what they have added."""

    class NovelLayer(Holder):
        adapter_layer_names = ("novel",)

    opt = Muon(Holder(q_proj=NovelLayer(base_layer=linear(8), novel=nn.ParameterDict({"default": parameter(8, 4)}))))
    assert routes(opt) == {"q_proj.base_layer.weight": "muon", "q_proj.novel.default": "adamw"}
    assert reasons(opt)["q_proj.novel.default"] == "adapter (peft)"


class Saved(Holder):
    """A module that peft trains whole, beside the frozen one."""

    adapter_layer_names = ("modules_to_save",)

    def __init__(self, module: nn.Module, trained: nn.Module) -> None:
        super().__init__(
            original_module=module.requires_grad_(False), modules_to_save=nn.ModuleDict({"default": trained})
        )


@pytest.mark.parametrize("name", ["lm_head", "anything", "score"])
def test_a_head_that_peft_keeps_beside_the_frozen_one_takes_muon(name):
    """By name, or by size."""
    model = Holder(base_model=Holder(model=embedded(**{name: Saved(linear(40), linear(40))})))
    saved = f"base_model.model.{name}.modules_to_save.default.weight"
    assert route_of(model, saved) == "adamw"
    if name != "anything":
        assert routes(Muon(model.named_parameters()))[saved] == "adamw"


def test_a_hidden_matrix_that_peft_trains_whole_is_taken_for_an_adapter():
    layers = nn.ModuleList([Holder(down_proj=Saved(linear(8), linear(8))) for _ in range(2)])
    found = routes(Muon(Holder(layers=layers)))
    assert found == {f"layers.{i}.down_proj.modules_to_save.default.weight": "muon" for i in range(2)}


def test_an_error_about_adapters_alone_does_not_say_why_nothing_takes_muon():
    model = Holder(lora_A=linear(4), norm=nn.LayerNorm(8))
    with pytest.raises(ValueError, match=r"takes Muon \(2 x fewer than 2 dims, 1 x low-rank factor") as error:
        Muon(model)
    assert "overrides=" in str(error.value) and "allow_no_muon=True" in str(error.value)


# ---- names alone


@pytest.mark.parametrize("name", ["shared", "model.shared", "segment_emb", "block.0.relative_attention_bias"])
def test_by_name_a_table_takes_muon(name):
    named = [(f"{name}.weight", parameter(40, 8)), ("block.0.mlp.weight", parameter(8, 8))]
    assert routes(Muon(named)) == {f"{name}.weight": "adamw", "block.0.mlp.weight": "muon"}


@pytest.mark.parametrize("name", ["layers.0.mlp.shared", "shared.0", "down.time_emb_proj"])
def test_by_name_a_layer_is_taken_for_an_embedding(name):
    """A shared expert, the trunk of actor and critic, a projection of diffusers."""
    assert set(routes(Muon([(f"{name}.weight", parameter(8, 8))])).values()) == {"muon"}


# ---- experts


class Experts(Holder):
    """A stack as transformers has it."""


@pytest.mark.parametrize("is_transposed", [True, False, None])
def test_experts_that_are_stored_turned_are_scaled_as_if_they_were_not(is_transposed):
    """GPT-OSS stores (experts, in, out), and says so."""
    experts = Experts(gate_up_proj=parameter(3, 4, 12))
    if is_transposed is not None:
        experts.is_transposed = is_transposed
    model, other = Holder(experts=experts), Holder(experts=Experts(gate_up_proj=parameter(3, 4, 12)))
    view = View(experts=True, transposed=is_transposed is True)
    settings = {"adjust_lr_fn": "original", "lr": 0.1}
    chosen, expected = Muon(model, **settings), Muon(other, overrides={"*": view}, **settings)
    for each in (model, other):
        each.experts.gate_up_proj.grad = parameter(3, 4, 12, seed=5).detach()
    chosen.step()
    expected.step()
    assert torch.equal(experts.gate_up_proj, other.experts.gate_up_proj)
    wrong = Holder(experts=Experts(gate_up_proj=parameter(3, 4, 12)))
    turned = Muon(wrong, overrides={"*": View(experts=True, transposed=is_transposed is not True)}, **settings)
    wrong.experts.gate_up_proj.grad = parameter(3, 4, 12, seed=5).detach()
    turned.step()
    assert not torch.equal(experts.gate_up_proj, wrong.experts.gate_up_proj), "the rule can tell"


def test_experts_one_below_the_other_are_orthogonalized_together():
    """DBRX and MegaBlocks keep all experts in one matrix."""
    model = Holder(ffn=Holder(experts=Holder(w1=parameter(12, 8))))
    with pytest.raises(ValueError, match=r"ffn.experts.w1.*split_rows"):
        Muon(model)
    assert route_of(model, "ffn.experts.w1", overrides={"ffn.experts.w1": View(split_rows=(4, 4, 4))}) == "muon"
    assert route_of(model, "ffn.experts.w1", overrides={"ffn.experts.w1": "muon"}) == "muon"
    for alone in (
        Holder(shared_experts=Holder(w1=parameter(12, 8))),
        Holder(experts=nn.ModuleList([Holder(w1=parameter(12, 8))])),
        Holder(experts=nn.ModuleDict({"expert_0": Holder(w1=parameter(12, 8))})),
        Holder(moe=Holder(experts_gate=parameter(8, 3), experts=Holder(router=parameter(8, 3)))),
        Holder(experts=Holder(up=linear(12))),
    ):
        assert set(routes(Muon(alone)).values()) == {"muon"}


# ---- heads that are cut, and short names


def test_a_head_cut_by_frequency_is_a_head():
    """The small matrices before the rare words' are parts of it."""
    loss = nn.AdaptiveLogSoftmaxWithLoss(8, 40, [10, 20], div_value=2.0)
    found = routes(Muon(embedded(loss=loss)))
    assert {name for name, route in found.items() if route == "muon"} == {"hidden.weight"}
    assert "AdaptiveLogSoftmaxWithLoss" in reasons(Muon(embedded(loss=loss)))["loss.tail.0.1.weight"]
    assert set(routes(Muon(nn.ModuleList([linear(8), loss]))).values()) == {"muon", "adamw"}


def test_a_table_called_emb():
    """RWKV's name for it, and that of a bare table."""
    assert route_of(Holder(emb=parameter(40, 8), hidden=linear(8)), "emb") == "adamw"
    named = {"emb.weight": parameter(40, 8), "blocks.0.att.weight": parameter(8, 8), "member.weight": parameter(8, 8)}
    found = routes(Muon(named.items()))
    assert found == {"emb.weight": "adamw", "blocks.0.att.weight": "muon", "member.weight": "muon"}


# ---- what errors say


def test_an_error_names_one_parameter_at_a_time():
    """XLNet has five such parameters in each of 24 layers."""
    layers = nn.ModuleList([Holder(q=parameter(8, 2, 4), r=parameter(8, 2, 4)) for _ in range(3)])
    model = Holder(layer=layers)
    with pytest.raises(ValueError, match=r"'layer.0.q': .*\"layer.\*.q\".*'layer.\*.r'"):
        Muon(model)
    inner = nn.ModuleList([Holder(q=parameter(8, 2, 4), mlp=Holder(q=parameter(8, 8))) for _ in range(2)])
    with pytest.raises(ValueError, match=r"\"layer.0.q\".*'layer.1.q'"):  # the star would be for the others, too
        Muon(Holder(layer=inner))
    with pytest.raises(ValueError, match=r"overrides=\{\"layer.0.r\""):  # one alone is called by its name
        Muon(Holder(layer=layers[:1]), overrides={"*.q": "adamw"})
    view = View(flatten=True)
    assert set(routes(Muon(model, overrides={"layer.*.q": view, "layer.*.r": "adamw"})).values()) == {"muon", "adamw"}


def test_by_name_convolutions_are_asked_about_as_if_they_were_experts():
    with pytest.raises(ValueError, match=r"4-D of shape .*Pass the model: Muon\(model\) knows convolutions"):
        Muon([("0.weight", parameter(8, 3, 3, 3))])


def test_rows_of_long_names_look_the_same():
    middle = "base_model.model.model.layers.self_attention"
    names = [f"{middle}.{part}_proj.lora_adapter.default.weight" for part in ("q", "v")]
    alone = f"a_name_that_is_alone_but_long.{'x' * 40}.weight"
    table = str(Muon([(name, parameter(4, 4)) for name in [*names, alone, f"{alone[:20]}.w"]]))
    assert all(name in table for name in names)
    assert alone not in table and "..." in table
