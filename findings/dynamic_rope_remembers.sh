#!/usr/bin/env bash
# transformers 5.23.0: with rope_type "dynamic" the logits of a text depend on what the model has seen before.
#
# The frequencies grow with the longest row so far and stay there until a row comes that is within the original
# length. So one text of 100 tokens (original length 64) has other logits before a row of 400 tokens than after it,
# in eval mode and without a cache of keys. A short row in between puts them back. Losses of a validation set depend
# on the order of its batches.
#
# Seen: the logits of the same text differ by 5e-4 after the longer row, and by 0 after a short one.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.23.0
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - <<'PYTHON'
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    max_position_embeddings=64,
    rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
)
model = LlamaForCausalLM(config).eval()
text, longer, short = (torch.randint(64, (1, length)) for length in (100, 400, 40))


@torch.no_grad()
def logits(ids):
    return model(ids, use_cache=False).logits


print("transformers", transformers.__version__)
first = logits(text)
logits(longer)
after_longer = (logits(text) - first).abs().max().item()
logits(short)
after_short = (logits(text) - first).abs().max().item()
print(f"the same text: {after_longer:.2g} apart after a longer row, {after_short:.2g} after a short one")
assert after_longer > 1e-5 and after_short == 0, "the behaviour has changed"
PYTHON
