"""Try every chat template of a folder, and print the table of docs/guides/data.md.

TRL's package has copies of published templates:

    pip download --no-deps trl && unzip trl-*.whl
    python tools/chat_templates.py trl/chat_templates
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from shardwise.config import Data, UserError
from shardwise.data.chat_format import ChatFormat
from shardwise.data.record import BadDocument

SYSTEM = {"role": "system", "content": "Sysword."}
QUESTIONS = [{"role": "user", "content": f"Userword {i}?"} for i in range(3)]
ANSWERS = [{"role": "assistant", "content": f"Answer {i}."} for i in range(3)]
THOUGHTS = [{**answer, "reasoning_content": f"Thought {i}."} for i, answer in enumerate(ANSWERS)]
ARGUMENTS = {"place": "Callword", "exact": True}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {
            "type": "function",
            "id": "call00000",
            "function": {"name": "look", "arguments": ARGUMENTS},
        }
    ],
}
RESULT = {"role": "tool", "content": "Toolword.", "tool_call_id": "call00000", "name": "look"}
PLACE = {"type": "string", "description": "Where."}
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks up.",
        "parameters": {"type": "object", "properties": {"place": PLACE}, "required": ["place"]},
    },
}
CASES: dict[str, list[dict[str, Any]]] = {
    "one turn": [QUESTIONS[0], ANSWERS[0]],
    "three turns": [m for pair in zip(QUESTIONS, ANSWERS) for m in pair],
    "system": [SYSTEM, QUESTIONS[0], ANSWERS[0], QUESTIONS[1], ANSWERS[1]],
    "thinking": [QUESTIONS[0], THOUGHTS[0], QUESTIONS[1], THOUGHTS[1]],
    "tools": [QUESTIONS[0], CALL, RESULT, ANSWERS[0], QUESTIONS[1], ANSWERS[1]],
}
OTHERS = re.compile("Sysword|Userword|Toolword|Where|Looks")
"""Words of anybody but the assistant."""


def main() -> int:
    rows, wrong = [], 0
    for file in sorted(Path(sys.argv[1]).glob("*.jinja")):
        if file.stem.endswith("_training"):
            continue  # TRL's own changes of published templates
        results = {name: outcome(file, name, messages) for name, messages in CASES.items()}
        wrong += sum(result.startswith("WRONG") for result in results.values())
        rows.append([file.stem, *results.values()])
    print(f"| template | {' | '.join(CASES)} |\n|{'---|' * (len(CASES) + 1)}")
    for row in rows:
        print(f"| {' | '.join(row)} |")
    return 1 if wrong else 0


def outcome(file: Path, case: str, messages: list[dict[str, Any]]) -> str:
    """Return the end mark of the last turn if the targets are right, or why there are none."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = file.read_text()
    keys = {"tools": "tools"} if case == "tools" and "tools" in tokenizer.chat_template else {}
    record = {"messages": messages, "tools": json.dumps([TOOL])}
    try:
        chat = ChatFormat.of(tokenizer, Data(train="unused", format="chat", **keys))
        ((tokens, targets),) = chat.encode(record)
    except BadDocument as error:
        return "leaves calls out" if "leaves out" in str(error) else "refuses it"
    except UserError as error:
        return f"WRONG {error}"
    turns = runs(tokenizer, tokens, targets)
    if problem := mistake(turns, messages):
        return f"WRONG {problem}: {turns}"
    end = turns[-1].rpartition(".")[2]
    return f"`{end.strip()}`" if end.strip() else "no end mark"


def runs(tokenizer: Any, tokens: list[int], targets: list[bool]) -> list[str]:
    """Return the text of each run of targets."""
    marked = "".join(
        tokenizer.decode([token]) if target else "\0" for token, target in zip(tokens, targets)
    )
    return [run for run in marked.split("\0") if run]


def mistake(turns: list[str], messages: list[dict[str, Any]]) -> str:
    """Return what is wrong with the targets of a dialogue, or ""."""
    spoken = [message for message in messages if message["role"] == "assistant"]
    if len(turns) != len(spoken):
        return f"{len(turns)} turns instead of {len(spoken)}"
    for turn, message in zip(turns, spoken):
        word = message["content"] or "Callword"
        if word not in turn:
            return f"{word!r} is no target"
        if OTHERS.search(turn):
            return "another's words are targets"
        if re.match(r"\W*(assistant|model|start_header_id)", turn, re.IGNORECASE):
            return "the header is a target"
    return ""


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer each of whose tokens is one character of the texts tried here."""
    characters = {chr(i) for i in range(32, 127)} | set("\n\t▁｜")
    vocab = {token: i for i, token in enumerate(["<pad>", "</s>", "<s>", *sorted(characters)])}
    backend = Tokenizer(models.WordLevel(vocab=vocab, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )


if __name__ == "__main__":
    sys.exit(main())
