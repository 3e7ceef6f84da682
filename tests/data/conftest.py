import json
import multiprocessing
import multiprocessing.forkserver
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from shardwise.config import Data, Entry, Model, RunConfig, Training


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE with two merges, made without training.

    `the` is one token, and any other byte is one.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate(["<pad>", "<eos>", *alphabet, "th", "the"])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[("t", "h"), ("th", "e")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>")


def without_end(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """The tokenizer without an end-of-text token: a text has the tokens of its words alone."""
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer, pad_token=tokenizer.pad_token
    )


@pytest.fixture(scope="module", autouse=True)
def no_fork_server_left() -> Iterator[None]:
    # A process that is forked from this one would take the fork server for its child, and could not
    # start workers. The server ends when its workers have ended; the traceback of a failed test can
    # keep some alive.
    yield
    for process in multiprocessing.active_children():
        if isinstance(process, ForkServerProcess):
            process.terminate()
            process.join()
    multiprocessing.forkserver._forkserver._stop()


@pytest.fixture(scope="session")
def write_corpus(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Sequence[str]], str]:
    """A function that writes texts to a new JSONL file and returns its path."""

    def write(texts: Sequence[str]) -> str:
        path: Path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        return str(path)

    return write


@pytest.fixture(scope="session")
def run_config() -> Callable[..., RunConfig]:
    """A function that makes a RunConfig from keys of data and training, and weights of entries."""

    def make(train: str | list[str], **keys: Any) -> RunConfig:
        names = {"global_batch_size", "micro_batch_size", "seed", "eval_batches", "steps", "epochs"}
        names.add("objective")
        training = names & keys.keys()
        if weights := keys.pop("weights", None):
            train = [Entry(path, weight=weight) for path, weight in zip(train, weights)]
        data = {key: value for key, value in keys.items() if key not in training}
        return RunConfig(
            model=Model(path="unused"),
            data=Data(train=train, **data),
            training=Training(output_dir="unused", **{key: keys[key] for key in training}),
        )

    return make
