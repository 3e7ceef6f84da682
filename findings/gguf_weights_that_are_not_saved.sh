#!/usr/bin/env bash
# transformers 5.23.0: a model that was read from a GGUF file is float32 throughout, and save_pretrained refuses it.
#
# `from_pretrained(folder, gguf_file=...)` dequantises every weight; the model trains and generates like any other. It
# keeps a `quantization_config` with `quant_method: gguf`, by which `save_pretrained` takes it for a quantised model
# that cannot be written. The same weights in a new model of the same config are saved, once that key is gone.
#
# Seen: all weights are float32, also those of a file without any quantised one; ValueError "The model is quantized with
# gguf and is not serializable"; the copy is saved and loads with equal logits.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.23.0 gguf==0.19.0 accelerate==1.15.0
cat > "$folder/run.py" <<'PYTHON'
import sys

import gguf
import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM

folder, width, wide = sys.argv[1], 64, 128
words = ["<unk>", "<s>", "</s>", *(chr(n) for n in range(97, 123))]
writer = gguf.GGUFWriter(f"{folder}/tiny.gguf", "llama")
for add, value in (
    (writer.add_context_length, 64), (writer.add_embedding_length, width), (writer.add_block_count, 1),
    (writer.add_feed_forward_length, wide), (writer.add_head_count, 4), (writer.add_head_count_kv, 4),
    (writer.add_rope_dimension_count, width // 4), (writer.add_layer_norm_rms_eps, 1e-5),
    (writer.add_vocab_size, len(words)), (writer.add_tokenizer_model, "gpt2"),
    (writer.add_token_list, words), (writer.add_token_merges, ["a b"]),
    (writer.add_bos_token_id, 1), (writer.add_eos_token_id, 2),
):
    add(value)
shapes = {"token_embd": (len(words), width), "output_norm": (width,)}
shapes |= {f"blk.0.attn_{name}": (width, width) for name in ("q", "k", "v", "output")}
shapes |= {"blk.0.ffn_gate": (wide, width), "blk.0.ffn_up": (wide, width), "blk.0.ffn_down": (width, wide)}
shapes |= {"blk.0.attn_norm": (width,), "blk.0.ffn_norm": (width,)}
drawn = np.random.default_rng(0)
for name, shape in shapes.items():
    writer.add_tensor(f"{name}.weight", drawn.standard_normal(shape).astype(np.float32))
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()

print("transformers", transformers.__version__)
model = AutoModelForCausalLM.from_pretrained(folder, gguf_file="tiny.gguf", dtype=torch.float32)
dtypes = {parameter.dtype for parameter in model.parameters()}
print("dtypes of the weights:", dtypes)
try:
    model.save_pretrained(f"{folder}/saved")
    said = "saved"
except ValueError as error:
    said = str(error).split(".")[0]
print("save_pretrained:", said)
config = model.config
del config.quantization_config
plain = type(model)(config)
plain.load_state_dict(model.state_dict())
plain.save_pretrained(f"{folder}/plain")
tokens = torch.arange(3, 12)[None]
again = AutoModelForCausalLM.from_pretrained(f"{folder}/plain")
is_equal = torch.equal(again(tokens).logits, model(tokens).logits)
print("a copy without the key is saved, and its logits are equal:", is_equal)
assert dtypes == {torch.float32} and "not serializable" in said and is_equal, "the behaviour has changed"
PYTHON
mkdir "$folder/model"
"$folder/venv/bin/python" "$folder/run.py" "$folder/model" 2> "$folder/log" || { tail -5 "$folder/log"; exit 1; }
