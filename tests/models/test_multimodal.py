"""What is trained on a multimodal folder is saved under the names of the class that it names."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from shardwise.config import Lora, Model, UserError
from shardwise.models.adapters.coverage import with_rest
from shardwise.models.adapters.writing import export_adapter, merge_adapter, save_adapter
from shardwise.models.load import other_weights, read_config, weights
from shardwise.models.multimodal import multimodal_of
from shardwise.models.save import save_model
from tests.distributed import PATIENCE
from tests.models import multimodal
from tests.models.tiny import (
    logits,
    on_meta,
    relative_error,
    same,
    tiny,
    tokens,
    trained,
    with_adapters,
)

TOLERANCE = 1e-5  # float32, relative to the largest logit
LORA = Lora(r=3, alpha=7.0, targets="all-linear", rslora=True, modules_to_save=["model.norm"])

# Plain transformers and peft in a process of their own; a warning, such as of keys that PEFT finds
# no place for, is an error.
SCRIPT = """
import json, sys, warnings
import torch
from peft import PeftModel
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

warnings.simplefilter("error")
warnings.simplefilter("ignore", FutureWarning)
torch.set_num_threads(1)
ids, out = torch.tensor(json.loads(sys.argv[1])), {}
whole, text = AutoModelForImageTextToText.from_pretrained, AutoModelForCausalLM.from_pretrained
with torch.no_grad():
    for load, base, adapter in (
        (whole, "base", "adapter"), (whole, "base", "peft"), (text, "base", "hf"),
        (whole, "merged", None), (whole, "from-text", None), (text, "merged", None),
    ):
        model = load(base)
        if adapter is not None:
            model = PeftModel.from_pretrained(model, adapter)
        out[f"{load.__self__.__name__} {base} {adapter}"] = model.eval()(input_ids=ids).logits
    model = text("base")
    model.load_adapter("hf")
    out["load_adapter"] = model.eval()(input_ids=ids).logits
assert "shardwise" not in sys.modules
save_file(out, "out.safetensors")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("multimodal")
    multimodal.write(path / "base", "tiny-qwen3_5_moe")  # has all that the dense one has
    return path


def test_all_forms_of_an_adapter_give_the_logits_of_the_text_class(folder):
    base = Model(str(folder / "base"))
    model, _ = with_adapters(base, LORA)
    for name, parameter in model.named_parameters():
        if ".modules_to_save." in name:
            parameter.data.mul_(1.5)
    expected = logits(model)
    whole = multimodal_of(base, model)
    save_adapter(model, LORA, trained(model), folder / "adapter", "base", whole)
    save_adapter(model, LORA, trained(model), folder / "text", "base")
    export_adapter(base, folder / "text", folder / "peft", "peft")
    export_adapter(base, folder / "adapter", folder / "hf", "hf")
    merge_adapter(base, folder / "adapter", folder / "merged")
    merge_adapter(base, folder / "text", folder / "from-text")

    for one, other in (("adapter", "peft"), ("text", "hf")):
        files = [folder / name / "adapter_model.safetensors" for name in (one, other)]
        assert same(*map(load_file, files))
    keys = load_file(folder / "adapter" / "adapter_model.safetensors").keys()
    inside = "base_model.model.model.language_model."
    assert all(key.startswith(inside) for key in keys), keys
    base_files, merged = (multimodal.entries(folder / name) for name in ("base", "merged"))
    assert base_files.keys() == merged.keys()
    beside = {k: v for k, v in base_files.items() if k.startswith(("mtp.", "model.visual."))}
    assert len(beside) > 10
    assert same(beside, {key: merged[key] for key in beside})
    configs = [json.loads((folder / n / "config.json").read_text()) for n in ("base", "merged")]
    assert [config["text_config"].pop("dtype", None) for config in configs] == [None, "float32"]
    assert configs[0] == configs[1]
    assert (folder / "merged" / "preprocessor_config.json").read_text() == '{"patch_size": 4}'

    command = [sys.executable, "-c", SCRIPT, json.dumps(tokens().tolist())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, cwd=folder)
    assert done.returncode == 0, done.stderr[-2000:]
    theirs = load_file(folder / "out.safetensors")
    assert len(theirs) == 7
    for form, found in theirs.items():
        assert relative_error(found, expected) < TOLERANCE, form
    plain, _ = with_adapters(base, LORA, factor_std=0.0)
    assert relative_error(logits(plain), expected) > 0.01  # the adapters do something


