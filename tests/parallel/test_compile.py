"""Compiled layers: compiled once, with the same masks and sums; what cannot compile is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from shardwise.assembly.build import build
from shardwise.base.batches import Batch
from shardwise.metrics.memory import PeakMemory
from shardwise.models.slot_dropout import DropoutState, SlotDropout
from shardwise.parallel import compile
from shardwise.parallel.compile import BACKENDS, uncompiled
from shardwise.parallel.mesh import build_mesh
from shardwise.training.step import training_step
from tests import compiling  # noqa: F401  (what forked processes then need not import)
from tests.distributed import run_ranks
from tests.parity.harness import CONFIGS, Cell, DrawnStart, microbatches, run_config


def _steps(
    family: str, compiled: str, checkpointing: str
) -> tuple[list[float], list[float], list[int]]:
    torch._dynamo.utils.counters.clear()  # of whatever was compiled before this process was forked
    cfg = run_config(Cell(family, "single", "lora", variant="dropout"))
    cfg = replace(
        cfg, training=replace(cfg.training, compile=compiled, checkpointing=checkpointing)
    )
    mesh = build_mesh(cfg, torch.device("cpu"))
    job = build(cfg, mesh, DrawnStart())
    losses, norms, graphs = [], [], []
    for step in (1, 2, 3):
        result = training_step(job, microbatches(cfg, mesh, step), mesh, 1.0)
        losses.append(result.loss)
        norms.append(result.grad_norm)
        graphs.append(
            torch._dynamo.utils.counters["stats"]["unique_graphs"] if compiled != "none" else 0
        )
    return losses, norms, graphs


# Without checkpointing a compiled parity cell shows that nothing else changes.
@pytest.mark.parametrize(
    ("family", "checkpointing", "versions"),
    [
        ("llama", "full", 2),
        pytest.param("qwen3_5_text", "full", 3, marks=pytest.mark.slow),
        pytest.param("qwen3_5_text", "none", 3, marks=pytest.mark.slow),
    ],
)
def test_masks_are_drawn_anew_and_nothing_is_compiled_again(family, checkpointing, versions):
    ((losses, norms, _),) = run_ranks(1, _steps, family, "none", "none")
    ((compiled, compiled_norms, graphs),) = run_ranks(1, _steps, family, "aot_eager", checkpointing)
    # As one layout to another in the parity cells; a mask of step 1 in step 2 moves the loss by
    # 1e-3.
    assert compiled == pytest.approx(losses, rel=1e-6)
    assert compiled_norms == pytest.approx(norms, rel=1e-5)
    # No break: the first layer, whose input needs no gradient, and each kind of others.
    assert graphs == [versions] * 3


def test_masks_are_drawn_in_compiled_code_which_all_modules_share():
    state = DropoutState(0)
    modules = [SlotDropout(0.5, name, state) for name in "xy"]
    torch._dynamo.reset()
    x, graphs = torch.randn(2, 5, 8), []
    compiled = [
        torch.compile(module.forward, backend="aot_eager", fullgraph=True) for module in modules
    ]
    for step in (1, 2):
        zeros = torch.zeros(2, 5, dtype=torch.long)
        state.start(Batch(zeros, zeros, zeros, (3, 4), step))
        for module, forward in zip(modules, compiled):
            assert torch.equal(forward(x), module(x))
            graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs == [graphs[0]] * 4


def _kept_bytes(share: float) -> int:
    """The bytes that the forward of a compiled model keeps, if layers keep so much at most."""
    cfg = run_config(Cell("qwen3_5_text", "single", "lora"))
    cfg = replace(cfg, training=replace(cfg.training, compile="aot_eager"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compile, "ACTIVATIONS_KEPT", share)
        mesh = build_mesh(cfg, torch.device("cpu"))
        (part,) = build(cfg, mesh, DrawnStart()).pm.parts
    (batch, *_) = microbatches(cfg, mesh, 1)
    part(batch).backward()  # compiles
    part.zero_grad()
    with PeakMemory(mesh.device) as peak:
        part(batch).backward()
    return peak.added_bytes()


@pytest.mark.slow
def test_compiled_layers_keep_less_than_torch_would():
    (ours,), (torchs,) = (run_ranks(1, _kept_bytes, x) for x in (compile.ACTIVATIONS_KEPT, 1.0))
    assert ours < 0.95 * torchs


def _softplus(backend: str) -> torch.Tensor:
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    x = torch.ones(2, 24, 64)

    def layer() -> torch.Tensor:
        return F.softplus(F.linear(x, weight)).transpose(1, 2).contiguous()

    run = layer if backend == "none" else torch.compile(layer, backend=backend)
    run().sum().backward()
    assert weight.grad is not None
    return weight.grad


def test_why_aot_eager_is_not_torchs_own():
    ((plain), (ours)) = (
        run_ranks(1, _softplus, backend)[0] for backend in ("none", BACKENDS["aot_eager"][0])
    )
    torch.testing.assert_close(ours, plain)
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        run_ranks(1, _softplus, "aot_eager")


def _graphed_steps() -> tuple[list[float], list[str]]:
    """Losses of two steps of `reduce-overhead`, and what torch is told meanwhile."""
    cfg = run_config(Cell("llama", "single", "lora"))
    training = replace(cfg.training, compile="reduce-overhead")
    cfg = replace(cfg, training=replace(training, micro_batch_size=training.global_batch_size))
    mesh, told = build_mesh(cfg, torch.device("cpu")), list[str]()

    def compiled(forward: Any, **options: Any) -> Any:
        told.append(f"{options['backend']} {options['mode']}")
        return forward

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", compiled)
        patch.setattr(
            torch.compiler, "cudagraph_mark_step_begin", lambda: told.append("a new step")
        )
        job = build(cfg, mesh, DrawnStart())
        rows = [microbatches(cfg, mesh, step) for step in (1, 2)]
        return [training_step(job, batches, mesh, 1.0).loss for batches in rows], told


def test_each_layer_is_a_graph_that_may_be_replayed_in_every_step():
    ((losses, told),) = run_ranks(1, _graphed_steps)
    num_layers = told.count("inductor reduce-overhead")
    assert num_layers > 1
    assert told == ["inductor reduce-overhead"] * num_layers + ["a new step"] * 2
    assert losses[0] != losses[1]


def _runs_of_other_shapes(folder: str) -> int:
    cfg = run_config(Cell("llama", "single", "lora"))
    cfg = replace(cfg, training=replace(cfg.training, compile="aot_eager"))
    cfg = replace(cfg, model=replace(cfg.model, path=folder))
    mesh = build_mesh(cfg, torch.device("cpu"))
    graphs = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compile, "VERSIONS_PER_LAYER", 1)  # 2 layers: 2 versions
        for size in (1, 2):
            sized = replace(cfg, training=replace(cfg.training, micro_batch_size=size))
            training_step(build(sized, mesh, DrawnStart()), microbatches(sized, mesh, 1), mesh, 1.0)
            graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs == sorted(set(graphs)), "some run has compiled nothing"
    return graphs[-1]


@pytest.mark.slow
def test_what_earlier_runs_have_compiled_does_not_count(tmp_path):
    content = json.loads((CONFIGS / "tiny-llama" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(content | {"num_hidden_layers": 2}))
    assert run_ranks(1, _runs_of_other_shapes, str(tmp_path))[0] > 2


def _uncompiled() -> tuple[list[torch.Tensor], list[torch.Tensor], list[int]]:
    torch._dynamo.utils.counters.clear()  # of whatever was compiled before this process was forked
    logits: dict[str, list[torch.Tensor]] = {}
    graphs = []
    for compiled in ("none", "aot_eager"):
        cfg = run_config(Cell("llama", "single", "lora", variant="dropout"))
        cfg = replace(cfg, training=replace(cfg.training, compile=compiled))
        mesh = build_mesh(cfg, torch.device("cpu"))
        job = build(cfg, mesh, DrawnStart())
        (part,) = job.pm.parts
        part.eval()
        batch = microbatches(cfg, mesh, 1)[0]
        with torch.no_grad(), uncompiled(cfg):
            logits[compiled] = [
                part(_cut(batch, length), return_logits=True) for length in (3, 5, 7)
            ]
        if compiled != "none":
            graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
            training_step(job, microbatches(cfg, mesh, 1), mesh, 1.0)
            graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    return logits["none"], logits["aot_eager"], graphs


def _cut(batch: Batch, length: int) -> Batch:
    cut = {
        name: getattr(batch, name)[:, :length] for name in ("input_ids", "labels", "document_ids")
    }
    return replace(batch, **cut)


def test_rows_of_every_length_run_uncompiled_where_they_are_asked_to():
    ((plain, ours, graphs),) = run_ranks(1, _uncompiled)
    assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))
    assert graphs[0] == 0
    assert graphs[1] > 0  # and compiled again after it
