"""A few steps of one strategy on one device, and the same work in float32 on the CPU."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Literal

import torch
from transformers import PreTrainedModel

from shardwise.assembly.build import Job, build
from shardwise.assembly.state import MemoryState
from shardwise.base.batches import IGNORED, Batch
from shardwise.base.interfaces import Mesh
from shardwise.config import Data, Lora, Model, Optimizer, Parallel, RunConfig, Training
from shardwise.metrics.memory import PeakMemory, state_bytes
from shardwise.models.causal_lm import CausalLM
from shardwise.parallel.mesh import build_mesh
from shardwise.parallel.place import full_tensor
from shardwise.training.step import forward_backward, training_step
from tests.parity.harness import DrawnStart

GDN = os.environ.get("SHARDWISE_GDN")
"""The kernels that the gated delta rule must be computed by: fla or torch; None: whichever
transformers takes.
"""
ROWS, SEQUENCE = 4, 70  # 70 is no multiple of the recurrent layers' chunks of 64 and 32
STEPS = 3


@dataclass(frozen=True)
class Cell:
    """One strategy on one model at world size 1."""

    model: str  # a folder
    strategy: Literal["single", "ddp", "fsdp2"]  # hsdp needs two replicas
    mode: Literal["lora", "full"]
    dtype: Literal["bfloat16", "float32"]
    device: Literal["cuda", "cpu"]
    offloads: bool = False
    """Whether activations wait in CPU memory."""

    def reference(self) -> Cell:
        """Return the same work in one process on the CPU in float32."""
        return replace(self, strategy="single", dtype="float32", device="cpu")

    def control(self) -> Cell:
        """Return the same work on the CPU in this cell's dtype: what rounding alone does."""
        return replace(self, strategy="single", device="cpu")


@dataclass(frozen=True)
class FirstStep:
    """What the first step computed before its update; full tensors, float32, on the CPU."""

    loss: float
    logits: torch.Tensor  # [B, T, V], without dropout
    grads: dict[str, torch.Tensor]  # before clipping


@dataclass(frozen=True)
class Outcome:
    """What a cell did in STEPS steps on a repeated batch."""

    first: FirstStep
    losses: list[float]  # before each update
    frozen_with_gradient: list[str]
    state: dict[str, int]  # bytes after the first backward and update, gradients still there
    expected_state: dict[str, int]
    memory: dict[str, int]  # bytes around the last step


def run_config(cell: Cell) -> RunConfig:
    """Return the run of a cell. Its dtype is that of weights and products."""
    return RunConfig(
        model=Model(cell.model, init="random", dtype=cell.dtype, slow_cores="allow"),
        lora=Lora(r=4, alpha=8) if cell.mode == "lora" else None,
        data=Data(train="unused", sequence_length=SEQUENCE),
        parallel=Parallel(data=cell.strategy),
        optimizer=Optimizer(lr=1e-2 if cell.mode == "lora" else 1e-3, lr_schedule="constant"),
        training=Training(
            output_dir="unused",
            steps=STEPS,
            global_batch_size=ROWS,
            micro_batch_size=ROWS // 2,
            precision=cell.dtype,
            offload_activations=cell.offloads,
            device=cell.device,
        ),
    )


