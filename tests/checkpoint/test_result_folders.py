"""Results carry the tokenizer with its chat template, and models a generation config."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
)

from shardwise.assembly.build import build
from shardwise.checkpoint.export import save_result
from shardwise.commands.cli import main
from shardwise.config import Model, UserError
from shardwise.data.tokenizer import load_tokenizer
from shardwise.models.load import load_whole, read_config
from shardwise.parallel.mesh import build_mesh
from shardwise.training.evaluate import encode_prompt
from tests.data.templates import CHATML, INST
from tests.distributed import run_ranks
from tests.integration.conftest import make_corpus
from tests.integration.test_train import config, run_on
from tests.models.tiny import tiny
from tests.parity.harness import Cell, run_config

MESSAGES = [{"role": "user", "content": "Where is it?"}]
CHAT = "<|im_start|>user\nWhere is it?<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model with a generation config that transformers would not write, and a tokenizer."""
    path = tmp_path_factory.mktemp("results")
    make_corpus(path)
    tokenizer = load_tokenizer(Model(str(path / "tokenizer")))
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(path / "tokenizer")
    load_whole(tiny("tiny-llama"), read_config(tiny("tiny-llama"))).save_pretrained(path / "base")
    generation = {"temperature": 0.6, "do_sample": False, "eos_token_id": [0, 7]}
    (path / "base" / "generation_config.json").write_text(json.dumps(generation))
    for mode in ("lora", "full"):
        assert run_ranks(2, written, mode, path) == [
            path / ("adapter" if mode == "lora" else "model"),
            None,
        ]
    return path


def written(mode: str, path: Path) -> Path | None:
    cfg = run_config(Cell("llama", "fsdp2", mode, 2))
    cfg = replace(cfg, model=Model(str(path / "base")))
    mesh = build_mesh(cfg, torch.device("cpu"))
    return save_result(
        build(cfg, mesh), cfg, mesh, path, load_tokenizer(Model(str(path / "tokenizer")))
    )


def can_chat(folder: Path) -> bool:
    loaded = AutoTokenizer.from_pretrained(folder)
    assert loaded("the state")["input_ids"]
    return loaded.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True) == CHAT


@pytest.mark.filterwarnings(
    "ignore:.is_gradient_checkpointing:FutureWarning"
)  # PEFT asks by an old name
def test_an_adapter_carries_its_tokenizer(folder):
    assert can_chat(folder / "adapter")
    loaded = AutoPeftModelForCausalLM.from_pretrained(folder / "adapter")
    assert (
        loaded.get_input_embeddings().weight.shape[0] == 256
    )  # no larger for the tokenizer's sake


def test_a_model_carries_its_tokenizer_and_the_bases_generation_config(folder):
    assert can_chat(folder / "model")
    assert GenerationConfig.from_pretrained(folder / "model").eos_token_id == [0, 7]
    assert (
        AutoModelForCausalLM.from_pretrained(folder / "model").generation_config.temperature == 0.6
    )
    assert not [
        path for path in folder.rglob("*.json") if str(folder / "tokenizer") in path.read_text()
    ]


@pytest.mark.parametrize("source", ["adapter", "model", "neither"])
def test_merging_takes_the_adapters_tokenizer_or_else_the_models(folder, tmp_path, source, capsys):
    for name, of in (("adapter", folder / "adapter"), ("base", folder / "base")):
        (tmp_path / name).mkdir()
        for file in of.iterdir():
            if "token" not in file.name and "template" not in file.name:
                (tmp_path / name / file.name).symlink_to(file)
    if source != "neither":
        place = {"adapter": "adapter", "model": "base"}[source]
        load_tokenizer(Model(str(folder / "tokenizer"))).save_pretrained(tmp_path / place)
    out = tmp_path / "merged"
    assert (
        main(["export", "--merge", str(tmp_path / "base"), str(tmp_path / "adapter"), str(out)])
        == 0
    )
    assert ("without a tokenizer" in capsys.readouterr().out) == (source == "neither")
    assert AutoModelForCausalLM.from_pretrained(out).generation_config.eos_token_id == [0, 7]
    assert (out / "tokenizer.json").is_file() == (source != "neither")
    assert source == "neither" or can_chat(out)


def prompt_of(folder: Path, template: str | None, chat: bool) -> str:
    cfg = run_config(Cell("llama", "single", "lora"))
    cfg = replace(cfg, training=replace(cfg.training, sample="Where is it?"))
    if chat:
        cfg = replace(cfg, data=replace(cfg.data, format="chat"))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer")
    tokenizer.chat_template = template
    return tokenizer.decode(encode_prompt(cfg, tokenizer, None) or [])


def test_a_sample_after_chats_is_asked_as_a_user_asks(folder):
    assert prompt_of(folder, CHATML, chat=True) == CHAT
    assert prompt_of(folder, CHATML, chat=False) == "Where is it?"
    assert prompt_of(folder, INST, chat=True).endswith("[INST] Where is it? [/INST]")
    with pytest.raises(UserError, match=r"the chat template refuses .*never alone"):
        prompt_of(folder, "{{ raise_exception('never alone') }}", chat=True)


@pytest.mark.parametrize("mask", [0o022, 0o077])
@pytest.mark.parametrize("lora", [True, False])
def test_what_a_run_writes_has_the_permissions_of_any_new_file(folder, lora, mask, tmp_path):
    cfg = config(folder, "unused", lora=lora, steps=2, eval_every=0, save_every=1)
    cfg = replace(cfg, training=replace(cfg.training, output_dir=str(tmp_path / "run")))
    before = os.umask(mask)
    try:
        run_on(1, cfg)
    finally:
        os.umask(before)
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    weights = {path.parent.name for path in files if path.suffix == ".safetensors"}
    assert weights == {"adapter" if lora else "model", "step-1", "step-2"}
    assert {path: path.stat().st_mode & 0o777 for path in files} == dict.fromkeys(
        files, 0o666 & ~mask
    )
