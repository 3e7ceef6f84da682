import datetime
import json
import re
import resource
import signal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from shardwise.base.batches import IGNORED
from shardwise.config import Data, Model, UserError
from shardwise.data import bounds
from shardwise.data.chat_format import ChatFormat, known_roles
from shardwise.data.formats import Encoder
from shardwise.data.packing import Document, to_batch
from shardwise.data.record import BadDocument
from shardwise.data.state import SlotState
from shardwise.data.tokenizer import load_tokenizer, tokens_of
from tests.data.templates import CHATML, HEADERS, INST, LAST_TURN_DIFFERS, MARKED

IMAGE = {"type": "text", "text": "What is it?", "image_url": {"url": "x"}}


def chat_tokenizer(
    tokenizer: PreTrainedTokenizerFast, template: str | None
) -> PreTrainedTokenizerFast:
    special = {"bos_token": "<pad>", "eos_token": "<eos>", "pad_token": "<pad>"}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer,
        chat_template=template,
        clean_up_tokenization_spaces=False,
        **special,
    )


def marked(
    tokenizer: PreTrainedTokenizerFast,
    record: dict[str, Any],
    data_format: str = "chat",
    packing: str = "none",
    **keys: Any,
) -> str:
    """The document as text, with « and » around the runs of tokens that are targets."""
    (text,) = all_marked(tokenizer, record, data_format, packing, **keys)
    return text


def all_marked(
    tokenizer: PreTrainedTokenizerFast,
    record: dict[str, Any],
    data_format: str = "chat",
    packing: str = "none",
    **keys: Any,
) -> list[str]:
    """All documents of a record, as `marked` writes them."""
    data = Data(train="unused", format=data_format, packing=packing, **keys)
    documents = Encoder.of(tokenizer, data).documents(record, SlotState())
    return [mark_targets(tokenizer, document) for document in documents]


def mark_targets(tokenizer: PreTrainedTokenizerFast, document: Document) -> str:
    text, inside = "", False
    for token, target in zip(document.tokens, document.targets):
        if target != inside:
            text += "«" if target else "»"
            inside = target
        text += tokenizer.decode([token])
    return text + ("»" if inside else "")


def dialogue(*turns: str, system: str | None = None) -> dict[str, Any]:
    """Turns of user and assistant, one after the other."""
    messages = [{"role": "system", "content": system}] if system is not None else []
    return {
        "messages": messages
        + [{"role": ("user", "assistant")[i % 2], "content": t} for i, t in enumerate(turns)]
    }


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_chatml(tokenizer: PreTrainedTokenizerFast, template: str) -> None:
    # By hand: after each header of the assistant, down to the end of its turn; not the line feed
    # after it.
    expected = (
        "<|im_start|>system\nbe brief<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n«hello!<|im_end|>»\n"
        "<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n«  no\n<|im_end|>»\n"
    )
    record = dialogue("hi", "hello!", "and?", "  no\n", system="be brief")
    assert marked(chat_tokenizer(tokenizer, template), record) == expected


def test_llama_3_style_headers(tokenizer):
    def header(role: str) -> str:
        return f"<|start_header_id|>{role}<|end_header_id|>\n\n"

    expected = (
        f"<pad>{header('system')}be brief<|eot_id|>{header('user')}hi<|eot_id|>"
        f"{header('assistant')}«hello!<|eot_id|>»"
        # the template trims the turn
        f"{header('user')}and?<|eot_id|>{header('assistant')}«no<|eot_id|>»"
    )
    record = dialogue("hi", "hello!", "and?", " no ", system="be brief")
    assert marked(chat_tokenizer(tokenizer, HEADERS), record) == expected


def test_inst_style(tokenizer: PreTrainedTokenizerFast) -> None:
    # The template writes a space before the assistant's words: it is added for the turn, so the
    # model must say it.
    expected = "<pad>[INST] hi [/INST]« hello!<eos>»[INST] and? [/INST]« no<eos>»"
    tokenizer = chat_tokenizer(tokenizer, INST)
    assert marked(tokenizer, dialogue("hi", "hello!", "and?", "no")) == expected
    assert (
        marked(tokenizer, dialogue("hi", "hello!", "and?", "no"), packing="concat") == expected
    )  # ends with it already
    with pytest.raises(BadDocument, match=r"\(roles must alternate user/assistant\); "):
        marked(tokenizer, dialogue("hi", "hello!", system="be brief"))


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n«<|im_end|>»\n"),
        (MARKED, "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n«<|im_end|>»\n"),
        (INST, "<pad>[INST] hi [/INST]« <eos>»"),
    ],
)
def test_empty_turn_of_the_assistant_is_its_end(tokenizer, template, expected):
    assert marked(chat_tokenizer(tokenizer, template), dialogue("hi", "")) == expected


@pytest.mark.parametrize("packing", ["concat", "isolated"])
def test_joined_dialogues_end_with_eos_which_nobody_said(tokenizer, packing):
    tokenizer = chat_tokenizer(tokenizer, CHATML)
    text = marked(tokenizer, dialogue("hi", "yes"), packing=packing)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n«yes<|im_end|>»\n<eos>"


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_dialogue_without_the_assistant_has_no_target(tokenizer, template):
    assert "«" not in marked(chat_tokenizer(tokenizer, template), dialogue("hi"))


