"""Every strategy at world size 1 on a CUDA device (NCCL), in bfloat16 and in float32, against
float32 on the CPU.

How far bfloat16 may be from float32 is not a number that we choose: it is what the same work in
bfloat16 in one process on the CPU, the control, is off by. A device rounds at other places and adds
up in another order, so it gets ROOM times that.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from shardwise.assembly.state import MemoryState
from tests.distributed import run_ranks
from tests.gpu.strategies import (
    GDN,
    ROWS,
    SEQUENCE,
    Cell,
    FirstStep,
    Outcome,
    distances,
    first_step,
    run_cell,
    set_up,
    shares,
    start_values,
)
from tests.gpu.workload import FLA_SHAPES
from tests.left_out import some_now
from tests.parity.harness import CONFIGS, FAMILIES

STRATEGIES = ("single", "ddp", "fsdp2")
MODES = ("lora", "full")
ROOM = 3.0
# The control rounds each result to bfloat16 (unit roundoff 2^-9) but adds up in float32. In float32
# the unit is 2^-24, and a sum of n products adds about sqrt(n) of them; the longest sums are over
# all tokens. (TF32's unit is 2^-11: a quarter of the control, hundreds of times this share.)
FLOAT32_SHARE = 2.0**-24 / 2.0**-9 * (ROWS * SEQUENCE) ** 0.5

cuda = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device (make gpu)"),
]


def model_folder(name: str, scratch: Callable[[str], str]) -> str:
    """Return a tiny model; with fla, its recurrent layers have the shape that is timed."""
    if GDN != "fla":
        return str(CONFIGS / name)
    folder = scratch(name)
    config = json.loads((CONFIGS / name / "config.json").read_text(encoding="utf-8"))
    with open(f"{folder}/config.json", "w", encoding="utf-8") as file:
        json.dump(config | FLA_SHAPES[name], file)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    return cache(lambda name: model_folder(name, lambda name: str(tmp_path_factory.mktemp(name))))


@pytest.fixture(scope="module")
def nccl() -> Iterator[None]:
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def free_memory() -> Iterator[None]:
    yield
    gc.collect()


@dataclass(frozen=True)
class Result:
    """A cell, and how far it and the bfloat16 control are from the float32 reference."""

    outcome: Outcome
    off_by: dict[str, float]
    control_off_by: dict[str, float]
    shares: dict[str, float]

    def record(self, record_property: Callable[[str, object], None]) -> None:
        record_property("off_by", self.off_by)
        record_property("control_off_by", self.control_off_by)
        record_property("losses", self.outcome.losses)
        record_property("memory_bytes", self.outcome.memory)
        record_property("state_bytes", self.outcome.state)


def run(cell: Cell) -> Result:
    start, reference, control = expected(replace(cell, strategy="single", device="cpu"))
    outcome = run_cell(cell, start)
    return Result(
        outcome, distances(outcome.first, reference), control, shares(outcome.first, reference)
    )


@cache
def expected(cell: Cell) -> tuple[MemoryState, FirstStep, dict[str, float]]:
    """What does not depend on device and strategy: start values, reference, and the control's
    distances to it.
    """
    start = start_values(cell)
    reference = first_step(*set_up(cell.reference(), start))
    return (
        start,
        reference,
        distances(first_step(*set_up(replace(cell, dtype="bfloat16"), start)), reference),
    )


def check(result: Result, room: float) -> None:
    """All that must hold of a cell that may be `room` times as far off as the control."""
    outcome, off_by, control = result.outcome, result.off_by, result.control_off_by
    for key in ("logits", "gradients", "any logit"):
        assert off_by[key] <= room * control[key], (
            f"{key} off by {off_by[key]:.1e}, the control by {control[key]:.1e}"
        )
    # Cross entropy changes by at most twice the largest change of a logit.
    assert off_by["loss"] <= 2 * room * control["any logit"]
    wrong = {name: share for name, share in result.shares.items() if not 0.5 < share < 1.5}
    assert not wrong, f"gradients by their share in the reference's: {wrong}"
    assert all(later < earlier for earlier, later in zip(outcome.losses, outcome.losses[1:])), (
        outcome.losses
    )
    assert outcome.frozen_with_gradient == []
    assert outcome.state == outcome.expected_state
    kept_bytes = (
        outcome.state["weights"] + 2 * outcome.state["gradients"]
    )  # and the two moments; step counters may be elsewhere
    assert kept_bytes <= outcome.memory["entry"]
    assert outcome.memory["entry"] + outcome.state["gradients"] <= outcome.memory["peak"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    "family", [f for f, name in FAMILIES.items() if GDN != "fla" or name in FLA_SHAPES]
)
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=cuda)])
def test_bfloat16_on_the_device(device, family, strategy, mode, folder, nccl, record_property):
    result = run(Cell(folder(FAMILIES[family]), strategy, mode, "bfloat16", device))
    result.record(record_property)
    check(result, ROOM)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", [] if GDN == "fla" else list(FAMILIES))
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=cuda)])
def test_float32_on_the_device(device, family, mode, folder, nccl, record_property, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # torch lets convolutions use it
    assert torch.get_float32_matmul_precision() == "highest"
    result = run(Cell(folder(FAMILIES[family]), "single", mode, "float32", device))
    result.record(record_property)
    check(result, ROOM * FLOAT32_SHARE)


@pytest.mark.parametrize("strategy", ["single", "fsdp2"])
@pytest.mark.parametrize("family", ["llama", "qwen3_next", "nemotron_h"])
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=cuda)])
def test_activations_come_back_in_time(device, family, strategy, folder, nccl, record_property):
    """Through the stream that copies them: what is read too early is not there."""
    cell = Cell(folder(FAMILIES[family]), strategy, "lora", "bfloat16", device, offloads=True)
    result = run(cell)
    result.record(record_property)
    check(result, ROOM)


# The same lines without a GPU: fsdp2 keeps olmo_hybrid's float32 parameters whole, qwen3_next
# routes in float32.
CPU_CELLS = [
    ("olmo_hybrid", "fsdp2", "full"),
    ("qwen3_next", "ddp", "lora"),
    ("nemotron_h", "fsdp2", "lora"),
    ("jet_nemotron", "single", "lora"),
]


@pytest.mark.parametrize(("family", "strategy", "mode"), some_now(CPU_CELLS, CPU_CELLS[:2]))
def test_bfloat16_on_the_cpu(family, strategy, mode, record_property):
    cell = Cell(str(CONFIGS / FAMILIES[family]), strategy, mode, "bfloat16", "cpu")
    (result,) = run_ranks(1, run, cell)
    result.record(record_property)
    check(result, ROOM)


def test_the_float32_bound_lets_another_order_of_sums_pass_and_sees_tf32():
    ((reversed_sums, tf32, control),) = run_ranks(1, _two_other_linears)
    for key in ("logits", "gradients", "any logit"):
        bound = ROOM * FLOAT32_SHARE * control[key]
        assert 0 < reversed_sums[key] <= bound < tf32[key]


def _two_other_linears() -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    cell = Cell(str(CONFIGS / FAMILIES["llama"]), "single", "lora", "float32", "cpu")
    start, reference, control = expected(cell)
    linear = F.linear

    def reversed_sum(
        x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None
    ) -> torch.Tensor:
        return linear(x.flip(-1), w.flip(-1), b)

    def in_tf32(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None) -> torch.Tensor:
        return linear(_ten_bits(x), _ten_bits(w), b)

    results = []
    for other in (reversed_sum, in_tf32):
        with mock.patch.object(F, "linear", other):
            results.append(distances(first_step(*set_up(cell, start)), reference))
    return results[0], results[1], control


def _ten_bits(x: torch.Tensor) -> torch.Tensor:
    """Float32 rounded to the 10 bits of mantissa that TF32 has, its gradient passed on."""
    bits = x.detach().contiguous().view(torch.int32)
    return x + (((bits + 0x1000) & ~0x1FFF).view(torch.float32) - x).detach()
