"""Model types that no family lists: what inspection finds of them, and what it refuses."""

import re
from pathlib import Path

import pytest
import torch
import transformers
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import Chunk, WeightConverter
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from shardwise.base.batches import Batch
from shardwise.config import Data, Lora, Model, RunConfig, Training, UserError
from shardwise.models.adapters.writing import save_adapter
from shardwise.models.causal_lm import CausalLM
from shardwise.models.expert_plan import experts_of
from shardwise.models.families import FAMILIES, family_of, spec_of, unproven
from shardwise.models.families.unproven import inspect_family
from shardwise.models.load import load_whole, read_config, weights
from shardwise.models.names import adapter_layers
from shardwise.models.patches import patch
from shardwise.models.save import save_model
from tests.left_out import some_now
from tests.models.tiny import (
    EACH_KIND,
    PLAIN,
    loaded_by_transformers,
    logits,
    on_meta,
    relative_error,
    tiny,
    tokens,
    trained,
    with_adapters,
)
from tests.models.unproven import UNPROVEN, write_config


def test_none_of_them_is_listed():
    assert not UNPROVEN.keys() & FAMILIES.keys()


@pytest.fixture(params=UNPROVEN)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Model:
    return Model(str(write_config(request.param, tmp_path)), init="random")


@pytest.mark.parametrize("name", some_now(PLAIN, EACH_KIND))
def test_inspection_finds_what_is_written_of_the_listed_families(name: str) -> None:
    # Where the facts are known, inspection has to come to the same, adapters or not. Layer kinds it
    # cannot know.
    known, model = FAMILIES[on_meta(tiny(name)).config.model_type], on_meta(tiny(name))
    adapted, _ = with_adapters(tiny(name), Lora(targets="all-linear"))
    for found in (inspect_family(model), inspect_family(adapted)):
        for fact in ("embed", "positions", "layers", "norm", "head"):
            assert getattr(found, fact) == getattr(known, fact), fact
        assert set(found.named("experts")) == set(known.named("experts"))
        assert set(found.named("gates")) >= set(known.named("gates"))
        assert set(found.named("bypassed")) >= set(known.named("bypassed"))
        assert set(found.feed_forward_paths) >= set(known.feed_forward_paths) & {
            n.partition(".")[0] for n in _inside(model)
        }


def _inside(model: PreTrainedModel) -> set[str]:
    layers = [layer.name for layer in spec_of(model.config, model).layers]
    return {name for layer in layers for name, _ in model.get_submodule(layer).named_parameters()}


@pytest.mark.parametrize("saved", ["norm", "embed_tokens", "lm_head", "mlp"])
def test_modules_that_peft_wraps_are_found_as_without_it(model, saved):
    plain = inspect_family(on_meta(model))
    if saved in ("embed_tokens", "lm_head") and on_meta(model).all_tied_weights_keys:
        return  # refused: test_lora.py
    adapted, _ = with_adapters(model, Lora(r=4, targets=["q_proj"], modules_to_save=[saved]))
    assert inspect_family(adapted) == plain


def test_checkpoints_that_could_not_be_written_are_refused_before_training(monkeypatch):
    split = WeightConverter(["qkv"], ["q", "k", "v"], operations=[Chunk(dim=0)])
    monkeypatch.setattr(unproven, "get_model_conversion_mapping", lambda *args, **kwargs: [split])
    with pytest.raises(UserError, match="an entry of its checkpoints is made of several weights"):
        inspect_family(on_meta(tiny("tiny-llama")))


def test_layers_are_named_and_auto_reaches_every_projection(model):
    built, coverage = with_adapters(model, Lora(r=4))
    spec = spec_of(built.config, built)
    assert [layer.name for layer in spec.layers] == [f"model.layers.{i}" for i in range(4)]
    kinds = {
        "hyperclovax": ["full_attention"] * 4,
        "olmoe": ["full_attention"] * 4,
        "minimax": ["linear_attention", "full_attention"] * 2,
    }
    alternating = ["sliding_attention", "full_attention"] * 2
    assert [layer.kind for layer in spec.layers] == kinds.get(spec.family, alternating)
    moe = spec.family in ("olmoe", "minimax")
    assert {layer.feed_forward for layer in spec.layers} == {"moe" if moe else "dense"}
    assert spec.tied == (spec.family == "vaultgemma")
    # q, k, v, o and, where there are no experts, gate, up and down; the stacks of experts stay
    # frozen. MiniMax's linear attention has q, k and v in one, an output gate, and an output that
    # a fused kernel might read past an adapter.
    num_adapted = 2 * (2 + 4) if spec.family == "minimax" else 4 * (4 if moe else 7)
    assert len(adapter_layers(built)) == num_adapted
    num_frozen = {"olmoe": 4 * 2, "minimax": 4 * 2 + 2}.get(spec.family, 0)
    assert sum(row.weights for row in coverage.rows) == num_adapted + num_frozen