def test_a_template_may_write_the_last_turn_differently(tokenizer):
    expected = (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n«yes<|im_end|>»\n"
        "<|im_start|>user\nand?<|im_end|>\n"
        "<|im_start|>assistant\n«<think></think>no<|im_end|>»\n"
    )
    record = dialogue("hi", "yes", "and?", "no")
    assert marked(chat_tokenizer(tokenizer, LAST_TURN_DIFFERS), record) == expected


@pytest.mark.parametrize(
    "mark",
    [
        "{% generation %}",
        "{%- generation -%}",
        "{%+ generation %}",
        "{%generation%}",
        "{%-\n generation +%}",
    ],
)
def test_marks_are_found_as_jinja_reads_them(tokenizer: PreTrainedTokenizerFast, mark: str) -> None:
    # Without the mark the end of the turn would be a target too.
    words = "{{ message.content }}"
    condition = "{% if message.role == 'assistant' %}"
    marks = f"{condition}{mark}{words}{{% endgeneration %}}{{% else %}}{words}{{% endif %}}"
    template = CHATML.replace(words, marks)
    text = marked(chat_tokenizer(tokenizer, template), dialogue("hi", "yes", "and?", "no"))
    # The marks leave out the end of a turn, so the end of the text is learnt.
    assert re.findall("«([^»]*)»", text) == ["yes", "no", "<eos>"]


@pytest.mark.parametrize(
    "words",
    [
        "{# {% generation %} would stand here #}",
        "{% raw %}{% generation %}{% endraw %}",
        "{{ '{% generation %}'[:0] }}",
    ],
)
def test_what_only_looks_like_a_mark_is_none(tokenizer, words):
    text = marked(chat_tokenizer(tokenizer, words + CHATML), dialogue("hi", "hello!"))
    assert text.endswith(
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n«hello!<|im_end|>»\n"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("{% for i in range(10**9) %}{% endfor %}", "too much"),
        ("{{ 'x' * 10**12 }}", "too much|GiB|takes more than"),
        (
            "{% set n = namespace(s='xx') %}"
            "{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
            "too much|GiB|takes more than",
        ),
        (
            "{% for i in range(99999) %}{% for k in range(99999) %}{% endfor %}{% endfor %}",
            "takes more than 0.3 s",
        ),
        ("{% for i in range(99999) %}{{ 'x' * 100 }}{% endfor %}", "writes 9,999,9.. characters"),
    ],
)
def test_template_without_end(tokenizer, monkeypatch, words, message):
    monkeypatch.setattr(bounds, "CPU_SECONDS", 0.3)
    monkeypatch.setattr(bounds, "MEMORY_BYTES", 100 << 20)
    limits = resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGPROF)
    encoder = Encoder.of(
        chat_tokenizer(tokenizer, words + CHATML), Data(train="unused", format="chat")
    )
    with pytest.raises(UserError, match=message) as caught:
        encoder.check(dialogue("hi", "yes"))
    assert not isinstance(caught.value, BadDocument)
    assert (resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGPROF)) == limits
    assert signal.getitimer(signal.ITIMER_PROF) == (0, 0)


@pytest.mark.parametrize(
    ("words", "extra"),
    [("{{ 1 / 0 }}", "a"), ("{{ messages[0].x | tojson }}", json.loads("[" * 900 + "]" * 900))],
)
def test_whatever_a_template_raises_is_of_the_document(tokenizer, words, extra):
    messages = [{"role": "user", "content": "a", "x": extra}, {"role": "assistant", "content": "b"}]
    with pytest.raises(BadDocument, match=r"chat template refuses it \("):
        marked(chat_tokenizer(tokenizer, words + CHATML), {"messages": messages})


@pytest.mark.parametrize(
    ("words", "reason", "message"),
    [
        ("{{ raise_exception('no') }}", "bad chat template", "plain question .* in the template"),
        ("{{ messages[0].x.y.z }}", "bad chat template", "plain question .* in the template"),
        (
            "{% if messages[0].content == 'hi' %}{{ raise_exception('no') }}{% endif %}",
            "bad chat",
            "refuses it .no.; correct or remove",
        ),
        ("{% set messages = [] %}", "bad chat template", "leaves out what .* plain question"),
        (
            "{% if messages[0].role != 'system' %}{{ raise_exception('no') }}{% endif %}",
            "bad chat",
            "refuses it .no.; correct or remove",
        ),
    ],
)
def test_who_is_at_fault_where_a_template_refuses_a_dialogue(tokenizer, words, reason, message):
    with pytest.raises(BadDocument, match=message) as caught:
        marked(chat_tokenizer(tokenizer, words + CHATML), dialogue("hi", "yes"))
    assert caught.value.reason == reason


