"""The comparison on GPT-2 Large: its run files do the same work, shown on models small enough for
this machine.

And tools/gpt2_large.py says what such runs hold, to the byte, and nearly what their peak is.
"""

from __future__ import annotations

import json
import math
import runpy
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

from shardwise.assembly.build import build
from shardwise.base.batches import Batch
from shardwise.base.layouts import axis_sizes
from shardwise.base.records.record import RunRecord
from shardwise.config import RunConfig
from shardwise.config.run_file import load_config
from shardwise.lab.instruments import INSTRUMENTS
from shardwise.metrics.memory import PeakMemory
from shardwise.parallel.mesh import build_mesh
from shardwise.training.loop import train
from shardwise.training.measure import measure_memory
from shardwise.training.step import training_step
from tests.distributed import run_ranks
from tests.left_out import some_now

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "configs" / "gpt2-large"
LAYOUTS = {"single": 1, "ddp": 4, "zero3": 4, "fsdp2-tp": 4}  # on how many processes each is to run
SMALL = {
    "n_layer": 2,
    "n_embd": 40,
    "vocab_size": 257,
}  # 20 heads and an odd vocabulary, as the large one has
GLOBAL_BATCH = 4
TOOL = runpy.run_path(str(ROOT / "tools" / "gpt2_large.py"))


LONG = {"n_layer": 6, "n_embd": 80, "vocab_size": 1009}


