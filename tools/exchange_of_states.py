"""Two ways in which ranks of `parallel.cp` can get the state before their tokens.

    python -m tools.exchange_of_states [--ranks 2 4 8] [--rounds 9]

Each rank has the affine map of its tokens, as wide as in one layer of a published model. With
`gather` all ranks gather all maps, and each applies those before its own. `scan` is what a run does
(parallel/neighbours.py). The two take turns on gloo ranks of one thread each, and must give equal
states. `seconds`: until the last rank has its state. `speed`: those of `gather` over those of the
scan. `sent_bytes`: what leaves a rank at the most. `flops`: what products of maps, and of maps with
states, take on the rank with the most; an elementwise product of x numbers is x. The backward is
the same from the other end.
"""

from __future__ import annotations

import json
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from tools.paired import Results, command_line, ratios, spread, take_turns, timed
from torch import multiprocessing

from shardwise.base.schedule.context import sent_by_recurrence
from shardwise.kernels import (
    gated_delta_rule,
    kimi_delta_attention,
    selective_scan,
    state_space_duality,
)
from shardwise.kernels.recurrence import Recurrence, Summary
from shardwise.metrics.hardware import environment
from shardwise.parallel.neighbours import ContextNeighbours
from shardwise.parallel.reduce import all_gather


class Kind(NamedTuple):
    """A recurrent layer of a published model, by the shapes of its maps for one row."""

    model: str
    core: Recurrence
    transition: tuple[int, ...]
    state: tuple[int, ...]


MATRIX, DELTA, KIMI = (1, 32, 128, 128), gated_delta_rule.RECURRENCE, kimi_delta_attention
KINDS = {
    "gated_delta_net": Kind("qwen3-next-80b-a3b", DELTA, MATRIX, MATRIX),
    "kda": Kind("kimi-linear-48b-a3b", KIMI.RECURRENCE, MATRIX, MATRIX),
    "mamba2": Kind(
        "nemotron-3-nano-30b-a3b", state_space_duality.RECURRENCE, (1, 64, 1, 1), (1, 64, 64, 128)
    ),
    "mamba": Kind("jamba-mini", selective_scan.RECURRENCE, (1, 8192, 16), (1, 8192, 16)),
}


def main() -> None:
    out = Path(__file__).parents[1] / "results" / "context" / "exchange.json"
    parser = command_line(__doc__, out)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    sizes = {"rounds": options.rounds, "models": {name: KINDS[name].model for name in KINDS}}
    results = Results(options.out, {"environment": environment(), "sizes": sizes})
    for name in KINDS:
        for size in options.ranks:
            results.add(f"{name}, cp {size}", partial(on_ranks, name, size, options.rounds))
    results.write()


def on_ranks(name: str, size: int, rounds: int) -> dict[str, Any]:
    """Return what both ways cost on so many processes."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = size, name, rounds, folder
        multiprocessing.start_processes(compare, arguments, size, start_method="fork")
        return json.loads((Path(folder) / "row.json").read_text(encoding="utf-8"))


def compare(rank: int, size: int, name: str, rounds: int, folder: str) -> None:
    """Compare the two ways on one of the ranks; the first one writes the row."""
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=size)
    kind, generator = KINDS[name], torch.Generator().manual_seed(rank)
    transition = torch.rand(kind.transition, generator=generator)
    if kind.transition == MATRIX:
        transition = (transition - 0.5) * MATRIX[-1] ** -0.5  # so products of maps stay near 1
    summary = Summary(transition, torch.randn(kind.state, generator=generator))
    documents = torch.zeros(1, size, dtype=torch.long)
    neighbours = ContextNeighbours(dist.group.WORLD, documents, isolated=False)
    ways = {"gather": partial(gathered, neighbours), "scan": neighbours.state_before}
    states: dict[str, torch.Tensor] = {}

    def run(way: str, number: int) -> dict[str, float]:
        flops = [0]
        dist.barrier()
        core = kind.core._replace(pass_on=partial(counted, kind.core, flops))
        states[way], seconds = timed(lambda: ways[way](core, summary))
        worst = torch.tensor([seconds["wall"], flops[0]], dtype=torch.float64)
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        return {"wall": worst[0].item(), "flops": worst[1].item()}

    taken = take_turns({way: partial(run, way) for way in ways}, rounds, warm_up=2)
    torch.testing.assert_close(states["scan"], states["gather"], rtol=1e-5, atol=1e-5)
    transition, after = summary
    by_scan = [
        sent_by_recurrence(transition.numel(), after.numel(), after.itemsize, rank, size)[0]
        for rank in range(size)
    ]
    if rank == 0:
        theirs = taken["wall"]["gather"]
        row = {
            "seconds": {way: spread(seconds) for way, seconds in taken["wall"].items()},
            "speed": ratios(theirs, taken["wall"]["scan"]),
            "sent_bytes": {
                "gather": (size - 1) * (transition.nbytes + after.nbytes),
                "scan": max(sent["send"][1] for sent in by_scan),
            },
            "flops": {way: int(flops[0]) for way, flops in taken["flops"].items()},
        }
        (Path(folder) / "row.json").write_text(json.dumps(row), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def gathered(neighbours: ContextNeighbours, core: Recurrence, summary: Summary) -> torch.Tensor:
    """Return the state before this rank's tokens, from the maps of all ranks."""
    flat = torch.cat([x.flatten() for x in summary])
    maps = flat.new_empty(neighbours.size, len(flat))
    all_gather(maps.view(-1), flat, group=neighbours.group)
    state = torch.zeros_like(summary.after)
    for row in maps[: neighbours.rank]:
        transition, after = row.split([x.numel() for x in summary])
        state = core.pass_on(transition.view_as(summary.transition), state) + after.view_as(state)
    return state


def counted(
    core: Recurrence, flops: list[int], transition: torch.Tensor, state: torch.Tensor
) -> torch.Tensor:
    """Apply a map, and add up what that takes."""
    is_matrix = tuple(transition.shape) == MATRIX
    flops[0] += state.numel() * (2 * transition.shape[-1] if is_matrix else 1)
    return core.pass_on(transition, state)


if __name__ == "__main__":
    main()