def test_white_space_that_special_tokens_strip_is_theirs_and_not_the_assistants(tokenizer):
    template = CHATML.replace("assistant\n", "assistant>").replace("role }}\n", "role }}>")
    marks = [AddedToken(word, rstrip=True) for word in ("<|im_start|>assistant>", "<|im_end|>")]
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.add_special_tokens(marks)
    chat = PreTrainedTokenizerFast(
        tokenizer_object=backend, chat_template=template, eos_token="<eos>", pad_token="<pad>"
    )
    # Both tokens take white space behind them: the first one what the assistant says first.
    text = marked(chat, dialogue("hi", "\n  yes"))
    assert text == "<|im_start|>user>hi<|im_end|><|im_start|>assistant>«yes<|im_end|>»"
    record = {"prompt": "hi<|im_start|>assistant>", "completion": "  yes"}
    expected = "hi<|im_start|>assistant>«yes<eos>»"
    assert marked(chat, record, data_format="completion") == expected


def test_a_question_as_the_template_writes_it(tokenizer, tmp_path):
    tools = tmp_path / "tools.json"
    tools.write_text(json.dumps([{"type": "function", "function": {"name": "add"}}]))
    template = "{% for t in tools %}{{ t.function.name }};{% endfor %}" + CHATML
    chat = chat_tokenizer(tokenizer, template)
    data = Data(train="unused", format="chat", tools=str(tools))
    prompt = ChatFormat.of(chat, data).prompt("hi")
    assert chat.decode(prompt) == f"add;<|im_start|>user\nhi<|im_end|>\n{HEADER}"
    raising = "{{ raise_exception('no') }}"
    of_questions = f"{{% if messages[-1].role == 'user' %}}{raising}{{% endif %}}{CHATML}"
    for template, message in (
        (raising, r"^the chat template refuses a plain question \(no\); correct it"),
        (of_questions, r"^training\.sample: .*\(no\); leave it out"),
    ):
        refusing = ChatFormat.of(
            chat_tokenizer(tokenizer, template), Data(train="unused", format="chat")
        )
        with pytest.raises(UserError, match=message):
            refusing.prompt("hi")


def test_a_header_that_no_generation_prompt_writes_is_not_learnt(tokenizer):
    prompt = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    text = marked(chat_tokenizer(tokenizer, CHATML.replace(prompt, "")), dialogue("hi", "yes"))
    assert text.endswith("<|im_start|>assistant\n«yes<|im_end|>»\n")


def test_template_that_is_not_jinja(tokenizer):
    with pytest.raises(UserError, match=r"not valid Jinja \(.*\); "):
        marked(chat_tokenizer(tokenizer, "{{ 'no end }}"), dialogue("hi", "yes"))


def test_long_dialogue_is_cut_into_rows(tokenizer: PreTrainedTokenizerFast) -> None:
    # <pad>[INST] hi [/INST] yes<eos> is 1 + 17 + 4 + 1 tokens, of which " yes<eos>" are the targets
    # 18 to 22. Rows of 6 are positions 0-6, 6-12, 12-18, 18-23: the first two predict nothing and
    # are left out.
    tokenizer = chat_tokenizer(tokenizer, INST)
    encoder = Encoder.of(
        tokenizer, Data(train="unused", format="chat", packing="none", sequence_length=6)
    )
    (document,) = encoder.documents(dialogue("hi", "yes"), SlotState())
    assert len(document) == 23
    batches = [to_batch(row[None], [0], 1) for row, _ in encoder.rows([document])]
    shown = [
        (
            tokenizer.decode(b.input_ids[0]),
            [tokenizer.decode([t]) if t >= 0 else "" for t in b.labels[0]],
        )
        for b in batches
    ]
    assert shown == [
        ("/INST]", ["", "", "", "", "", " "]),
        (" yes<eos><pad>", ["y", "e", "s", "<eos>", "", ""]),
    ]
    assert batches[1].labels[0].tolist()[4:] == [IGNORED, IGNORED]


@pytest.mark.parametrize("packing", ["none", "concat"])
def test_completion(tokenizer: PreTrainedTokenizerFast, packing: str) -> None:
    # "the" is one token; one that begins in the prompt holds a character of the completion, and is
    # a target.
    for prompt, completion, expected in (
        ("2+2=", " 4", "2+2=« 4<eos>»"),
        ("", "so", "«so<eos>»"),
        ("say th", "e", "say «the<eos>»"),
        (
            "say ä",
            "ö",
            "say \ufffd\ufffd«\ufffd\ufffd<eos>»",
        ),  # two tokens a letter, none of which is one by itself
        ("no", "", "no<eos>"),  # nothing to learn
        ("so ", "it ends<eos>", "so «it ends<eos>»"),
    ):
        assert (
            marked(tokenizer, {"prompt": prompt, "completion": completion}, "completion", packing)
            == expected
        )


@given(
    st.lists(st.text("ab \n", max_size=6), min_size=1, max_size=7),
    st.sampled_from([CHATML, HEADERS, INST, MARKED]),
)
@settings(deadline=None, max_examples=80, derandomize=True)
def test_what_the_assistant_says_is_what_is_learnt(tokenizer, turns, template):
    text = marked(chat_tokenizer(tokenizer, template), dialogue(*turns))
    ends = {CHATML: "<|im_end|>", MARKED: "<|im_end|>", HEADERS: "<|eot_id|>", INST: "<eos>"}
    begins = {INST: " "}
    spoken = [turn.strip() if template is HEADERS else turn for turn in turns[1::2]]
    assert re.findall("«([^»]*)»", text) == [
        begins.get(template, "") + turn + ends[template] for turn in spoken
    ]


