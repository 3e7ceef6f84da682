"""Under fsdp no rank ever holds the whole model: weights go from safetensors straight into the
shards."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from shardwise.assembly.build import build
from shardwise.base.batches import Batch
from shardwise.config import Data, Lora, Model, Parallel, RunConfig, Training
from shardwise.metrics.memory import PeakMemory, tensor_bytes
from shardwise.models import load, weight_files
from shardwise.models.causal_lm import CausalLM
from shardwise.models.save import save_model
from shardwise.parallel.mesh import build_mesh
from shardwise.parallel.place import full_tensor
from tests.distributed import run_ranks
from tests.parity.harness import CONFIGS

NPROC = 4


def _config(path: Path, lora: bool, dtype: str = "float32", layout: str = "fsdp2") -> RunConfig:
    return RunConfig(
        Model(str(path), dtype=dtype),
        Data("unused"),
        Training("unused", global_batch_size=NPROC, device="cpu"),
        lora=Lora() if lora else None,
        parallel=Parallel(layout),
    )


def _load(cfg: RunConfig) -> tuple[int, int, int, dict[str, torch.Tensor]]:
    mesh = build_mesh(cfg, torch.device("cpu"))
    with PeakMemory(mesh.device) as memory:
        job = build(cfg, mesh)
    assert memory.peak_bytes is not None
    assert memory.entry_bytes is not None
    named = dict(job.pm.named_parameters())
    held = tensor_bytes(named.values())
    kept = [(name, p) for name, p in named.items() if not p.requires_grad or cfg.lora is None]
    whole = {name: full_tensor(job.pm.to_portable(name, p)) for name, p in kept}
    return memory.peak_bytes - memory.entry_bytes, held, memory.entry_bytes, whole


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model")
    model = Model(str(CONFIGS / "demo-hybrid"), init="random")
    hf = load.build_meta(model, load.read_config(model))
    save_model(hf, load.weights(hf, model, seed=3), path)
    return path


@pytest.mark.parametrize(
    ("layout", "copies", "lora"),
    [
        ("fsdp2", 1, True),
        ("fsdp1", 2, False),
        pytest.param("fsdp2", 1, False, marks=pytest.mark.slow),
        pytest.param("fsdp1", 2, True, marks=pytest.mark.slow),
    ],
)
def test_peak_while_loading_is_a_share_and_one_unit(folder, lora, layout, copies, capsys):
    """fsdp1 holds a unit twice while it flattens it: as parameters and end to end, each from a
    multiple of 16 bytes."""
    model = Model(str(folder))
    saved = dict(load.weights(load.build_meta(model, load.read_config(model)), model, seed=0))
    total = tensor_bytes(saved.values())
    layers = [n.split(".")[2] for n in saved if ".layers." in n]
    units = [[t for n, t in saved.items() if f".layers.{i}." in n] for i in set(layers)]
    units += [
        [saved["model.embed_tokens.weight"]],
        [saved["model.norm.weight"], saved["lm_head.weight"]],
    ]
    largest = max(tensor_bytes(unit) for unit in units)
    padding = 0 if layout == "fsdp2" else copies * 16 * max(map(len, units))
    outcomes = run_ranks(NPROC, _load, _config(folder, lora, layout=layout))
    with capsys.disabled():
        peak, held, _, _ = outcomes[0]
        print(
            f"\n  {layout} {'lora' if lora else 'full'}: peak while loading {peak:,} B of a model "
            f"of {total:,} B on {NPROC} ranks; share + largest unit "
            f"{total // NPROC + copies * largest:,} B; held after {held:,} B",
            end="",
        )
    for peak, held, _, whole in outcomes:
        assert peak <= total / NPROC + copies * largest + padding + (
            held - total / NPROC if lora else 0
        )
        for name, tensor in whole.items():
            assert torch.equal(tensor, saved[name.replace(".base_layer", "")]), name


def _load_counting(cfg: RunConfig) -> tuple[dict[str, int], int, int, int]:
    """Bytes that this rank reads, by key; peak while it does, the largest of its parameters, and
    all of them."""
    read: dict[str, int] = {}
    reader = weight_files._Reader.__call__

    def counting(self: Any, key: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        tensor = reader(self, key, dtype)
        assert key not in read
        read[key] = tensor.nbytes
        return tensor

    weight_files._Reader.__call__ = counting  # this process ends with the answer
    peak, held, _, whole = _load(cfg)
    return read, peak, max(map(tensor_bytes, [[p] for p in whole.values()])), held


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        pytest.param("demo-hybrid", "1f1b", marks=pytest.mark.slow),
        ("tiny-qwen3_5-tied", "interleaved-1f1b"),
    ],
)
def test_a_rank_of_a_pipeline_reads_its_own_stages_only(name, schedule, tmp_path, capsys):
    model = Model(str(CONFIGS / name), init="random")
    hf = load.build_meta(model, load.read_config(model))
    save_model(hf, load.weights(hf, model, seed=3), tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    cfg = _config(tmp_path, lora=False)
    cfg = replace(cfg, parallel=Parallel("single", pp=2, schedule=schedule))
    outcomes = run_ranks(2, _load_counting, cfg)
    with capsys.disabled():
        read = " and ".join(f"{sum(read.values()):,}" for read, *_ in outcomes)
        print(
            f"\n  {name}, {schedule}: {read} B read of {tensor_bytes(stored.values()):,} B", end=""
        )
    for read, peak, largest, held in outcomes:
        assert sum(read.values()) == held
        assert peak <= held + largest
    (below, *_), (above, *_) = outcomes
    assert below.keys() | above.keys() == stored.keys()
    assert below.keys() & above.keys() == (
        {"model.embed_tokens.weight"} if "tied" in name else set()
    )


def test_a_cast_while_loading_takes_no_memory_for_the_whole(folder):
    """float32 in the file, bfloat16 in the model: the shard is cast, not the complete weight."""
    for peak, held, _, _ in run_ranks(NPROC, _load, _config(folder, lora=False, dtype="bfloat16")):
        assert peak <= held + 20_000  # what is held, and the rope tables


def _look(cfg: RunConfig, ids: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    job = build(cfg, build_mesh(cfg, torch.device("cpu")))
    (part,) = job.pm.parts
    assert isinstance(part, CausalLM)
    tensors = {
        n: full_tensor(t.detach())
        for n, t in chain(part.hf.named_parameters(), part.hf.named_buffers())
    }
    part.eval()
    with torch.no_grad():
        return tensors, part(Batch(ids, ids, torch.zeros_like(ids), (0, 1), 1), return_logits=True)


@pytest.mark.parametrize(
    "name", ["tiny-kimi_linear", pytest.param("tiny-falcon_h1", marks=pytest.mark.slow)]
)
def test_shards_are_what_transformers_loads_whole(name, tmp_path):
    """transformers' own sharded loading gets these two wrong: convolutions fused on load, a buffer
    in no file."""
    model = Model(str(CONFIGS / name), init="random")
    load.load_whole(model, load.read_config(model), seed=3).save_pretrained(tmp_path)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ids = torch.arange(48).view(2, 24)
    with torch.no_grad():
        logits = whole(input_ids=ids, use_cache=False).logits
    expected = dict(chain(whole.named_parameters(), whole.named_buffers()))
    for tensors, ours in run_ranks(2, _look, _config(tmp_path, lora=False), ids):
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(tensors[n], expected[n]) for n in expected)
        assert (ours - logits).abs().max() <= 1e-5 * logits.abs().max()
