"""Tiny folders of multimodal classes: a language model, a tower, and of Qwen3.5 also layers for
prediction of several tokens, which no class of transformers reads."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    PretrainedConfig,
    PreTrainedModel,
)

from shardwise.models.families import FAMILIES
from tests.models.tiny import CONFIGS, TINY_OF

VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 1,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
    "patch_size": 4,
    "temporal_patch_size": 1,
}
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def config(name: str = "tiny-qwen3_5") -> PretrainedConfig:
    """A Qwen3.5, dense or with experts, whose language model is one of the tiny ones."""
    text = AutoConfig.from_pretrained(CONFIGS / name).to_dict()
    whole = text["model_type"].removesuffix("_text")
    ids = {"image_token_id": 250, "video_token_id": 251, "vision_start_token_id": 252}
    tied = text["tie_word_embeddings"]
    sizes = {"text_config": text, "vision_config": VISION, "tie_word_embeddings": tied}
    return AutoConfig.for_model(whole, **sizes, **ids)


def write(folder: Path, name: str = "tiny-qwen3_5") -> None:
    """Write the model with random weights; those of `mtp` have a shard and a dtype of their own."""
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(config(name)).save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / SHARDS[0])
    extra = {"mtp.fc.weight": torch.rand(3, 4).bfloat16(), "mtp.norm.weight": torch.rand(3)}
    save_file(extra, folder / SHARDS[1], metadata={"format": "pt"})
    shard_of = dict.fromkeys(weights, SHARDS[0]) | dict.fromkeys(extra, SHARDS[1])
    index = {"metadata": {}, "weight_map": shard_of}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "preprocessor_config.json").write_text('{"patch_size": 4}')


def entries(folder: Path) -> dict[str, torch.Tensor]:
    """All that is in a folder's weight files."""
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


CLASSES = (
    *(
        "aya_vision",
        "cohere2_vision",
        "cosmos3_omni",
        "deepseek_vl",
        "deepseek_vl_hybrid",
        "exaone4_5",
        "gemma3",
    ),
    *("fun_asr_nano", "glmasr", "got_ocr2", "granite_speech", "granite_speech_plus", "hunyuan_vl"),
    *("idefics2", "idefics3", "internvl", "janus", "kimi_k25", "lfm2_vl", "lighton_ocr", "llava"),
    *("llava_next", "llava_next_video", "llava_onevision", "minicpm_ocr", "minicpmv4_6"),
    *("minicpmv4_7", "mistral3", "moss_transcribe_diarize", "nemotron_h_omni"),
    *("ovis2", "pp_chart2table", "qianfan_ocr", "qwen2_5_vl", "qwen2_audio", "qwen2_vl"),
    *("qwen3_5", "qwen3_5_moe", "qwen3_asr", "qwen3_vl", "qwen3_vl_moe", "smolvlm"),
    *("vibevoice_asr", "video_llama_3", "video_llava", "vipllava", "voxtral"),
)
"""Model types of multimodal classes of transformers whose language model is a listed family."""
NOT_BUILT = {
    "fast_vlm": "its tower needs timm",
    "nemo_speechlm": "no small config of it was made here",
    "perception_lm": "its tower needs timm",
    "shieldgemma2": "a classifier: its class has no head of tokens",
}
"""Others of that kind, with the reason why they are no model here."""
_SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "intermediate_size", "embed_dim", "d_model", "image_size"), 16),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "encoder_layers", "depth"), 1),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "num_heads"), 2),
    **{"head_dim": 8, "patch_size": 8, "encoder_attention_heads": 2, "encoder_ffn_dim": 16},
    **{"mlp_ratio": 1, "out_hidden_size": 64, "base_channels": 32, "num_embeddings": 16},
    **{"num_filters": 1, "depths": 1},
}
"""Sizes of towers."""
_OF_TEXT = {
    "ovis2": ("hidden_size", "vocab_size"),
    "fun_asr_nano": ("adaptor_config.hidden_size",),
    "idefics2": ("perceiver_config.hidden_size", "perceiver_config.rms_norm_eps"),
}
"""Keys that have the language model's size."""


def family_of_part(model_type: str) -> str | None:
    """The listed family that a class's language model is of."""
    text = CONFIG_MAPPING[model_type]().get_text_config().model_type
    alike = (name for name, family in FAMILIES.items() if text in family.text_parts)
    return text if text in FAMILIES else next(alike, None)


def small_config(model_type: str) -> PretrainedConfig:
    """A class of `CLASSES` with a small tower, whose language model is the tiny one."""
    whole = CONFIG_MAPPING[model_type]()
    tower_sizes(whole)
    part, family = whole.get_text_config(), family_of_part(model_type)
    assert family is not None
    tiny = AutoConfig.from_pretrained(CONFIGS / TINY_OF[family])
    if part.model_type == family:
        text = tiny
    else:
        known = {field.name for field in fields(part)} - {"model_type", "transformers_version"}
        head = tiny.hidden_size // tiny.num_attention_heads
        if "head_dim" in known:
            head = tiny.head_dim or head
        values = {key: getattr(tiny, key) for key in known if hasattr(tiny, key)}
        # Three shares of the pairs of a head, for the positions of time, height and width.
        shares = [head // 2 - 2 * (head // 8), head // 8, head // 8]
        values["rope_parameters"] = {**tiny.rope_parameters, "mrope_section": shares}
        text = type(part)(**values)
    key = next(key for key, value in vars(whole).items() if value is part)
    setattr(whole, key, text)
    for name in _OF_TEXT.get(model_type, ()):
        owner, _, leaf = name.rpartition(".")
        setattr(getattr(whole, owner) if owner else whole, leaf, getattr(text, leaf))
    whole.tie_word_embeddings = tiny.tie_word_embeddings
    return type(whole).from_dict(whole.to_dict())  # with what a class derives from sizes


def tower_sizes(config: PretrainedConfig) -> None:
    """Make all parts of a config small."""
    for part in (getattr(config, key, None) for key in config.sub_configs):
        if not isinstance(part, PretrainedConfig):
            continue
        tower_sizes(part)
        for key, size in _SMALL.items():
            value = getattr(part, key, None)
            if type(value) in (list, tuple):
                setattr(part, key, [size] * len(value))
            elif type(value) in (int, float):
                setattr(part, key, type(value)(size))


def write_small(folder: Path, model_type: str) -> PreTrainedModel:
    """Write a class of `CLASSES` with random weights, and return it."""
    torch.manual_seed(0)
    model = AutoModelForMultimodalLM.from_config(small_config(model_type)).eval()
    model.save_pretrained(folder)
    return model
