"""What whole runs read."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from shardwise.training import evaluate


@pytest.fixture(scope="module", autouse=True)
def short_samples() -> Iterator[None]:
    """Each token of a sample costs a forward."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate, "SAMPLE_TOKENS", 12)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("run")
    make_corpus(path)
    return path


def make_corpus(path: Path) -> None:
    """A corpus and a byte-level tokenizer of 256 tokens."""
    words = re.findall(
        r"\w+",
        "the state of a gated delta rule decays and is corrected by each key and value it meets",
    )
    lines = [
        json.dumps({"text": " ".join(words[(i * k) % len(words)] for k in range(40))})
        for i in range(1, 60)
    ]
    (path / "corpus.jsonl").write_text("\n".join(lines) + "\n")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<|end|>": 0} | {symbol: i for i, symbol in enumerate(alphabet[:255], 1)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<|end|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>").save_pretrained(
        path / "tokenizer"
    )
