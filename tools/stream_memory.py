"""Memory that reading a corpus larger than memory takes: generate it, open it, read batches.

    python tools/stream_memory.py [--scale 1.0] [--batches 300] [--out results/stream_memory.json]

There are two: 2 GB of documents of some 3,000 bytes, and 0.5 GB of lines of some 50 bytes, which
are ten million documents (2 GB of them would only take longer). Each reading has a process of its
own, with a tokenizer loaded and used before the first figure, so that a growth is the loader's: the
index of the documents and the rows that are waiting. The sum of the resident memory of the process
and of those it has started is sampled every few milliseconds. With a worker process that sum has
the worker's libraries too, so there the growth is against the same reading of a small corpus. The
exit code is 1 where a growth is over the bound.
"""

from __future__ import annotations

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
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from shardwise.benchmark.paired import Results, command_line
from shardwise.config import Data, Model, RunConfig, Training
from shardwise.data.loader import build_loaders
from shardwise.data.tokenizer import load_tokenizer
from shardwise.metrics.hardware import environment

BOUND = 150 * 10**6
SMALL = 10**7
CORPORA = {"documents": (2 * 10**9, (2000, 4000)), "lines": (5 * 10**8, (10, 40))}
"""Bytes of a corpus, and from how many to how many characters its documents have."""
BATCH = 8


def main() -> None:
    parser = command_line(__doc__, Path(__file__).parents[1] / "results" / "stream_memory.json")
    parser.add_argument("--scale", type=float, default=1.0, help="of the bytes of the corpora")
    parser.add_argument("--batches", type=int, default=300)
    options = parser.parse_args()
    sizes = {"scale": options.scale, "batches": options.batches, "global_batch_size": BATCH}
    results = Results(options.out, {"environment": environment(), **sizes, "bound": BOUND})
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_tokenizer(folder)
        for corpus in CORPORA:
            results.add(corpus, partial(measure, folder, corpus, options.scale, options.batches))
    results.write()
    sys.exit(any(case["growth"] > BOUND for row in results.rows.values() for case in row["cases"]))


def measure(folder: Path, corpus: str, scale: float, batches: int) -> dict[str, Any]:
    """Generate a corpus and a small one, read both without and with a worker, and remove them."""
    size, characters = CORPORA[corpus]
    needed_bytes = 2 * scale * size
    if shutil.disk_usage(folder).free < needed_bytes:
        sys.exit(f"{folder}: less than {needed_bytes:,.0f} bytes free; set TMPDIR to a larger disk")
    small_path, large_path = folder / "small.jsonl", folder / "large.jsonl"
    write_corpus(small_path, SMALL, characters)
    documents = write_corpus(large_path, int(scale * size), characters)
    cases = []
    for workers in (0, 1):
        small = in_new_process(folder, small_path, workers, batches)
        large = in_new_process(folder, large_path, workers, batches)
        growth = large["peak"] - (large["before"] if workers == 0 else small["peak"])
        cases.append({"workers": workers, "small": small, "large": large, "growth": growth})
    sizes = {"corpus_bytes": large_path.stat().st_size}
    sizes["small_corpus_bytes"] = small_path.stat().st_size
    small_path.unlink()
    large_path.unlink()
    return {"documents": documents, **sizes, "cases": cases}


def save_tokenizer(folder: Path) -> None:
    """Save a tokenizer with one token per byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(
        models.BPE({symbol: i for i, symbol in enumerate(["<end>", *alphabet])}, [])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>").save_pretrained(folder)


def write_corpus(path: Path, size: int, characters: tuple[int, int]) -> int:
    """Write at least `size` bytes of JSONL, and return how many documents they are."""
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
    """Return resident bytes before opening, after it and at their most, and the seconds taken."""
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
    """Give a list that grows by the resident bytes, again and again while the block runs."""
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
    """Return the resident bytes of this process and of those that it started."""
    total, here = 0, psutil.Process()
    for process in [here, *here.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):  # it may have ended since it was listed
            total += process.memory_info().rss
    return total


if __name__ == "__main__":
    main()