def shrunk(name: str, folder: Path, out: Path, sizes: dict[str, int] = SMALL) -> RunConfig:
    """A run file as it is, but for the sizes of the model and of the batch, and the number of
    steps."""
    cfg = load_config(FOLDER / f"{name}-8.yaml")
    published = json.loads((ROOT / cfg.model.path / "config.json").read_text(encoding="utf-8"))
    small = out / "model"
    small.mkdir(exist_ok=True)
    (small / "config.json").write_text(json.dumps(published | sizes), encoding="utf-8")
    replicas = cfg.training.global_batch_size // cfg.training.micro_batch_size
    batch = {"global_batch_size": GLOBAL_BATCH, "micro_batch_size": GLOBAL_BATCH // replicas}
    return replace(
        cfg,
        model=replace(cfg.model, path=str(small), tokenizer=str(folder / "tokenizer")),
        data=replace(cfg.data, train=str(folder / "corpus.jsonl"), sequence_length=32),
        training=replace(cfg.training, steps=2, output_dir=str(out), device="cpu", **batch),
        measure=replace(cfg.measure, warmup_steps=0),
    )


def run(cfg: RunConfig) -> RunRecord | None:
    return train(cfg, build_mesh(cfg, torch.device("cpu")), INSTRUMENTS)


@pytest.fixture(scope="module")
def single(folder, tmp_path_factory) -> RunRecord:
    return run_ranks(1, run, shrunk("single", folder, tmp_path_factory.mktemp("single")))[0]


@pytest.mark.parametrize("name", some_now(("ddp", "zero3", "fsdp2-tp"), ("fsdp2-tp",)))
def test_every_layout_does_the_same_work(folder, tmp_path, single, name):
    cfg = shrunk(name, folder, tmp_path)
    record = run_ranks(LAYOUTS[name], run, cfg)[0]
    assert record.status == "ok"
    # Products are in bfloat16, whose numbers lie 2^-8 apart; a mean over 128 tokens is no worse
    # than one of them.
    assert record.losses == pytest.approx(single.losses, rel=2**-8)
    # On its way down from the loss a gradient is rounded no more than 16 times, to 2^-9 each.
    assert record.grad_norms == pytest.approx(single.grad_norms, rel=2**-5)
    assert single.losses[0] == pytest.approx(math.log(SMALL["vocab_size"]), abs=0.5)
    assert record.parameters == single.parameters
    assert TOOL["states_of"](cfg, LAYOUTS[name]) == record.state_bytes[0]


PEAKS = (("single", "chunked"),)
"""Layouts and losses that `make test` measures."""


PLANNED = [case for case in product(LAYOUTS, ("chunked", "plain")) if case != ("fsdp2-tp", "plain")]


@pytest.mark.parametrize(("name", "loss"), some_now(PLANNED, PEAKS))
def test_predicted_peak_is_near_a_measured_one(folder, tmp_path, name, loss, capsys):
    """On a CPU, with rows so long that fixed sizes count little. Small tensors are left out."""
    cfg = shrunk(name, folder, tmp_path, LONG)
    replicas = LAYOUTS[name] // cfg.parallel.tp
    batch = {"micro_batch_size": 4, "global_batch_size": 4 * replicas}
    cfg = replace(
        cfg,
        data=replace(cfg.data, sequence_length=256),
        training=replace(cfg.training, loss=loss, **batch),
    )
    peak = run_ranks(LAYOUTS[name], measure, cfg)[0]
    predicted = TOOL["peak_of"](cfg, LAYOUTS[name], loss, "cpu").total
    with capsys.disabled():
        print(
            f"\n{name:6} {loss:7} predicted {predicted:>11,} B, peak {peak:>11,} B, "
            f"{predicted / peak:.2f}",
            end="",
        )
    assert 0.9 * peak < predicted < 1.1 * peak


def measure(cfg: RunConfig) -> int:
    """Peak of a step, without what a forked rank inherits."""
    with PeakMemory(torch.device("cpu")) as inherited:
        pass
    mesh = build_mesh(cfg, torch.device("cpu"))
    job = build(cfg, mesh)
    tokens = torch.randint(0, 257, (cfg.training.micro_batch_size, cfg.data.sequence_length))
    batch = Batch(tokens, tokens, torch.zeros_like(tokens), tuple(range(len(tokens))), step=1)
    training_step(job, [batch], mesh, 1.0)
    memory = measure_memory(job, [batch], mesh, cfg)
    assert inherited.entry_bytes is not None
    return memory.peak_bytes[0] - inherited.entry_bytes


def test_the_page_has_what_is_planned_now():
    rows = [TOOL["row_of"](layout, rows) for layout in LAYOUTS for rows in (8, 32)]
    page = (ROOT / "results" / "gpt2-large" / "memory.md").read_text(encoding="utf-8")
    assert page == TOOL["page_of"](rows), "run python -m tools.gpt2_large"
    guide = (ROOT / "docs" / "guides" / "gpt2-large.md").read_text(encoding="utf-8")
    small = json.loads((ROOT / "results" / "gpt2-large" / "small.json").read_text("utf-8"))
    for lines in TOOL["tables_of"](rows, small).values():
        assert "\n".join(lines) in guide, "run python -m tools.gpt2_large"


def test_small_runs_have_the_losses_of_one_process():
    small = json.loads((ROOT / "results" / "gpt2-large" / "small.json").read_text("utf-8"))
    cells = {cell["layout"]: cell for cell in small["cells"]}
    assert len(cells) == 7
    assert max(cell["largest_loss_difference"] for cell in cells.values()) < 1e-6
    whole = cells["single"]["state_bytes"][0]
    assert set(cells["ddp-4"]["state_bytes"]) == {whole}
    assert max(cells["zero3-4"]["state_bytes"]) < 0.26 * whole
    assert [cell["tokens_per_second"] is None for cell in cells.values()] == [
        cell["processes"] > 2 for cell in cells.values()
    ]


def test_run_files_are_those_of_the_comparison():
    assert {path.name for path in FOLDER.glob("*.yaml")} == {
        *(f"{n}-{rows}.yaml" for n in LAYOUTS for rows in (8, 32)),
        "wikitext-8.yaml",
    }
    for name, nproc in LAYOUTS.items():
        small, large = (load_config(FOLDER / f"{name}-{rows}.yaml") for rows in (8, 32))
        assert (small.training.micro_batch_size, large.training.micro_batch_size) == (8, 32)
        sizes = axis_sizes(small, nproc)
        replicas = sizes["dp_replicate"] * sizes["dp_shard"]
        for cfg in (small, large):
            assert cfg.training.global_batch_size == replicas * cfg.training.micro_batch_size
            assert (cfg.lora, cfg.optimizer.name, cfg.data.sequence_length) == (None, "adamw", 1024)
            assert (cfg.training.precision, cfg.training.checkpointing) == ("bfloat16", "full")
        same = {
            "micro_batch_size": 8,
            "global_batch_size": 8 * replicas,
            "output_dir": small.training.output_dir,
        }
        assert replace(large, training=replace(large.training, **same)) == small
