"""A device that computes wrong numbers ends a run that compares copies of weights, before they are
saved; the run then resumes as if nothing had happened."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from shardwise.base.process.ending import RunError
from shardwise.config import RunConfig
from shardwise.parallel.place import local
from shardwise.training import session
from tests.distributed import run_ranks
from tests.integration.test_train import config, run, run_on

BROKEN = 3
"""The step in which rank 1 flips a bit."""


def on_a_broken_device(cfg: RunConfig) -> str:
    """Return the error of a run in which a bit of an adapter flips on rank 1."""
    step, count = session.training_step, 0

    def flipping(job, *args):
        nonlocal count
        result = step(job, *args)
        count += 1
        if dist.get_rank() == 1 and count == BROKEN:
            weight = next(iter(job.pm.trained().values()))
            local(weight.detach()).flatten()[:1].view(torch.int32).bitwise_xor_(1 << 12)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "training_step", flipping)
        with pytest.raises(RunError) as caught:
            run(cfg)
    return str(caught.value)


@pytest.mark.parametrize(
    ("layout", "every", "save_every", "seen"),
    [
        ("ddp", 2, 0, 4),
        # The next test has its run.
        pytest.param("ddp", 100, 1, 3, marks=pytest.mark.slow),
        # A step of zero2 overwrites the copy with its owner's; before that it is saved.
        ("zero2", 100, 1, 3),
    ],
)
def test_a_flipped_bit_ends_the_run_before_it_is_saved(layout, every, save_every, seen, folder):
    name = f"broken-{layout}-{every}"
    cfg = config(
        folder, name, layout, check_copies_every=every, save_every=save_every, eval_every=0
    )
    messages = run_ranks(2, on_a_broken_device, cfg)
    assert messages[0] == messages[1]
    assert messages[0].startswith(f"step {seen}: copies of ")
    assert "ranks 0, 1" in messages[0]
    saved = sorted(path.name for path in (folder / name).glob("checkpoints/step-*"))
    assert saved == ([f"step-{step}" for step in (1, 2)] if save_every else [])


def test_the_run_resumes_as_if_nothing_had_happened(folder):
    steps = {"steps": BROKEN + 1, "eval_every": 0}
    expected = run_on(2, config(folder, "sound", "ddp", **steps))
    cfg = config(folder, "resumed", "ddp", check_copies_every=100, save_every=1, **steps)
    run_ranks(2, on_a_broken_device, cfg)
    again = replace(cfg, training=replace(cfg.training, resume="latest"))
    assert run_on(2, again).losses == expected.losses
