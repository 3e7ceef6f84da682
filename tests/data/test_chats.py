"""The assistant's turns are found in what any chat template writes."""

from __future__ import annotations

import json
from collections.abc import Sequence

import jinja2
import jinja2.ext
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shardwise.data.chats import Message, Refused, Render, Undecidable, find_turns

ROLE = "{{ '<|' + m.role + '|>\n' }}"
PROMPT = "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
LOOP = "{% for m in messages %}"
ONE_LINE = LOOP + ROLE + "{{ m.content }}<end>\n{% endfor %}" + PROMPT
LAST_TURN_DIFFERS = (
    LOOP + ROLE + "{% if loop.last and m.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content }}<end>\n{% endfor %}" + PROMPT
)
THINKING_REMOVED = (
    LOOP + ROLE + "{% if m.role == 'assistant' %}"
    "{% if loop.last %}<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}"
    "{{ m.content.split('</think>')[-1].lstrip('\n') }}"
    "{% else %}{{ m.content }}{% endif %}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n<think>\n{% endif %}"
)
TOOLS = (
    "<|system|>\n{% for t in tools %}{{ t.function.name }} {% endfor %}"
    "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}<end>\n"
    "{% for m in messages if m.role != 'system' %}" + ROLE + "{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<end>\n{% endfor %}" + PROMPT
)
BETWEEN_TURNS = (
    LOOP + "{% if not loop.first %}<sep>{% endif %}" + ROLE + "{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<sep><|assistant|>\n{% endif %}"
)
TRIMMED = LOOP + ROLE + "{{ m.content | trim }}<end>\n{% endfor %}" + PROMPT
SYSTEM_IN_USER = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content + '\n\n' %}"
    "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}"
    + LOOP
    + "{% if m.role == 'user' %}[INST] {{ system if loop.first else '' }}{{ m.content }} [/INST]"
    "{% else %} {{ m.content }} </s>{% endif %}{% endfor %}"
)
OTHER_END = (
    LOOP + ROLE + "{{ m.content }}{{ '<return>' if loop.last else '<end>' }}{% endfor %}" + PROMPT
)
NAME_AGAIN = (
    LOOP + ROLE + "{% for c in m.tool_calls or [] %}"
    "call:{{ c.function.name }}({{ c.function.arguments.to }}){% endfor %}"
    "{% if m.role == 'tool' %}{{ messages[loop.index0 - 1].tool_calls[0].function.name }} gave "
    "{% endif %}{{ m.content or '' }}<end>\n{% endfor %}" + PROMPT
)
HEADER_AFTER_PROMPT = (
    LOOP + ROLE + "{% if m.role == 'assistant' %}<|channel|>final<|message|>{% endif %}"
    "{{ m.content }}<end>\n{% endfor %}" + PROMPT
)
NO_PROMPT = LOOP + ROLE + "{{ m.content }}<end>\n{% endfor %}"
"""A template that ignores `add_generation_prompt`."""
ALTERNATE = (
    LOOP + "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}" + ROLE + "{{ m.content }}<end>\n"
    "{% endfor %}" + PROMPT
)
NO_TEXT = (
    LOOP + ROLE + "{% for p in m.content %}{{ p.text }}{% endfor %}<end>\n{% endfor %}" + PROMPT
)
TWICE = LOOP + ROLE + "{{ m.content }} / {{ m.content }}<end>\n{% endfor %}" + PROMPT
BY_CONTENT = LOOP + ROLE + "{{ m.content }}{{ m.content | length }}<end>\n{% endfor %}" + PROMPT

