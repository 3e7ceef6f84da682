"""What a search of layouts misses: its best beside that of one that looks at ten times as many.

    python -m tools.plan_search [--out results/plan/search.json]

Each question is the arguments of `shardwise plan`. `seconds` is the CPU time of each search, and
`regret` how much longer a step of the first search's best layout is, both as predicted.
"""

from __future__ import annotations

import gc
import shlex
import time
from pathlib import Path
from typing import Any

from tools.paired import command_line, write_json
from transformers.utils import logging

from shardwise.commands.cli import parse
from shardwise.commands.plan_request import question_of, sections_of, with_published
from shardwise.lab.planner.candidates import Question
from shardwise.lab.planner.cluster import cluster_of
from shardwise.lab.planner.search import search
from shardwise.metrics.hardware import environment

EFFORT = 10
QUESTIONS = """
llama-3.1-8b --devices 8xH100-80GB --nodes 2048 --tokens-per-step 128M
llama-3.1-70b --devices 8xH100-80GB
llama-3.1-70b --full --devices 8xH100-80GB --nodes 4 --link 25Gbps --tokens-per-step 4M
llama-3.1-405b --full --devices 8xH100-80GB --nodes 64 --tokens-per-step 4M
llama-3.1-405b --full --devices 8xH100-80GB --nodes 2048 --tokens-per-step 128M
llama-3.1-405b --full --devices 8xRTX4090 --nodes 2048 --tokens-per-step 128M
llama-3.1-405b --devices 8xRTX4090 --nodes 64 --link 100Gbps --tokens-per-step 4M
qwen3_5-9b --full --devices 8xRTX4090 --tokens-per-step 4M
qwen3-next-80b-a3b --devices 8xL40S --nodes 4
qwen3-next-80b-a3b --full --devices 8xH100-80GB --nodes 16 --sequence 32K --tokens-per-step 4M
deepseek-v3 --full --devices 8xH100-80GB --nodes 256 --sequence 4K --tokens-per-step 64M
deepseek-v3 --full --devices 8xH100-80GB --nodes 2048 --sequence 4K --tokens-per-step 128M
olmo-hybrid-7b --full --devices 8xA100-80GB --nodes 2 --sequence 64K
jet-nemotron-2b --devices 2xRTX4090 --sequence 16K
nemotron-3-nano-30b-a3b --full --devices 8xH200 --nodes 4 --sequence 16K --tokens-per-step 4M
kimi-linear-48b-a3b --devices 4xA100-40GB --sequence 8K
"""


def main() -> None:
    options = command_line(__doc__, Path("results/plan/search.json")).parse_args()
    logging.set_verbosity_error()
    rows = {}
    for line in QUESTIONS.strip().splitlines():
        found, wider = (looked(asked(line), effort) for effort in (1, EFFORT))
        regret = round(found["step"] / wider["step"] - 1, 4)
        rows[line] = {"found": found, "wider": wider, "regret": regret}
        print(f"{regret:.1%} {found['seconds']} s: {line}", flush=True)
    worst = max(row["regret"] for row in rows.values())
    write_json(options.out, {"environment": environment(), "worst": worst, "rows": rows})


def asked(line: str) -> Question:
    """Return the question of a command line."""
    args = with_published(parse(["plan", *shlex.split(line)]))
    sections, fixed = sections_of(args)
    return question_of(sections, fixed, cluster_of(args.devices, args.nodes, args.link), args.run)


def looked(question: Question, effort: int) -> dict[str, Any]:
    """Return what a search finds, and how long it takes."""
    gc.disable()  # as the command does
    start = time.process_time()
    answer = search(question, effort=effort)
    seconds = time.process_time() - start
    gc.enable()
    return {
        "layout": f"{answer.best.title}, {answer.best.details}",
        "step": round(answer.best.time.total, 4),
        "computed": len(answer.computed),
        "seconds": round(seconds, 1),
    }


if __name__ == "__main__":
    main()
