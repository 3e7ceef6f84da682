"""Messages of every form become what transformers' own rendering of the row has."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from shardwise.config import Data
from shardwise.data.corpus import open_corpus
from shardwise.data.formats import Encoder
from shardwise.data.record import BadDocument
from shardwise.data.state import SlotState
from tests.data.templates import CHATML
from tests.data.test_corpus import datasets_cache  # noqa: F401
from tests.data.test_formats import HEADER, chat_tokenizer, marked

TOOLS_FIRST = "{% if tools %}{{ 'Tools: ' + (tools | tojson) + '\n' }}{% endif %}"
CALLS = (
    TOOLS_FIRST + "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} "
    "{% if c.function.arguments is string %}{{ c.function.arguments }}"
    "{% else %}{{ c.function.arguments | tojson }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
AS_JSON = re.sub("{% if c.func.*?endif %}", "{{ c.function | tojson }}", CALLS)
OLDER = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% if m.function_call %}<call>{{ m.function_call.name }} {{ m.function_call.arguments }}"
    "{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QUESTION = {"role": "user", "content": "Where?"}
ANSWER = {"role": "assistant", "content": "Here."}

keys = st.text(st.sampled_from("ab é\n\"'\\<{"), min_size=1, max_size=4)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.sampled_from([0.5, 1e30]) | keys,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(keys, inner, max_size=2),
    max_leaves=4,
)
objects = st.dictionaries(keys, values, max_size=3)


def call(arguments: Any, **fields: Any) -> dict[str, Any]:
    function = {"name": "find", "arguments": arguments}
    calls = [{"type": "function", "function": function}]
    return {"role": "assistant", "content": "", "tool_calls": calls, **fields}


def encoded(
    tokenizer: PreTrainedTokenizerFast, template: str, path: Path, **data: Any
) -> tuple[str, list[str]]:
    """The text of the first row of a file, and its targets."""
    chat = chat_tokenizer(tokenizer, template)
    run = Data(train=str(path), format="chat", packing="none", **data)
    encoder = Encoder.of(chat, run)
    (document,) = encoder.documents(open_corpus(str(path), run)[0], SlotState())
    runs, inside = [], False
    for token, target in zip(document.tokens, document.targets):
        if target and not inside:
            runs.append([])
        if target:
            runs[-1].append(token)
        inside = target
    return chat.decode(document.tokens), [chat.decode(run) for run in runs]


def rendered(
    tokenizer: PreTrainedTokenizerFast, template: str, messages: Any, **fields: Any
) -> str:
    """What transformers writes."""
    chat = chat_tokenizer(tokenizer, template)
    return str(chat.apply_chat_template(messages, tokenize=False, **fields))


def jsonl(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@given(objects, objects, st.sampled_from([CALLS, AS_JSON]), st.booleans())
@settings(deadline=None, max_examples=60, derandomize=True)
def test_arguments_and_schemas_of_jsonl_survive(
    tokenizer: PreTrainedTokenizerFast,
    tmp_path_factory: pytest.TempPathFactory,
    arguments: dict[str, Any],
    schema: dict[str, Any],
    template: str,
    as_text: bool,
) -> None:
    # A null that the author wrote is a value. Text in JSON is written as it stands, where the
    # template takes text.
    written = json.dumps(arguments, separators=(",", ":")) if as_text else arguments
    row = {
        "messages": [QUESTION, call(written)],
        "tools": [{"type": "function", "function": {"name": "find", "parameters": schema}}],
    }
    path = jsonl(tmp_path_factory.mktemp("rows") / "a.jsonl", row)
    text, targets = encoded(tokenizer, template, path)
    # This template makes a string in JSON of a text: it wants the object.
    wanted = call(arguments if template is AS_JSON else written)
    right = rendered(tokenizer, template, [QUESTION, wanted], tools=row["tools"])
    assert text == right
    assert targets == [right[right.rindex(HEADER) + len(HEADER) : -1]]


def parquet(path: Path, rows: list[Any], schema: pa.Schema | None = None) -> Path:
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path)
    return path


def test_only_the_nulls_that_a_table_added_are_left_out(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    # Arrow gives each struct the keys of all rows. In text, a null is the author's.
    rows = [
        {"messages": [QUESTION, call({"city": "Rome"})], "tools": '[{"default": null}]'},
        {"messages": [QUESTION, call({"unit": "C"})], "tools": None},
    ]
    path = parquet(tmp_path / "a.parquet", rows)
    first = open_corpus(str(path), Data(train="unused", format="chat"))[0]
    assert first["messages"][1]["tool_calls"][0]["function"]["arguments"] == {"city": "Rome"}
    text, _ = encoded(tokenizer, CALLS, path)
    right = rendered(tokenizer, CALLS, rows[0]["messages"], tools=[{"default": None}])
    assert text == right


@pytest.mark.parametrize("content", ["", None, "I look."])
@pytest.mark.parametrize("template", [CALLS, OLDER])
def test_an_older_call_is_written(tokenizer, tmp_path, content, template):
    function = {"name": "find", "arguments": '{"city":"Rome"}'}
    older = {"role": "assistant", "content": content, "function_call": function}
    newer = call(function["arguments"], content=content)
    path = jsonl(tmp_path / "a.jsonl", {"messages": [QUESTION, older]})
    text, targets = encoded(tokenizer, template, path)
    right = rendered(tokenizer, template, [QUESTION, older if template is OLDER else newer])
    assert text == right
    assert targets == [f'{content or ""}<call>find {{"city":"Rome"}}<|im_end|>']


@pytest.mark.parametrize(
    ("template", "messages", "part"),
    [
        (CHATML, [QUESTION, {**ANSWER, "function_call": {"name": "find"}}], "leaves out"),
        (CALLS, [QUESTION, {**ANSWER, "function_call": "find"}], "no function with a name"),
        (CALLS, [QUESTION, call({}, function_call={"name": "other"})], "another 'function_call'"),
        (CALLS, [QUESTION, {**ANSWER, "content": "", "refusal": "I can't."}], "'refusal' of"),
        (CALLS, [{**QUESTION, "mask": True}, ANSWER], "'mask' of message 1 .* train, training, "),
        (CALLS, [QUESTION, {**ANSWER, "learn": False}], r"'learn' .*\{unused: learn\}"),
        (CALLS, [QUESTION, {**ANSWER, "loss_weight": 0.5}], "'loss_weight' of message 2"),
        (CALLS, [QUESTION, {**ANSWER, "loss": "no"}], "'loss' of message 2 is not true or false"),
        (CALLS, [QUESTION, {**ANSWER, "supervised": 0}], "'supervised' of message 2 is no flag"),
        (CALLS, [QUESTION, {**ANSWER, "compute_loss": 0}], "'compute_loss' of message 2"),
        (CALLS, [QUESTION, {**ANSWER, "trained": "no"}], "'trained' of message 2 is no flag"),
        (CALLS, [QUESTION, {**ANSWER, "isTrainable": "no"}], "'isTrainable' of message 2"),
        (CALLS, [QUESTION, {**ANSWER, "weights": [0]}], "'weights' of message 2 is no flag"),
        (CALLS, [QUESTION, {**ANSWER, "content": [{"text": "a", "train": False}, "b"]}], "a part"),
        (CALLS, [QUESTION, {**ANSWER, "content": ["b", {"text": "a", "weight": 0}]}], "a part"),
        (
            CALLS,
            [QUESTION, {**ANSWER, "content": [{"text": "a", "loss_mask": 0}]}],
            "message 2 has",
        ),
    ],
)
def test_what_would_be_lost_of_a_message_is_refused(tokenizer, template, messages, part):
    with pytest.raises(BadDocument, match=part):
        marked(chat_tokenizer(tokenizer, template), {"messages": messages})


@pytest.mark.parametrize("flag", [{"train": False}, {"training": False}, {"loss": False}])
def test_a_turn_that_is_marked_as_no_target(tokenizer, flag):
    messages = [QUESTION, {**ANSWER, **flag}, QUESTION, {**ANSWER, "content": "There."}]
    text = marked(chat_tokenizer(tokenizer, CHATML), {"messages": messages})
    assert re.findall("«([^»]*)»", text) == ["There.<|im_end|>"]


def test_a_flag_that_the_template_reads_or_that_is_left_out_on_purpose(tokenizer):
    record = {"messages": [QUESTION, {**ANSWER, "partial": True}]}
    reading = CHATML.replace(
        "{{ message.content }}", "{{ '+' if message.partial }}{{ message.content }}"
    )
    assert "«+Here.<|im_end|>»" in marked(chat_tokenizer(tokenizer, reading), record)
    unused = {"unused": "partial"}
    assert "«Here.<|im_end|>»" in marked(chat_tokenizer(tokenizer, CHATML), record, fields=unused)


def test_fields_of_a_message_that_say_nothing_of_targets(tokenizer):
    part = {"type": "text", "text": "Here.", "train": True, "cache_control": {"type": "short"}}
    more = {"name": "Ada", "id": 7, "timestamp": 1, "constraint": "none", "glossary": ["a"]}
    record = {"messages": [{**QUESTION, **more}, {**ANSWER, **more, "content": [part]}]}
    text = marked(chat_tokenizer(tokenizer, CHATML), record)
    right = rendered(tokenizer, CHATML, [QUESTION, ANSWER])
    assert text == right.replace("Here.<|im_end|>", "«Here.<|im_end|>»")


def test_lists_and_objects_may_be_text_in_json(tokenizer, tmp_path):
    calling = call({"city": None})
    messages = [QUESTION, calling]
    right = rendered(tokenizer, CALLS, messages)
    as_text = {**calling, "tool_calls": json.dumps(calling["tool_calls"])}
    forms = [json.dumps(messages), list(map(json.dumps, messages)), [QUESTION, as_text]]
    for form in forms:
        path = jsonl(tmp_path / "a.jsonl", {"messages": form})
        assert encoded(tokenizer, CALLS, path)[0] == right


def test_prompt_and_completion_may_be_messages(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    # In TRL's form for dialogues: only what the completion has is learnt.
    prompt = [QUESTION, {**ANSWER, "content": "There."}, QUESTION]
    row = {"prompt": prompt, "completion": [ANSWER]}
    path = jsonl(tmp_path / "a.jsonl", row)
    fields = {"messages": ["prompt", "completion"]}
    text, targets = encoded(tokenizer, CHATML, path, fields=fields)
    assert text == rendered(tokenizer, CHATML, [*prompt, ANSWER])
    assert targets == ["Here.<|im_end|>"]
    with pytest.raises(BadDocument, match=r"list of messages; .*chat .*messages: \[prompt"):
        marked(tokenizer, row, "completion")
    broken = {**row, "completion": [{"role": "assistant"}]}
    with pytest.raises(BadDocument, match="message 4 has no field 'content'"):
        marked(chat_tokenizer(tokenizer, CHATML), broken, fields=fields)
