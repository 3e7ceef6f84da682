"""What a config may turn on or off, sizes that are no powers of two, and blocks left whole: against
one process."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.granitemoehybrid import modeling_granitemoehybrid as granite

from shardwise.models import families
from tests.distributed import run_ranks
from tests.left_out import some_now
from tests.models.tiny import CONFIGS, with_whole_feed_forwards
from tests.parity import harness
from tests.parity.harness import Cell, compare, run_cell, verdict

BIASES = ("attention_bias", "mlp_bias", "mamba_proj_bias", "projectors_bias")
OPTIONS = {
    # Experts that work in a narrower width, whose way back has a bias too.
    "nemotron_h": {"use_bias": True, "mlp_bias": True, "moe_latent_size": 24, "n_groups": 1},
    "granitemoehybrid": {"attention_bias": True, "mamba_proj_bias": True, "mamba_n_groups": 1},
    "falcon_h1": {**dict.fromkeys(BIASES, True), "mamba_n_groups": 1},
    # Its biases are shared by 2 ranks. Larger weights: the gradients of decays cancel less.
    # With smaller weights the gradients of A_log are so small that rounding shows in them.
    "jet_nemotron": {"num_key_value_heads": 1, "initializer_range": 0.08},
    "falcon_h1 without a norm": {"mamba_rms_norm": False, "mamba_proj_bias": True},
}
SHOWN = {
    "nemotron_h": "fc2_latent_proj.bias",
    "granitemoehybrid": "o_proj.bias",
    "falcon_h1": "in_proj.bias",
    "jet_nemotron": "v_proj.bias",
}
"""Parameters that are there because of them."""


SIX_HEADS = {
    "hidden_size": 96,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "intermediate_size": 174,
}
SIZES = {
    # 257 tokens: 86, 86 and 85.
    "three ranks": (
        {**SIX_HEADS, "vocab_size": 257, "attention_bias": True},
        Cell("llama", "tp-sp", "full", 3),
    ),
    # 65, 65, 65 and 62; one head of keys and values, which all four share.
    "one key": ({"num_key_value_heads": 1, "vocab_size": 257}, Cell("llama", "tp", "full", 4)),
    "odd and tied": (
        {"vocab_size": 257, "tie_word_embeddings": True},
        Cell("llama", "zero1-tp", "full", 4),
    ),
}


def with_config(
    family: str, changes: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cells of a family have its tiny model with these changes."""
    config = json.loads(
        (CONFIGS / harness.FAMILIES[family] / "config.json").read_text(encoding="utf-8")
    )
    (folder / "config.json").write_text(json.dumps(config | changes), encoding="utf-8")
    monkeypatch.setitem(harness.FAMILIES, family, str(folder))


@pytest.mark.parametrize("case", some_now(OPTIONS, ("nemotron_h", "jet_nemotron")))
def test_options_of_configs(case, tmp_path, monkeypatch):
    family = case.split()[0]
    with_config(family, OPTIONS[case], tmp_path, monkeypatch)
    cell = Cell(family, "tp", "full", 2)
    (reference,) = run_ranks(1, run_cell, cell.reference())
    assert any(name.endswith(SHOWN[family]) for name in reference.grads)
    assert verdict(compare(run_ranks(2, run_cell, cell), reference)) == []


@pytest.mark.parametrize("case", some_now(SIZES, ("three ranks",)))
def test_sizes_that_do_not_come_out_even(case, tmp_path, monkeypatch):
    changes, cell = SIZES[case]
    with_config(cell.family, changes, tmp_path, monkeypatch)
    (reference,) = run_ranks(1, run_cell, cell.reference())
    assert verdict(compare(run_ranks(cell.nproc, run_cell, cell), reference)) == []


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(Cell("llama", "tp-sp", "lora", 2), marks=pytest.mark.slow),
        Cell("qwen3_moe", "tp", "full", 2),
    ],
)
def test_a_block_that_is_left_whole(cell, monkeypatch):
    """Every rank computes all of a feed-forward, of a mixture with its router's own loss too."""
    (reference,) = run_ranks(1, run_cell, cell.reference())
    family = families.FAMILIES[cell.family]
    monkeypatch.setitem(families.FAMILIES, cell.family, with_whole_feed_forwards(family))
    assert verdict(compare(run_ranks(2, run_cell, cell), reference)) == []


def test_a_kernel_that_would_norm_over_a_ranks_own_features_is_not_taken(tmp_path, monkeypatch):
    with_config("granitemoehybrid", {"mamba_n_groups": 1}, tmp_path, monkeypatch)

    def kernel(
        projected: torch.Tensor, *args: object, rmsnorm_weight: torch.Tensor, **kwargs: object
    ) -> torch.Tensor:
        raise AssertionError(f"asked for a norm over {len(rmsnorm_weight)} features")

    monkeypatch.setattr(granite, "mamba2_split_conv1d_scan_combined", kernel)
    run_ranks(2, run_cell, Cell("granitemoehybrid", "tp", "lora", 2))