# PEFT 0.21 uses a name that transformers will drop.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize("targets", ["all-linear", r".*\.visual\..*fc[12]"])
def test_adapters_of_a_vision_tower_are_merged_too(targets, folder, tmp_path):
    base = Model(str(folder / "base"))
    whole = AutoModelForImageTextToText.from_pretrained(base.path)
    config = LoraConfig(
        r=2, target_modules=targets, init_lora_weights=False, modules_to_save=["patch_embed"]
    )
    adapted = get_peft_model(whole, config)
    for name, parameter in adapted.named_parameters():
        if ".modules_to_save." in name:
            parameter.data.mul_(1.5)
    adapted.save_pretrained(tmp_path / "adapter")
    merge_adapter(base, tmp_path / "adapter", tmp_path / "merged")
    expected = adapted.merge_and_unload().state_dict()
    before, merged = multimodal.entries(folder / "base"), multimodal.entries(tmp_path / "merged")
    assert before.keys() == merged.keys()
    for name in before.keys() & expected.keys():
        torch.testing.assert_close(merged[name], expected[name])
    changed = {name for name in before if not torch.equal(before[name], merged[name])}
    assert {"model.visual.blocks.0.mlp.linear_fc1.weight"} < changed
    assert "model.visual.patch_embed.proj.weight" in changed
    assert changed < expected.keys()  # mtp is what it was
    with pytest.raises(UserError, match="none of the language model") as error:
        export_adapter(base, tmp_path / "adapter", tmp_path / "out", "vllm")
    assert "(--merge)" in str(error.value)


# PEFT 0.21 uses a name that transformers will drop, and warns of tied layers that are adapted.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_adapters_of_the_embedding_and_the_head_are_kept(folder, tmp_path):
    multimodal.write(tmp_path / "tied", "tiny-qwen3_5-tied")
    for base in (Model(str(folder / "base")), Model(str(tmp_path / "tied"))):
        targets = ["embed_tokens", "lm_head", "q_proj"]
        config = LoraConfig(r=2, target_modules=targets, init_lora_weights=False)
        load = AutoModelForImageTextToText.from_pretrained
        adapted = get_peft_model(load(base.path), config).eval()
        out = tmp_path / Path(base.path).name
        adapted.save_pretrained(out / "adapter")
        export_adapter(base, out / "adapter", out / "peft", "peft")
        exported = json.loads((out / "peft" / "adapter_config.json").read_text())
        ends = {name.rpartition(".")[2] for name in exported["target_modules"]}
        assert ends == set(targets)
        with torch.no_grad():
            expected = adapted(input_ids=tokens()).logits
            loaded = PeftModel.from_pretrained(load(base.path), out / "peft").eval()
            assert relative_error(loaded(input_ids=tokens()).logits, expected) < TOLERANCE
        merge_adapter(base, out / "adapter", out / "merged")
        with torch.no_grad():
            merged = load(out / "merged").eval()(input_ids=tokens()).logits
        assert relative_error(merged, expected) < TOLERANCE


def test_the_report_of_lora_says_what_of_the_tower_is_left(folder):
    base = Model(str(folder / "base"))
    model, report = with_adapters(base, LORA)
    whole = AutoModelForImageTextToText.from_pretrained(base.path)
    linears = {n for n, m in whole.model.visual.named_modules() if isinstance(m, torch.nn.Linear)}
    *rows, tower = with_rest(report, multimodal_of(base, model)).rows
    assert tuple(rows) == report.rows
    assert (tower.kind, tower.layers, tower.weights) == ("model.visual", 1, len(linears))
    assert tower.adapted == 0
    assert set(tower.frozen) == {name.removeprefix("blocks.0.") for name in linears}


@pytest.mark.parametrize("name", ["tiny-qwen3_5", "tiny-qwen3_5-tied", "tiny-qwen3_5_moe"])
def test_a_model_trained_in_full_keeps_what_is_beside_it(name, tmp_path):
    multimodal.write(tmp_path / "base", name)
    base = Model(str(tmp_path / "base"))
    text = on_meta(base)
    whole = multimodal_of(base, text)
    state = {name: value + 1 for name, value in weights(text, base, seed=0)}
    others = other_weights(text, base)
    out = tmp_path / "model"
    save_model(text, state.items(), out, shard_bytes=200_000, multimodal=whole, others=others)
    saved, before = multimodal.entries(out), multimodal.entries(tmp_path / "base")
    assert saved.keys() == before.keys()
    for key, value in saved.items():
        is_beside = key.startswith(("mtp.", "model.visual."))
        assert value.dtype == before[key].dtype
        assert torch.equal(value, before[key] if is_beside else before[key] + 1), key
    assert same(dict(weights(text, Model(str(out)), seed=0)), state)


@pytest.mark.parametrize(
    ("architectures", "fragment"),
    [
        (["Qwen9ForConditionalGeneration"], "which transformers does not have"),
        (["LlavaForConditionalGeneration"], "cannot build LlavaForConditionalGeneration"),
        (["Qwen3_5ForSequenceClassification"], "is not found once"),
    ],
)
def test_a_class_without_the_language_model_is_refused(architectures, fragment, tmp_path):
    config = multimodal.config().to_dict() | {"architectures": architectures}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = Model(str(tmp_path), init="random")
    with pytest.raises(UserError, match=fragment) as error:
        multimodal_of(model, on_meta(model))
    assert "take `architectures` out of config.json" in str(error.value)


@pytest.mark.parametrize("architectures", [None, ["Qwen3_5ForCausalLM"]])
def test_a_folder_that_names_the_text_class_has_its_names(architectures, tmp_path):
    config = multimodal.config().to_dict() | {"architectures": architectures}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = Model(str(tmp_path), init="random")
    assert multimodal_of(model, on_meta(model)) is None
    assert multimodal_of(tiny("tiny-llama"), on_meta(tiny("tiny-llama"))) is None
    assert read_config(model).model_type == "qwen3_5_text"
