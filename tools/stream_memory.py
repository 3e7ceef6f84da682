"""Memory that reading a corpus larger than memory takes: generate one, open it as a run does, read batches.

    python tools/stream_memory.py [--scale 1.0] [--batches 300] [--out results/stream_memory.json]

There are two: 2 GB of documents of some 3,000 bytes, and 0.5 GB of lines of some 50 bytes, which are ten million
documents (2 GB of them would only take longer to write and to find). Each reading has a process of its own, with a
tokenizer loaded and used before the first figure, so that a growth is the loader's: the index of the documents and the
rows that are held. The sum of the resident memory of the process and those it has started is sampled every few
milliseconds. With a worker process that sum holds the worker's libraries, too, so there the growth is against the same
reading of a small corpus.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import multiprocessing
import random
import shutil
import string
import sys
import tempfile
import threading
import time
from collections.abc import Generator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import psutil
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from shardwise.config import Data, Model, RunConfig, Training
from shardwise.data.loader import build_loaders
from shardwise.data.tokenizer import load_tokenizer
from shardwise.metrics.hardware import environment

BOUND = 150 * 10**6
SMALL = 10**7
CORPORA = {"documents": (2 * 10**9, (2000, 4000)), "lines": (5 * 10**8, (10, 40))}
"""Bytes, and from how many to how many characters a document has."""
BATCH = 8


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scale", type=float, default=1.0, help="of the bytes of the corpora")
    parser.add_argument("--batches", type=int, default=300)
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parents[1] / "results" / "stream_memory.json"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_tokenizer(folder)
        cases = [measure(folder, name, options.scale, options.batches) for name in CORPORA]
    result = {
        "environment": environment(),
        "batches": options.batches,
        "global_batch_size": BATCH,
        "bound": BOUND,
        "ok": all(row["ok"] for case in cases for row in case["rows"]),
        "cases": cases,
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(not result["ok"])


def measure(folder: Path, name: str, scale: float, batches: int) -> dict[str, Any]:
    """Generate a corpus and a small one like it, read both without and with a worker process, and remove them."""
    size, characters = CORPORA[name]
    if shutil.disk_usage(folder).free < 2 * scale * size:
        sys.exit(
            f"{folder}: less than {2 * scale * size:,.0f} bytes free; set TMPDIR to a larger disk"
        )
    paths = {"small": folder / "small.jsonl", "large": folder / "large.jsonl"}
    write_corpus(paths["small"], SMALL, characters)
    documents = write_corpus(paths["large"], int(scale * size), characters)
    case = {
        "corpus": name,
        "documents": documents,
        "corpus_bytes": paths["large"].stat().st_size,
        "small_corpus_bytes": paths["small"].stat().st_size,
        "rows": [],
    }
    for workers in (0, 1):
        small, large = (in_new_process(folder, path, workers, batches) for path in paths.values())
        growth = large["peak"] - (large["before"] if workers == 0 else small["peak"])
        row = {
            "workers": workers,
            "small": small,
            "large": large,
            "growth": growth,
            "ok": growth <= BOUND,
        }
        print(name, json.dumps(row), flush=True)
        case["rows"].append(row)
    for path in paths.values():
        path.unlink()
    return case


def save_tokenizer(folder: Path) -> None:
    """One token a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(
        models.BPE({symbol: i for i, symbol in enumerate(["<end>", *alphabet])}, [])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>").save_pretrained(folder)


def write_corpus(path: Path, size: int, characters: tuple[int, int]) -> int:
    """At least `size` bytes of JSONL; how many documents they are."""
    draw = random.Random(0)
    words = [
        "".join(draw.choices(string.ascii_lowercase, k=draw.randint(1, 12))) for _ in range(5000)
    ]
    text = " ".join(draw.choices(words, k=200_000))
    written = documents = 0
    with path.open("w", encoding="ascii") as file:
        while written < size:
            begin = draw.randrange(len(text) - characters[1])
            document = f"{documents} {text[begin : begin + draw.randint(*characters)]}"
            written += file.write(json.dumps({"text": document}) + "\n")
            documents += 1
    return documents


def in_new_process(folder: Path, corpus: Path, workers: int, batches: int) -> dict[str, Any]:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(read, folder, corpus, workers, batches).result()


def read(folder: Path, corpus: Path, workers: int, batches: int) -> dict[str, Any]:
    """Resident bytes before and after opening, the most of all while opening and reading, and seconds of both."""
    model = Model(str(folder))
    tokenizer = load_tokenizer(model)
    tokenizer("the first text starts what a tokenizer starts")
    cfg = RunConfig(
        model=model,
        data=Data(str(corpus), validation=0.001, workers=workers),
        training=Training(output_dir="unused", global_batch_size=BATCH, eval_batches=20),
    )
    gc.collect()
    before = resident()
    with sampled() as samples:
        start = time.perf_counter()
        loaders = build_loaders(cfg, tokenizer, range(BATCH))
        opened, seconds_to_open = resident(), time.perf_counter() - start
        for _ in range(batches):
            next(loaders.train)
        assert loaders.validation is not None
        for _ in loaders.validation:
            pass
        seconds = time.perf_counter() - start - seconds_to_open
    loaders.train.close()
    return {
        "before": before,
        "opened": opened,
        "peak": max(samples),
        "seconds_to_open": round(seconds_to_open, 2),
        "seconds_to_read": round(seconds, 2),
    }


@contextlib.contextmanager
def sampled() -> Generator[list[int], None, None]:
    """Resident bytes, again and again while the block runs."""
    samples, done = [resident()], threading.Event()

    def sample() -> None:
        while not done.wait(0.005):
            samples.append(resident())

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield samples
    finally:
        done.set()
        thread.join()


def resident() -> int:
    """Bytes of this process and of those below it."""
    total, here = 0, psutil.Process()
    for process in [here, *here.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):  # it may have ended since it was listed
            total += process.memory_info().rss
    return total


if __name__ == "__main__":
    main()
