"""How long a run stands still that has lost one of two nodes, and how many steps it does again.

`python -m tests.clusters.restart` writes results/restart.json. The nodes are two loopback addresses
of this machine, with a rank each; one is killed with its agent. Checkpoints are on disk, every ten
steps, or in the memory of both nodes, after each step. The agents miss one another as soon as torch
lets them by itself (`torch's`), or within seconds (`soon`, the `rdzv-conf` of the tests).
"""

from __future__ import annotations

import re
import statistics
import tempfile
import time
from contextlib import ExitStack
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from tools.paired import write_json

from shardwise.metrics.hardware import environment
from tests.clusters.agents import Node, is_open, start
from tests.clusters.runs import losses, prepare, wait_for, wait_for_step
from tests.clusters.slurm import free_ports

RESULTS = Path(__file__).parents[2] / "results" / "restart.json"
ROUNDS = 3
SAVES = {"disk": (), "memory": ("--training.memory_checkpoint_every=1", "--training.save_every=0")}
CONFS = {"torch's": "", "soon": Node.conf}


def main() -> None:
    rows: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = prepare(Path(name))
        for number in range(ROUNDS):
            for place, (conf, saves) in enumerate(product(CONFS, SAVES)):
                row = lose_a_node(folder, f"{saves}-{place}-{number}", saves, conf)
                rows.setdefault(f"{saves}, {conf}", []).append(row)
                print(f"{saves}, {conf}: {row}", flush=True)
    medians = {
        case: {key: statistics.median(row[key] for row in of_case) for key in of_case[0]}
        for case, of_case in rows.items()
    }
    write_json(RESULTS, {"environment": environment(), "medians": medians, "rounds": rows})


def lose_a_node(folder: Path, name: str, saves: str, conf: str) -> dict[str, float]:
    """Kill a node; return the seconds until a further step, and the steps done again."""
    (port,) = free_ports(1)
    overrides = ("--launch.min_nodes=1", "--parallel.data=ddp", *SAVES[saves])
    Node.conf = CONFS[conf]
    with ExitStack() as stack:
        first = start(stack, folder, name, "127.0.0.1", port, *overrides)
        # Both addresses are this machine's: whoever comes first is where the agents meet.
        wait_for(partial(is_open, port), "the first agent")
        second = start(stack, folder, name, "127.0.0.2", port, *overrides)
        wait_for_step(folder, name, 17)
        second.kill()
        killed, num_done = time.monotonic(), len(losses(folder, name))
        wait_for(lambda: len(losses(folder, name)) > num_done, "the next step")
        seconds = time.monotonic() - killed
        saved = int(re.findall(r"resuming after step (\d+)", first.log.read_text())[-1])
        return {"seconds": round(seconds, 1), "steps_again": num_done - saved}


if __name__ == "__main__":
    main()
