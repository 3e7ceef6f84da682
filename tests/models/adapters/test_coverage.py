"""What `shardwise check` finds in an adapter that would do nothing, and in a sound one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import Qwen3_5ForConditionalGeneration

from shardwise.commands import cli
from shardwise.config import Lora, Model
from shardwise.models.adapters.coverage import audit
from shardwise.models.adapters.writing import save_adapter
from tests.models import multimodal
from tests.models.tiny import tiny, trained, with_adapters

Tensors = dict[str, torch.Tensor]
LLAMA = tiny("tiny-llama")
Q = "base_model.model.model.layers.0.self_attn.q_proj"


def write(folder: Path, model: Model, lora: Lora) -> None:
    adapted, _ = with_adapters(model, lora)
    save_adapter(adapted, lora, trained(adapted), folder, "base")


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    write(folder, LLAMA, Lora(r=4, alpha=8.0, targets="attention", modules_to_save=["model.norm"]))
    return folder


def test_a_sound_adapter_has_no_findings(sound, capsys):
    result = audit(str(sound), LLAMA)
    assert result.findings == ()
    assert "rank 4, alpha 8, scale 2;" in str(result.table().title)
    (row,) = result.rows
    assert (row.kind, row.adapted) == ("full_attention", result.num_matched)
    assert row.frozen == ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    assert cli.main(["check", str(sound), LLAMA.path]) == 0
    assert "all of it takes effect" in capsys.readouterr().out


def renamed(tensors: Tensors, config: dict[str, Any]) -> None:
    for key in [key for key in tensors if key.startswith(Q)]:
        tensors[key.replace("q_proj", "query")] = tensors.pop(key)


def zero(tensors: Tensors, config: dict[str, Any]) -> None:
    tensors[f"{Q}.lora_B.weight"].zero_()


def not_finite(tensors: Tensors, config: dict[str, Any]) -> None:
    tensors[f"{Q}.lora_A.weight"][0, 0] = torch.nan


def without_b(tensors: Tensors, config: dict[str, Any]) -> None:
    del tensors[f"{Q}.lora_B.weight"]


def too_narrow(tensors: Tensors, config: dict[str, Any]) -> None:
    tensors[f"{Q}.lora_A.weight"] = tensors[f"{Q}.lora_A.weight"][:, 1:].clone()


def empty(tensors: Tensors, config: dict[str, Any]) -> None:
    tensors.clear()


def without_prefix(tensors: Tensors, config: dict[str, Any]) -> None:
    for key in list(tensors):
        tensors[key.removeprefix("base_model.model.")] = tensors.pop(key)


def without_norm(tensors: Tensors, config: dict[str, Any]) -> None:
    del tensors["base_model.model.model.norm.weight"]


def other_key(tensors: Tensors, config: dict[str, Any]) -> None:
    tensors["something"] = torch.ones(1)


def targets(*names: str) -> Callable[[Tensors, dict[str, Any]], None]:
    return lambda tensors, config: config["target_modules"].extend(names)


def values(**changes: Any) -> Callable[[Tensors, dict[str, Any]], None]:
    return lambda tensors, config: config.update(changes)


@pytest.mark.parametrize(
    ("change", "fragment"),
    [
        (
            renamed,
            "factors of modules that the model does not have: model.layers.0.self_attn.query",
        ),
        (zero, "modules with a factor of zeros only: model.layers.0.self_attn.q_proj"),
        (not_finite, f"not finite: {Q}.lora_A.weight"),
        (without_b, f"the file lacks: {Q}.lora_B.weight"),
        (too_narrow, f"shapes that do not fit the module or the config's rank: {Q}.lora_A"),
        (empty, "the file has no LoRA factors"),
        (targets("in_proj"), "target_modules of the config that the model does not have: in_proj"),
        (targets("down_proj"), "the file lacks: base_model.model.model.layers.0.mlp.down_proj"),
        (values(target_modules=".*key_proj"), "PEFT does not take its config"),
        (values(modules_to_save=["score"]), "modules_to_save of the config that the model does"),
        (values(r=5), "do not fit the module or the config's rank"),
        (without_prefix, "PEFT does not read with this config: model.layers.0"),
        (values(target_modules=["q_proj"]), "PEFT does not read with this config"),
        (
            values(exclude_modules=["q_proj"]),
            f"PEFT does not read with this config: {Q}.lora_A.weight",
        ),
        (without_norm, "the file lacks: base_model.model.model.norm.weight"),
        (values(rank_pattern={"q_proj": 2}), f"the config's rank: {Q}.lora_A.weight [4, 64]"),
        (values(alpha_pattern={"q_proj": 0}), "the scale is 0 in"),
        (other_key, "PEFT does not read with this config: something"),
        (values(target_modules="*.q_proj"), "PEFT does not take its config"),
    ],
)
def test_what_would_do_nothing_is_found(change, fragment, sound, tmp_path):
    folder = shutil.copytree(sound, tmp_path / "adapter")
    tensors = load_file(folder / "adapter_model.safetensors")
    config = json.loads((folder / "adapter_config.json").read_text())
    change(tensors, config)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    findings = audit(str(folder), LLAMA).findings
    assert any(fragment in finding for finding in findings), findings


def test_the_text_names_of_a_multimodal_folder_are_found(tmp_path, capsys):
    config = multimodal.config()
    config.architectures = ["Qwen3_5ForConditionalGeneration"]
    config.save_pretrained(tmp_path / "base")
    write(tmp_path / "adapter", Model(str(tmp_path / "base"), init="random"), Lora(r=2))
    assert cli.main(["check", str(tmp_path / "adapter"), str(tmp_path / "base")]) == 1
    out = capsys.readouterr().out
    assert "Qwen3_5ForConditionalGeneration, which config.json names, loads none of them" in out
    arguments = [str(tmp_path / name) for name in ("base", "adapter", "out")]
    assert cli.main(["export", *arguments, "--for", "peft"]) == 0
    assert cli.main(["check", str(tmp_path / "out"), str(tmp_path / "base")]) == 0


# PEFT 0.21 uses a name that transformers will drop.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_a_multimodal_adapter_is_sound_with_its_vision_tower_and_not_half_renamed(tmp_path):
    base, folder = tmp_path / "base", tmp_path / "adapter"
    config = multimodal.config()
    config.architectures = ["Qwen3_5ForConditionalGeneration"]
    config.save_pretrained(base)
    lora = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    get_peft_model(Qwen3_5ForConditionalGeneration(config), lora).save_pretrained(folder)
    model = Model(str(base), init="random")
    assert audit(str(folder), model).findings == ()
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    for key in [key for key in tensors if ".language_model.layers.0." in key]:
        tensors[key.replace(".language_model.", ".")] = tensors.pop(key)
    save_file(tensors, file)
    findings = audit(str(folder), model).findings
    lost = "factors of modules that the model does not have: model.layers.0"
    assert any(lost in finding for finding in findings), findings


def test_adapters_that_a_layer_reads_past_are_found(tmp_path):
    write(tmp_path, tiny("tiny-jamba"), Lora(r=2))
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    for key in [key for key in tensors if ".mamba.x_proj." in key]:
        tensors[key.replace("x_proj", "dt_proj")] = tensors[key].clone()
    save_file(tensors, file)
    findings = audit(str(tmp_path), tiny("tiny-jamba")).findings
    assert any("reads past the adapter" in finding for finding in findings), findings


@pytest.mark.parametrize(
    ("name", "content", "fragment"),
    [
        ("adapter_model.bin", "", "adapter_model.bin is a pickle, which is never read"),
        ("adapter_model.safetensors", "{", "not a whole safetensors file"),
        ("adapter_config.json", "[]", "not the config of a LoRA adapter"),
        (
            "adapter_config.json",
            '{"peft_type": "IA3", "r": 1, "lora_alpha": 1}',
            'peft_type is "IA3"',
        ),
        (
            "adapter_config.json",
            '{"peft_type": "LORA", "r": 0, "lora_alpha": 1}',
            "r is 0 instead of a whole number",
        ),
        (
            "adapter_config.json",
            '{"peft_type": "LORA", "r": 2, "lora_alpha": 0}',
            "lora_alpha is 0 instead of a finite number other than 0",
        ),
        ("adapter_config.json", "", "not the config of a LoRA adapter"),
    ],
)
def test_a_folder_that_cannot_be_read_is_one_line(name, content, fragment, sound, tmp_path, capsys):
    folder = shutil.copytree(sound, tmp_path / "adapter")
    if name == "adapter_model.bin":
        (folder / "adapter_model.safetensors").unlink()
    (folder / name).write_text(content)
    assert cli.main(["check", str(folder), LLAMA.path]) == 2
    error = capsys.readouterr().err
    assert fragment in error
    assert error.count("\n") == 1