@pytest.mark.parametrize(
    ("record", "reason", "message"),
    [
        ({"text": "a"}, "missing field", r"no field 'messages'; .* text: set data\.format: text"),
        ({"conversations": []}, "missing field", r"set .*data\.fields: .messages: conversations"),
        (
            {"messages": "hi"},
            "bad chat",
            "'messages' is not a list of objects, nor JSON text of one; ",
        ),
        (
            {"messages": []},
            "bad chat",
            "'messages' is not a list of objects, nor JSON text of one; ",
        ),
        ({"messages": [{"role": "user"}]}, "bad chat", "message 1 has no field 'content'; "),
        (
            {"messages": [{"role": "user", "content": 3}]},
            "wrong type",
            "'content' of message 1 is a number, not text",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}]},
            "not text",
            "message 1 has a part of type 'image'",
        ),
        *(
            ({"messages": messages, **fields}, reason, message)
            for messages, fields, reason, message in (
                (
                    [{"role": "user", "content": [IMAGE]}],
                    {},
                    "not text",
                    "a part of message 1 has 'image_url'",
                ),
                (
                    [{"role": "user", "content": "a", "images": ["x"]}],
                    {},
                    "not text",
                    "message 1 has 'images'",
                ),
                (
                    [{"role": "user", "content": "a"}],
                    {"images": ["x"]},
                    "unread field",
                    "'images' is not read; only text",
                ),
                (
                    [{"role": "user", "content": [{"type": "refusal", "text": "a"}]}],
                    {},
                    "not text",
                    "a part of type 'refusal'",
                ),
            )
        ),
        (
            {"messages": [{"role": "assistant", "content": "a", "train": 1}]},
            "bad chat",
            "'train' of message 1 is not true or false; ",
        ),
        (
            {"messages": [{"role": "assistant", "content": "a", "weight": "1"}]},
            "bad chat",
            "'weight' of message 1 is not 0 or 1, all there is; ",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"name": "f"}]}]},
            "bad chat",
            "tool call of message 1 has no function with a name; ",
        ),
        (
            {"messages": [{"role": "assistant", "content": "a", "train": "no"}]},
            "bad chat",
            "'train' of message 1 is not true or false",
        ),
        (
            {"messages": [{"role": "assistant", "content": "a", "weight": 0.5}]},
            "bad chat",
            "'weight' of message 1 is not 0 or 1",
        ),
    ],
)
def test_broken_chat(tokenizer, record, reason, message):
    with pytest.raises(BadDocument, match=message) as caught:
        marked(chat_tokenizer(tokenizer, CHATML), record)
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    ("condition", "known"),
    [
        ("message.role == 'critic'", True),
        ("'critic' == message.role", False),  # not looked for; nobody writes it so
        ("message['role'] in ['tool', \"critic\"]", True),
        ("message['role'] in ('critic',)", True),
        ("{'a': 'critic'}", False),
        ("x('critic')", False),
    ],
)
def test_roles_that_a_template_compares_are_known(tokenizer, condition, known):
    template = f"{{% if false and {condition} %}}{{% endif %}}" + CHATML
    record = {
        "messages": [{"role": "critic", "content": "a"}, {"role": "assistant", "content": "b"}]
    }
    assert ("critic" in known_roles(template)) == known
    if known:
        assert "<|im_start|>critic\na<|im_end|>" in marked(
            chat_tokenizer(tokenizer, template), record
        )


def test_fields_that_only_other_rows_have_are_left_out(tokenizer):
    template = (
        "{% for m in messages %}{{ m.role }}"
        "{% if 'name' in m %}({{ m.name }}){% endif %}:{{ m.content }};{% endfor %}"
        "{% if add_generation_prompt %}assistant{% endif %}"
    )
    record = {
        "messages": [
            {"role": "user", "content": "a", "name": None},
            {"role": "assistant", "content": "b", "name": "c"},
        ]
    }
    assert marked(chat_tokenizer(tokenizer, template), record) == "user:a;assistant«(c):b;»"


TURNS = dialogue("hi", "yes", "and?", "no")
HEADER = "<|im_start|>assistant\n"


def test_only_the_last_turn(tokenizer):
    text = marked(chat_tokenizer(tokenizer, CHATML), TURNS, train_on="last")
    assert re.findall("«([^»]*)»", text) == ["no<|im_end|>"]


def test_every_token(tokenizer):
    text = marked(chat_tokenizer(tokenizer, CHATML), TURNS, train_on="all")
    assert text.startswith("«<|im_start|>user")
    assert text.endswith("no<|im_end|>»\n")
    assert text.count("«") == 1


@pytest.mark.parametrize("template", [CHATML, MARKED])
@pytest.mark.parametrize("mark", [{"train": False}, {"weight": 0}])
def test_a_message_that_is_not_to_be_trained_on(tokenizer, template, mark):
    first, answer, *rest = TURNS["messages"]
    record = {"messages": [first, {**answer, **mark}, *rest]}
    text = marked(chat_tokenizer(tokenizer, template), record)
    assert re.findall("«([^»]*)»", text) == ["no<|im_end|>"]


