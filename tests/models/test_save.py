import json
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from shardwise.config import Model
from shardwise.models.families import spec_of
from shardwise.models.load import load_whole, read_config
from shardwise.models.save import save_model
from tests.left_out import some_now
from tests.models.tiny import (
    CONFIGS,
    EACH_KIND,
    PLAIN,
    TINY,
    entries,
    loaded_by_transformers,
    logits,
    on_meta,
    same,
    tiny,
)


@pytest.mark.parametrize(
    ("name", "shard_bytes"),
    some_now(
        product(TINY, (10**9, 200_000)),
        [("tiny-llama", 10**9), *((name, 200_000) for name in (*EACH_KIND, "tiny-qwen3_5-tied"))],
    ),
)
def test_what_is_saved_is_what_transformers_and_we_load(name, shard_bytes, tmp_path):
    model = tiny(name)
    whole = load_whole(model, read_config(model), seed=1)
    saved = entries(model, seed=1)
    save_model(on_meta(model), saved.items(), tmp_path, shard_bytes)
    assert (tmp_path / "model.safetensors").exists() == (shard_bytes == 10**9)
    for file in tmp_path.glob("*.safetensors"):
        # one matrix may be larger than the limit, and then has a file of its own
        tensors = load_file(file)
        assert sum(t.nbytes for t in tensors.values()) <= shard_bytes or len(tensors) == 1
    theirs = loaded_by_transformers(tmp_path)
    assert torch.equal(logits(theirs), logits(whole))
    assert theirs.config.use_cache is True
    assert same(entries(Model(str(tmp_path))), saved)


@pytest.mark.parametrize("name", ["tiny-lfm2", "tiny-gpt2"])
def test_families_that_are_tied_by_default_can_be_untied(name, tmp_path):
    config = json.loads((CONFIGS / name / "config.json").read_text()) | {
        "tie_word_embeddings": False
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = Model(str(tmp_path), init="random")
    saved = entries(model)
    assert not spec_of(on_meta(model).config, on_meta(model)).tied
    save_model(on_meta(model), saved.items(), tmp_path / "out")
    theirs = loaded_by_transformers(tmp_path / "out")
    assert torch.equal(logits(theirs), logits(load_whole(model, read_config(model))))
    head, embedding = theirs.get_output_embeddings().weight, theirs.get_input_embeddings().weight
    assert not torch.equal(head, embedding)


def test_our_files_are_byte_by_byte_what_transformers_writes(tmp_path):
    for name in PLAIN:
        model = tiny(name)
        save_model(on_meta(model), entries(model).items(), tmp_path / "ours")
        load_whole(model, read_config(model)).save_pretrained(tmp_path / "theirs")
        assert same(
            load_file(tmp_path / "ours" / "model.safetensors"),
            load_file(tmp_path / "theirs" / "model.safetensors"),
        )


def test_checkpoints_differ_from_modules_in_names_and_layout(tmp_path: Path) -> None:
    # Without these differences the two tests above would prove nothing about conversion.
    expected = {
        "tiny-olmo_hybrid": "model.layers.0.linear_attn.q_conv1d.weight",
        "tiny-qwen3_next": "model.layers.0.mlp.experts.7.gate_proj.weight",
        "tiny-nemotron_h": "backbone.layers.1.mixer.experts.7.up_proj.weight",
        "tiny-granitemoehybrid": "model.layers.0.block_sparse_moe.input_linear.weight",
        "tiny-kimi_linear": "model.layers.1.self_attn.q_conv1d.weight",
        "tiny-jamba": "model.layers.1.feed_forward.experts.7.gate_proj.weight",
    }
    for name, key in expected.items():
        save_model(on_meta(tiny(name)), entries(tiny(name)).items(), tmp_path)
        assert key in load_file(tmp_path / "model.safetensors")


def test_saving_again_leaves_no_shards_of_before(tmp_path):
    model = tiny("tiny-llama")
    save_model(on_meta(model), entries(model).items(), tmp_path, shard_bytes=100_000)
    save_model(on_meta(model), entries(model, seed=1).items(), tmp_path)
    assert sorted(file.name for file in tmp_path.glob("*")) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]
    assert same(entries(Model(str(tmp_path))), entries(model, seed=1))


def test_saving_wants_every_parameter_once(tmp_path):
    state = entries(tiny("tiny-llama"))
    built = on_meta(tiny("tiny-llama"))
    with pytest.raises(AssertionError, match="no value for"):
        save_model(built, list(state.items())[1:], tmp_path)
    with pytest.raises(AssertionError, match="given twice"):
        save_model(built, [*state.items(), *state.items()], tmp_path)
