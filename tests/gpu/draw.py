"""Makes what is read by what is timed, in a process of its own: `python -m tests.gpu.draw FOLDER
DEVICE [WORKLOAD]`.

Into FOLDER go the model, drawn at random on the device (safetensors in bfloat16), and `facts.json`:
where this runs, what its device can do at best, and what a step costs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from shardwise.metrics.flops import CONVENTION, model_flops_per_token
from shardwise.metrics.hardware import environment, measured_flops, peak_flops
from shardwise.models import load, lora
from shardwise.models.counts import count_model
from shardwise.models.families import spec_of
from tests.gpu.sides import DIFFERENCES, run_config
from tests.gpu.workload import Workload, workload_of


def main(folder: str, device_type: str, name: str = "qwen3_5") -> None:
    """Draw, save, and write the facts."""
    device = torch.device("cuda", 0) if device_type == "cuda" else torch.device("cpu")
    workload = workload_of(name, device_type)
    Path(folder, "config.json").write_text(json.dumps(workload.model), encoding="utf-8")
    torch.manual_seed(workload.seed)
    with device:
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(folder), dtype=torch.bfloat16
        )
    model.save_pretrained(folder)
    del model
    peaks = {
        "published": peak_flops(device, torch.bfloat16),
        "measured": measured_flops(device, torch.bfloat16, 2.0),
    }
    facts = {
        "environment": where(),
        # Both are there for every device: of one without a published peak, the first is measured
        # too and says so.
        "peaks": {
            name: {"flops_per_second": p.flops_per_second, "source": p.source}
            for name, p in peaks.items()
        },
        "differences": DIFFERENCES,
        "flops": {
            "model_per_token": flops_per_token(workload, folder, device),
            "convention": CONVENTION,
        },
    }
    Path(folder, "facts.json").write_text(json.dumps(facts), encoding="utf-8")


def flops_per_token(workload: Workload, folder: str, device: torch.device) -> float:
    """Model FLOPs of a LoRA step: the same for both sides, with and without checkpointing, whatever
    the kernels.
    """
    cfg = run_config(workload, folder, "none", device)
    hf = load.build_meta(cfg.model, load.read_config(cfg.model))
    spec = spec_of(hf.config, hf)
    assert cfg.lora is not None
    lora.inject(hf, cfg.lora, spec)
    return model_flops_per_token(count_model(hf, spec), workload.sequence_length)


def where() -> dict[str, Any]:
    """`environment()` with what else a figure from a GPU needs; the commit may come from
    SHARDWISE_COMMIT.
    """
    found = environment()
    found["commit"] = found["commit"] or os.environ.get("SHARDWISE_COMMIT")
    for name in ("accelerate", "triton", "fla-core", "causal-conv1d"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        found["driver"] = subprocess.run(
            command, capture_output=True, text=True, check=True
        ).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        found["driver"] = None
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
