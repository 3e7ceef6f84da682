"""The record of a finished run: memory, measured in a step of its own, FLOPs, and what was read."""

import dataclasses
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.hooks import RemovableHandle

from shardwise.assembly.build import Job
from shardwise.assembly.step_time import peak_of
from shardwise.base.batches import AnyBatch
from shardwise.base.interfaces import Mesh, Part
from shardwise.base.records.record import RunRecord
from shardwise.config import RunConfig
from shardwise.data.loader import Loaders
from shardwise.data.packing import RowLengths
from shardwise.data.state import Counts, counts, merge_states
from shardwise.metrics.allocations import AllocationRecorder
from shardwise.metrics.dispatch import Dispatches, counts_of_steps
from shardwise.metrics.flops import (
    CONVENTION,
    hardware_flops_per_token,
    model_flops_per_token,
    utilization,
)
from shardwise.metrics.hardware import environment
from shardwise.metrics.memory import PeakMemory, StateTensors, state_bytes, state_tensors
from shardwise.metrics.meter import Meter
from shardwise.models.part import ModelPart
from shardwise.parallel.reduce import from_every_rank, sum_over
from shardwise.training.reporter import Reporter
from shardwise.training.step import NonFiniteLossError, Phase, training_step


@dataclass(frozen=True)
class MeasuredMemory:
    """Bytes on each rank, in the order of ranks, and what the step launched there."""

    peak_bytes: list[int]
    parts: list[dict[str, int]]  # bytes of the peak, by `memory_parts.PARTS`
    state_bytes: list[dict[str, int]]
    launches: list[int] | None  # operators; None where compiled code hides them
    host_waits: list[int] | None
    offloaded_bytes: list[int] | None
    disk_bytes: list[tuple[int, int]] | None

    def fields(self) -> dict[str, Any]:
        """Return the fields of the record."""
        return {
            "peak_memory_bytes": self.peak_bytes,
            "memory_parts": self.parts,
            "state_bytes": self.state_bytes,
            "launches_per_step": self.launches,
            "host_waits_per_step": self.host_waits,
            "offloaded_bytes_per_step": self.offloaded_bytes,
            "disk_bytes_per_step": self.disk_bytes,
        }


def measure_memory(
    job: Job,
    microbatches: Sequence[AnyBatch],
    mesh: Mesh,
    cfg: RunConfig,
    recorder: AllocationRecorder | None = None,
) -> MeasuredMemory:
    """Return the peak and state bytes of one step, and its launches, a collective of all ranks.

    The step changes the model, so everything has to be saved before. `recorder`: see PeakMemory.
    """
    microbatches = [batch.to(mesh.device) for batch in microbatches]
    dispatches = Dispatches(counts_of_steps(job.optimizer))
    is_seen = not cfg.training.is_compiled

    def offloaded() -> int:
        return sum(part.offloaded_bytes for part in job.pm.parts if isinstance(part, ModelPart))

    before, on_disk = offloaded(), job.pm.storage.moved_bytes()
    window_bytes = job.pm.storage.memory_bytes()

    def state() -> StateTensors:
        return state_tensors(job.pm.stored(), job.optimizer)

    peak, bytes_of_state = PeakMemory(mesh.device, state, recorder), dict[str, int]()
    measuring = ExitStack()

    def after(phase: Phase) -> None:
        if phase == "update":  # ends before gradients are dropped: see PeakMemory
            measuring.close()
            bytes_of_state.update(state_bytes(job.pm.stored(), job.optimizer))
        else:
            peak.mark()

    with measuring:
        measuring.enter_context(peak)
        if is_seen:
            measuring.enter_context(dispatches)
        for part in job.pm.parts:
            for hook in _mark_forwards(part, peak):
                measuring.callback(hook.remove)
        try:
            training_step(job, microbatches, mesh, cfg.optimizer.max_grad_norm, after)
        except NonFiniteLossError:  # by what the last update left; the run's work is done
            after("update")
    read, written = (a - b for a, b in zip(job.pm.storage.moved_bytes(), on_disk, strict=True))
    assert peak.peak_bytes is not None
    assert peak.parts is not None
    weights_bytes = peak.parts["weights"] + window_bytes
    return MeasuredMemory(
        from_every_rank(peak.peak_bytes + window_bytes),
        from_every_rank({**peak.parts, "weights": weights_bytes}),
        from_every_rank(bytes_of_state),
        from_every_rank(dispatches.num_launches) if is_seen else None,
        from_every_rank(dispatches.num_waits) if is_seen else None,
        from_every_rank(offloaded() - before) if cfg.training.offload_activations else None,
        from_every_rank((read, written)) if cfg.parallel.offload == "disk" else None,
    )


def _mark_forwards(part: Part, peak: PeakMemory) -> tuple[RemovableHandle, RemovableHandle]:
    # Outside of the hooks of wrappers: what they allocate for a forward lies between these two.
    begin = part.register_forward_pre_hook(lambda *_: peak.mark(), prepend=True)
    return begin, part.register_forward_hook(lambda *_: peak.mark(ends_forward=True))