def test_every_token_except_a_message_that_is_not_to_be_trained_on(tokenizer):
    first, answer, *rest = TURNS["messages"]
    record = {"messages": [first, {**answer, "train": False}, *rest]}
    text = marked(chat_tokenizer(tokenizer, CHATML), record, train_on="all")
    user = "<|im_start|>user\n"
    assert re.findall("«([^»]*)»", text) == [
        f"{user}hi<|im_end|>\n{HEADER}",
        f"\n{user}and?<|im_end|>\n{HEADER}no<|im_end|>",
    ]


@pytest.mark.parametrize(
    ("keys", "part"),
    [
        ({"tools": "offered"}, "does not write tools"),
        ({"template_arguments": {"tokenize": True}}, "has tokenize, which is not for a template"),
    ],
)
def test_what_a_template_cannot_use(tokenizer, keys, part):
    with pytest.raises(UserError, match=part):
        marked(chat_tokenizer(tokenizer, CHATML), TURNS, **keys)


def test_template_arguments_are_plain_data():
    with pytest.raises(UserError, match="put dates in quotes"):
        Data(train="unused", template_arguments={"date": datetime.date(2024, 7, 26)})


def test_a_misspelt_field_of_tools(tokenizer):
    with pytest.raises(BadDocument, match=r"no field 'tolls' \(data\.tools\)"):
        marked(chat_tokenizer(tokenizer, CALLS), TURNS, tools="tolls")


def test_a_file_of_tools_that_is_none(tokenizer, tmp_path):
    file = tmp_path / "tools.json"
    file.write_text("{}")
    with pytest.raises(UserError, match=r"^data\.tools: .*tools.json .*; give a JSON file"):
        marked(chat_tokenizer(tokenizer, CALLS), TURNS, tools=str(file))


def test_each_turn_as_its_own_document(tokenizer: PreTrainedTokenizerFast) -> None:
    # As at inference: the thinking of the turn itself is written, that of earlier turns is not.
    user = "<|im_start|>user\n"
    assert all_marked(chat_tokenizer(tokenizer, LAST_TURN_DIFFERS), TURNS, turns="separate") == [
        f"{user}hi<|im_end|>\n{HEADER}«<think></think>yes<|im_end|>»\n",
        f"{user}hi<|im_end|>\n{HEADER}yes<|im_end|>\n{user}and?<|im_end|>\n"
        f"{HEADER}«<think></think>no<|im_end|>»\n",
    ]


def test_a_turn_whose_end_the_template_does_not_mark_ends_with_eos(tokenizer):
    template = CHATML.replace("<|im_end|>\n", "\n")
    text = marked(chat_tokenizer(tokenizer, template), TURNS)
    assert re.findall("«([^»]*)»", text) == ["yes", "no\n<eos>"]


def test_a_template_file_and_its_arguments(tokenizer, tmp_path):
    chat_tokenizer(tokenizer, CHATML).save_pretrained(tmp_path)
    file = tmp_path / "other.jinja"
    file.write_text("{{ greeting }} " + CHATML)
    loaded = load_tokenizer(Model(path=str(tmp_path)), str(file))
    keys = {"chat_template": str(file), "template_arguments": {"greeting": "Good day!"}}
    text = marked(loaded, dialogue("hi", "yes"), **keys)
    assert text.startswith("Good day! <|im_start|>user")
    assert "«yes<|im_end|>»" in text
    with pytest.raises(UserError, match=r"^data\.chat_template: .*absent is not a file"):
        load_tokenizer(Model(path=str(tmp_path)), str(tmp_path / "absent"))


CALLS = (
    "{% for t in tools or [] %}<tool>{{ t.function.name }}</tool>{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALL = '{"name": "add", "arguments": {"to": "two"}}'
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}


@pytest.mark.parametrize("arguments", ['{"to": "two"}', {"to": "two"}])
@pytest.mark.parametrize("content", [None, ""])
def test_a_tool_call_without_content(tokenizer, arguments, content, tmp_path):
    function = {"name": "add", "arguments": arguments}
    messages = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "add "}, {"type": "text", "text": "it"}],
        },
        {"role": "assistant", "content": content, "tool_calls": [{"function": function}]},
        {"role": "tool", "content": "four"},
        {"role": "assistant", "content": "Four."},
    ]
    tools = tmp_path / "tools.json"
    tools.write_text(json.dumps([TOOL]))
    expected = (
        f"<tool>add</tool><|im_start|>user\nadd it<|im_end|>\n{HEADER}«{CALL}<|im_end|>»\n"
        f"<|im_start|>tool\nfour<|im_end|>\n{HEADER}«Four.<|im_end|>»\n"
    )
    tokenizer = chat_tokenizer(tokenizer, CALLS)
    assert marked(tokenizer, {"messages": messages}, tools=str(tools)) == expected
    record = {"messages": messages, "offered": json.dumps([TOOL])}
    assert marked(tokenizer, record, tools="offered") == expected


