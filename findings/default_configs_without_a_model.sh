#!/usr/bin/env bash
# transformers 5.23.0: the default config of five causal model types cannot build the type's own model.
#
# A config class without arguments is documented to be that of a published model. Five of them lack a value that the
# constructor of their own attention, experts or rotary embedding reads, and the errors are of Python's types: they name
# neither the key nor the config. A program that walks the listed types has to expect any kind of exception.
#
# Seen: AttributeError of dbrx, TypeError of dots1, hunyuan_v1_dense and hunyuan_v1_moe, KeyError of
# cohere_compass_text.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.23.0
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - 2>"$folder/errors" <<'PYTHON'
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

EXPECTED = {
    "dbrx": "AttributeError",
    "dots1": "TypeError",
    "hunyuan_v1_dense": "TypeError",
    "hunyuan_v1_moe": "TypeError",
    "cohere_compass_text": "KeyError",
    "llama": "builds",
}


def outcome(model_type):
    config = AutoConfig.for_model(model_type)
    try:
        with torch.device("meta"):
            AutoModelForCausalLM.from_config(config)
    except Exception as error:
        print(f"{model_type}: {type(error).__name__}: {error}")
        return type(error).__name__
    return "builds"


print("transformers", transformers.__version__)
seen = {model_type: outcome(model_type) for model_type in EXPECTED}
assert seen == EXPECTED, f"the behaviour has changed: {seen}"
PYTHON