def documents_read(loaders: Loaders) -> dict[str, Counts]:
    """Return what was read for training since step 1, and for the last evaluation.

    It is the same on every rank.
    """
    # An all-gather of a few numbers for each micro-batch row, from every rank to all.
    read = {"train": counts(merge_states(from_every_rank(loaders.state())))}
    return read if loaders.validation is None else {**read, "validation": loaders.validation.read}


def write_record(
    cfg: RunConfig, mesh: Mesh, job: Job, reporter: Reporter, meter: Meter
) -> RunRecord | None:
    """Write `record.json` and return the record on rank 0; the other ranks wait and return None."""
    work = _work(cfg, mesh, job, meter) if job.counts else None
    record = _record(cfg, mesh, job, reporter, meter, work) if dist.get_rank() == 0 else None
    return _write(cfg, record)


def add_to_record(cfg: RunConfig, record: RunRecord | None, **fields: Any) -> RunRecord | None:
    """Write the record again with fields that came later, and return it on rank 0.

    What came later may have failed, so the record was written before it.
    """
    return _write(cfg, None if record is None else replace(record, **fields))


def _write(cfg: RunConfig, record: RunRecord | None) -> RunRecord | None:
    if record is not None:
        record.write(Path(cfg.training.output_dir) / "record.json")
    dist.barrier()
    return record


def _record(
    cfg: RunConfig, mesh: Mesh, job: Job, reporter: Reporter, meter: Meter, work: "_Work | None"
) -> RunRecord:
    seconds = meter.step_seconds()
    mean_seconds = seconds["mean"] if seconds else None
    figures = _flops(cfg, mesh, work, mean_seconds) if work else {}
    start, early_stop, history = reporter.start, reporter.early_stop, reporter.history
    routing = {name: values.tolist() for name, values in history.routing.items()}
    return RunRecord(
        status="ok",
        config=cfg.recorded(),
        environment=environment(mesh.device),
        mesh={axis: mesh.size(axis) for axis in mesh.AXES},
        parameters=dict(job.parameters),
        lora=job.run.coverage.to_dict() if job.run.coverage else None,
        losses=history.losses.tolist(),
        grad_norms=history.grad_norms.tolist(),
        skipped_steps=history.skipped_steps,
        eval=history.evaluations,
        data={name: read.to_dict() for name, read in reporter.documents.items()},
        tokens_per_second=meter.tokens_per_second(),
        samples_per_second=cfg.training.global_batch_size / mean_seconds if mean_seconds else None,
        step_seconds=seconds,
        first_step_seconds=meter.first_step_seconds,
        kernels=dict(job.run.kernels),
        recomputation=job.chosen.to_dict() if job.chosen else None,
        routing=job.routing.summary() | {"steps": routing} if job.routing else None,
        pairs={name: values.tolist() for name, values in history.pairs.items()},
        resplits=history.resplits,
        notes=list(reporter.notes),
        stopped_early=dataclasses.asdict(early_stop) if early_stop else None,
        saved_step=reporter.saved_step,
        resumed_from={"folder": str(start.folder), "step": start.step} if start.folder else None,
        **figures,
    )


@dataclass(frozen=True)
class _Work:
    """Positions that a step computes on all ranks, and the FLOPs of each: means of timed steps."""

    positions: float
    """Not only targets: the device computes padding too."""
    model: float
    hardware: float


def _work(cfg: RunConfig, mesh: Mesh, job: Job, meter: Meter) -> _Work:
    """Return what the timed steps computed, a collective of all ranks where rows are cut."""
    counts = job.counts
    assert counts is not None

    def flops(length: int) -> tuple[float, float]:
        checkpointing = job.cfg.training.checkpointing
        return (
            model_flops_per_token(counts, length),
            hardware_flops_per_token(counts, length, checkpointing),
        )

    full, num_steps = cfg.data.sequence_length, len(meter.seconds) - meter.warmup_steps
    if RowLengths.of(cfg).multiple is None or num_steps < 1:
        return _Work(cfg.training.global_batch_size * full, *flops(full))
    totals = torch.zeros(3, dtype=torch.float64, device=mesh.device)
    for length, number in meter.positions.items():
        totals += torch.tensor([1.0, *flops(length)], dtype=torch.float64).to(mesh.device) * number
    # Three numbers of 8 bytes from every rank to all.
    positions, model, hardware = sum_over(totals, mesh, mesh.ROW_AXES).tolist()
    return _Work(positions / num_steps, model / positions, hardware / positions)


def _flops(cfg: RunConfig, mesh: Mesh, work: _Work, step_seconds: float | None) -> dict[str, Any]:
    """Return the fields of the record that come from counting the model's FLOPs.

    `step_seconds` is the mean time of a step, None where no step was timed.
    """
    peak = peak_of(cfg, mesh.device)

    def share(flops_per_token: float) -> float | None:
        if not step_seconds:
            return None
        rate, num_ranks = work.positions / step_seconds, dist.get_world_size()
        return utilization(flops_per_token, rate, peak.flops_per_second, num_ranks)

    return {
        "mfu": share(work.model),
        "hfu": share(work.hardware),
        "flops": {
            "model_per_token": work.model,
            "hardware_per_token": work.hardware,
            "convention": CONVENTION,
            "peak_per_second": peak.flops_per_second,
            "peak_source": peak.source,
        },
    }
