#!/usr/bin/env bash
# TRL 1.16.0: KTO's estimate of the divergence is of answers to the same prompt where a file has both of them in turn.
#
# KTO compares each answer with how much more likely answers to *other* prompts have become. KTOTrainer pairs each
# prompt with the answer of the row before it, within groups of `per_device_train_batch_size` rows in the order of the
# file, and refuses another order. Published files often have a good and a bad answer to one prompt in rows that follow
# each other. With batches of two rows every pairing is then of one prompt and its own other answer; with larger ones
# half of them. Nothing says so.
#
# Seen: with batches of 2 rows 8 of 8 pairings are of the row's own prompt; with batches of 4 rows 4 of 8; with the
# same rows shuffled once, so that no two neighbours share a prompt, 0 of 8.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check trl==1.16.0 transformers==5.23.0
cat > "$folder/run.py" <<'PYTHON'
import sys

import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import KTOConfig, KTOTrainer

WORDS = ["<pad>", "</s>", *(f"w{n}" for n in range(40))]


def tokenizer():
    made = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", pad_token="<pad>")


def own_pairings(rows, batch_size):
    """Count the rows whose prompt is paired with an answer that a row of the same prompt has."""
    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, pad_token_id=0, eos_token_id=1,
    )
    arguments = KTOConfig(
        output_dir=sys.argv[1], per_device_train_batch_size=batch_size, use_cpu=True, report_to=[]
    )
    trainer = KTOTrainer(
        model=LlamaForCausalLM(config), ref_model=LlamaForCausalLM(config), args=arguments,
        train_dataset=Dataset.from_list(rows), processing_class=tokenizer(),
    )
    found = list(trainer.train_dataset)
    answers = {}
    for row in found:
        answers.setdefault(tuple(row["prompt_ids"]), set()).add(tuple(row["completion_ids"]))
    return sum(tuple(row["KL_completion_ids"]) in answers[tuple(row["prompt_ids"])] for row in found)


in_turn = [
    {"prompt": f"w{n} ", "completion": f"w{10 + 2 * n + bad}", "label": not bad}
    for n in range(4)
    for bad in (0, 1)
]
apart = [in_turn[n] for n in (0, 2, 4, 6, 1, 3, 5, 7)]
print("trl", trl.__version__)
found = [own_pairings(in_turn, 2), own_pairings(in_turn, 4), own_pairings(apart, 4)]
print("pairings of the own prompt: batches of 2", found[0], "of 4", found[1], "apart", found[2])
assert found == [8, 4, 0], "the behaviour has changed"
PYTHON
"$folder/venv/bin/python" "$folder/run.py" "$folder/out" 2> "$folder/log" || { tail -5 "$folder/log"; exit 1; }
