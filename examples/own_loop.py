"""Train a transformers model in a loop of one's own, under any layout.

`python examples/own_loop.py --nproc 2 --parallel.data=fsdp2` runs it on two processes. Any key of
the run file can be given in this way. The rows are random here; they are a function of (step,
slot), so that every layout reads the same ones.
"""

from __future__ import annotations

import argparse
import math

import torch

import shardwise

CONFIG = {
    "model": {"path": "configs/models/tiny-qwen3_next", "init": "random"},
    "data": {"sequence_length": 32},
    "optimizer": {"name": "sgd", "lr": 0.1},
    "training": {
        "steps": 4,
        "global_batch_size": 8,
        "micro_batch_size": 2,
        "output_dir": "runs/own-loop",
    },
}


def main(cfg: shardwise.RunConfig, mesh: shardwise.Mesh) -> None:
    """Be one rank: every rank runs the same loop, on its own rows."""
    with shardwise.prepare(cfg, mesh) as run:
        for step in run.steps():
            rows = random_rows(step, run.slots, cfg.data.sequence_length)
            result = run.step(run.microbatches(step, rows))
            run.log(perplexity=math.exp(result.loss))
        held_out = random_rows(0, run.slots, cfg.data.sequence_length)
        run.evaluate([run.microbatches(0, held_out)])
        run.finish()


def random_rows(step: int, slots: range, length: int) -> dict[str, torch.Tensor]:
    """Return the rows of these slots in a step: `input_ids` and `labels`, [slots, length] each.

    A label is the token that follows, or -100 where there is no target: slot j has j of these.
    """
    rows = []
    for slot in slots:
        generator = torch.Generator().manual_seed(1000 * step + slot)
        rows.append(torch.randint(0, 256, (length + 1,), generator=generator))
    tokens = torch.stack(rows)
    labels = tokens[:, 1:].clone()
    for row, slot in enumerate(slots):
        labels[row, length - slot :] = -100
    return {"input_ids": tokens[:, :-1], "labels": labels}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--nproc", type=int)
    options, overrides = parser.parse_known_args()
    shardwise.run(main, CONFIG, options.nproc, overrides)
