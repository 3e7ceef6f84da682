"""What a config may turn on or off in the families with Mamba2, over two ranks against one process."""

import json
from pathlib import Path

import pytest
import torch
from transformers.models.granitemoehybrid import modeling_granitemoehybrid as granite

from tests.distributed import run_ranks
from tests.models.tiny import CONFIGS
from tests.parity import harness
from tests.parity.harness import Cell, compare, run_cell, verdict

BIASES = ("attention_bias", "mlp_bias", "mamba_proj_bias", "projectors_bias")
OPTIONS = {
    # Experts that work in a narrower width, whose way back has a bias too.
    "nemotron_h": {"use_bias": True, "mlp_bias": True, "moe_latent_size": 24, "n_groups": 1},
    "granitemoehybrid": {"attention_bias": True, "mamba_proj_bias": True, "mamba_n_groups": 1},
    "falcon_h1": {**dict.fromkeys(BIASES, True), "mamba_n_groups": 1},
    "falcon_h1 without a norm": {"mamba_rms_norm": False, "mamba_proj_bias": True},
}
SHOWN = {"nemotron_h": "fc2_latent_proj.bias", "granitemoehybrid": "o_proj.bias", "falcon_h1": "in_proj.bias"}
"""Parameters that are there because of them."""


@pytest.mark.parametrize("case", OPTIONS)
def test_options_of_configs(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family = case.split()[0]
    config = json.loads((CONFIGS / f"tiny-{family}" / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(config | OPTIONS[case]), encoding="utf-8")
    monkeypatch.setitem(harness.FAMILIES, family, str(tmp_path))
    cell = Cell(family, "tp", "full", 2)
    (reference,) = run_ranks(1, run_cell, cell.reference())
    assert any(name.endswith(SHOWN[family]) for name in reference.grads)
    assert verdict(compare(run_ranks(2, run_cell, cell), reference)) == []


def test_a_kernel_that_would_norm_over_a_ranks_own_features_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = json.loads((CONFIGS / "tiny-granitemoehybrid" / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(config | {"mamba_n_groups": 1}), encoding="utf-8")
    monkeypatch.setitem(harness.FAMILIES, "granitemoehybrid", str(tmp_path))

    def kernel(projected: torch.Tensor, *args: object, rmsnorm_weight: torch.Tensor, **kwargs: object) -> torch.Tensor:
        raise RuntimeError(f"asked for a norm over {len(rmsnorm_weight)} features")

    monkeypatch.setattr(granite, "mamba2_split_conv1d_scan_combined", kernel)
    cell = Cell("granitemoehybrid", "tp", "lora", 2)
    with pytest.raises(RuntimeError, match="a norm over 128 features"):
        run_ranks(1, run_cell, cell.reference())  # where it may
    run_ranks(2, run_cell, cell)
