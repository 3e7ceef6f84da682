"""The chat template of a preset's tokenizer rehearses what published ones write."""

from __future__ import annotations

import json

from transformers import AutoTokenizer

from shardwise.config.presets import STARTER
from tests.command import run_command

CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CHAT = [
    {"role": "user", "content": "Is it warm in Rome?"},
    {"role": "assistant", "content": "", "reasoning_content": "I ask.", "tool_calls": [CALL]},
    {"role": "tool", "content": "31 degrees"},
    {"role": "assistant", "content": "Yes."},
]


def test_calls_thoughts_and_tools_are_written():
    tokenizer = AutoTokenizer.from_pretrained(STARTER)
    assert tokenizer.apply_chat_template(CHAT, tools=[TOOL], tokenize=False) == (
        f"tools: {json.dumps([TOOL])}<|end|>user: Is it warm in Rome?<|end|>"
        f"assistant: <think>I ask.</think><tool_call>{json.dumps(CALL['function'])}</tool_call>"
        "<|end|>tool: 31 degrees<|end|>assistant: Yes.<|end|>"
    )
    plain = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert plain == "user: Hi<|end|>assistant: "


def test_a_tiny_model_trains_on_calls(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [json.dumps({"messages": CHAT, "tools": [TOOL]})] * 16
    (tmp_path / "chats.jsonl").write_text("\n".join(rows))
    assert run_command(["init", "--data", "chats.jsonl"]).returncode == 0
    options = ("--data.tools=tools", "--data.sequence_length=512", "--data.validation=0")
    steps = ("--training.steps=1", "--training.eval_every=0", "--training.global_batch_size=4")
    done = run_command(["train", "run.yaml", *options, *steps])
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "runs" / "run" / "record.json").read_text())
    assert (record["status"], record["data"]["train"].get("skipped_by_reason", {})) == ("ok", {})
