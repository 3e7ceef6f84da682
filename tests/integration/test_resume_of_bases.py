"""A run whose base is stored in 4 bits goes on from a checkpoint, which has nothing of the base:
codes, scales and their statistics are made again of the model's files, under any layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from shardwise.assembly import state
from shardwise.config import Lora, Parallel, RunConfig
from tests.distributed import run_ranks
from tests.integration.test_train import config, run, run_on
from tests.models.tiny import relative_error
from tests.parity.harness import DEEP


@pytest.fixture(scope="module")
def whole(folder: Path) -> RunConfig:
    """A run of four steps on nf4, which has saved step 2."""
    cfg = config(folder, "whole-base", steps=4, save_every=2)
    model = replace(cfg.model, path=str(DEEP / "wide-qwen3_5"), base="nf4")
    cfg = replace(cfg, model=model, lora=Lora(r=4))
    run_on(1, cfg)
    return cfg


def resumed(cfg: RunConfig, name: str, **changes) -> RunConfig:
    """The run from step 2 on, in a folder of its own."""
    before = Path(cfg.training.output_dir)
    checkpoint = str(before / "checkpoints" / "step-2")
    training = replace(cfg.training, output_dir=str(before.parent / name), resume=checkpoint)
    return replace(cfg, training=training, **changes)


def adapter_of(cfg: RunConfig) -> dict[str, torch.Tensor]:
    return load_file(Path(cfg.training.output_dir) / "adapter" / "adapter_model.safetensors")


def difference(cfg: RunConfig, other: RunConfig) -> float:
    expected, found = adapter_of(cfg), adapter_of(other)
    assert expected.keys() == found.keys()
    return max(relative_error(found[key], expected[key]) for key in expected)


def test_a_checkpoint_has_nothing_of_the_base(whole):
    folder = Path(whole.training.output_dir) / "checkpoints" / "step-2"
    keys = {key for file in folder.glob("tensors-*.safetensors") for key in load_file(file)}
    assert any("lora_A" in key for key in keys)
    assert not any(key.endswith((".codes", ".scales", ".steps")) for key in keys)


@pytest.mark.parametrize(
    ("nproc", "parallel"),
    [
        pytest.param(1, Parallel(), id="single"),
        pytest.param(2, Parallel("fsdp2"), marks=pytest.mark.slow, id="fsdp2"),
        pytest.param(2, Parallel(tp=2), id="tp"),
    ],
)
def test_a_resume_goes_on_as_if_it_had_not_ended(nproc, parallel, whole):
    again = resumed(whole, f"again-base-{parallel.data}-{parallel.tp}", parallel=parallel)
    run_on(nproc, again)
    error = difference(whole, again)
    assert error == 0 if nproc == 1 else error < 1e-4


def statistics_lost(cfg: RunConfig) -> None:
    """The planted bug: the least scale and the step of each row are those of no row."""
    quantise = state.quantised

    def without(matrix, fmt, name):
        tensors = quantise(matrix, fmt, name)
        return {**tensors, "steps": torch.zeros_like(tensors["steps"])}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state, "quantised", without)
        run(cfg)


def test_statistics_of_scales_that_are_lost_change_the_result(whole):
    cfg = resumed(whole, "statistics-lost")
    run_ranks(1, statistics_lost, cfg)
    assert difference(whole, cfg) > 1e-3


def test_another_base_is_refused(whole):
    cfg = resumed(whole, "another-base", model=replace(whole.model, base="int8"))
    with pytest.raises(RuntimeError, match=r"UserError: model\.base is int8, .* with nf4; set it"):
        run_ranks(1, run, cfg)
