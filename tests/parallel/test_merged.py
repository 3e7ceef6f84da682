"""Merged adapters train as unmerged ones do, but for the rounding, which is measured; weights and files stay."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import psutil
import pytest
import torch
import torch.distributed as dist

from shardwise.assembly.build import build
from shardwise.assembly.order import check
from shardwise.config import Lora, RunConfig, UserError
from shardwise.models import lora_forward
from shardwise.parallel import merged as strategy
from shardwise.parallel.mesh import build_mesh
from shardwise.training.step import training_step
from tests.distributed import run_ranks
from tests.parity.harness import Cell, microbatches, run_config, start

STEPS = 6


def config(layout: str = "single", nproc: int = 1, merged: bool = True, precision: str = "float32") -> RunConfig:
    cfg = run_config(Cell("olmo_hybrid", layout, "lora", nproc))
    assert cfg.lora is not None
    training: Any = {"precision": precision}
    return replace(cfg, lora=replace(cfg.lora, merged=merged), training=replace(cfg.training, **training))


def curve(*args: Any) -> tuple[list[float], list[float], bool, int, int]:
    """Losses, norms, whether frozen weights stayed, merges of an adapter, and those that are due."""
    cfg = config(*args)
    merge, merges = lora_forward.merge, []
    lora_forward.merge = lambda linear, out: (merges.append(1), merge(linear, out))
    mesh = build_mesh(cfg, torch.device("cpu"))
    job = build(cfg, mesh, start(cfg))
    layers = sum(lora_forward._is_plain(module) for module in job.hf.modules())
    frozen = {n: p.clone() for n, p in job.pm.named_parameters() if not p.requires_grad}
    results = [training_step(job, microbatches(cfg, mesh, step), mesh, 1.0) for step in range(1, STEPS + 1)]
    kept = all(torch.equal(p, frozen[n]) for n, p in job.pm.named_parameters() if n in frozen)
    kept &= not any("merged" in name for name in job.hf.state_dict())
    return [r.loss for r in results], [r.grad_norm for r in results], kept, len(merges), layers * STEPS


@pytest.mark.parametrize(("layout", "nproc"), [("single", 1), ("ddp", 2)])
def test_trains_as_unmerged_once_per_step(layout, nproc):
    ((losses, norms, *_),) = run_ranks(1, curve, "single", 1, False)
    for found, found_norms, kept, merges, expected in run_ranks(nproc, curve, layout, nproc):
        assert found == pytest.approx(losses, rel=1e-6)
        assert found_norms == pytest.approx(norms, rel=1e-5)
        assert kept
        assert merges == expected  # though a step has two micro-batches


def test_what_rounding_the_merged_weights_costs_in_bfloat16(capsys):
    curves = {
        (merged, precision): run_ranks(1, curve, "single", 1, merged, precision)[0]
        for merged in (False, True)
        for precision in ("float32", "bfloat16")
    }
    exact = curves[False, "float32"]
    off = {key: [max(abs(a / b - 1) for a, b in zip(one[i], exact[i])) for i in (0, 1)] for key, one in curves.items()}
    with capsys.disabled():
        for (merged, precision), (loss, norm) in off.items():
            name = "merged" if merged else "unmerged"
            print(f"\n  {name:8} {precision:8}: losses off by {loss:.0e}, gradient norms by {norm:.0e}", end="")
    # Autocast rounds weights and adapters anyway, by an eps of 2^-8; W' is rounded once, as W is.
    assert off[True, "bfloat16"][0] < 2**-8
    assert off[True, "bfloat16"][1] < 4 * 2**-8


def test_its_memory_is_told():
    def notes(cfg: RunConfig) -> tuple[str, ...]:
        return build(cfg, build_mesh(cfg, torch.device("cpu"))).notes

    (one, half) = (run_ranks(1, notes, config(precision=p))[0][-1] for p in ("float32", "bfloat16"))
    sizes = [int(note.split("takes ")[1].split(" ")[0].replace(",", "")) for note in (one, half)]
    assert sizes[0] == 2 * sizes[1] > 0


def refusal(free: list[int], num_bytes: int) -> str:
    with mock.patch.object(strategy, "free_bytes", return_value=free[dist.get_rank()]):
        try:
            strategy.check_fits(num_bytes, torch.device("cpu"))
        except UserError as error:
            return str(error)
    return ""


def test_what_does_not_fit_is_refused_on_every_rank_before_it_is_made():
    # Two ranks of one machine: each has a half of what that has left.
    assert run_ranks(2, refusal, [2000, 2001], 1000) == ["", ""]
    for message in run_ranks(2, refusal, [2000, 1999], 1000):
        assert message == (
            "lora.merged copies 1,000 bytes of weights, but a rank has only 999 bytes left; set lora.merged to false"
        )
    with (
        mock.patch.object(strategy, "free_bytes", return_value=0),
        pytest.raises(RuntimeError, match=r"lora\.merged copies"),
    ):
        run_ranks(1, curve, "single", 1)


def test_what_a_machine_has_left():
    # A tenth of it: others take and give back memory meanwhile.
    assert strategy.free_bytes(torch.device("cpu")) == pytest.approx(psutil.virtual_memory().available, rel=0.1)


@pytest.mark.parametrize("layout", ["fsdp1", "fsdp2", "zero1", "tp", "pp"])
def test_layouts_that_it_does_not_fit(layout):
    cfg = config(layout, 2)
    if layout == "pp":
        cfg = run_config(Cell("olmo_hybrid", "pp", "lora", 2, schedule="1f1b"))
        assert cfg.lora is not None
        cfg = replace(cfg, lora=replace(cfg.lora, merged=True))
    with pytest.raises(
        UserError, match=rf"lora\.merged is for single and ddp, not {layout}; set lora\.merged to false"
    ):
        check(cfg, "olmo_hybrid")


def test_settings_that_it_does_not_fit():
    with pytest.raises(UserError, match=r"lora\.merged leaves nothing to drop from: set lora\.dropout, 0\.1, to 0"):
        Lora(merged=True, dropout=0.1)
    with pytest.raises(UserError, match=r"lora\.merged is not for PEFT's forward"):
        Lora(merged=True, kernel="peft")
    cfg = config()
    with pytest.raises(UserError, match=r"lora\.merged is not proven with training\.compile"):
        check(replace(cfg, training=replace(cfg.training, compile="inductor")), "olmo_hybrid")
