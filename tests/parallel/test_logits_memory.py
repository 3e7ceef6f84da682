"""All logits of a micro-batch never lie on one rank: the peak of a whole training step with tensor
parallelism."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shardwise.assembly.build import build
from shardwise.base.batches import Batch
from shardwise.config import RunConfig
from shardwise.kernels.linear_cross_entropy import chunked
from shardwise.metrics.memory import PeakMemory
from shardwise.parallel.mesh import build_mesh
from shardwise.training.step import training_step
from tests.distributed import run_ranks
from tests.parity.harness import CONFIGS, Cell, run_config

V = 16_001  # 8,001 rows on the first of two ranks, 8,000 on the second
B, T = 4, 128
ALL_LOGITS = B * T * V * 4
"""33 MB: [B, T, V] in float32, which no rank's own loss or gradient needs."""
CHUNK = 2**18


@pytest.fixture(scope="module")
def large_vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    config = json.loads((CONFIGS / "tiny-llama" / "config.json").read_text()) | {"vocab_size": V}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def step(cfg: RunConfig) -> tuple[int, float, float]:
    """Bytes that one step takes beyond what was there; its loss and its gradient norm."""
    chunked.CHUNK_BYTES = CHUNK  # this process ends with the measurement
    mesh = build_mesh(cfg, torch.device("cpu"))
    job = build(cfg, mesh)
    tokens = torch.randint(0, V, (B, T + 1), generator=torch.Generator().manual_seed(0))
    batch = Batch(
        tokens[:, :-1], tokens[:, 1:], torch.zeros(B, T, dtype=torch.long), tuple(range(B)), step=1
    )
    with PeakMemory(mesh.device) as memory:
        result = training_step(job, [batch], mesh, 1.0)
    assert memory.peak_bytes is not None
    assert memory.entry_bytes is not None
    return memory.peak_bytes - memory.entry_bytes, result.loss, result.grad_norm


def measured(layout: str, loss: str, folder: Path) -> list[tuple[int, float, float]]:
    cfg = run_config(Cell("llama", layout, "lora", 2))
    training = replace(cfg.training, loss=loss, global_batch_size=B, micro_batch_size=B)
    cfg = replace(cfg, model=replace(cfg.model, path=str(folder)), training=training)
    found = run_ranks(2, step, cfg)
    for rank, (taken, *_) in enumerate(found):
        print(f"{layout} {loss:7} rank {rank}: {taken:>11,} B; all logits {ALL_LOGITS:,} B")
    return found


def test_a_step_takes_a_fraction_of_what_all_logits_would(large_vocabulary, capsys):
    with capsys.disabled():
        print()
        found = {
            layout: measured(layout, "chunked", large_vocabulary) for layout in ("tp", "tp-sp")
        }
        plain = measured("tp", "plain", large_vocabulary)
    for ranks in found.values():
        # What a layer keeps for its backward is about 15 tensors of 512 x 64 and 4 of 512 x 172/2
        # floats, 2.7 MB; of four layers 11 MB, less with LoRA. With them, a chunk of 0.3 MB. (Of
        # all logits there would be three at once: they, their logarithms of probabilities and their
        # gradient.)
        assert all(CHUNK < taken < ALL_LOGITS / 3 for taken, *_ in ranks)
    # The control: logits that torch's own cross entropy takes are seen, and each rank gathers all
    # of them.
    assert all(taken > ALL_LOGITS for taken, *_ in plain)
    for (_, *chunked_result), (_, *plain_result) in zip(found["tp"], plain, strict=True):
        assert chunked_result == pytest.approx(plain_result, rel=1e-5)
