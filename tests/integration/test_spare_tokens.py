"""A tokenizer may have a token that the model has no embedding for, as long as no text uses it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from shardwise.config import Model, RunConfig
from shardwise.models.load import load_whole, read_config
from tests.distributed import run_ranks
from tests.integration.test_resume import PROCESSES, cheap, config, record, run
from tests.left_out import some_now

__all__ = ["cheap"]  # a fixture

TEXT = "the state of a rule"


def with_spare_token(folder: Path, out: Path, layout: str, text: str, pad: bool) -> RunConfig:
    """A run at a learning rate of 0 on one text, whose tokenizer has one token too many."""
    cfg = config(
        folder, str(out / "run"), layout, lora=False, steps=1, save_every=0, eval_batches=0
    )
    base = out / "base"
    random = Model(cfg.model.path, init="random")
    load_whole(random, read_config(random)).save_pretrained(base)
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    tokenizer.add_tokens(["<image>"], special_tokens=True)
    if pad:
        tokenizer.pad_token = "<image>"
    tokenizer.save_pretrained(base)
    assert tokenizer.convert_tokens_to_ids("<image>") == 256
    (out / "text.jsonl").write_text(4 * f"{json.dumps({'text': text})}\n")
    return replace(
        cfg,
        model=Model(str(base)),
        data=replace(cfg.data, train=str(out / "text.jsonl"), validation=0.0, packing="none"),
        optimizer=replace(cfg.optimizer, lr=0.0),
    )


@pytest.mark.parametrize("layout", some_now(["single", "tp", "fsdp2"], ["single", "tp"]))
@pytest.mark.parametrize("pad", [False, True])
def test_the_loss_is_that_of_transformers(layout, pad, folder, tmp_path):
    cfg = with_spare_token(folder, tmp_path, layout, TEXT, pad)
    run_ranks(PROCESSES[layout], run, cfg)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "base")
    ids = torch.tensor([*tokenizer(TEXT).input_ids, tokenizer.eos_token_id])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    with torch.no_grad():
        logits = model(input_ids=ids[None], use_cache=False).logits[0]
    expected = F.cross_entropy(logits[:-1], ids[1:]).item()
    assert record(cfg).losses == pytest.approx([expected], rel=1e-5)
    saved = AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    assert saved.get_vocab() == tokenizer.get_vocab()
    assert saved.pad_token == tokenizer.pad_token


def test_a_text_with_such_a_token_is_refused_by_its_name(folder, tmp_path):
    cfg = with_spare_token(folder, tmp_path, "single", f"{TEXT} <image>", pad=False)
    with pytest.raises(RuntimeError, match="'<image>' is token 256, but the model has 256"):
        run_ranks(1, run, cfg)


def test_a_sample_with_such_a_token_is_refused_before_training(folder, tmp_path):
    cfg = with_spare_token(folder, tmp_path, "single", TEXT, pad=False)
    cfg = replace(cfg, training=replace(cfg.training, sample="an <image>"))
    with pytest.raises(RuntimeError, match="has a token without an embedding"):
        run_ranks(1, run, cfg)
