#!/usr/bin/env bash
# torch 2.13.0: on a CPU the FLOP counter counts nothing for fused attention.
#
# `FlopCounterMode` has formulas for the fused kernels of GPUs. `scaled_dot_product_attention` on a CPU runs
# `_scaled_dot_product_flash_attention_for_cpu`, for which it has none, and it says nothing: the total is 0, forward and
# backward. With the kernel `MATH` the same call has 4 T^2 H FLOPs a head. A share of a peak that was checked on a CPU,
# or a model's FLOPs counted there, lacks its attention.
#
# Seen, 4 heads, 256 tokens, head size 64: fused 0 and 0; MATH 67,108,864 forward, 201,326,592 with the backward.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat > "$folder/run.py" <<'PYTHON'
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode

q = torch.randn(1, 4, 256, 64, requires_grad=True)
seen = {}
for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH):
    with sdpa_kernel(backend), FlopCounterMode(display=False) as counter:
        out = scaled_dot_product_attention(q, q, q, is_causal=True)
        forward = counter.get_total_flops()
        out.sum().backward()
    seen[backend.name] = (forward, counter.get_total_flops())
once = 4 * 4 * 256 * 256 * 64
print("torch", torch.__version__, seen, "of one forward by hand:", once)
assert seen == {"FLASH_ATTENTION": (0, 0), "MATH": (once, 3 * once)}, "the behaviour has changed"
PYTHON
"$folder/venv/bin/python" "$folder/run.py"
