#!/usr/bin/env bash
# transformers 5.23.0: two classes give the window of their attention to the mask alone.
#
# Attention kernels such as flash's get no mask where no row is padded: a class hands them its window as the argument
# `sliding_window`. Qwen2 and Mixtral do. Qwen2-MoE and PhiMoE do not, although their masks have the window, so a
# kernel lets every token see all tokens before. The attention registered here takes what such kernels take.
#
# Seen: with windows of 8 on rows of 32 tokens the logits of qwen2 and mixtral equal those of eager attention up to
# rounding; those of qwen2_moe and phimoe are off by more than 1e-3, and equal a model's without a window.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.23.0
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - <<'PYTHON'
import torch
import transformers
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModelForCausalLM
from transformers.masking_utils import flash_attention_mask

transformers.logging.set_verbosity_error()


def kernel(module, q, k, v, mask, scaling=None, sliding_window=None, **others):
    assert mask is None
    places = torch.arange(q.shape[2])
    distance = places[:, None] - places
    sees = (distance >= 0) & (distance < (sliding_window or q.shape[2]))
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=sees, scale=scaling, enable_gqa=True
    )
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register("kernel", kernel)
AttentionMaskInterface.register("kernel", flash_attention_mask)
SIZES = {
    **{"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 64, "vocab_size": 64},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 4, "num_local_experts": 4},
    **{"moe_intermediate_size": 16, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 16},
    **{"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": None, "router_jitter_noise": 0.0},
}


def logits(name, attention, window):
    keys = {"sliding_window": window, **SIZES}
    if name.startswith("qwen2"):
        keys |= {"use_sliding_window": window is not None, "max_window_layers": 2}
        kind = "full_attention" if window is None else "sliding_attention"
        keys["layer_types"] = [kind] * 2
    config = AutoConfig.for_model(name, **keys)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    with torch.no_grad():
        return model(input_ids=torch.arange(32)[None], use_cache=False).logits


print("transformers", transformers.__version__)
off = {}
for name in ("qwen2", "mixtral", "qwen2_moe", "phimoe"):
    eager, by_kernel, whole = logits(name, "eager", 8), logits(name, "kernel", 8), logits(name, "eager", None)
    off[name] = (eager - by_kernel).abs().max().item(), (whole - by_kernel).abs().max().item()
    print(f"{name}: off by {off[name][0]:.1e} from eager attention, by {off[name][1]:.1e} from all tokens before")
assert all(off[name][0] < 1e-5 for name in ("qwen2", "mixtral")), "the behaviour has changed"
for name in ("qwen2_moe", "phimoe"):
    assert off[name][0] > 1e-3 and off[name][1] < 1e-5, "the behaviour has changed"
PYTHON
