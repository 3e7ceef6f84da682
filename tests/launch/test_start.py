"""A run imports what it uses, and of transformers what that imports by itself."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.config.presets import MODELS, STARTER
from tests.distributed import PATIENCE

OTHERS = {
    *("datasets", "pandas", "pyarrow", "matplotlib", "scipy", "sklearn", "plotly"),
    *("torchao", "bitsandbytes", "triton", "fla", "torchvision", "torchaudio"),
    *("ray", "wandb", "mlflow", "tensorboard", "trackio", "argcomplete"),
    *("torch.distributed.pipelining", "torch._inductor.compile_fx", "torch.utils.tensorboard"),
    *("shardwise.lab.benchmark", "shardwise.lab.drawing", "shardwise.lab.proof"),
    *("shardwise.lab.report", "shardwise.lab.planner.search"),
    *("shardwise.lab.planner.collectives", "shardwise.lab.planner.timeline"),
    *("shardwise.parallel.pipeline_stage", "shardwise.commands.plan"),
}
"""Modules that a run in one process does not use."""
BY_THEMSELVES = {"torch._dynamo", "torch.distributed.tensor", "sympy", "accelerate"}
"""Modules that transformers imports with its base class: a third of the seconds before step 1."""
FORWARDS = re.compile(r"transformers\.models\.(\w+)\.modeling_\w+")


def imported(code: str, *arguments: str) -> set[str]:
    """The modules that are imported after some code has run in a process of its own."""
    code += "; import sys, json; print(json.dumps([*sys.modules]))"
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE)
    return {*json.loads(done.stdout.splitlines()[-1])}


@pytest.mark.parametrize("lora", [None, {"r": 4, "alpha": 8}], ids=["full", "lora"])
def test_a_run_imports_nothing_that_it_does_not_use(lora, tmp_path: Path):
    (tmp_path / "corpus.jsonl").write_text('{"text": "three plus four is seven"}\n' * 9)
    path, tokenizer = str(MODELS / "tiny-qwen3_5"), str(STARTER)
    run = {
        "model": {"path": path, "tokenizer": tokenizer, "init": "random"},
        "data": {"train": str(tmp_path / "corpus.jsonl"), "sequence_length": 16},
        "training": {"steps": 1, "global_batch_size": 2, "output_dir": str(tmp_path / "run")},
        "measure": {"memory": False},
        "lora": lora,
    }
    code = "import sys, json, shardwise; shardwise.train(json.loads(sys.argv[1]))"
    modules = imported(code, json.dumps(run))
    assert (tmp_path / "run" / "record.json").is_file()
    assert modules & OTHERS == set()
    assert ("peft" in modules) == (lora is not None)
    families = {found[1] for name in modules if (found := FORWARDS.fullmatch(name))}
    # Jet-Nemotron, which is registered in transformers, is made of Qwen2; PEFT imports Bloom.
    assert families == {"auto", "qwen3_5", "qwen2", *(["bloom"] if lora else [])}


def test_what_transformers_imports_by_itself():
    """Where this fails, the start of a run has become faster; see BY_THEMSELVES."""
    modules = imported("from transformers import PreTrainedModel")
    assert modules >= BY_THEMSELVES
    assert "peft" not in modules
