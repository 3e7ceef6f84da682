"""What a recurrent layer costs a token, and what it keeps, in rows of 512 to 32,768 tokens.

    python -m tools.lengths_of_cores [--rounds 5] [--out results/cores/lengths.json]

One layer of each kind, of the widths of `speed_of_cores.py` and with frozen weights, in one process
of one thread: forward and backward of one row after the other, of 32,768 tokens in all. The lengths
take turns, and time is that of the processor, so other load changes it little. Memory that was
freed stays with the process, as it does on a GPU: otherwise the long rows alone would ask the
system for pages. A figure beside the file draws, over the length, the seconds of a token in
relation to those in rows of 512, and the bytes that one row keeps for its backward, which are
exact.
"""

from __future__ import annotations

import ctypes
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tools.paired import Results, command_line, ratios, spread, take_turns, timed
from tools.speed_of_cores import COMMON, MODELS
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoConfig, AutoModelForCausalLM

from shardwise.base.safety import write_atomically
from shardwise.kernels.recurrence import Tokens
from shardwise.lab.drawing.svg import drawing, svg_file
from shardwise.metrics.hardware import environment
from shardwise.models.families import spec_of
from shardwise.models.patches.cores import use_cores
from shardwise.models.patches.forget_gate import use_finite_gates

LENGTHS = (512, 2048, 8192, 32768)
TOKENS = LENGTHS[-1]
WITH_MAMBA = MODELS | {
    "jamba": {"num_key_value_heads": 2, "mamba_d_state": 16, "mamba_dt_rank": 32, "num_experts": 1}
}
KINDS = {
    "gated_delta_net": "qwen3_5_text",
    "kda": "kimi_linear",
    "mamba2": "granitemoehybrid",
    "mamba": "jamba",
}


def main() -> None:
    parser = command_line(__doc__, Path(__file__).parents[1] / "results" / "cores" / "lengths.json")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # as launch/rank.py does for a run
    keep_freed_memory()
    sizes = {"lengths": LENGTHS, "tokens": TOKENS, "rounds": options.rounds}
    results = Results(options.out, {"environment": environment(), "sizes": sizes})
    for kind in KINDS:
        results.add(kind, partial(lengths_of, kind, options.rounds))
    results.write()
    write_atomically(options.out.with_suffix(".svg"), figure_of(results.rows))


def keep_freed_memory() -> None:
    """Make glibc neither map a large tensor on its own nor give freed memory back."""
    libc = ctypes.CDLL("libc.so.6")
    mmap_max, trim_threshold = -4, -1  # of malloc.h
    assert libc.mallopt(mmap_max, 0)
    assert libc.mallopt(trim_threshold, -1)


def lengths_of(kind: str, rounds: int) -> dict[str, Any]:
    """Return what a layer costs in rows of each length."""
    mixer = mixer_of(kind)

    def run(length: int, number: int) -> dict[str, float]:
        row = torch.randn(1, length, COMMON["hidden_size"], requires_grad=True)

        def step() -> None:
            for _ in range(TOKENS // length):
                mixer(row).sum().backward()

        return {"seconds_per_token": timed(step)[1]["cpu"] / TOKENS}

    sides = {str(n): partial(run, n) for n in LENGTHS}
    taken = take_turns(sides, rounds, warm_up=1)["seconds_per_token"]
    return {
        "seconds_per_token": {n: spread(taken[n]) for n in taken},
        "relative": {n: ratios(taken[n], taken[str(LENGTHS[0])]) for n in taken},
        "kept_bytes": {str(n): kept_bytes(mixer, n) for n in LENGTHS},
    }


def mixer_of(kind: str) -> Any:
    """Return the mixer of a model's first layer, which is of this kind, with its core."""
    family = KINDS[kind]
    sizes = {**COMMON, **WITH_MAMBA[family], "num_hidden_layers": 1}
    sizes |= {"mlp_layer_types": ["dense"]} if family == "kimi_linear" else {}
    sizes |= {} if family == "jamba" else {"layer_types": ["linear_attention"]}
    config = AutoConfig.for_model(family, **sizes)
    model = AutoModelForCausalLM.from_config(config)
    spec = spec_of(config, model)
    use_finite_gates(model)
    use_cores(model, spec, Tokens)
    (layer,) = spec.layers
    (block,) = layer.mixers
    assert block.kind.name == kind, block.kind.name
    return model.get_submodule(f"{layer.name}.{block.path}").requires_grad_(False)


def kept_bytes(mixer: Any, length: int) -> int:
    """Return the bytes that the forward of one row keeps for its backward, without weights."""
    weights = {p.untyped_storage().data_ptr() for p in mixer.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        out = mixer(torch.randn(1, length, COMMON["hidden_size"], requires_grad=True))
    assert out.requires_grad
    return sum(kept.values())


def figure_of(rows: dict[str, Any]) -> str:
    """Return the figure as SVG."""
    with drawing():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(5.8, 2.8), layout="constrained")
        time, memory = figure.subplots(1, 2)
        for kind, row in rows.items():
            seconds = [row["relative"][str(n)]["median"] for n in LENGTHS]
            time.plot(LENGTHS, seconds, marker="o", markersize=3, label=kind)
            mib = [row["kept_bytes"][str(n)] / 2**20 for n in LENGTHS]
            memory.plot(LENGTHS, mib, marker="o", markersize=3, label=kind)
        time.axhspan(0.9, 1.1, alpha=0.15, linewidth=0)
        time.set(
            title="Time of a token", ylabel="times that in rows of 512", xscale="log", ylim=(0, 2)
        )
        memory.set(title="Kept for a backward", ylabel="MiB")
        for axes in (time, memory):
            axes.set_xlabel("tokens of a row")
            axes.set_xticks(LENGTHS, [f"{n:,}" for n in LENGTHS])
        time.minorticks_off()
        memory.set_xticks(LENGTHS[1:], [f"{n:,}" for n in LENGTHS[1:]])
        time.legend()
        return svg_file(figure, "lengths", "Recurrent layers in rows of 512 to 32,768 tokens")


if __name__ == "__main__":
    main()
