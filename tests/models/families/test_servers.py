"""Exported adapters, key by key, against the rules by which servers map names to their modules.

The rules are those of the releases that docs/decisions/044-served-adapters.md names, in own words.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from shardwise.commands import export
from shardwise.config import Lora, Model, UserError
from shardwise.models.adapters.writing import READERS, export_adapter, save_adapter
from shardwise.models.multimodal import multimodal_of
from tests.models import multimodal
from tests.models.tiny import tiny, trained, with_adapters

R = 3
CONFIG = multimodal.config().get_text_config()
KEYS = CONFIG.linear_key_head_dim * CONFIG.linear_num_key_heads
VALUES = CONFIG.linear_value_head_dim * CONFIG.linear_num_value_heads
QKVZ = "linear_attn.in_proj_qkvz"
WITHOUT_GATES = [
    *("in_proj_qkv", "in_proj_z", "out_proj"),
    *(f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")),
]


def written(folder: Path, model: Model, lora: Lora) -> tuple[Model, dict[str, torch.Tensor]]:
    """An adapter in `folder`, named after the class of the model's folder; its model and tensors,
    by the names of the text class."""
    adapted, _ = with_adapters(replace(model, init="random"), lora)
    state = trained(adapted)
    save_adapter(adapted, lora, state, folder, "base", multimodal_of(model, adapted))
    return model, {name.replace(".default.", "."): value for name, value in state.items()}


def qwen(folder: Path, lora: Lora) -> tuple[Model, dict[str, torch.Tensor]]:
    (folder / "base").mkdir()
    config = multimodal.config()
    config.architectures = ["Qwen3_5ForConditionalGeneration"]
    config.save_pretrained(folder / "base")
    return written(folder / "adapter", Model(str(folder / "base"), init="random"), lora)


def server_modules(prefix: str) -> set[str]:
    """The linears that both servers build of the tiny Qwen3.5."""
    modules = set()
    for number, kind in enumerate(CONFIG.layer_types):
        names = ["mlp.gate_up_proj", "mlp.down_proj"]
        if kind == "full_attention":
            names += ["self_attn.qkv_proj", "self_attn.o_proj"]
        else:
            names += [f"linear_attn.{name}" for name in ("in_proj_qkvz", "in_proj_ba", "out_proj")]
        modules |= {f"{prefix}layers.{number}.{name}" for name in names}
    return modules


# ------------------------------------------------------------------------------------------- vllm

VLLM_PREFIXES = {
    "Qwen3_5ForConditionalGeneration": {
        "model.visual.": "visual.",
        "lm_head.": "language_model.lm_head.",
        "model.language_model.": "language_model.model.",
    },
    "Qwen3_5ForCausalLM": {"model.language_model.": "model."},
}
VLLM_PACKED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
}


def in_vllm(key: str, architecture: str) -> str:
    """The module of vLLM that gets a factor: its names are looked up by equality alone."""
    name = re.fullmatch(r"base_model\.model\.(.+)\.lora_[AB]\.weight", key)[1]
    for old, new in VLLM_PREFIXES[architecture].items():
        if name.startswith(old):
            name = new + name.removeprefix(old)
            break
    block, _, leaf = name.rpartition(".")
    packed = {part: whole for whole, parts in VLLM_PACKED.items() for part in parts}
    return f"{block}.{packed.get(leaf, leaf)}"


def test_every_key_reaches_a_module_of_vllm_and_every_module_is_reached(tmp_path):
    base, state = qwen(tmp_path, Lora(r=R))
    export_adapter(base, tmp_path / "adapter", tmp_path / "out", "vllm")
    tensors = load_file(tmp_path / "out" / "adapter_model.safetensors")
    reached = {in_vllm(key, "Qwen3_5ForConditionalGeneration") for key in tensors}
    assert reached == server_modules("language_model.model.")
    assert len(tensors) == len(state)
    # The names of the text class, as AutoModelForCausalLM gives them, reach none there.
    text = {
        in_vllm(f"base_model.model.{name}", "Qwen3_5ForConditionalGeneration") for name in state
    }
    assert not text & server_modules("language_model.model.")
    # Nor do they get lost where `architectures` names the text class.
    both = {in_vllm(key, "Qwen3_5ForCausalLM") for key in tensors}
    assert both == server_modules("model.")


def test_vllm_has_factors_for_all_or_none_of_a_fused_projection(tmp_path):
    base, state = qwen(tmp_path, Lora(r=R, targets=["in_proj_z"]))
    export_adapter(base, tmp_path / "adapter", tmp_path / "out", "vllm")
    tensors = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert len(tensors) == 2 * len(state)
    block = "base_model.model.model.language_model.layers.0.linear_attn"
    zeros = tensors[f"{block}.in_proj_qkv.lora_B.weight"]
    assert zeros.shape == (2 * KEYS + VALUES, R)
    assert not zeros.any()
    assert tensors[f"{block}.in_proj_z.lora_B.weight"].any()


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-olmo_hybrid", "tiny-lfm2"])
def test_text_models_keep_their_names_for_vllm(name, tmp_path):
    model, state = written(tmp_path / "adapter", tiny(name), Lora(r=R))
    export_adapter(model, tmp_path / "adapter", tmp_path / "out", "vllm")
    tensors = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert tensors.keys() == {f"base_model.model.{key}" for key in state}
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert set(config["target_modules"]) == {key.split(".")[-3] for key in state}


# ----------------------------------------------------------------------------------------- sglang

SGLANG_STACKS = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "in_proj_qkvz": ("in_proj_q", "in_proj_k", "in_proj_v", "in_proj_z"),
}
SGLANG_ROWS = {
    "qkv_proj": CONFIG.head_dim * (2 * CONFIG.num_attention_heads + 2 * CONFIG.num_key_value_heads),
    "gate_up_proj": 2 * CONFIG.intermediate_size,
    "in_proj_qkvz": 2 * KEYS + 2 * VALUES,
    "o_proj": CONFIG.hidden_size,
    "out_proj": CONFIG.hidden_size,
    "down_proj": CONFIG.hidden_size,
}
SGLANG_TARGETS = dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj") | dict.fromkeys(
    ("gate_proj", "up_proj"), "gate_up_proj"
)


def in_sglang(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """The stacked A and B that SGLang makes for each of its modules.

    It finds the layer by its number and stacks all parts of a fused linear or fails. The module is
    one that `target_modules` names, after q, k, v, gate and up have been renamed there.
    """
    config = json.loads((folder / "adapter_config.json").read_text())
    targets = {SGLANG_TARGETS.get(name, name) for name in config["target_modules"]}
    assert targets <= SGLANG_ROWS.keys()
    weights = load_file(folder / "adapter_model.safetensors")
    for whole, parts in SGLANG_STACKS.items():
        for key in [key for key in weights if f".{parts[0]}." in key]:
            keys = [key.replace(f".{parts[0]}.", f".{part}.") for part in parts]
            stacked = torch.cat([weights.pop(part) for part in keys])
            weights[key.replace(f".{parts[0]}.", f".{whole}.")] = stacked
    modules: dict[str, dict[str, torch.Tensor]] = {}
    for key, value in weights.items():
        (number,) = re.findall(r"layers\.(\d+)\.", key)
        block, leaf, factor = key.split(".")[-4:-1]
        assert leaf in targets, key
        modules.setdefault(f"layers.{number}.{block}.{leaf}", {})[factor] = value
    for name, pair in modules.items():
        leaf = name.rpartition(".")[2]
        assert pair["lora_A"].shape[0] == R * len(SGLANG_STACKS.get(leaf, (leaf,))), name
        assert pair["lora_B"].shape[0] == SGLANG_ROWS[leaf], name
    return modules


def product(pair: dict[str, torch.Tensor], rows: list[int]) -> torch.Tensor:
    """What SGLang adds to a weight that has slices of these many rows."""
    slices = zip(pair["lora_B"].split(rows), pair["lora_A"].split(R))
    return torch.cat([b @ a for b, a in slices])


def test_every_key_reaches_a_module_of_sglang_with_the_same_product(tmp_path):
    lora = Lora(r=R, alpha=6.0, rslora=True, targets=WITHOUT_GATES)
    base, state = qwen(tmp_path, lora)
    export_adapter(base, tmp_path / "adapter", tmp_path / "out", "sglang")
    modules = in_sglang(tmp_path / "out")
    reached = {name for name in server_modules("") if not name.endswith("in_proj_ba")}
    assert modules.keys() == reached

    def ours(*names: str) -> torch.Tensor:
        block = "model.layers.0.linear_attn"
        return torch.cat(
            [
                state[f"{block}.{name}.lora_B.weight"] @ state[f"{block}.{name}.lora_A.weight"]
                for name in names
            ]
        )

    theirs = product(modules[f"layers.0.{QKVZ}"], [KEYS, KEYS, VALUES, VALUES])
    assert torch.allclose(theirs, ours("in_proj_qkv", "in_proj_z"), atol=1e-6)
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    # It divides alpha by r, whatever use_rslora says.
    assert config["lora_alpha"] / config["r"] == pytest.approx(6.0 / R**0.5)
    assert config["use_rslora"] is False


def test_sglang_has_factors_for_all_parts_of_a_fused_linear(tmp_path):
    base, _ = qwen(tmp_path, Lora(r=R, targets=["in_proj_z", "q_proj", "up_proj"]))
    export_adapter(base, tmp_path / "adapter", tmp_path / "out", "sglang")
    modules = in_sglang(tmp_path / "out")
    assert {name.rpartition(".")[2] for name in modules} == SGLANG_STACKS.keys()
    b = modules[f"layers.0.{QKVZ}"]["lora_B"]
    assert not b[: 2 * KEYS + VALUES].any()
    assert b[2 * KEYS + VALUES :].any()


# ---------------------------------------------------------------------------------------- refusals


def test_what_a_server_would_not_use_is_refused(tmp_path):
    base, _ = qwen(tmp_path, Lora(r=R))
    gpt2, _ = written(tmp_path / "gpt2", tiny("tiny-gpt2"), Lora(r=R))
    llama = tiny("tiny-llama")
    written(tmp_path / "saved", llama, Lora(r=R, modules_to_save=["lm_head"]))
    written(tmp_path / "llama", llama, Lora(r=R))
    for model, adapter, reader, fragment in (
        (base, "adapter", "sglang", "reads no adapter on linear_attn.in_proj_a, linear_attn.in_"),
        (gpt2, "gpt2", "vllm", "of gpt2 is known only for llama, qwen3"),
        (llama, "saved", "vllm", "has modules_to_save"),
        (llama, "adapter", "peft", "does not fit .*: factors of modules that the model does not"),
    ):
        with pytest.raises(UserError, match=fragment) as error:
            export_adapter(model, tmp_path / adapter, tmp_path / "out", reader)
        assert "--merge" in str(error.value) or "shardwise check" in str(error.value)
        assert "\n" not in str(error.value)
    file = tmp_path / "llama" / "adapter_config.json"
    config = json.loads(file.read_text())
    for change, fragment in (
        ({"use_dora": True}, "does not fit .* the file lacks: .*lora_magnitude_vector"),
        ({"rank_pattern": {"q_proj": 2}}, "does not fit .* the config's rank"),
        ({"r": 4}, "does not fit .* the config's rank"),
        ({"bias": "all"}, "reads plain LoRA of one rank only, .* has bias"),
        ({"alpha_pattern": {"q_proj": 2}}, "one rank only, .* has several ranks or scales"),
        ({"init_lora_weights": "pissa"}, "one rank only, .* has init_lora_weights"),
        ({"init_lora_weights": "lora_ga"}, "init_lora_weights is lora_ga, which changed the base"),
    ):
        file.write_text(json.dumps(config | change))
        with pytest.raises(UserError, match=fragment):
            export_adapter(llama, tmp_path / "llama", tmp_path / "out", "sglang")
    assert not (tmp_path / "out").exists()


def test_an_exported_adapter_replaces_nothing(tmp_path):
    llama, _ = written(tmp_path / "adapter", tiny("tiny-llama"), Lora(r=R))
    with pytest.raises(UserError, match="is there already and not an empty folder"):
        export_adapter(llama, tmp_path / "adapter", tmp_path / "adapter", "peft")


def test_targets_of_peft_reach_no_other_module_of_the_class(tmp_path):
    base, state = qwen(tmp_path, Lora(r=R, targets=["layers.1.mlp.down_proj", "q_proj"]))
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    inside = "model.language_model.layers.1.mlp.down_proj"
    assert config["target_modules"] == [inside, "self_attn.q_proj"]
    export_adapter(base, tmp_path / "adapter", tmp_path / "hf", "hf")
    config = json.loads((tmp_path / "hf" / "adapter_config.json").read_text())
    assert config["target_modules"] == ["model.layers.1.mlp.down_proj", "self_attn.q_proj"]
    tensors = load_file(tmp_path / "hf" / "adapter_model.safetensors")
    assert tensors.keys() == {f"base_model.model.{name}" for name in state}


def test_the_command_knows_every_reader():
    assert export.READERS == READERS


def test_experts_are_renamed_with_their_parameters(tmp_path):
    lora = Lora(r=R, targets="all-linear")
    model, _ = written(tmp_path / "adapter", tiny("tiny-qwen3_moe"), lora)
    export_adapter(model, tmp_path / "adapter", tmp_path / "out", "peft")
    files = [tmp_path / name / "adapter_model.safetensors" for name in ("adapter", "out")]
    one, other = map(load_file, files)
    assert one.keys() == other.keys()
    configs = [json.loads((f.parent / "adapter_config.json").read_text()) for f in files]
    for key in ("target_modules", "target_parameters"):
        assert sorted(configs[0][key]) == sorted(configs[1][key])
    written(tmp_path / "stacks", model, Lora(r=R, targets=["experts", "q_proj"]))
    with pytest.raises(UserError, match=r"reads no adapter on mlp\.experts") as error:
        export_adapter(model, tmp_path / "stacks", tmp_path / "more", "vllm")
    assert "--for hf writes, with --enable-mixed-moe-lora-format and" in str(error.value)
    assert "is_3d_lora_weight=True" in str(error.value)
    config = configs[0] | {"target_parameters": None}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"PEFT does not read with this config: .*experts"):
        export_adapter(model, tmp_path / "adapter", tmp_path / "more", "peft")
