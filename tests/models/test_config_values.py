"""Any value of any key of a config.json: a step that trains, or one line that names the file.

A line of Python or torch about its own types is none."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from shardwise.assembly.describe import describe
from shardwise.base.batches import Batch
from shardwise.config import Data, Model, RunConfig, Training, UserError
from shardwise.models import load, sizes
from tests.models.test_every_type import OF_PYTHON
from tests.models.tiny import CONFIGS, PLAIN

NAN, INFINITE = float("nan"), float("inf")
VALUES = ("x", [], {}, True, None, -1, 0, 1, 7, 1.5, NAN, INFINITE, -INFINITE, 1e308, 2**40, [None])
WRONG: list[tuple[str, str, Any, str]] = [
    ("tiny-qwen3_5", "text_config", {}, "text_config"),
    ("tiny-qwen3_5", "text_config", 3, "text_config"),
    ("tiny-qwen3_5", "text_config", {"a": 1}, "text_config"),
    ("tiny-llama", "rope_theta", -1, "rope_theta is -1"),
    ("tiny-llama", "rope_theta", 0, "rope_theta is 0"),
    ("tiny-llama", "rope_theta", NAN, "rope_theta is nan"),
    ("tiny-llama", "rope_theta", INFINITE, "rope_theta is inf"),
    ("tiny-llama", "rope_parameters", {"rope_type": "linear", "factor": 1e308}, "factor is 1e"),
    ("tiny-llama", "rope_parameters", {"rope_type": ["linear"]}, "rope_type is"),
    ("tiny-llama", "rope_parameters", {"partial_rotary_factor": 1e5}, "partial_rotary_factor"),
    ("tiny-llama", "intermediate_size", 0, "gate_proj.weight"),
    ("tiny-llama", "rms_norm_eps", NAN, "rms_norm_eps is nan"),
    ("tiny-qwen3_5", "sliding_window", "x", "sliding_window is 'x'"),
    ("tiny-qwen3_5", "linear_num_value_heads", 7, "no multiple of linear_num_key_heads"),
    ("tiny-qwen3_5", "linear_key_head_dim", 0, "cannot compute with the sizes"),
    ("tiny-qwen3_5", "linear_conv_kernel_dim", 100_000, "linear_conv_kernel_dim is 100000"),
    ("tiny-mixtral", "num_experts_per_tok", 0, "num_experts_per_tok is 0"),
    ("tiny-deepseek_v3", "n_group", 0, "cannot compute with the sizes"),
    ("tiny-deepseek_v3", "topk_group", 99, "cannot compute with the sizes"),
]
OF_DENSE = {"num_local_experts": 0, "num_experts_per_tok": 0}
"""What a published Granite-4.0-H without experts says, such as its micro and 350m."""
IGNORED = [("output_hidden_states", "x"), ("output_attentions", True), ("return_dict", False)]
"""What a model would return beside its logits, which nothing here reads."""


def outcome(folder: Path, name: str, key: str, value: Any) -> str | None:
    """What a step of a tiny model with another value ends in: None, or the line of a refusal."""
    content = json.loads((CONFIGS / name / "config.json").read_text()) | {key: value}
    (folder / "config.json").write_text(json.dumps(content))
    model = Model(str(folder), init="random")
    run = RunConfig(model, Data("x", sequence_length=16), Training("o", steps=1))
    try:
        described = describe(run, 1)
        if described.hf.num_parameters() > 2**24 or described.spec.vocab_size < 256:
            return None  # a model that is what its config says: large, or of few tokens
        part = described.parts(run)[0]
        load.fill(part.hf, load.weights(part.hf, model, 0))
        ids = torch.arange(32).view(2, 16)
        rows = Batch(ids, ids, torch.zeros_like(ids), (0, 1), 0)
        try:
            part.train()(rows).backward()
        except Exception:
            load.check_computes(model)  # as a session asks after its first step
            raise
    except UserError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("tiny-lfm2", {"conv_dim": 2048, "conv_dim_out": 2048}),  # widths, not taps
        ("tiny-jamba", {"mamba_dt_rank": "auto"}),
        ("tiny-jamba", {"num_experts": 1, "num_experts_per_tok": 2}),  # without a router
    ],
    ids=str,
)
def test_what_published_folders_say_is_taken(name, keys, tmp_path):
    content = json.loads((CONFIGS / name / "config.json").read_text()) | keys
    (tmp_path / "config.json").write_text(json.dumps(content))
    model = Model(str(tmp_path), init="random")
    load.build_meta(model, load.read_config(model))


def test_a_mixture_without_experts_is_a_dense_model(tmp_path):
    content = json.loads((CONFIGS / "tiny-granitemoehybrid" / "config.json").read_text()) | OF_DENSE
    (tmp_path / "config.json").write_text(json.dumps(content))
    model = Model(str(tmp_path), init="random")
    built = load.build_meta(model, load.read_config(model))
    assert not any("experts" in name for name, _ in built.named_parameters())


@pytest.mark.parametrize(("name", "key", "value", "message"), WRONG)
def test_a_wrong_value_is_named(name, key, value, message, tmp_path):
    line = outcome(tmp_path, name, key, value)
    assert line is not None
    assert message in line
    assert "config.json" in line
    assert not any(sign in line for sign in OF_PYTHON)


@pytest.mark.parametrize(("key", "value"), IGNORED)
def test_what_a_model_returns_beside_logits_is_no_matter(key, value, tmp_path):
    assert outcome(tmp_path, "tiny-llama", key, value) is None


@pytest.mark.parametrize("name", PLAIN)
def test_any_value_trains_or_is_refused_in_a_line(name, tmp_path):
    config = AutoConfig.from_pretrained(CONFIGS / name).to_dict()
    keys = sorted(config.keys() - {"architectures", "transformers_version", "model_type"})
    draw = random.Random(name)
    for key, value in [(draw.choice(keys), draw.choice(VALUES)) for _ in range(12)]:
        line = outcome(tmp_path, name, key, value)
        if line is not None:
            assert str(tmp_path) in line or "config.json" in line, (key, value)
            assert len(line) < 900, (key, value)


def test_plain_transformers_computes_by_the_presets_own_config() -> None:
    # Else an error of ours in a first step would be called one of config.json.
    for name in PLAIN:
        load.check_computes(Model(str(CONFIGS / name), init="random"))


def test_the_place_of_a_layer_is_no_number_of_layers():
    sizes.check_written("m", {"vision_feature_layer": -2, "num_hidden_layers": 1})
    for key in ("num_hidden_layers", "n_layer", "encoder_layers"):
        with pytest.raises(UserError, match=f"{key} is -2 in config.json"):
            sizes.check_written("m", {key: -2})


def test_a_config_of_many_megabytes_is_not_read(tmp_path):
    content = json.loads((CONFIGS / "tiny-llama" / "config.json").read_text())
    content["notes"] = ["x" * 1000] * (sizes.MOST_BYTES // 1000)
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"no config\.json has"):
        load.read_config(Model(str(tmp_path)))
