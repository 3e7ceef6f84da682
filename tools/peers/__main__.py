"""Peers of shardwise beside it, on the same work: speed, memory, losses, and what each gets wrong.

    python -m tools.peers [--rounds 5] [--untimed] [--out results/peers]

Each side of each round runs in processes of its own, forked from this one. The sides take turns.
A side that cannot run has a row with its error. An interrupted run goes on where it was.
`page.py` writes `peers.md` and `peers.svg` from `peers.json`.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import tempfile
import time
import traceback
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from tools.paired import Results, command_line, turns
from tools.peers import torchtitan_fsdp
from tools.peers.page import write_page
from tools.peers.sides import LEARNING_RATE, MODES, ROOT, SIDES, TIMED, WARM_UP, Side, definition
from tools.peers.work import Watch, Work, batch, packed, uneven
from torch.multiprocessing.spawn import ProcessException, start_processes
from transformers import DataCollatorWithFlattening

from shardwise.config import Model
from shardwise.metrics.hardware import environment
from shardwise.metrics.memory import tensor_bytes
from shardwise.models import load
from shardwise.models.adapters import lora
from shardwise.models.families import spec_of

PACKAGES = ("torch", "transformers", "peft", "accelerate", "deepspeed")
SECONDS = 240
"""A side that takes longer hangs."""
HYBRIDS = (
    "demo-hybrid",
    "tiny-qwen3_5_moe",
    "tiny-nemotron_h",
    "tiny-bamba",
    "tiny-granitemoehybrid",
)
"""Models of which the page says what adapters reach."""


def main() -> None:
    parser = command_line(__doc__, ROOT / "results" / "peers")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--untimed", action="store_true", help="for a machine that is busy")
    options = parser.parse_args()
    torch.set_num_threads(1)
    equal = {
        "environment": environment(),
        "versions": {name: metadata.version(name) for name in PACKAGES}
        | {"torchtitan": torchtitan_fsdp.version()},
        **definition(),
        "rounds": options.rounds,
        "untimed": options.untimed,
    }
    results = Results(options.out / "peers.json", equal)
    begin = time.perf_counter()
    for name in HYBRIDS:
        results.add(f"adapters/{name}", partial(adapters, name))
    results.add("collator/lora/trainer", collator)
    cases = [(mode, name) for mode in MODES for name in SIDES]
    for mode, name in cases:
        results.add(f"checks/{mode}/{name}", partial(run, SIDES[name], mode, True))
    for number, (mode, name) in turns(cases, options.rounds):
        measure = partial(run, SIDES[name], mode, False, options.untimed)
        results.add(f"round-{number}/{mode}/{name}", measure)
    results.write()
    write_page(options.out)
    print(f"{options.out}: {time.perf_counter() - begin:.0f} s")


def run(side: Side, mode: str, checks: bool, untimed: bool = True) -> dict[str, Any]:
    """Run a side in processes of its own; return what they took, or its error."""
    load_average = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        arguments, error = (side, mode, checks, folder), None
        try:
            start_processes(run_rank, arguments, side.ranks, start_method="fork")
        except ProcessException as failure:
            error = str(failure)
        files = sorted(Path(folder).glob("rank-*.json"))
        ranks = [json.loads(path.read_text(encoding="utf-8")) for path in files]
    if error is not None:
        told = [rank["error"] for rank in ranks if "error" in rank]
        return {"error": (told or [error])[0], "load_average": load_average}
    first = ranks[0]
    slowest = [max(step) for step in zip(*(rank["seconds"] for rank in ranks), strict=True)]
    return {
        "load_average": load_average,
        "losses": first["losses"],
        "norms": first["norms"],
        "seconds": None if untimed else slowest,
        "peak_bytes": [rank["peak_bytes"] for rank in ranks],
        "weight_bytes": [rank["weight_bytes"] for rank in ranks],
    }


def run_rank(rank: int, side: Side, mode: str, checks: bool, folder: str) -> None:
    """Run one process of a side; leave what it took in a file."""
    if side.ranks > 1:  # as torchrun says it; nobody listens, since the group is made by a file
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(side.ranks)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", store, rank=rank, world_size=side.ranks)
    torch.set_flush_denormal(True)  # as launch/rank.py does for a run
    signal.alarm(SECONDS)  # ends a process that hangs
    out = Path(folder, f"rank-{rank}.json")
    option = side.checked_as if checks and side.checked_as else side.option
    rate = 0.0 if checks else LEARNING_RATE
    work = Work(option, mode == "lora", rank, side.ranks, rate, folder)
    log = os.open(Path(folder, f"log-{rank}"), os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)  # what peers print
    os.dup2(log, 2)
    try:
        taken = train(side, work, checks)
    except BaseException as error:
        reason = " ".join("".join(traceback.format_exception_only(error)).split())[:300]
        out.write_text(json.dumps({"error": reason}), encoding="utf-8")
        raise
    out.write_text(json.dumps(taken), encoding="utf-8")
    dist.barrier()
    os._exit(0)  # some peers leave threads that do not end


def train(side: Side, work: Work, checks: bool) -> dict[str, Any]:
    """Train as a side does, and return what a rank took."""
    peer: Any = importlib.import_module(f"tools.peers.{side.module}")
    built = peer.build(work)
    if checks:
        watch, batches = Watch(), [uneven(), packed(1), packed(2)]
    else:
        steps = WARM_UP + TIMED
        watch, batches = Watch(steps), [batch(step) for step in range(steps + 1)]
    peer.train(built, batches, watch, work)
    return {
        "losses": watch.losses,
        "norms": watch.norms,
        "seconds": watch.seconds,
        "peak_bytes": watch.peak_bytes,
        "weight_bytes": tensor_bytes(getattr(peer, "weights", parameters)(built)),
    }


def parameters(built: Any) -> Any:
    """Return what a rank holds of the weights, where a side does not say it: its first part has."""
    return built[0].parameters()


def adapters(name: str) -> dict[str, Any]:
    """Return which matrices of a model's layers are left without an adapter, by way of choosing."""
    section = Model(str(ROOT / "configs" / "models" / name), init="random")
    ways: dict[str, Any] = {}
    for way, options in {"PEFT": {}, "PEFT all-linear": {"target_modules": "all-linear"}}.items():
        hf = load.build_meta(section, load.read_config(section))
        every = set(lora.reach(hf, spec_of(hf.config, hf), "all-linear"))
        try:
            get_peft_model(hf, LoraConfig(r=8, **options))
        except ValueError as error:
            ways[way] = {"error": " ".join(str(error).split())[:300]}
            continue
        without = every - lora.adapter_layers(hf).keys()
        ways[way] = {"matrices": len(every), "without": sorted(without)}
    return ways


def collator() -> dict[str, Any]:
    """Return what transformers says of rows whose documents its own collator tells apart."""
    model = Work("", False, 0, 1, LEARNING_RATE, "").model()
    documents = [{"input_ids": list(range(n))} for n in (48, 80)]
    try:
        model(**DataCollatorWithFlattening(return_seq_idx=True)(documents))
    except ValueError as error:
        return {"error": " ".join(str(error).split())}
    return {}


if __name__ == "__main__":
    main()
