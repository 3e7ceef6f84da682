"""The recipe for the official Jet-Nemotron-2B on a folder of the same names: a shorter run, on the
CPU."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from shardwise.commands.cli import main
from shardwise.config import Model
from shardwise.models import load
from tests.integration.conftest import make_corpus
from tests.parity.harness import CONFIGS

SHORT = (
    "--training.steps=2",
    "--training.global_batch_size=1",
    "--training.eval_batches=1",
    "--training.device=cpu",
    "--measure.memory=false",
)


@pytest.mark.slow  # the family and the recipes have tests of their own
@pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing`:FutureWarning"
)  # which peft asks for
def test_the_recipe_runs_when_the_folder_is_put_in_place(tmp_path, monkeypatch, capfd):
    folder = tmp_path / "models" / "Jet-Nemotron-2B"
    make_corpus(tmp_path)
    shutil.copytree(tmp_path / "tokenizer", folder)
    shutil.copy(CONFIGS / "jet-nemotron-tiny" / "config.json", folder)
    random = Model(str(folder), init="random", dtype="bfloat16")
    state = load.load_whole(random, load.read_config(random)).state_dict()
    save_file(
        {k: v for k, v in state.items() if k != "lm_head.weight"},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    (tmp_path / "corpus").mkdir()
    shutil.copy(tmp_path / "corpus.jsonl", tmp_path / "corpus" / "some.jsonl")
    monkeypatch.chdir(tmp_path)
    recipe = ["--recipe", "jet-nemotron-2b-one-gpu", "--model", "models/Jet-Nemotron-2B"]
    assert main(["init", *recipe, "--data", "corpus/*.jsonl"]) == 0
    code = main(["train", "run.yaml", *SHORT])
    assert code == 0, capfd.readouterr().err
    out = tmp_path / "runs" / "run"
    record = json.loads((out / "record.json").read_text())
    assert record["status"] == "ok"
    trained = load_file(out / "adapter" / "adapter_model.safetensors")
    reached = {
        name.split("layers.0.")[1].split(".lora_")[0] for name in trained if "layers.0." in name
    }
    jet = {f"self_attn.{x}_proj" for x in "qkvbago"} | {
        f"mlp.{x}_proj" for x in ("gate", "up", "down")
    }
    assert reached == jet | {f"self_attn.dynamic_conv1d.kernel_generator.{w}" for w in ("w1", "w2")}
    assert all(trained[name].abs().max() > 0 for name in trained if "lora_B" in name)
    # With peft alone, on the model that transformers' classes load from the folder.
    base = load.load_whole(Model(str(folder)), load.read_config(Model(str(folder))))
    ids = torch.arange(1, 40)[None]
    with torch.no_grad():
        plain = base(ids, use_cache=False).logits
        assert (
            PeftModel.from_pretrained(base, str(out / "adapter"))(ids, use_cache=False).logits
            != plain
        ).any()
