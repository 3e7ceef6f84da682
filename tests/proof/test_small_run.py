"""A small run has the layout of the large one, and what a comparison needs."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardwise.config import (
    Data,
    Lora,
    Model,
    Parallel,
    Recomputation,
    RunConfig,
    Training,
    UserError,
)
from shardwise.lab.proof import small_run as module
from shardwise.lab.proof.prove import heading
from shardwise.lab.proof.small_run import SmallRun, small_run
from tests.parity.harness import CONFIGS


def config(
    parallel: Parallel, name: str = "tiny-llama", lora: Lora | None = None, **training: Any
) -> RunConfig:
    return RunConfig(
        Model(str(CONFIGS / name)),
        Data("none.jsonl", sequence_length=4096),
        Training("none", **training),
        lora=lora,
        parallel=parallel,
    )


def small(cfg: RunConfig, folder: Path, nproc: int | None = None, own: bool = False) -> SmallRun:
    return small_run(cfg, nproc, own, folder)


@pytest.mark.parametrize(
    ("parallel", "nproc", "axes"),
    [
        (Parallel("ddp"), None, {"dp_replicate": 2}),
        (Parallel("fsdp2", dp_replicate=8), None, {"dp_replicate": 2, "dp_shard": 2}),
        (Parallel("fsdp2", tp=4), None, {"dp_shard": 2, "tp": 2}),
        (Parallel("fsdp2", tp=4), 8, {"dp_shard": 2, "tp": 4}),
        (Parallel("fsdp2", tp=4), 12, {"dp_shard": 3, "tp": 4}),
        (Parallel("ddp", pp=4, tp=2), 8, {"pp": 2, "dp_replicate": 2, "tp": 2}),
        (Parallel(pp=2, schedule="zbv"), None, {"pp": 2}),
        (Parallel(), None, {}),
    ],
)
def test_axes_are_as_short_as_may_be(parallel, nproc, axes, tmp_path):
    run = small(config(parallel, global_batch_size=24), tmp_path, nproc)
    assert run.axes == axes
    changed = {key for key in run.changes if key.startswith("parallel.")}
    assert changed == {
        f"parallel.{key}"
        for key in ("pp", "tp", "dp_replicate")
        if getattr(parallel, key) != getattr(run.cfg.parallel, key)
    }


def test_what_decides_is_kept_and_what_would_hide_a_mistake_is_not(tmp_path):
    lora = Lora(r=16, dropout=0.1, kernel="triton")
    cfg = config(
        Parallel("fsdp2", offload="optimizer"),
        lora=lora,
        checkpointing="operators",
        precision="bfloat16",
        micro_batch_size=16,
        device="cuda",
        loss="triton",
    )
    cfg = replace(cfg, data=replace(cfg.data, packing="documents"))
    run = small(cfg, tmp_path)
    assert run.cfg.lora == replace(lora, r=8, alpha=8.0, kernel="torch")  # of the same scale
    assert run.cfg.parallel == cfg.parallel
    training = run.cfg.training
    assert (training.checkpointing, training.loss, training.device) == (
        "operators",
        "chunked",
        "cpu",
    )
    assert (run.cfg.data.packing, run.cfg.data.sequence_length) == ("documents", 24)
    assert (training.precision, training.global_batch_size) == ("float32", 8)
    assert run.cfg.optimizer.name == "sgd"
    assert len(run.notes) == 2  # two kernels that a CPU has not
    alone = run.one_process()
    assert (alone.parallel, alone.training.checkpointing) == (Parallel(), "none")


def test_its_own_precision_may_be_compared(tmp_path):
    run = small(config(Parallel("ddp"), precision="bfloat16"), tmp_path, own=True)
    assert (run.cfg.training.precision, run.cfg.optimizer.lr) == ("bfloat16", 0.0)


def test_a_ratio_of_b_is_kept_and_makes_no_update_larger(tmp_path):
    def rates(ratio: float) -> tuple[float, float, float]:
        cfg = config(Parallel("ddp"), lora=Lora(r=4))
        cfg = replace(cfg, optimizer=replace(cfg.optimizer, lora_b_lr_ratio=ratio))
        of_run = small(cfg, tmp_path).cfg.optimizer
        of_b = of_run.lr * of_run.lora_b_lr_ratio
        return of_run.lora_b_lr_ratio, max(of_run.lr, of_b), min(of_run.lr, of_b)

    (_, plain, _) = rates(1.0)
    assert rates(16.0) == (16.0, plain, plain / 16)
    assert rates(0.5) == (0.5, plain, plain / 2)


def test_a_given_split_keeps_its_stages_and_empty_ends(tmp_path):
    parallel = Parallel(pp=4, split=[0, 1, 3, 0])
    run = small(config(parallel, global_batch_size=8), tmp_path)
    assert run.cfg.parallel.split == [0, 1, 3, 0]
    assert run.axes == {"pp": 4}


def test_heads_that_ranks_share_are_named(tmp_path):
    run = small(config(Parallel(tp=8), "qwen3_5-9b"), tmp_path)
    assert run.num_ranks == 2
    assert "--nproc 8 proves that too" in run.notes[0]


def test_one_process_says_that_it_proves_no_layout(tmp_path):
    for parallel, is_told in ((Parallel(), True), (Parallel("ddp"), False)):
        folder = tmp_path / parallel.data
        folder.mkdir()
        lines = "\n".join(heading(small(config(parallel), folder)))
        assert ("one process is compared with one process" in lines) == is_told


@pytest.mark.parametrize(
    ("parallel", "nproc", "fragment"),
    [
        (Parallel(tp=3), None, "parallel.tp is 3, but this llama has 8 attention heads"),
        (
            Parallel("fsdp2", tp=2),
            3,
            "--nproc is 3, which fsdp2-tp cannot be split over; .* give 4",
        ),
        (Parallel("ddp"), 0, "--nproc is 0, which ddp cannot be split over; .* give 2"),
        (Parallel(), 2, "--nproc is 2, which single cannot be split over; .* give 1"),
        (Parallel("fsdp2"), 1_000_000, "are free; lower --nproc"),
    ],
)
def test_layouts_that_the_run_cannot_have_are_refused(parallel, nproc, fragment, tmp_path):
    with pytest.raises(UserError, match=fragment):
        small(config(parallel), tmp_path, nproc)


def test_more_than_the_memory_is_refused(tmp_path, monkeypatch):
    memory = namedtuple("memory", "available")(2**20)
    monkeypatch.setattr(module.psutil, "virtual_memory", lambda: memory)
    with pytest.raises(UserError, match=r"2 processes with .* and 1 MiB are free"):
        small(config(Parallel("ddp")), tmp_path)


def test_code_that_comes_with_a_model_is_refused(tmp_path):
    cfg = config(Parallel("ddp"))
    cfg = replace(cfg, model=replace(cfg.model, trust_remote_code=True))
    with pytest.raises(UserError, match=r"model\.trust_remote_code is true"):
        small(cfg, tmp_path)


@pytest.mark.parametrize(("training", "operators"), [({}, (1,)), ({"compile": "aot_eager"}, ())])
def test_layers_of_a_budget_are_computed_again_in_turn(training, operators, tmp_path):
    budget = Recomputation(budget_gib=40.0)
    run = small(config(Parallel("ddp"), checkpointing=budget, **training), tmp_path)
    chosen = run.cfg.training.checkpointing
    assert isinstance(chosen, Recomputation)
    assert (chosen.full[0], chosen.operators) == (0, operators)
    assert any("take turns" in note for note in run.notes)