@pytest.mark.parametrize(
    "template",
    [
        # arguments as text, and a content in parts
        CALLS.replace("c.function | tojson", "'call:' + c.function.arguments"),
        CALLS.replace("{{ m.content }}", "{% for p in m.content %}{{ p.text }}{% endfor %}"),
    ],
)
def test_a_template_gets_a_dialogue_in_the_form_that_it_can_write(tokenizer, template):
    function = {"name": "add", "arguments": {"to": "two"}}
    call = {"role": "assistant", "content": "Now.", "tool_calls": [{"function": function}]}
    text = marked(
        chat_tokenizer(tokenizer, template), {"messages": [{"role": "user", "content": "a"}, call]}
    )
    assert re.findall("«([^»]*)»", text)[0].startswith("Now.")


ADD = {"name": "add", "arguments": {"to": "two"}}
ASKED = {"role": "user", "content": "a"}
SAID = {"role": "assistant", "content": "Now."}
LENGTHS = MARKED.replace(
    "{{ message.content }}", "{{ message.content }}{{ message.content|length }}"
)
"""A template in which no marks can be put around the words."""


@pytest.mark.parametrize("template", [CHATML, MARKED, LENGTHS])
@pytest.mark.parametrize(
    ("messages", "what"),
    [
        ([ASKED, {**SAID, "content": None, "tool_calls": [{"function": ADD}]}], "message 2 calls"),
        ([ASKED, {**SAID, "tool_calls": [{"function": ADD}]}, ASKED, SAID], "message 2 calls"),
        ([ASKED, {**SAID, "function_call": ADD}], "message 2 calls"),
        ([ASKED, {**SAID, "content": "", "reasoning_content": "so"}], "message 2 says"),
        ([{"role": "tool", "content": "Now."}, ASKED, SAID], "message 1 says"),
        ([{"role": "system", "content": "Now."}, ASKED, SAID], "message 1 says"),
    ],
)
def test_words_that_the_template_does_not_write_are_no_silent_loss(
    tokenizer: PreTrainedTokenizerFast, template: str, messages: list[Any], what: str
) -> None:
    # transformers' rendering shows it: without these words it is the same.
    dropping = "{% set messages = messages | rejectattr('role', 'in', ['system', 'tool']) | list %}"
    chat = chat_tokenizer(tokenizer, dropping + template)
    written = [
        {"role": m["role"], "content": m["content"] or ""}
        for m in messages
        if m["role"] in "user assistant"
    ]
    right = chat.apply_chat_template(written, tokenize=False)
    assert chat.apply_chat_template(messages, tokenize=False).replace("None", "") == right
    with pytest.raises(BadDocument, match=f"leaves out what {what}; .*set data.chat_template"):
        marked(chat, {"messages": messages})


@pytest.mark.parametrize("template", [MARKED, LENGTHS])
def test_what_a_marking_template_may_leave_out(
    tokenizer: PreTrainedTokenizerFast, template: str
) -> None:
    # White space, thoughts beside an answer, and contents without words.
    template = template.replace("message.content }}", "message.content | trim }}")
    answer = {**SAID, "content": " Now. ", "reasoning_content": "so"}
    messages = [ASKED, answer, {**ASKED, "content": ""}, {**SAID, "content": ""}, ASKED, SAID]
    chat = chat_tokenizer(tokenizer, template)
    text = marked(chat, {"messages": messages}).translate({ord("«"): None, ord("»"): None})
    assert text == chat.apply_chat_template(messages, tokenize=False)


def test_fields_by_other_names(tokenizer):
    record = {"instruction": "2+2=", "output": " 4"}
    names = {"prompt": "instruction", "completion": "output"}
    text = marked(tokenizer, record, "completion", fields=names)
    assert text == "2+2=« 4<eos>»"
    with pytest.raises(UserError, match=r"data\.fields names answer; .*completion"):
        Data(train="unused", fields={"answer": "output"})


def test_fields_that_are_joined(tokenizer):
    record = {"instruction": "add", "input": "2 2", "output": "4"}
    names = {"prompt": ["instruction", "input"], "completion": "output"}
    assert marked(tokenizer, record, "completion", fields=names) == "add\n\n2 2«4<eos>»"
    for nothing in ({}, {"input": ""}, {"input": None}):
        other = {"instruction": "add", "output": "4", **nothing}
        assert marked(tokenizer, other, "completion", fields=names) == "add«4<eos>»"
    with pytest.raises(BadDocument, match="no field 'instruction'"):
        marked(tokenizer, {"output": "4"}, "completion", fields=names)
    without = {"prompt": "instruction", "completion": "output"}
    with pytest.raises(BadDocument, match=r"'input' is not read; .*\[instruction, input\]"):
        marked(tokenizer, record, "completion", fields=without)
    with pytest.raises(UserError, match=r"data\.fields"):
        Data(train="unused", fields={"prompt": []})


def test_a_turn_longer_than_a_row_loses_its_beginning(tokenizer):
    tokenizer = chat_tokenizer(tokenizer, CHATML)
    keys = {"turns": "separate", "packing": "documents", "sequence_length": 20}
    (turn,) = all_marked(tokenizer, dialogue("a long question", "yes"), **keys)
    assert turn.endswith("«yes<|im_end|>»\n")
    assert "question" not in turn


