"""Random questions to the planner: each has an answer of sound numbers, or one line.

`python -m tests.planner.test_questions --draws 2000` asks more of them, of large models too.
"""

from __future__ import annotations

import argparse
import math
import random
import traceback
from collections import Counter
from dataclasses import replace
from pathlib import Path
from time import process_time

import pytest
import yaml

from shardwise.config import Data, Lora, Model, RunConfig, Training, UserError
from shardwise.config.presets import MODELS
from shardwise.lab.planner import cluster
from shardwise.lab.planner.candidates import Question
from shardwise.lab.planner.cluster import cluster_of
from shardwise.lab.planner.exact import Choice
from shardwise.lab.planner.plan_page import as_data, overview
from shardwise.lab.planner.plan_screen import screen
from shardwise.lab.planner.search import Answer, search

DRAWS, MORE = 20, 1.3
TABLE = yaml.safe_load(Path(cluster.__file__).with_name("devices.yaml").read_text())
DEVICES = sorted(TABLE["devices"])
NETWORKS = sorted(name for name, link in TABLE["links"].items() if link.get("network"))
SMALL = sorted(folder.name for folder in MODELS.iterdir() if folder.name.startswith("tiny-"))
LARGE = sorted({folder.name for folder in MODELS.iterdir()} - {*SMALL})


def drawn(seed: int, share_of_large: float = 0.0) -> tuple[RunConfig, cluster.Cluster]:
    """Return a run and its devices, drawn from what a user may ask."""
    draw = random.Random(seed)
    lora = Lora(r=draw.choice((1, 8, 64))) if draw.random() < 0.6 else None
    dtype = draw.choice(("float32", "bfloat16"))
    base = draw.choice(("none", "none", "none", "int8", "nf4")) if lora else "none"
    is_large = draw.random() < share_of_large
    cfg = RunConfig(
        Model(str(MODELS / draw.choice(LARGE if is_large else SMALL)), dtype=dtype, base=base),
        Data("any", sequence_length=64 * 2 ** draw.randrange(12)),
        Training(
            "any",
            global_batch_size=2 ** draw.randrange(8),
            precision=draw.choice(("float32", "bfloat16")),
            loss=draw.choice(("auto", "auto", "plain")),
            compile=draw.choice(("none", "none", "none", "inductor")),
        ),
        lora=lora,
    )
    count, nodes = draw.choice((1, 2, 3, 4, 8)), draw.choice((1, 1, 2, 3))
    link = draw.choice((None, *NETWORKS)) if nodes > 1 else None
    asked = cluster_of(f"{count}x{draw.choice(DEVICES)}", nodes, link)
    if seed % 2 and not is_large:  # memory that binds a tiny model: little beside CUDA's context
        memory_bytes = int(draw.uniform(1.25, 3) * 2**30)
        asked = replace(asked, device=replace(asked.device, memory_bytes=memory_bytes))
    return cfg, asked


def check(choice: Choice) -> None:
    """Check the numbers of a choice: finite, none below 0, and parts that make the whole."""
    memory = {k: v for k, v in choice.memory._asdict().items() if isinstance(v, int)}
    assert min(memory.values()) >= 0
    time = vars(choice.time)
    assert all(math.isfinite(value) and value >= 0 for value in time.values())
    assert choice.time.total > 0
    assert 0 <= choice.mfu < 1
    assert math.isfinite(choice.tokens_per_second)


def answer_to(question: Question) -> Answer | None:
    """Return the answer, of which every number has been checked; None where there is one line."""
    try:
        answer = search(question)
    except UserError as error:
        if "\n" in str(error):
            raise
        return None
    for choice in answer.computed:
        check(choice)
    as_data(answer)
    list(overview(answer))
    if answer.choices:
        list(screen(answer))
    return answer


def ask(cfg: RunConfig, asked: cluster.Cluster) -> str:
    """Ask a question, and again with more memory, which never makes the fastest answer slower.

    (The first answer may be slower: it is the simplest of those that tie with the fastest.)
    """
    answer = answer_to(Question(cfg, asked))
    if answer is None:
        return "refused"
    if not answer.choices:
        return "nothing fits"
    larger = replace(asked.device, memory_bytes=int(MORE * asked.device.memory_bytes))
    richer = answer_to(Question(cfg, replace(asked, device=larger)))
    assert richer is not None
    assert richer.fastest.time.total <= 1.001 * answer.fastest.time.total
    return "answered"


@pytest.mark.parametrize(
    ("seed", "share_of_large"),
    # Three had faults: a split by cost that fits only where some layers are computed again was not
    # looked at, a bubble was -9e-19 s, and the best division with all layers computed again is not
    # that with as many as memory asks for.
    [
        *((seed, 0.0) for seed in range(DRAWS)),
        *((271, 0.1), (334, 0.1)),
        pytest.param(1027, 0.1, marks=pytest.mark.slow),
    ],
)
def test_a_random_question_has_sound_numbers_and_more_memory_never_costs_time(seed, share_of_large):
    ask(*drawn(seed, share_of_large))


def main() -> int:
    """Ask as many random questions as the command says; 1 where one of them has a fault."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--draws", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after so many")
    args = parser.parse_args()
    results = Counter[str]()
    for seed in range(args.first, args.first + args.draws):
        try:
            results[ask(*drawn(seed, share_of_large=0.1))] += 1
        except Exception:
            results["FAULT"] += 1
            print(f"seed {seed}: {drawn(seed, share_of_large=0.1)}\n{traceback.format_exc()}")
        if process_time() > args.seconds:
            break
    print(f"{results.total()} questions in {process_time():.0f} CPU seconds: {dict(results)}")
    return int(results["FAULT"] > 0)


if __name__ == "__main__":
    raise SystemExit(main())
