"""A start that PEFT makes of a base's own weights (PiSSA, OLoRA): PEFT writes what is left of the
base and the factors, and a run on these two folders begins at the loss of the base."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from shardwise.config import Lora, Model, Optimizer, Parallel, RunConfig
from shardwise.models.save import save_model
from tests.integration.test_train import config, run_on
from tests.models.tiny import entries, on_meta, tiny

TARGETS = ["q_proj", "v_proj", "down_proj", "out_proj"]


def beginning(folder: Path, name: str, path: Path, section: Lora, parallel: Parallel) -> RunConfig:
    """A run of one step that changes nothing: its learning rate is lost in rounding."""
    cfg = config(folder, name, steps=1, eval_every=1)
    model = Model(str(path), tokenizer=str(folder / "tokenizer"))
    return replace(cfg, model=model, lora=section, parallel=parallel, optimizer=Optimizer(lr=1e-30))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT asks for it
@pytest.mark.parametrize("start", ["pissa", pytest.param("olora", marks=pytest.mark.slow)])
def test_a_run_begins_at_the_loss_of_the_decomposed_base(start, folder, tmp_path):
    base, left, adapter = (tmp_path / name for name in ("base", "left", "adapter"))
    model = tiny("tiny-qwen3_5")
    save_model(on_meta(model), entries(model).items(), base)
    split = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base),
        LoraConfig(r=4, lora_alpha=4, target_modules=TARGETS, init_lora_weights=start),
    )
    # What docs/guides/lora.md tells.
    split.peft_config["default"].init_lora_weights = True
    split.save_pretrained(adapter)
    split.unload().save_pretrained(left)

    def loss(name: str, path: Path, section: Lora, parallel: Parallel) -> float:
        nproc = 1 if parallel.data == "single" else 2
        run = beginning(folder, f"{start}-{name}", path, section, parallel)
        return run_on(nproc, run).eval[-1]["loss"]

    expected = loss("base", base, Lora(r=4, targets=TARGETS), Parallel())
    path = Lora(path=str(adapter))
    for layout in ("single", "fsdp2"):
        assert loss(layout, left, path, Parallel(layout)) == pytest.approx(expected, rel=1e-5)
    # The factors count: what is left of the base has another loss.
    assert abs(loss("left", left, Lora(r=4, targets=TARGETS), Parallel()) - expected) > 1e-3
