#!/usr/bin/env bash
# peft 0.21.2: merging LoRA into a model with `layer_replication` gives another model than the one that was tuned.
#
# `layer_replication` repeats layers that share their base weights and have adapters of their own. The merge adds each
# adapter to its base weight, so a shared weight gets the adapters of all its copies, and each copy computes with the
# sum. Nothing is said. The unmerged adapter is right.
#
# Seen: layers 0, 1, 1, 2; the logits of the merged model are 0.2 away from the tuned model's, which reach 0.32.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.23.0 peft==0.21.2
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - <<'PYTHON'
import warnings

import peft
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=2,
    num_key_value_heads=2,
)
lora = LoraConfig(
    r=4,
    target_modules=["q_proj", "v_proj"],
    layer_replication=[(0, 2), (1, 3)],
    init_lora_weights=False,  # random factors, as after training
)
tuned = get_peft_model(LlamaForCausalLM(config).eval(), lora).eval()
text = torch.arange(20)[None]
with torch.no_grad(), warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    before = tuned(text, use_cache=False).logits
    merged = tuned.merge_and_unload()
    after = merged(text, use_cache=False).logits
layers = merged.model.layers
shared = layers[1].self_attn.q_proj.weight is layers[2].self_attn.q_proj.weight
apart = (after - before).abs().max().item()
print("peft", peft.__version__)
print(f"{len(layers)} layers, the middle two share weights: {shared}")
print(f"logits {apart:.2g} apart after the merge; the largest is {before.abs().max().item():.2g}")
about_it = [str(w.message) for w in said if "replicat" in str(w.message) or "merge" in str(w.message)]
print("warnings about it:", about_it)
assert shared and apart > 0.05 and not about_it, "the behaviour has changed"
PYTHON
