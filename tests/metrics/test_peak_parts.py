"""The parts of a peak that was measured, against sums by hand; KIB is a tensor of 256 float32."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardwise.metrics.memory import PeakMemory, state_tensors
from tests.records.test_memory_parts import parts, without_temporary

CPU = torch.device("cpu")
KIB = 1024


def sines(x: torch.Tensor) -> torch.Tensor:
    for _ in range(6):
        x = x.sin()  # saves its input
    return x


def step(microbatches: int, checkpointing: bool = False, spare: int = 0) -> PeakMemory:
    """Run a weight of 4 KiB through six sines, with an AdamW that has its states already."""
    run = (
        partial(checkpoint, sines, use_reentrant=False, preserve_rng_state=False)
        if checkpointing
        else sines
    )
    weight = nn.Parameter(torch.ones(4 * 256))
    frozen = nn.Parameter(torch.ones(3 * 256), requires_grad=False)
    optimizer = torch.optim.AdamW([weight])
    weight.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    with PeakMemory(CPU, lambda: state_tensors([weight, frozen], optimizer)) as peak:
        for _ in range(microbatches):
            peak.mark()
            loss = run(weight).sum()
            peak.mark(ends_forward=True)
            loss.backward()
            del loss
        peak.mark()
        late = torch.ones(spare * 256)
        del late
        optimizer.step()
    assert peak.parts is not None
    assert sum(peak.parts.values()) == peak.peak_bytes
    return peak


STATE = {"weights": 7 * KIB, "optimizer": 8 * KIB + 4}


def test_the_peak_of_one_microbatch_lies_in_its_backward_before_there_are_gradients():
    # Saved are the five sines between, 4 KiB each; the loss is 4 bytes.
    assert without_temporary(step(1).parts) == parts(**STATE, activations=20 * KIB + 4)


def test_the_second_microbatch_finds_the_first_ones_gradients():
    assert without_temporary(step(2).parts) == parts(
        **STATE, gradients=4 * KIB, activations=20 * KIB + 4
    )


def test_checkpointing_makes_activations_temporary():
    plain, recomputed = step(2).parts, step(2, checkpointing=True).parts
    # Nothing is saved but the weight itself; what the backward computes again is temporary.
    assert without_temporary(recomputed) == parts(**STATE, gradients=4 * KIB, activations=4)
    assert recomputed["temporary"] >= plain["temporary"] + 20 * KIB


def test_a_peak_after_the_backward_has_no_activations():
    peak = step(1, spare=64)
    assert without_temporary(peak.parts) == parts(**STATE, gradients=4 * KIB)
    # The spare 64 KiB, and what other tests' modules hold.
    assert peak.parts["temporary"] == peak.peak_bytes - (7 + 4 + 8) * KIB - 4


def test_without_marks_all_is_temporary():
    with PeakMemory(CPU) as peak:
        torch.ones(256)
    assert peak.parts == {**parts(), "temporary": peak.peak_bytes}


class Allocator:
    """A stand-in for CUDA's caching allocator, which rounds up to 512 bytes and keeps a history."""

    def __init__(self) -> None:
        self.history = [{"action": "alloc", "addr": 1, "size": 100}]  # from an earlier recording
        self.alive = self.peak = 512
        self.counts = {"allocation.all.allocated": 7, "allocation.all.freed": 6}

    def alloc(self, address: int, size: int) -> None:
        self.history += [{"action": "segment_alloc", "addr": 0, "size": 4096}]
        self.history += [{"action": "alloc", "addr": address, "size": size}]
        self.counts = {
            **self.counts,
            "allocation.all.allocated": self.counts["allocation.all.allocated"] + 1,
        }
        self.alive += -(-size // 512) * 512
        self.peak = max(self.peak, self.alive)

    def free(self, address: int, size: int) -> None:
        for action in ("free_requested", "free_completed"):
            self.history += [{"action": action, "addr": address, "size": size}]
        self.counts = {
            **self.counts,
            "allocation.all.freed": self.counts["allocation.all.freed"] + 1,
        }
        self.alive -= -(-size // 512) * 512


def test_the_history_of_cuda(monkeypatch):
    allocator = Allocator()
    fakes = {
        "synchronize": lambda device: None,
        "reset_peak_memory_stats": lambda device: None,
        "memory_allocated": lambda device: allocator.alive,
        "max_memory_allocated": lambda device: allocator.peak,
        "memory_stats": lambda device: allocator.counts,
        "memory._record_memory_history": lambda **options: None,
        "memory._snapshot": lambda: {"device_traces": [[], allocator.history]},
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(f"torch.cuda.{name}", fake)
    with PeakMemory(torch.device("cuda", 1)) as peak:
        allocator.alloc(1024, 700)
        peak.mark()
        allocator.alloc(2048, 600)
        allocator.alloc(4096, 100)
        allocator.free(4096, 100)
        peak.mark(ends_forward=True)
        allocator.free(1024, 700)
        allocator.alloc(1024, 1100)
    assert (peak.entry_bytes, peak.exit_bytes, peak.peak_bytes) == (512, 512 + 1024 + 1536, 3072)
    # Of the 600 and 1100 requested bytes inside, the forward kept the 600.
    assert without_temporary(peak.parts) == parts(activations=600)
    assert sum(peak.parts.values()) == peak.peak_bytes
