"""With `training.keep_best` a run leaves the weights of its lowest validation loss."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardwise.config import RunConfig
from shardwise.training import session
from tests.distributed import run_ranks
from tests.integration.test_resume import (
    PROCESSES,
    cheap,
    checkpoint_of,
    config,
    record,
    result,
    run,
)
from tests.left_out import some_now

__all__ = ["cheap"]  # a fixture

LOSSES = {0: 9.0, 2: 5.0, 4: 7.0, 6: 6.0}
"""What validation finds after a step; the best is neither the first nor the last."""
BEST, LAST = 2, 6
NOW = (
    *(("single", lora) for lora in (True, False)),
    *(("ddp", True), ("zero2", False), ("fsdp1", True), ("fsdp2", True), ("fsdp2", False)),
    *(("offload", False), ("pp", False), ("tp", True)),
)


def run_as_told(*cfgs: RunConfig) -> None:
    """Run with LOSSES in the place of those that were evaluated."""
    evaluate = session.evaluate
    session.evaluate = lambda pm, batches, mesh, step: replace(
        evaluate(pm, batches, mesh, step), loss=LOSSES[step]
    )
    for cfg in cfgs:
        run(cfg)


def best_run(folder: Path, name: str, layout: str, lora: bool, **training: Any) -> RunConfig:
    options = {"eval_every": 2, "save_every": 4, "keep_best": True, "keep_last": 1, **training}
    return config(folder, name, layout, lora=lora, **options)


@pytest.mark.parametrize(
    ("layout", "lora"),
    some_now(((layout, lora) for layout in PROCESSES for lora in (True, False)), NOW),
)
def test_the_result_is_the_best_checkpoints(layout, lora, folder, tmp_path, capfd):
    """The oracle: the result of that checkpoint alone, where no step is left."""
    one = best_run(folder, str(tmp_path / "one"), layout, lora, sample="the")
    stopped = best_run(folder, str(tmp_path / "stopped"), layout, lora, patience=1)
    best = checkpoint_of(one, BEST)
    alone = config(
        folder, str(tmp_path / "alone"), layout, lora=lora, resume=best, steps=BEST, sample="the"
    )
    # Once more, without a step left.
    over = replace(
        one, training=replace(one.training, resume=checkpoint_of(one, LAST), overwrite=False)
    )
    num_ranks = PROCESSES[layout]
    run_ranks(num_ranks, run_as_told, one, stopped, alone)
    wanted = result(alone)
    assert result(one) == result(stopped) == wanted
    assert (record(one).saved_step, record(stopped).saved_step) == (BEST, BEST)
    assert record(one).sample == record(alone).sample
    assert record(alone).saved_step == BEST
    assert "the result has the weights after step 2" in capfd.readouterr().out
    run_ranks(num_ranks, run_as_told, over)
    assert result(over) == wanted


def test_a_resume_elsewhere_has_the_best_of_the_whole_run(folder, tmp_path):
    """And so a run that was interrupted leaves what one that never was does."""
    one = best_run(folder, str(tmp_path / "one"), "single", True, keep_last=3)
    later = best_run(folder, str(tmp_path / "later"), "single", True, resume=checkpoint_of(one, 4))
    run_ranks(1, run_as_told, one, later)
    assert result(later) == result(one)
    assert record(later).saved_step == BEST
    assert not (tmp_path / "later" / "checkpoints" / "best").is_symlink()


def test_a_run_goes_on_from_its_last_step(folder, tmp_path):
    """Not from the weights that it has saved as its result."""
    one = best_run(folder, str(tmp_path / "one"), "single", True, patience=1)
    on = replace(one, training=replace(one.training, patience=0, resume="latest"))
    never = best_run(folder, str(tmp_path / "never"), "single", True)
    run_ranks(1, run_as_told, one, on, never)
    assert record(on).losses == record(never).losses
    assert result(on) == result(never)


def test_a_damaged_best_checkpoint_costs_no_result(folder, tmp_path, capfd):
    one = best_run(folder, str(tmp_path / "one"), "single", True)
    run_ranks(1, run_as_told, one)
    file = Path(checkpoint_of(one, BEST)) / "tensors-0.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    over = replace(one, training=replace(one.training, resume="latest"))
    run_ranks(1, run_as_told, over)
    assert "step-2, is damaged" in capfd.readouterr().out
    last = config(folder, str(tmp_path / "last"), resume=checkpoint_of(one, LAST))
    run_ranks(1, run_as_told, last)
    assert result(over) == result(last)
    assert record(over).saved_step == LAST


def test_without_keep_best_an_early_stop_says_what_is_saved(folder, tmp_path, capfd):
    one = best_run(folder, str(tmp_path / "one"), "single", True, patience=1, keep_best=False)
    run_ranks(1, run_as_told, one)
    assert json.loads((tmp_path / "one" / "record.json").read_text())["saved_step"] == 4
    said = capfd.readouterr().out
    assert "the result has the weights after step 4" in said
