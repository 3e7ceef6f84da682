"""A corpus and a tokenizer for the demo and the studies, made of what Python itself ships: below
runs/corpus.
"""

from __future__ import annotations

import json
import shutil
import sysconfig
from pathlib import Path
from pydoc_data.topics import topics

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = Path("runs/corpus")
NUM_BYTES = 3_000_000
VOCAB_SIZE = 2048  # as configs/models/demo-hybrid has it


def main() -> None:
    """Write python/ (Python's own source), reference.jsonl (its language reference) and tokenizer/,
    anew.
    """
    shutil.rmtree(CORPUS, ignore_errors=True)
    write_texts()
    train_tokenizer()


def write_texts() -> None:
    """Source files until NUM_BYTES are reached; the reference has a document a topic."""
    folder = CORPUS / "python"
    folder.mkdir(parents=True)
    size = 0
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text = file.read_text(encoding="utf-8", errors="ignore")
        if size + len(text) > NUM_BYTES:
            break
        (folder / file.name).write_text(text, encoding="utf-8")
        size += len(text)
    lines = (json.dumps({"text": text.strip()}) for _, text in sorted(topics.items()))
    (CORPUS / "reference.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def train_tokenizer() -> None:
    """A byte-level BPE tokenizer of the source files."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<|end|>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train(sorted(map(str, (CORPUS / "python").iterdir())), trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>").save_pretrained(
        CORPUS / "tokenizer"
    )


if __name__ == "__main__":
    main()
