"""A tiny folder of a multimodal class: a language model, a vision tower and layers for prediction
of several tokens, which no class of transformers reads."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText, PretrainedConfig

from tests.models.tiny import CONFIGS

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
