"""Every multimodal class of transformers whose language model is of a listed family: its text is
tuned, and what is saved is of that class. The oracle is the class itself, with PEFT."""

from __future__ import annotations

import json
import warnings
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForMultimodalLM
from transformers.models.auto import modeling_auto

from shardwise.config import Lora, Model
from shardwise.models.adapters.writing import merge_adapter, save_adapter
from shardwise.models.families import family_of
from shardwise.models.load import load_whole, read_config
from shardwise.models.multimodal import multimodal_of
from tests.left_out import some_now
from tests.models import multimodal
from tests.models.tiny import logits, relative_error, same, tokens, trained, with_adapters

TOLERANCE = 1e-5  # float32, relative to the largest logit
NOW = ("gemma3", "mistral3", "lfm2_vl", "nemotron_h_omni", "qwen2_5_vl", "qwen3_vl_moe", "smolvlm")
UNSCALED = {
    **dict.fromkeys(("aya_vision", "cohere2_vision"), "logit_scale"),
    **dict.fromkeys(("granite_speech", "granite_speech_plus"), "logits_scaling"),
}
"""Classes that leave out a factor on the logits of their language model."""


def test_the_list_of_classes_is_complete():
    names = modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES
    found = set()
    for name in names:
        with torch.device("meta"):
            config = multimodal.CONFIG_MAPPING[name]()
        if config.get_text_config() is not config and multimodal.family_of_part(name):
            found.add(name)
    assert found == {*multimodal.CLASSES, *multimodal.NOT_BUILT}


def of_class(model: Any) -> torch.Tensor:
    with torch.no_grad():
        ids = tokens()
        return model.eval()(input_ids=ids, attention_mask=torch.ones_like(ids)).logits


# PEFT 0.21 uses a name that transformers will drop.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize("model_type", some_now(multimodal.CLASSES, NOW))
def test_text_is_tuned_and_the_class_loads_what_is_saved(model_type, tmp_path):
    whole: Any = multimodal.write_small(tmp_path / "base", model_type)
    tower = {name: value.clone() for name, value in whole.state_dict().items()}
    base, lora = Model(str(tmp_path / "base")), Lora(r=2)
    text = load_whole(base, read_config(base))
    saved = multimodal_of(base, text)
    assert saved is not None
    notes, scale = saved.unscaled(family_of(text)), 1.0
    if key := UNSCALED.get(model_type):
        assert key in notes[0]
        value = getattr(text.config, key)
        scale = value if key == "logit_scale" else 1 / value
    assert len(notes) == (scale != 1)
    assert relative_error(logits(text), of_class(whole) * scale) < TOLERANCE

    model, _ = with_adapters(base, lora)
    expected = logits(model)
    assert relative_error(expected, logits(text)) > 0.01
    save_adapter(model, lora, trained(model), tmp_path / "adapter", base.path, saved)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Found missing adapter keys")
        adapted = PeftModel.from_pretrained(whole, tmp_path / "adapter")
    assert relative_error(of_class(adapted) * scale, expected) < TOLERANCE

    merge_adapter(base, tmp_path / "adapter", tmp_path / "merged")
    before, after = (multimodal.entries(tmp_path / name) for name in ("base", "merged"))
    assert after.keys() == before.keys()
    merged, info = AutoModelForMultimodalLM.from_pretrained(
        tmp_path / "merged", output_loading_info=True
    )
    assert not any(info.values()), info
    state = merged.state_dict()
    beside = {name: value for name, value in tower.items() if saved.text_name(name) is None}
    assert beside
    assert same({name: state[name] for name in beside}, beside)
    assert relative_error(of_class(merged) * scale, expected) < TOLERANCE
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert config["architectures"] == [type(whole).__name__]


def test_a_folder_without_architectures_gives_the_language_model_alone(tmp_path):
    whole: Any = multimodal.write_small(tmp_path / "base", "mistral3")
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    del config["architectures"]
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    base = Model(str(tmp_path / "base"))
    text = load_whole(base, read_config(base))
    assert multimodal_of(base, text) is None
    assert relative_error(logits(text), of_class(whole)) < TOLERANCE