def test_dialogues_in_the_form_of_sharegpt(tokenizer):
    turns = [
        {"from": "system", "value": "be brief"},
        {"from": "human", "value": "hi"},
        {"from": "gpt", "value": "yes"},
    ]
    fields = {"messages": "conversations"}
    tokenizer = chat_tokenizer(tokenizer, CHATML)
    text = marked(tokenizer, {"conversations": turns}, fields=fields)
    assert text == marked(tokenizer, dialogue("hi", "yes", system="be brief"))


def test_a_document_longer_than_a_row(tokenizer):
    record = {"text": "abcdefghij"}
    keys = {"data_format": "text", "packing": "documents", "sequence_length": 4}
    assert all_marked(tokenizer, record, **keys) == ["a«bcde»"]
    parts = ["a«bcde»", "e«fghi»", "i«j<eos>»"]
    assert all_marked(tokenizer, record, **keys, long="split") == parts
    assert all_marked(tokenizer, record, **keys, long="skip") == [""]


def adding_around(tokenizer: PreTrainedTokenizerFast, around: str) -> PreTrainedTokenizerFast:
    """A tokenizer that adds these tokens around any text."""
    chat = chat_tokenizer(tokenizer, None)
    names = [name for name in around.split() if name != "$A"]
    special = [(name, chat.convert_tokens_to_ids(name)) for name in names]
    backend = Tokenizer.from_str(chat.backend_tokenizer.to_str())
    backend.post_processor = TemplateProcessing(single=around, special_tokens=special)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<pad>", eos_token="<eos>", pad_token="<pad>"
    )


@pytest.mark.parametrize("around", ["<pad> $A", "$A <eos>", "<pad> $A <eos>"])
@pytest.mark.parametrize(
    "text", ["hi", "<pad>hi", "hi<eos>", "<pad>hi<eos>", "<pad>th hi", "<eos>"]
)
def test_what_a_tokenizer_adds_around_a_text_stands_there_once(
    tokenizer: PreTrainedTokenizerFast, around: str, text: str
) -> None:
    # Right by hand: what the text has already is not added, as a template's text has its BOS.
    adding = adding_around(tokenizer, around)
    before, after = around.replace(" ", "").split("$A")
    begin = "" if text.startswith(before) else before
    end = "" if text.endswith(after) else after
    expected = begin + text + end
    for packing in ("none", "documents", "concat"):
        written = marked(adding, {"text": text}, "text", packing)
        ended = expected if expected.endswith("<eos>") else f"{expected}<eos>"
        assert written.replace("«", "").replace("»", "") == ended, packing
    prompt, completion = text[:-1], text[-1:]
    written = marked(adding, {"prompt": prompt, "completion": completion}, "completion")
    assert written.replace("«", "").replace("»", "") == ended
    assert adding.decode(tokens_of(adding, text, is_open=True)) == begin + text


@pytest.mark.parametrize(
    ("around", "text", "expected"),
    [
        ("<pad> th $A", "hi", "<pad>thhi"),
        ("<pad> th $A", "<pad>hi", "<pad>thhi"),
        ("<pad> th $A", "th hi", "<pad>th hi"),
        ("<pad> th $A", "<pad>th hi", "<pad>th hi"),
        ("<pad> <pad> $A", "<pad>hi", "<pad><pad>hi"),
        ("<pad> $A th <eos>", "<pad>hi<eos>", "<pad>hith<eos>"),
        ("<pad> $A th <eos>", "hith", "<pad>hith<eos>"),
        ("<pad> $A th <eos>", "<pad>hith<eos>", "<pad>hith<eos>"),
    ],
)
def test_a_text_with_some_of_what_is_added_has_each_once(tokenizer, around, text, expected):
    adding, ended = adding_around(tokenizer, around), expected.removesuffix("<eos>") + "<eos>"
    for packing in ("none", "concat"):
        assert marked(adding, {"text": text}, "text", packing) == f"«{ended}»"
    written = marked(adding, {"prompt": "", "completion": text}, "completion")
    assert written.replace("«", "").replace("»", "") == ended


@pytest.mark.parametrize("packing", ["none", "concat", "isolated", "documents"])
def test_a_completion_teaches_every_token_with_which_it_ends(
    tokenizer: PreTrainedTokenizerFast, packing: str
) -> None:
    # Right by hand: behind the prompt, "<pad>q", the row goes on with "a", "th" and the end.
    record = {"prompt": "q", "completion": "a"}
    for around in ("<pad> $A th", "<pad> $A th <eos>"):
        adding = adding_around(tokenizer, around)
        assert marked(adding, record, "completion", packing) == "<pad>q«ath<eos>»"
        nothing = {"prompt": "q", "completion": ""}
        assert marked(adding, nothing, "completion", packing) == "<pad>qth<eos>"


@pytest.mark.parametrize("packing", ["none", "concat", "isolated", "documents"])
def test_a_text_ends_with_a_target_in_every_packing(tokenizer, packing):
    for text in ("so it ends", "so it ends<eos>"):
        written = marked(tokenizer, {"text": text}, "text", packing)
        assert written.replace("«", "").endswith("so it ends<eos>»")


