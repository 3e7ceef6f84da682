"""Rows without packing end with the longest document of their micro-batch, under every layout."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from shardwise.base.records.record import RunRecord
from shardwise.data import loader
from shardwise.data.packing import RowLengths
from shardwise.metrics.hardware import PeakFlops
from shardwise.training import measure
from tests.command import run_command
from tests.integration.conftest import make_corpus

MODEL = Path(__file__).parents[2] / "configs" / "models" / "tiny-qwen3_next"
"""Recurrent layers, attention, and experts with a router loss."""
LAYOUTS = {
    "single": (),
    "zero1": ("--parallel.data=zero1",),
    "tp": ("--parallel.tp=2", "--parallel.sequence_parallel=true"),
    "pp": ("--parallel.pp=2", "--parallel.schedule=1f1b"),
    "cp": ("--parallel.cp=2",),
    "ep": ("--parallel.data=fsdp2", "--parallel.ep=2"),
}
SENTENCE = "the state of a gated delta rule decays and is corrected by each key and value"
Train = Callable[..., RunRecord]


@pytest.fixture(scope="module")
def train(tmp_path_factory) -> Train:
    folder = tmp_path_factory.mktemp("lengths")
    make_corpus(folder)
    # 5 to 200 tokens, a byte each: some longer than a row.
    texts = [(SENTENCE * 3)[: 5 + 13 * (7 * i % 16)] for i in range(40)]
    (folder / "texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    run = {
        "model": {"path": str(MODEL), "init": "random", "tokenizer": str(folder / "tokenizer")},
        "lora": {"r": 4, "alpha": 8, "dropout": 0.1},
        "data": {
            "train": str(folder / "texts.jsonl"),
            "packing": "none",
            "validation": 0.1,
            "sequence_length": 192,
        },
        "training": {"steps": 2, "global_batch_size": 4, "micro_batch_size": 1, "device": "cpu"},
    }
    run["model"]["router_aux_loss_coef"] = 0.01
    run["measure"] = {"warmup_steps": 1}
    (folder / "run.yaml").write_text(json.dumps(run))  # JSON is YAML

    def of(name: str, *arguments: str) -> RunRecord:
        nproc = "1" if name.startswith("single") else "2"
        out = f"--training.output_dir={folder / name}"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(measure, "peak_of", lambda *_: PeakFlops(1.0, "not measured"))
            command = ["train", str(folder / "run.yaml"), "--nproc", nproc, out, *arguments]
            done = run_command(command, {"OMP_NUM_THREADS": "1"})
        assert done.returncode == 0, done.stderr
        return RunRecord.read(folder / name / "record.json")

    return of


@pytest.fixture(scope="module")
def full(train: Train) -> RunRecord:
    """One process whose rows all have `data.sequence_length` positions."""

    def of(cfg):
        return replace(RowLengths.of(cfg), multiple=None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader, "RowLengths", type("Full", (), {"of": of}))
        return train("single-full")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_are_those_of_rows_of_full_length(train: Train, full: RunRecord, layout: str):
    record = train(layout, *LAYOUTS[layout])
    assert record.losses == pytest.approx(full.losses, rel=2e-6)
    assert record.grad_norms == pytest.approx(full.grad_norms, rel=2e-5)
    assert record.eval[-1]["loss"] == pytest.approx(full.eval[-1]["loss"], rel=2e-6)
    assert record.data["train"] == full.data["train"]
    # The work of a token is less where rows are shorter, and so is the share of the peak.
    assert record.flops["model_per_token"] < full.flops["model_per_token"]
