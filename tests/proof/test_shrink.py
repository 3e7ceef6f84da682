"""Small models have the structure of large ones: their kinds of layers, heads, and layouts."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from shardwise.base.layouts import ModelFacts
from shardwise.config import Model, UserError
from shardwise.config.rules import offered_layouts
from shardwise.lab.proof import shrink as module
from shardwise.lab.proof.shrink import Small, shrink
from shardwise.models import load
from shardwise.models.facts import facts_of
from shardwise.models.families import family_of, spec_of
from shardwise.models.spec import ModelSpec
from tests.models.unproven import UNPROVEN, write_config
from tests.parity.harness import CONFIGS

LARGE = ("qwen3_5-9b", "jet-nemotron-2b", "llama-3.1-8b", "gpt2-large", "pipeline-kinds")
TINY = sorted(path.name for path in CONFIGS.glob("tiny-*"))


def read(model: Model, config: Any = None) -> tuple[ModelSpec, ModelFacts, int]:
    config = config or load.read_config(model)
    hf = load.build_meta(model, config)
    spec = spec_of(config, hf)
    facts = facts_of(hf, spec, family_of(hf))
    return spec, facts, sum(parameter.numel() for parameter in hf.parameters())


@cache
def small_of(folder: str) -> tuple[Small, Model]:
    model = Model(folder, init="random")
    return shrink(model, read(model)[0], [], 1, (2,)), model


@pytest.mark.parametrize("name", [*TINY, *LARGE])
def test_the_structure_stays(name):
    small, model = small_of(str(CONFIGS / name))
    spec, facts, num_parameters = read(model)
    small_spec, small_facts, num_small = read(model, small.config)
    kinds = [(layer.kind, layer.feed_forward) for layer in spec.layers]
    small_kinds = [(layer.kind, layer.feed_forward) for layer in small_spec.layers]
    assert small_kinds == [kinds[i] for i in small.layers]
    assert set(small_kinds) == set(kinds)
    assert small_spec.tied == spec.tied
    assert offered_layouts(small_facts) == offered_layouts(facts)
    for num_ranks in range(2, 9):
        divides = small_facts.indivisible(num_ranks) is None
        assert divides == (facts.indivisible(num_ranks) is None), num_ranks
    assert num_small <= min(num_parameters, 1_200_000)
    large = load.read_config(model)
    assert small.config.num_attention_heads == large.num_attention_heads
    heads = ("num_key_value_heads", "linear_num_key_heads", "mamba_n_heads", "n_groups")
    for key in heads:
        assert getattr(small.config, key, None) == getattr(large, key, None)


def written(folder: Path, name: str, **changes: Any) -> str:
    content = json.loads((CONFIGS / name / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | changes))
    return str(folder)


def test_a_formula_of_layers_keeps_the_first_ones(tmp_path):
    period = {"attn_layer_period": 8, "attn_layer_offset": 4, "num_hidden_layers": 32}
    small, model = small_of(written(tmp_path, "tiny-jamba", **period))
    assert small.layers == (0, 1, 2, 3, 4, 5, 6, 7)  # one period
    short = {"attn_layer_period": 12, "attn_layer_offset": 10, "num_hidden_layers": 32}
    folder = tmp_path / "long"
    folder.mkdir()
    small, model = small_of(written(folder, "tiny-jamba", **short))
    assert small.layers == (*range(11),)  # up to the first layer of attention
    assert {layer.kind for layer in read(model, small.config)[0].layers} == {
        "mamba",
        "full_attention",
    }


def test_experts_become_fewer_in_as_many_groups(tmp_path):
    groups = {"n_routed_experts": 128, "num_experts_per_tok": 6, "n_group": 8, "topk_group": 4}
    small, _ = small_of(written(tmp_path, "tiny-nemotron_h", **groups))
    assert small.config.n_routed_experts == 16
    assert (small.config.num_experts_per_tok, small.config.n_group) == (4, 8)


def test_heads_keep_their_ratio(tmp_path):
    sizes = {"linear_key_head_dim": 96, "linear_value_head_dim": 192}
    small, _ = small_of(written(tmp_path, "tiny-olmo_hybrid", **sizes))
    assert (small.config.linear_key_head_dim, small.config.linear_value_head_dim) == (8, 16)


def test_what_no_ranks_can_share_stays_so(tmp_path):
    small, model = small_of(written(tmp_path, "tiny-llama", intermediate_size=5003))
    assert "feed-forward features" in str(read(model, small.config)[1].indivisible(2))


def test_layers_that_a_run_names_are_kept_and_renumbered():
    model = Model(str(CONFIGS / "llama-3.1-8b"), init="random")
    names = [f"model.layers.{i}.self_attn.q_proj" for i in range(16, 32)]
    small = shrink(model, read(model)[0], [*names, "lm_head"], 1, (2,))
    assert small.layers == (0, 16)
    assert small.named([*names, "lm_head"]) == ["model.layers.1.self_attn.q_proj", "lm_head"]


def test_a_pipeline_gets_a_layer_for_each_stage():
    model = Model(str(CONFIGS / "qwen3_5-9b"), init="random")
    assert shrink(model, read(model)[0], [], 6, (2,)).layers == (0, 1, 2, 3, 4, 5)


@pytest.mark.parametrize("model_type", UNPROVEN)
def test_types_that_no_family_lists_become_small_too(model_type, tmp_path):
    small, model = small_of(str(write_config(model_type, tmp_path)))
    spec = read(model)[0]
    assert {layer.kind for layer in read(model, small.config)[0].layers} == {
        layer.kind for layer in spec.layers
    }


def test_a_model_that_has_no_smaller_one_is_refused(monkeypatch):
    model = Model(str(CONFIGS / "tiny-llama"), init="random")
    spec = read(model)[0]
    monkeypatch.setattr(module, "_with_layers", lambda config, narrow, layers: {})
    with pytest.raises(UserError, match="no smaller model of type llama"):
        shrink(model, spec, [], 1, (2,))