SYSTEM = {"role": "system", "content": "Be kind."}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"type": "function", "function": {"name": "add", "arguments": {"to": "two", "by": 2}}}
    ],
}
RESULT = {"role": "tool", "content": "four"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def assistant(content: str, **fields: object) -> Message:
    return {"role": "assistant", "content": content, **fields}


def renderer(template: str, **arguments: object) -> Render:
    environment = jinja2.Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )

    def fail(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment.globals["raise_exception"] = fail
    environment.filters["tojson"] = lambda x: json.dumps(x, ensure_ascii=False)
    compiled = environment.from_string(template)

    def render(messages: Sequence[Message], prompt: bool) -> str:
        try:
            return compiled.render(messages=messages, add_generation_prompt=prompt, **arguments)
        except (jinja2.TemplateError, TypeError) as error:
            raise Refused(str(error)) from None

    return render


def spoken(template: str, messages: Sequence[Message], **arguments: object) -> list[str]:
    """The text of each turn."""
    text, turns = find_turns(renderer(template, **arguments), messages)
    assert text == renderer(template, **arguments)(messages, False)
    return [text[turn.start : turn.end] for turn in turns]


TWO_TURNS = (user("One?"), assistant("Two."), user("Three?"), assistant("*Four* <b>!"))


@pytest.mark.parametrize(
    ("template", "first", "second"),
    [
        (ONE_LINE, "Two.<end>", "*Four* <b>!<end>"),
        (LAST_TURN_DIFFERS, "Two.<end>", "<think>\n\n</think>\n\n*Four* <b>!<end>"),
        (THINKING_REMOVED, "Two.<end>", "\n</think>\n\n*Four* <b>!<end>"),
        (TOOLS, "Two.<end>", "*Four* <b>!<end>"),
        (BETWEEN_TURNS, "Two.", "*Four* <b>!"),
        (TRIMMED, "Two.<end>", "*Four* <b>!<end>"),
        (SYSTEM_IN_USER, " Two. </s>", " *Four* <b>! </s>"),
        (OTHER_END, "Two.<end>", "*Four* <b>!<return>"),
        (HEADER_AFTER_PROMPT, "<|channel|>final<|message|>Two.<end>",
         "<|channel|>final<|message|>*Four* <b>!<end>"),
        (ALTERNATE, "Two.<end>", "*Four* <b>!<end>"),
    ],
)  # fmt: skip
def test_a_turn_is_what_follows_the_header_up_to_its_end_mark(template, first, second):
    assert spoken(template, TWO_TURNS, tools=[]) == [first, second]


def test_a_header_that_no_generation_prompt_writes_is_no_target():
    assert spoken(NO_PROMPT, TWO_TURNS) == ["Two.<end>", "*Four* <b>!<end>"]


def test_thinking_is_a_target_where_the_template_writes_it():
    messages = (
        user("One?"),
        assistant("Two.", reasoning_content="One and one."),
        user("Three?"),
        assistant("Four.", reasoning_content="Three and one."),
    )
    expected = ["Two.<end>", "Three and one.\n</think>\n\nFour.<end>"]
    assert spoken(THINKING_REMOVED, messages) == expected


def test_thinking_within_the_content_is_left_out_where_the_template_does():
    first = assistant("<think>\nOne and one.\n</think>\n\nTwo.")
    messages = (user("One?"), first, user("Three?"), assistant("Four."))
    assert spoken(THINKING_REMOVED, messages)[0] == "Two.<end>"


def test_a_system_message_changes_nothing():
    for template in (ONE_LINE, LAST_TURN_DIFFERS, SYSTEM_IN_USER, TOOLS):
        without = spoken(template, TWO_TURNS, tools=[])
        assert spoken(template, (SYSTEM, *TWO_TURNS), tools=[]) == without


def test_a_tool_call_is_a_target_and_its_result_is_none():
    messages = (user("Add."), CALL, RESULT, assistant("Four."))
    call = '<tool_call>\n{"name": "add", "arguments": {"to": "two", "by": 2}}\n</tool_call><end>'
    assert spoken(TOOLS, messages, tools=[TOOL]) == [call, "Four.<end>"]


def test_a_name_that_the_template_repeats_elsewhere_is_not_looked_for():
    # Then numbers alone are left of a call to go by: give it a text.
    messages = (user("Add."), {**CALL, "content": "Now."}, RESULT, assistant("Four."))
    assert spoken(NAME_AGAIN, messages) == ["call:add(two)Now.<end>", "Four.<end>"]


def test_a_turn_without_words_is_its_end():
    messages = (user("One?"), assistant(""), user("And?"), assistant("Two."))
    assert spoken(ONE_LINE, messages) == ["<end>", "Two.<end>"]
    if_content = ONE_LINE.replace("{{ m.content }}", "{{ m.content if m.content else '-' }}")
    assert spoken(if_content, messages) == ["Two.<end>"]


def test_the_words_of_others_may_be_the_assistants_own():
    messages = (user("Two."), assistant("Two."), user("Two."), assistant("Two."))
    text, turns = find_turns(renderer(ONE_LINE), messages)
    assert [text[: turn.start].count("Two.") for turn in turns] == [1, 3]


WITH_THINKING_PROMPT = ONE_LINE.replace(PROMPT, PROMPT.replace("\n{%", "\n<think>\n{%"))


def test_an_answer_may_begin_like_the_rest_of_the_prompt():
    answer = '<div class="x">hello</div>'
    assert spoken(WITH_THINKING_PROMPT, (user("One?"), assistant(answer))) == [f"{answer}<end>"]


def test_a_question_may_end_like_the_prompt():
    question = user("What does this do: <|assistant|>\n<think>\n")
    assert spoken(WITH_THINKING_PROMPT, (question, assistant("one"))) == ["one<end>"]


def test_a_calls_words_and_a_contents_words_are_both_there():
    both = {**CALL, "content": "Let me look."}
    with pytest.raises(Undecidable, match="leaves out what message 2 calls"):
        find_turns(renderer(ONE_LINE), (user("Add."), both))
    either = TOOLS.replace("{{ m.content or '' }}", "{{ m.content if not m.tool_calls }}")
    with pytest.raises(Undecidable, match="leaves out what message 2 says"):
        find_turns(renderer(either, tools=[]), (user("Add."), both))


def test_thoughts_before_a_call_may_be_left_out():
    thoughtful = {**CALL, "reasoning_content": "I must add."}
    messages = (user("Add."), thoughtful)
    render = renderer(TOOLS, tools=[])
    assert find_turns(render, messages)[1] == find_turns(render, (user("Add."), CALL))[1]
    alone = {"role": "assistant", "content": "", "reasoning_content": "I must add."}
    with pytest.raises(Undecidable, match="leaves out what message 2 says"):
        find_turns(render, (user("Add."), alone))


def test_the_words_of_others_are_there():
    no_user = ONE_LINE.replace(
        "{{ m.content }}", "{% if m.role != 'user' %}{{ m.content }}{% endif %}"
    )
    with pytest.raises(Undecidable, match="leaves out what message 1 says"):
        find_turns(renderer(no_user), TWO_TURNS)


def test_a_turn_whose_first_words_the_template_leaves_out_is_whole():
    template = LOOP + "<|{{ m.role }}|>{{ m.content.split('</think>')[-1] }}<|e|>{% endfor %}"
    answer = assistant("<think>because of this</think>The answer is four.")
    assert spoken(template, (user("One?"), answer)) == ["The answer is four.<|e|>"]


@pytest.mark.parametrize("header", ["<|{{ m.role }}|>\n", ""])
def test_what_follows_a_turn_is_no_end_mark(header):
    template = (
        LOOP + header + "{{ m.content }}{% if loop.last %}</s>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    )
    messages = (user("One?"), assistant("one"), user("<b>again</b>"), assistant("two"))
    assert spoken(template, messages) == ["one", "two</s>"]


def test_where_no_mark_ends_a_turn_all_that_stands_after_it_is_learnt():
    template = LOOP + "{{ m.role }}: {{ m.content }}\n{% endfor %}"
    assert spoken(template, TWO_TURNS)[-1].endswith("\n")


def test_a_dialogue_may_not_be_too_long():
    with pytest.raises(Undecidable, match="more than 1,000 messages"):
        find_turns(renderer(ONE_LINE), [user("One?"), assistant("Two.")] * 600)


def test_whether_a_turn_ends_with_a_mark_is_known():
    _, turns = find_turns(renderer(BETWEEN_TURNS), TWO_TURNS)
    assert [turn.has_end_mark for turn in turns] == [False, False]
    _, turns = find_turns(renderer(ONE_LINE), TWO_TURNS)
    assert [turn.has_end_mark for turn in turns] == [True, True]


@pytest.mark.parametrize(
    ("template", "part"),
    [(NO_TEXT, "leaves out"), (TWICE, "twice"), (BY_CONTENT, "treats words differently")],
)
def test_what_is_undecidable_is_said(template, part):
    with pytest.raises(Undecidable, match=part):
        find_turns(renderer(template), TWO_TURNS)


def test_a_template_that_refuses_the_dialogue_says_why():
    with pytest.raises(Refused, match="alternate"):
        find_turns(renderer(ALTERNATE), (user("One?"), user("Two?"), assistant("Three.")))


def test_characters_for_private_use_are_refused():
    with pytest.raises(Undecidable, match="private use"):
        find_turns(renderer(ONE_LINE), (user("\U000f0000"), assistant("Two.")))


words = st.text(st.sampled_from("ab <>/|\n.*_é1"), min_size=1, max_size=12).filter(
    lambda text: text.strip() and "end" not in text
)


@given(st.lists(st.tuples(words, words), min_size=1, max_size=3), st.booleans())
@example([("1", "1<1"), ("1", "1")], False)
def test_any_words_are_found(pairs, system):
    messages: list[Message] = [SYSTEM] if system else []
    for question, answer in pairs:
        messages += [user(question), assistant(answer)]
    expected = [f"{answer}<end>" for _, answer in pairs]
    assert spoken(ONE_LINE, messages) == expected
    assert spoken(TOOLS, messages, tools=[]) == expected
    assert spoken(OTHER_END, messages)[:-1] == expected[:-1]
