"""What LoRA on 32 routed experts costs here and in PEFT, on one thread of a CPU.

    python -m tools.speed_of_experts [--rounds 15] [--out results/experts/cpu.json]

One layer's experts of Qwen3-MoE (512 wide, 256 inside, 4 of 32 for a token) have adapters of rank 8
and take a forward and a backward in turns: `peft` adds B A to a copy of the stacks, `shardwise`
multiplies by the factors. `speed` is PEFT's seconds over ours, in one round, by the wall clock and
by the CPU time of the process, which other load changes less; `seconds` are CPU time. `difference`
of outputs and gradients is relative to the largest number. `peak_bytes` are added at the most:
exact, and not timed.
"""

from __future__ import annotations

import copy
import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from tools.paired import Results, command_line, ratios, spread, take_turns, timed
from torch import nn
from transformers import AutoConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from shardwise.metrics.hardware import environment
from shardwise.metrics.memory import PeakMemory
from shardwise.models.patches.experts import use_routed_experts

SIZES = {"num_experts": 32, "hidden_size": 512, "moe_intermediate_size": 256}
TOP_K, RANK, WARM_UP = 4, 8, 3
TOKENS = (64, 256, 1024)


def main() -> None:
    parser = command_line(__doc__, Path(__file__).parents[1] / "results" / "experts" / "cpu.json")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    sizes = {**SIZES, "top_k": TOP_K, "rank": RANK, "rounds": options.rounds}
    results = Results(options.out, {"environment": environment(), "sizes": sizes})
    for tokens in TOKENS:
        results.add(f"{tokens} tokens", partial(compare, tokens, options.rounds))
    results.write()


def compare(tokens: int, rounds: int) -> dict[str, Any]:
    """Return what both sides take for a layer with so many tokens."""
    load_average = os.getloadavg()[0]
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3_moe", **SIZES)
    config._experts_implementation = "grouped_mm"  # as transformers chooses for a whole model
    targets = ["experts.gate_up_proj", "experts.down_proj"]
    adapters = LoraConfig(r=RANK, target_modules=[], target_parameters=targets)
    theirs = inject_adapter_in_model(adapters, nn.ModuleDict({"experts": Qwen3MoeExperts(config)}))
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.05)
    ours = copy.deepcopy(theirs)
    use_routed_experts(ours)
    hidden = torch.randn(tokens, SIZES["hidden_size"], requires_grad=True)
    shares, indices = torch.rand(tokens, SIZES["num_experts"]).softmax(-1).topk(TOP_K)
    sides = {"peft": theirs, "shardwise": ours}

    def step(side: str) -> list[torch.Tensor]:
        out = sides[side]["experts"](hidden, indices, shares)
        factors = [p for p in sides[side].parameters() if p.requires_grad]
        return [out.detach(), *torch.autograd.grad(out.square().sum(), [hidden, *factors])]

    def time(side: str, number: int) -> dict[str, float]:
        return timed(partial(step, side))[1]

    taken = take_turns({side: partial(time, side) for side in sides}, rounds, WARM_UP)
    pairs = zip(step("shardwise"), step("peft"), strict=True)
    return {
        "load_average": load_average,
        "speed": {of: ratios(taken[of]["peft"], taken[of]["shardwise"]) for of in ("wall", "cpu")},
        "seconds": {side: spread(seconds) for side, seconds in taken["cpu"].items()},
        "peak_bytes": {side: peak_bytes(partial(step, side)) for side in sides},
        "stack_bytes": sum(p.nbytes for p in theirs.parameters() if p.ndim == 3),
        "difference": max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs),
    }


def peak_bytes(step: Any) -> int:
    """Return the bytes that a step adds to the memory at its most."""
    with PeakMemory(torch.device("cpu")) as peak:
        step()
    return (peak.peak_bytes or 0) - (peak.entry_bytes or 0)


if __name__ == "__main__":
    main()