def microbatches(device: torch.device) -> list[Batch]:
    """Return two micro-batches of two rows, the second with fewer target tokens."""
    ids = torch.randint(256, (ROWS, SEQUENCE + 1), generator=torch.Generator().manual_seed(0))
    labels = ids[:, 1:].clone()
    labels[ROWS // 2 :, 40:] = IGNORED
    halves = (slice(0, ROWS // 2), slice(ROWS // 2, ROWS))
    documents, slots = torch.zeros_like(labels), tuple(range(ROWS))
    batches = [Batch(ids[h, :-1], labels[h], documents[h], slots[h], step=1) for h in halves]
    return [batch.to(device) for batch in batches]


def start_values(cell: Cell) -> MemoryState:
    """Return every parameter in the cell's own dtype, LoRA's B at random: exact in float32 too."""
    job, _ = set_up(cell.control(), DrawnStart())
    return MemoryState({f"weights/{name}": p.detach() for name, p in job.pm.named_parameters()})


def set_up(cell: Cell, start: MemoryState) -> tuple[Job, Mesh]:
    """Build a cell's run with these values; a process group must be up."""
    cfg = run_config(cell)
    device = torch.device("cuda", 0) if cell.device == "cuda" else torch.device("cpu")
    mesh = build_mesh(cfg, device)
    return build(cfg, mesh, start), mesh


def first_step(job: Job, mesh: Mesh) -> FirstStep:
    """Run forward and backward; gradients stay where they are."""
    batches = microbatches(mesh.device)
    (part,) = job.pm.parts
    with torch.no_grad():
        part.eval()
        logits = torch.cat([part(batch, return_logits=True) for batch in batches]).float().cpu()
    loss, _ = forward_backward(job.pm, batches, mesh)
    trained = [(n, p.grad) for n, p in job.pm.named_parameters() if p.requires_grad]
    grads = {n: full_tensor(g).float().cpu() for n, g in trained if g is not None}
    return FirstStep(loss.item(), logits, grads)


def run_cell(cell: Cell, start: MemoryState) -> Outcome:
    """Take STEPS steps and record everything on the way."""
    job, mesh = set_up(cell, start)
    if GDN is not None and "gated delta rule" in job.run.kernels:
        takes_packages = cell.device == "cuda" and cell.dtype == "bfloat16"
        assert job.run.kernels["gated delta rule"] == (GDN if takes_packages else "torch")
    first = first_step(job, mesh)
    parameters = list(job.pm.named_parameters())
    frozen = [n for n, p in parameters if not p.requires_grad and p.grad is not None]
    job.optimizer.step()
    state = state_bytes([p for _, p in parameters], job.optimizer)
    job.optimizer.zero_grad(set_to_none=True)
    batches = microbatches(mesh.device)
    losses = [first.loss]
    for _ in range(STEPS - 2):
        losses.append(training_step(job, batches, mesh, 1.0).loss)
    with PeakMemory(mesh.device) as memory:
        losses.append(training_step(job, batches, mesh, 1.0).loss)
    figures = {key: getattr(memory, f"{key}_bytes") for key in ("entry", "peak", "exit")}
    return Outcome(first, losses, frozen, state, _expected_state(parameters), figures)


def hf_model(job: Job) -> PreTrainedModel:
    """Return the transformers model of a run."""
    (part,) = job.pm.parts
    assert isinstance(part, CausalLM)
    return part.hf


def _expected_state(parameters: list[tuple[str, torch.nn.Parameter]]) -> dict[str, int]:
    """Return the bytes at world size 1: of a trained parameter also a gradient, two moments and a
    step counter of 4 bytes.
    """
    every = sum(p.numel() * p.element_size() for _, p in parameters)
    trained = [(p.numel(), p.element_size()) for _, p in parameters if p.requires_grad]
    size = sum(numel * element for numel, element in trained)
    return {"weights": every, "gradients": size, "optimizer": 2 * size + 4 * len(trained)}


def distances(one: FirstStep, reference: FirstStep) -> dict[str, float]:
    """Return how far two outcomes are apart.

    Of the logits and of all gradients together, the 2-norm of the difference over that of the
    reference; the most that any logit differs by, and what the first loss differs by.
    """
    grads, expected = (
        torch.cat([step.grads[name].flatten() for name in reference.grads])
        for step in (one, reference)
    )
    return {
        "logits": ((one.logits - reference.logits).norm() / reference.logits.norm()).item(),
        "gradients": ((grads - expected).norm() / expected.norm()).item(),
        "any logit": (one.logits - reference.logits).abs().max().item(),
        "loss": abs(one.loss - reference.loss),
    }


def shares(one: FirstStep, reference: FirstStep) -> dict[str, float]:
    """Return how much of each gradient of the reference is there: 0 if it is missing, 2 if doubled.

    Rounding moves it little, even where a gradient is a small difference of large numbers, as that
    of `A_log` is.
    """
    assert one.grads.keys() == reference.grads.keys()
    return {
        name: (torch.dot(one.grads[name].flatten(), grad.flatten()) / grad.square().sum()).item()
        for name, grad in reference.grads.items()
    }
