"""What context parallelism leaves a rank to hold, for rows of 4,096 to 65,536 tokens.

    python tools/context_memory.py [--ranks 1 2 4 8] [--out results/context/memory.json]

`shardwise train` takes one step of one row of a small hybrid model (three layers of Gated DeltaNet,
one of attention) in each number of ranks along `parallel.cp`, and its record says what each rank
holds at its peak. A figure beside the file draws the activations of a rank over the tokens, and the
longest row that a given memory holds. `--limit` gives up on a row that takes longer, in seconds.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import yaml

import shardwise.presets
from shardwise.benchmark.paired import Results, command_line
from shardwise.drawing.svg import drawing, svg_of
from shardwise.metrics.hardware import environment
from shardwise.records.record import write_atomically

STARTER = Path(shardwise.presets.__file__).parent / "starter"
LENGTHS = (4096, 8192, 16384, 32768, 65536)
MODEL = {
    "model_type": "qwen3_5_text",
    "architectures": ["Qwen3_5ForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "vocab_size": 256,
    "max_position_embeddings": max(LENGTHS),
}


def main() -> None:
    parser = command_line(
        __doc__, Path(__file__).parents[1] / "results" / "context" / "memory.json"
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--limit", type=int, default=900)
    options = parser.parse_args()
    results = Results(options.out, {"environment": environment(), "model": MODEL})
    for ranks in options.ranks:
        for length in LENGTHS:
            name = f"cp {ranks}, {length} tokens"
            results.add(name, partial(measured, ranks, length, options.limit))
    results.write()
    write_atomically(options.out.with_suffix(".svg"), figure_of(results.rows, options.ranks))


def measured(ranks: int, length: int, way: str, packing: str, limit: int) -> dict[str, Any]:
    """Return what the fullest rank holds at the peak of a step, in bytes."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
        document = json.dumps({"text": "The quick brown fox jumps over the lazy dog. " * 20})
        lines = "\n".join([document] * (length // 400))
        (folder / "documents.jsonl").write_text(lines, encoding="utf-8")
        run = {
            "model": {"path": str(folder), "init": "random", "tokenizer": str(STARTER)},
            "data": {"train": str(folder / "documents.jsonl"), "packing": packing},
            "parallel": {"data": "ddp", "cp": ranks, "cp_attention": way},
            "training": {"output_dir": str(folder / "run"), "steps": 1, "global_batch_size": 1},
        }
        run["data"]["sequence_length"] = length
        run["training"] |= {"micro_batch_size": 1, "device": "cpu"}
        (folder / "run.yaml").write_text(yaml.safe_dump(run), encoding="utf-8")
        command = [sys.executable, "-m", "shardwise", "train", str(folder / "run.yaml")]
        command += ["--nproc", str(ranks)]
        subprocess.run(command, check=True, timeout=limit, stdout=subprocess.DEVNULL)
        record = json.loads((folder / "run" / "record.json").read_text(encoding="utf-8"))
    parts = max(record["memory_parts"], key=lambda part: sum(part.values()))
    return {"peak_bytes": max(record["peak_memory_bytes"]), "parts": parts}


def figure_of(rows: dict[str, Any], ranks: list[int]) -> str:
    """Return the figure as SVG."""
    with drawing():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 3), layout="constrained")
        memory, longest = figure.subplots(1, 2)
        for number in ranks:
            peaks = [rows[f"cp {number}, {n} tokens"]["peak_bytes"] / 2**20 for n in LENGTHS]
            memory.plot(LENGTHS, peaks, marker="o", markersize=3, label=f"cp {number}")
        limit = rows[f"cp 1, {LENGTHS[1]} tokens"]["peak_bytes"]
        fitting = [
            max(n for n in LENGTHS if rows[f"cp {number}, {n} tokens"]["peak_bytes"] <= limit)
            for number in ranks
        ]
        longest.bar([str(number) for number in ranks], fitting)
        memory.set(title="Peak of the fullest rank", xlabel="tokens of a row", ylabel="MiB")
        memory.legend()
        longest.set(title=f"Longest row in {limit / 2**20:.0f} MiB a rank", xlabel="ranks along cp")
        longest.set_ylabel("tokens")
        return svg_of(figure, "context-memory", "Memory of a rank under context parallelism")


if __name__ == "__main__":
    main()