ROLE_MARKS = (  # in the style of GLM-4: the mark of the next speaker ends a turn
    "<sop>{% for m in messages %}{% if m.role == 'tool' %}<|observation|>{% else %}<|{{ m.role }}|>"
    "{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}"
    "</tool_call>{% endfor %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.mark.parametrize("are_special", [True, False])
def test_a_turn_that_the_next_speakers_mark_ends(
    tokenizer: PreTrainedTokenizerFast, are_special: bool
) -> None:
    # Right as in TRL 1.16, whose own template for training GLM-4.5 writes these marks as generated:
    # its masks of eight dialogues of the published template are equal to ours.
    marks = [f"<|{name}|>" for name in ("user", "assistant", "system", "observation")]
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.add_tokens(["<tool_call>", "</tool_call>"])
    (backend.add_special_tokens if are_special else backend.add_tokens)(marks)
    chat = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>", chat_template=ROLE_MARKS
    )
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add"}}]}
    first, answer, second, last = TURNS["messages"]
    system = {"role": "system", "content": "be brief"}
    result = {"role": "tool", "content": "four"}
    called = "<tool_call>add</tool_call><|observation|>"
    cases = [
        ([first, answer, second, last], ["yes<|user|>", "no<|user|>"]),
        ([first, answer, system, second, last], ["yes<|system|>", "no<|user|>"]),
        ([first, call, result, last], [called, "no<|user|>"]),
        ([first, call], [called]),
        ([first, answer, last], ["yes", "no<|user|>"]),
        ([first, answer, second], ["yes<|user|>"]),
    ]
    for messages, expected in cases:
        text = marked(chat, {"messages": messages})
        if not are_special:  # then nothing says that the model would stop there
            assert "user|>»" not in text
            continue
        assert re.findall("«([^»]*)»", text) == expected
        separate = all_marked(chat, {"messages": messages}, turns="separate")
        assert [part.endswith("|>»") for part in separate] == [True] * len(separate)
        everything = marked(chat, {"messages": messages}, train_on="all")
        assert everything.replace("«", "").replace("»", "") == re.sub("[«»]", "", text)


def test_a_mark_with_which_every_turn_begins_ends_none(tokenizer):
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.add_special_tokens(["<|im_start|>"])
    template = CHATML.replace("<|im_end|>", "")
    chat = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>", chat_template=template
    )
    assert re.findall("«([^»]*)»", marked(chat, TURNS)) == ["yes", "no\n<eos>"]


def test_what_a_format_takes_of_the_tokenizer(tokenizer):
    with pytest.raises(UserError, match=r"^data\.format chat .* data\.chat_template"):
        Encoder.of(chat_tokenizer(tokenizer, None), Data(train="unused", format="chat"))


def test_a_missing_field_names_the_key_that_fits(tokenizer):
    cases = [
        ("completion", {"prompt": "p", "output": "o"}, {"prompt": "frage"}, r"data\.fields"),
        ("text", {"messages": []}, None, r"data\.format: chat"),
        ("text", {"prompt": "p", "completion": "c"}, None, r"data\.format: completion"),
        ("text", {"body": "b"}, None, r"data\.text_field .*body"),
    ]
    for data_format, record, fields, way_out in cases:
        encoder = Encoder.of(tokenizer, Data("any", format=data_format, fields=fields))
        with pytest.raises(BadDocument, match=rf"^no field .*{way_out}"):
            encoder.documents(record, SlotState())


@pytest.mark.parametrize("spoken", [["", "no"], ["no", ""], ["", ""], ["", " ", "no"], [""]])
@pytest.mark.parametrize("end", ["", "<|end|>"])
def test_a_turn_without_words_has_its_end_where_the_template_tests_for_words(
    tokenizer: PreTrainedTokenizerFast, spoken: list[str], end: str
) -> None:
    # Right is what transformers marks in the template that says itself what is generated.
    said = "{{ '\\n<think></think>' }}{% if m.content.strip() %}{{ '\\n' + m.content.strip() }}"
    said += "{% endif %}"
    loop = "<sop>{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>"
    rest = "{% else %}<|user|>{{ m.content }}{% endif %}{% endfor %}"
    prompt = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    if end:
        generated = f"{{% generation %}}{said}{end}{{% endgeneration %}}"
        by_marks = loop + generated + rest
    else:  # the mark of the next speaker is the end
        generated = f"{{% generation %}}{said}<|user|>{{% endgeneration %}}"
        others = "{% else %}{{ '<|user|>' if loop.first }}{{ m.content }}{% endif %}{% endfor %}"
        by_marks = loop + generated + others
    messages = [
        message
        for content in spoken
        for message in (
            {"role": "user", "content": "so"},
            {"role": "assistant", "content": content},
        )
    ]
    (text,), (marks,) = render_jinja_template(
        [messages], chat_template=by_marks, return_assistant_tokens_mask=True
    )
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.add_special_tokens(["<|user|>", "<|assistant|>", "<|end|>"])
    chat = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<eos>",
        pad_token="<pad>",
        chat_template=loop + said + end + rest + prompt,
    )
    ours = marked(chat, {"messages": messages})
    assert ours.translate({ord("«"): None, ord("»"): None}) == text
    assert re.findall("«([^»]*)»", ours) == [text[start:stop] for start, stop in marks]
