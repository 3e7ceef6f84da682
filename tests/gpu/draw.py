"""Make what the timed processes read: `python -m tests.gpu.draw FOLDER DEVICE WORKLOAD`.

Into FOLDER go the model, drawn at random on the device (safetensors in bfloat16), and `facts.json`:
the machine, what its device can do at best, and what a step costs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from tools.paired import write_json
from transformers import AutoConfig, AutoModelForCausalLM

from shardwise.metrics.flops import CONVENTION, model_flops_per_token
from shardwise.metrics.hardware import environment, measured_flops, peak_flops, version
from shardwise.models import load
from shardwise.models.adapters import lora
from shardwise.models.counts import count_model
from shardwise.models.families import spec_of
from tests.gpu.sides import DIFFERENCES, run_config
from tests.gpu.workload import Workload, workload_of


def main(folder: str, device_type: str, name: str) -> None:
    """Draw, save, and write the facts."""
    device = torch.device("cuda", 0) if device_type == "cuda" else torch.device("cpu")
    workload = workload_of(name, device_type)
    Path(folder, "config.json").write_text(json.dumps(workload.model), encoding="utf-8")
    torch.manual_seed(workload.seed)
    config = AutoConfig.from_pretrained(folder)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    del model
    # Both are there for every device; without a published peak, the first one is measured too.
    peaks = {
        "published": peak_flops(device, torch.bfloat16),
        "measured": measured_flops(device, torch.bfloat16, 2.0),
    }
    flops = {"model_per_token": flops_per_token(workload, folder, device), "convention": CONVENTION}
    facts = {
        "environment": machine(),
        "peaks": {source: vars(peak) for source, peak in peaks.items()},
        "differences": DIFFERENCES,
        "flops": flops,
    }
    write_json(Path(folder, "facts.json"), facts)


def flops_per_token(workload: Workload, folder: str, device: torch.device) -> float:
    """Return the model FLOPs of a LoRA step per token.

    They are the same for all sides and kernels, with and without checkpointing.
    """
    cfg = run_config(workload, folder, "none", device)
    hf = load.build_meta(cfg.model, load.read_config(cfg.model))
    spec = spec_of(hf.config, hf)
    assert cfg.lora is not None
    lora.inject(hf, cfg.lora, spec)
    return model_flops_per_token(count_model(hf, spec), workload.sequence_length)


def machine() -> dict[str, Any]:
    """Return `environment()` and what else a figure from a GPU needs.

    The commit may come from SHARDWISE_COMMIT.
    """
    facts = environment()
    facts["commit"] = facts["commit"] or os.environ.get("SHARDWISE_COMMIT")
    for name in ("accelerate", "triton", "causal-conv1d"):
        facts[name] = version(name)
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        facts["driver"] = lines[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        facts["driver"] = None
    return facts


if __name__ == "__main__":
    main(*sys.argv[1:])