def test_saved_models_and_adapters_are_loaded_by_transformers(model, tmp_path):
    built, _ = with_adapters(model, Lora(r=4))
    save_model(built, weights(built, model, seed=0), tmp_path / "base")
    save_adapter(
        built, Lora(r=4), trained(built), tmp_path / "adapter", base_name=str(tmp_path / "base")
    )
    loaded = loaded_by_transformers(tmp_path / "base")
    loaded.load_adapter(str(tmp_path / "adapter"))
    assert relative_error(logits(loaded), logits(built)) < 1e-5


def test_dense_layers_before_those_with_experts(tmp_path):
    config = AutoConfig.for_model(
        "ernie4_5_moe", hidden_size=64, intermediate_size=96, moe_intermediate_size=32,
        num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, vocab_size=256,
        moe_num_experts=4, moe_k=2, moe_layer_start_index=1,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    built = on_meta(Model(str(tmp_path), init="random"))
    spec = spec_of(built.config, built)
    assert [layer.feed_forward for layer in spec.layers] == ["dense", "moe", "moe"]
    experts = [f"model.layers.{number}.mlp.experts" for number in (1, 2)]
    assert [path for path, _ in experts_of(built, spec)] == experts


@pytest.mark.parametrize(
    ("model_type", "changes", "reason"),
    [
        ("opt", {"word_embed_proj_dim": 64, "ffn_dim": 8}, "it has no final norm after its layers"),
        (
            "bloom",
            {"n_head": 4, "n_layer": 1},
            "it has transformer.word_embeddings_layernorm.weight beside",
        ),
    ],
)
def test_what_is_not_of_the_common_shape_is_refused(model_type, changes, reason):
    config = AutoConfig.for_model(
        model_type, hidden_size=64, num_attention_heads=4, vocab_size=256, **changes
    )
    with pytest.raises(
        UserError, match=f"model type {model_type} is not one that shardwise knows .* {reason}"
    ):
        family_of(AutoModelForCausalLM.from_config(config))


def test_transformers_loses_no_sink_and_no_cap_in_the_form_that_is_asked_for():
    # Its scaled dot product refuses a cap, and would drop sinks without a word.
    folder = Path(transformers.__file__).parent / "models"
    texts = {path.stem: path.read_text(encoding="utf-8") for path in folder.glob("*/modeling_*.py")}
    with_sinks = {name: text for name, text in texts.items() if re.search(r"\bs_aux=", text)}
    assert {"modeling_gpt_oss", "modeling_granite_swa"} <= with_sinks.keys()
    for name, text in with_sinks.items():
        assert set(re.findall(r"_supports_sdpa = (\w+)", text)) == {"False"}, name
    q = torch.ones(1, 1, 2, 8)
    with pytest.raises(ValueError, match="does not support `softcap`"):
        sdpa_attention_forward(torch.nn.Identity(), q, q, q, None, softcap=1.0)


@pytest.mark.parametrize("model_type", ["vaultgemma", "gemma2", "gpt_oss", "granite_swa"])
def test_attention_without_a_fused_form_computes_as_in_transformers(model_type, tmp_path):
    model = tiny(f"tiny-{model_type}")
    if model_type not in FAMILIES:
        model = Model(str(write_config(model_type, tmp_path / "config")), init="random")
    cfg = RunConfig(model, Data("x", sequence_length=70), Training("o", steps=1))
    hf_config = read_config(cfg.model)
    hf = load_whole(cfg.model, hf_config)
    generator = torch.Generator().manual_seed(2)
    for parameter in hf.parameters():  # biases begin at 0, and sinks are small
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    hf.save_pretrained(tmp_path / "saved")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", attn_implementation="eager")
    part = CausalLM(hf, spec_of(hf_config, hf), family_of(hf), cfg)
    lm = patch(part, cfg, torch.device("cpu")).train()
    rows = tokens()
    batch = Batch(rows, rows.roll(-1, 1), torch.zeros_like(rows), tuple(range(len(rows))), step=1)
    (loss := lm(batch)).backward()
    scores = theirs.train()(input_ids=rows, use_cache=False).logits.flatten(0, 1)
    (of_theirs := cross_entropy(scores, batch.labels.flatten(), reduction="sum")).backward()
    torch.testing.assert_close(loss, of_theirs, rtol=1e-5, atol=0)
    expected = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    for name, parameter in hf.named_parameters():
        if name in expected:
            assert relative_error(parameter.grad, expected[name]) < 1e-4, name
    assert len(expected) > 35
    assert expected.keys() == dict(hf.named_parameters()).keys()
