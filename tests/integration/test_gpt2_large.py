"""The comparison on GPT-2 Large: its run files do the same work, shown on models small enough for this machine."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shardwise.config import RunConfig
from shardwise.metrics.record import RunRecord
from shardwise.parallel.mesh import build_mesh, mesh_sizes
from shardwise.run_file import load_config
from shardwise.training.loop import train
from tests.distributed import run_ranks

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "configs" / "gpt2-large"
LAYOUTS = {"single": 1, "ddp": 4, "zero3": 4, "ddp-tp": 4}  # on how many processes each is to run
SMALL = {"n_layer": 2, "n_embd": 40, "vocab_size": 257}  # 20 heads and an odd vocabulary, as the large one has
GLOBAL_BATCH = 4


def shrunk(name: str, folder: Path) -> RunConfig:
    """A run file as it is, but for the sizes of the model and of the batch, and the number of steps."""
    cfg = load_config(FOLDER / f"{name}-8.yaml")
    published = json.loads((ROOT / cfg.model.path / "config.json").read_text(encoding="utf-8"))
    small = folder / "small"
    small.mkdir(exist_ok=True)
    (small / "config.json").write_text(json.dumps(published | SMALL), encoding="utf-8")
    replicas = cfg.training.global_batch_size // cfg.training.micro_batch_size
    output_dir = folder / name
    output_dir.mkdir()
    batch = {"global_batch_size": GLOBAL_BATCH, "micro_batch_size": GLOBAL_BATCH // replicas}
    return replace(
        cfg,
        model=replace(cfg.model, path=str(small), tokenizer=str(folder / "tokenizer")),
        data=replace(cfg.data, train=str(folder / "corpus.jsonl"), sequence_length=32),
        training=replace(cfg.training, steps=2, output_dir=str(output_dir), device="cpu", **batch),
        measure=replace(cfg.measure, warmup_steps=0),
    )


def run(cfg: RunConfig) -> RunRecord | None:
    return train(cfg, build_mesh(cfg, torch.device("cpu")))


@pytest.fixture(scope="module")
def single(folder) -> RunRecord:
    return run_ranks(1, run, shrunk("single", folder))[0]


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "single"])
def test_every_layout_does_the_same_work(folder, single, name):
    record = run_ranks(LAYOUTS[name], run, shrunk(name, folder))[0]
    assert record.status == "ok"
    # Products are in bfloat16, whose numbers lie 2^-8 apart; a mean over 128 tokens is no worse than one of them.
    assert record.losses == pytest.approx(single.losses, rel=2**-8)
    # On its way down from the loss a gradient is rounded no more than 16 times, to 2^-9 each.
    assert record.grad_norms == pytest.approx(single.grad_norms, rel=2**-5)
    assert single.losses[0] == pytest.approx(math.log(SMALL["vocab_size"]), abs=0.5)
    assert record.parameters == single.parameters


def test_run_files_are_those_of_the_comparison():
    assert {path.name for path in FOLDER.glob("*.yaml")} == {f"{n}-{rows}.yaml" for n in LAYOUTS for rows in (8, 32)}
    for name, nproc in LAYOUTS.items():
        small, large = (load_config(FOLDER / f"{name}-{rows}.yaml") for rows in (8, 32))
        assert (small.training.micro_batch_size, large.training.micro_batch_size) == (8, 32)
        sizes = mesh_sizes(small, nproc)
        replicas = sizes["dp_replicate"] * sizes["dp_shard"]
        for cfg in (small, large):
            assert cfg.training.global_batch_size == replicas * cfg.training.micro_batch_size
            assert (cfg.lora, cfg.optimizer.name, cfg.data.sequence_length) == (None, "adamw", 1024)
            assert (cfg.training.precision, cfg.training.checkpointing) == ("bfloat16", "full")
        same = {"micro_batch_size": 8, "global_batch_size": 8 * replicas, "output_dir": small.training.output_dir}
        assert replace(large, training=replace(large.training, **same)) == small
