"""How the peak of a rank changes with the layout, by the formulas of real layers."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import given, reject, settings
from hypothesis import strategies as st

from shardwise.assembly.describe import describe
from shardwise.config import Data, Lora, Model, Parallel, RunConfig, Training, UserError
from shardwise.lab.planner.peak import memory_of_run

MODELS = Path(__file__).parents[2] / "configs" / "models"
FAMILIES = st.sampled_from(["llama", "qwen3_5", "falcon_h1", "kimi_linear", "jamba"])
MODES = st.sampled_from(["lora", "full"])
CHECKPOINTING = st.sampled_from(["none", "operators", "full"])
LAYOUTS = st.sampled_from(
    [
        (1, {}),
        (2, {"data": "ddp"}),
        (2, {"data": "zero1"}),
        (2, {"data": "zero2"}),
        (2, {"data": "fsdp2"}),
        (2, {"tp": 2}),
        (2, {"cp": 2}),
        (2, {"pp": 2}),
        (4, {"data": "fsdp2", "pp": 2}),
        (4, {"data": "fsdp2", "dp_replicate": 2}),
    ]
)
few = settings(max_examples=8)


@cache
def peak(
    family: str,
    mode: str,
    checkpointing: Any = "none",
    rows: int = 2,
    num_ranks: int = 1,
    **parallel: Any,
) -> int:
    cfg = RunConfig(
        model=Model(str(MODELS / f"tiny-{family}"), init="random"),
        lora=Lora(r=8) if mode == "lora" else None,
        data=Data(train="unused", sequence_length=256),
        parallel=Parallel(**parallel),
        training=Training(
            output_dir="unused",
            global_batch_size=16,
            micro_batch_size=rows,
            checkpointing=checkpointing,
            device="cpu",
        ),
    )
    return memory_of_run(cfg, describe(cfg, num_ranks)).total


@few
@given(FAMILIES, MODES, CHECKPOINTING, st.sampled_from(["zero1", "zero2", "fsdp2"]))
def test_more_ranks_never_need_more_each(family, mode, checkpointing, data):
    two, four = (peak(family, mode, checkpointing, num_ranks=n, data=data) for n in (2, 4))
    assert four <= two


@few
@given(FAMILIES, MODES, CHECKPOINTING)
def test_more_shards_of_a_pipeline_or_of_replicas_never_need_more_each(family, mode, checkpointing):
    for more in ({"pp": 2}, {"dp_replicate": 2}):
        four, eight = (
            peak(family, mode, checkpointing, num_ranks=n, data="fsdp2", rows=1, **more)
            for n in (4, 8)
        )
        assert eight <= four


@few
@given(FAMILIES, MODES, CHECKPOINTING)
def test_two_ranks_of_tp_need_less_than_one_process(family, mode, checkpointing):
    assert peak(family, mode, checkpointing, num_ranks=2, tp=2) <= peak(family, mode, checkpointing)


@few
@given(FAMILIES, MODES, CHECKPOINTING, st.sampled_from(["tp", "cp", "pp"]))
def test_more_ranks_along_an_axis_never_need_more_each(family, mode, checkpointing, axis):
    try:
        two, four = (
            peak(family, mode, checkpointing, rows=1, num_ranks=size, **{axis: size})
            for size in (2, 4)
        )
    except UserError:  # so many ranks cannot divide its heads or layers
        reject()
    assert four <= two


@few
@given(st.sampled_from(["qwen3_moe", "kimi_linear", "glm4_moe"]), CHECKPOINTING)
def test_experts_on_more_ranks_need_less(family, checkpointing):
    whole, spread = (
        peak(family, "full", checkpointing, num_ranks=4, data="fsdp2", ep=ep) for ep in (1, 4)
    )
    assert spread <= whole


@few
@given(FAMILIES, MODES, CHECKPOINTING, LAYOUTS)
def test_half_a_micro_batch_needs_less(family, mode, checkpointing, layout):
    num_ranks, parallel = layout
    one, two = (peak(family, mode, checkpointing, rows, num_ranks, **parallel) for rows in (1, 2))
    assert one <= two


@few
@given(FAMILIES, MODES, CHECKPOINTING, st.sampled_from(["single", "ddp", "zero1", "fsdp2"]))
def test_two_micro_batches_need_at_most_a_copy_of_gradients_more_than_one(
    family, mode, checkpointing, data
):
    """The second one finds the gradients of the first, which one micro-batch has only at its end:
    the one case in which half a micro-batch may need more.
    """
    num_ranks = 1 if data == "single" else 2
    whole, half = (
        peak(family, mode, checkpointing, rows // num_ranks, num_ranks, data=data)
        for rows in (16, 8)
    )
    assert half <= whole + gradient_bytes(family, mode)


@cache
def gradient_bytes(family: str, mode: str) -> int:
    cfg = RunConfig(
        model=Model(str(MODELS / f"tiny-{family}"), init="random"),
        lora=Lora(r=8) if mode == "lora" else None,
        data=Data(train="unused"),
        training=Training(output_dir="unused", global_batch_size=1, device="cpu"),
    )
    return sum(4 * p.numel() for p in describe(cfg, 1).hf.parameters() if p.requires_grad)


@few
@given(FAMILIES, CHECKPOINTING, LAYOUTS)
def test_adapters_need_less_than_all_weights(family, checkpointing, layout):
    num_ranks, parallel = layout
    lora, full = (
        peak(family, mode, checkpointing, 2, num_ranks, **parallel) for mode in ("lora", "full")
    )
    assert lora <= full


@few
@given(FAMILIES, MODES)
def test_recomputation_needs_less(family, mode):
    full, none = peak(family, mode, "full"), peak(family, mode)
    assert full <= none
