"""What context parallelism leaves a rank to hold, for rows of 4,096 to 65,536 tokens.

    python -m tools.context_memory [--ranks 1 2 4 8] [--out results/context/memory.json]

`shardwise train` takes one step of one row of a small hybrid model (three layers of Gated DeltaNet,
one of attention) on each number of ranks along `parallel.cp`, and its record says what each rank
holds at its peak. Activations are what the fullest rank holds beside weights, gradients and states
of the optimizer. `fit` says how many of their bytes come with a token of the rank, so fall to 1/n
on n ranks, and how many with a token of the complete row, so do not. With `--ways` one
length is measured with each way of attention and packing too. `--limit` is how many seconds a run
may take.

A figure beside the file draws the activations of a rank over the tokens of a row, and the longest
row that a given memory holds.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from tools.paired import Results, command_line

from shardwise.config.presets import STARTER
from shardwise.lab.drawing.svg import colour, drawing, svg_file
from shardwise.metrics.hardware import environment

LENGTHS = (4096, 8192, 16384, 32768, 65536)
WAYS, PACKINGS = ("ring", "gather", "ulysses"), ("concat", "isolated")
STATES = ("weights", "gradients", "optimizer")
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
    parser.add_argument("--ways", action="store_true")
    options = parser.parse_args()
    results = Results(options.out, {"environment": environment(), "model": MODEL})
    points = [(n, length, "ring", "concat") for n in options.ranks for length in LENGTHS]
    if options.ways:
        points += [(4, 16384, *choice) for choice in product(WAYS, PACKINGS)]
    for point in points:
        results.add(name_of(*point), partial(measured, *point, options.limit))
    curves = {n: [activations(results.rows[name_of(n, t)]) for t in LENGTHS] for n in options.ranks}
    results.add("fit", partial(fit_of, curves))
    results.write()
    options.out.with_suffix(".svg").write_text(figure_of(curves))


def name_of(ranks: int, length: int, way: str = "ring", packing: str = "concat") -> str:
    """Return the name of a measurement in the file."""
    return f"cp {ranks}, {length} tokens, {way}, {packing}"


def measured(ranks: int, length: int, way: str, packing: str, limit: int) -> dict[str, Any]:
    """Return what the fullest rank holds at the peak of a step, in bytes."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
        document = json.dumps({"text": "The quick brown fox jumps over the lazy dog. " * 20})
        lines = "\n".join([document] * (length // 400))
        (folder / "documents.jsonl").write_text(lines, encoding="utf-8")
        run: dict[str, dict[str, Any]] = {
            "model": {"path": str(folder), "init": "random", "tokenizer": str(STARTER)},
            "data": {"train": str(folder / "documents.jsonl"), "packing": packing},
            "parallel": {"data": "ddp", "cp": ranks},
            "training": {"output_dir": str(folder / "run"), "steps": 1, "global_batch_size": 1},
        }
        run["data"]["sequence_length"] = length
        run["parallel"] |= {"cp_attention": way} if ranks > 1 else {}
        run["training"] |= {"micro_batch_size": 1, "device": "cpu"}
        (folder / "run.yaml").write_text(yaml.safe_dump(run), encoding="utf-8")
        command = [sys.executable, "-m", "shardwise", "train", str(folder / "run.yaml")]
        command += ["--nproc", str(ranks)]
        subprocess.run(command, check=True, timeout=limit, stdout=subprocess.DEVNULL)
        record = json.loads((folder / "run" / "record.json").read_text(encoding="utf-8"))
    return max(record["memory_parts"], key=lambda parts: sum(parts.values()))


def activations(parts: dict[str, int]) -> int:
    """Return the bytes of a peak that are no weights, gradients or states of the optimizer."""
    return sum(size for part, size in parts.items() if part not in STATES)


def fit_of(curves: dict[int, list[int]]) -> dict[str, Any]:
    """Return the bytes of activations per token of a rank and of a row, by least squares.

    `share`: the activations of a rank of n, n times, over those of one process, by length.
    """
    points = [(n, t, size) for n, sizes in curves.items() for t, size in zip(LENGTHS, sizes)]
    terms = [(t / n, t, 1) for n, t, _ in points]
    of_rank, of_row, constant = np.linalg.lstsq(terms, [size for *_, size in points])[0]
    return {
        "bytes_per_token_of_rank": round(of_rank, 1),
        "bytes_per_token_of_row": round(of_row, 1),
        "constant_bytes": round(constant),
        "share": {
            str(n): [round(n * size / one, 4) for size, one in zip(sizes, curves[1])]
            for n, sizes in curves.items()
        },
    }


def figure_of(curves: dict[int, list[int]]) -> str:
    """Return the figure as SVG."""
    with drawing():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(5.8, 2.8), layout="constrained")
        memory, longest = figure.subplots(1, 2)
        for number, sizes in curves.items():
            mib = [size / 2**20 for size in sizes]
            label = f"{number} rank" + "s" * (number > 1)
            memory.plot(LENGTHS, mib, marker="o", markersize=3, label=label)
        memory.set_xscale("log", base=2)
        memory.set_yscale("log", base=2)
        memory.set_xticks(LENGTHS, [f"{length // 1024}k" for length in LENGTHS])
        memory.yaxis.set_major_formatter("{x:.0f}")
        memory.set(title="Activations of a rank", xlabel="tokens of a row", ylabel="MiB")
        memory.legend()
        limit = curves[1][1]
        # Memory is linear in the tokens, so what lies between two lengths does too.
        fitting = [np.interp(limit, sizes, LENGTHS) / 1024 for sizes in curves.values()]
        bars = longest.bar([str(number) for number in curves], fitting, color=colour("c1"))
        longest.bar_label(bars, fmt="%.1fk")
        title = f"Longest row in {limit / 2**20:.0f} MiB"
        longest.set(title=title, xlabel="ranks along cp", ylabel="1,024 tokens")
        return svg_file(figure, "memory")


if __name__ == "__main__":
    main()
