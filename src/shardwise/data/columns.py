"""Which fields of a document a run reads, and what becomes of known ones beside them.

A known field that is not empty is taken where its meaning is certain: a system message or tools
beside the messages of a dialogue. Else the document is refused, with the key that would use it.
"""

from collections.abc import Collection, Sequence
from typing import Any

from shardwise.config import Data
from shardwise.config.data import FIELDS as KEYS
from shardwise.data.record import BadDocument, Record

FIELDS = {"completion": ("prompt", "completion"), "chat": ("messages",)}
"""The fields that a format reads. `text` reads `data.text_field`."""

SYSTEM = ("system", "system_prompt", "system_message")
"""The fields with a system message."""
TOOLS = ("tools", "functions")
"""The fields with tools. `functions` has what each of `tools` has under its key `function`."""
FLAGS = ("train", "training", "loss", "weight")
"""The fields that say whether a message is a target: true or false, `weight` 1 or 0."""
ROW_FLAGS = (
    *FLAGS, "compute_loss", "ignore_loss", "is_target", "is_trained", "loss_mask", "loss_scale",
    "loss_weight", "mask", "masked", "no_loss", "supervise", "supervised", "train_detail",
    "train_mask", "train_on", "trainable", "trained", "training_detail",
)  # fmt: skip
"""The fields that say so of a whole document, here or in other programs."""
VARIABLES = "chat_template_kwargs"
"""The field with variables of the chat template for one dialogue, as in TRL."""

MEDIA = (
    "image", "images", "image_url", "input_image", "audio", "audios", "audio_url", "input_audio",
    "video", "videos", "video_url",
)  # fmt: skip
"""Fields of a document, a message, or a part of its content, that hold no text."""

LABELS = ("label", "kto_tag")
"""The fields that say of an answer whether it is a good one."""

BESIDE = (*SYSTEM, "history", *TOOLS, "documents", *MEDIA)
"""The known fields beside those that a format reads."""
BESIDE_QUESTION = ("input", "context")
"""The known fields beside a prompt that is called `instruction` or `question`."""


def names_of(data: Data, given: Collection[str]) -> tuple[str, ...]:
    """Return what a run reads of a document with these fields, as `data.fields` calls it.

    Of preferences it is what is shared, if anything, and the two answers, or one and its label.
    """
    if data.format != "preference":
        return FIELDS.get(data.format, ())
    found = data.named | {name for name in KEYS if data.columns(name)[0] in given}
    if "label" in found and data.columns("chosen")[0] not in given:
        if "completion" not in found and "messages" in found:
            return ("messages", "label")
        return ("messages" if "messages" in data.named else "prompt", "completion", "label")
    shared = ("messages",) if "messages" in data.named else ("prompt",) if "prompt" in found else ()
    return (*shared, "chosen", "rejected")


def fields_of(data: Data, given: Collection[str] = ()) -> tuple[str, ...]:
    """Return the names in the data of the fields that a run reads, of those that are given."""
    names = names_of(data, given)
    fields = tuple(column for name in names for column in data.columns(name)) or (data.text_field,)
    if (
        data.format in ("chat", "preference")
        and data.tools is not None
        and not data.tools.endswith(".json")
    ):
        return (*fields, data.tools)
    return fields


def fields_beside(data: Data, given: Collection[str] = ()) -> tuple[str, ...]:
    """Return the known fields that a run does not name, which are taken or refused."""
    fields, names = fields_of(data, given), () if data.format == "text" else BESIDE
    names += ROW_FLAGS
    if data.format in ("completion", "chat"):
        names += LABELS
    if data.format in ("chat", "preference"):
        names += (VARIABLES,)
    if data.format != "chat" and {"instruction", "question"} & {*fields}:
        names += BESIDE_QUESTION
    return tuple(name for name in names if name not in (*fields, *data.unused))


def given(record: Record, names: Sequence[str]) -> dict[str, Any]:
    """Return those of these fields of a document that are not empty, and flags with an effect."""
    flags = (*ROW_FLAGS, *LABELS)
    values = {k: record.get(k) for k in names if k not in flags or has_effect(k, record.get(k))}
    return {k: v for k, v in values.items() if k in flags or str(v or "").strip()}


def has_effect(flag: str, value: Any) -> bool:
    """Return whether a flag, which is text in CSV, may take away a target, or a label an answer."""
    if flag in LABELS:
        return str(value).strip().lower() in ("false", "0", "0.0")
    is_negative, is_unclear = flag in ("ignore_loss", "masked", "no_loss"), flag == "mask"
    harmless = () if is_unclear else ("false", "0", "0.0") if is_negative else ("true", "1", "1.0")
    return str(value).strip().lower() not in ("none", "", "[]", *harmless)


def check_all_read(record: Record, names: Sequence[str], data: Data) -> None:
    """Raise BadDocument where one of these fields, which the run does not read, is not empty."""
    for name in given(record, names):
        key = "messages" if "messages" in data.named else "prompt"
        prompt, others = data.columns(key), ", completion: ..." * (data.format == "completion")
        first = (name, *prompt) if name in SYSTEM else (*prompt, name)
        way_out = f"set data.fields to {{{key}: [{', '.join(first)}]{others}}}"
        if data.format == "preference" and name not in BESIDE_QUESTION:
            way_out = f"set data.fields to {{messages: [{', '.join(prompt)}]}}, for a chat template"
        if name in MEDIA:
            way_out = "only text is trained on; remove the line"
        elif name in LABELS:
            way_out = (
                "the answer, which would be learnt, is bad; remove the line, set data.format: "
            )
            way_out += "preference and training.objective: kto"
        elif name in ROW_FLAGS:
            way_out = "only messages of a chat have flags; remove the line"
        elif data.format == "chat" and name in TOOLS:
            way_out = f"set data.tools: {name}"
        elif data.format == "chat":
            way_out = "write its turns into the messages"
        elif name == "history":
            way_out = "write its turns as messages and set data.format: chat"
        elif name not in BESIDE_QUESTION and data.format != "preference":
            way_out += ", or write messages and set data.format: chat"
        raise unread(name, way_out)


def unread(name: str, way_out: str) -> BadDocument:
    """Return the error of a field that would be lost; it can always be left out on purpose."""
    ways = f"{way_out}, or set data.fields: {{unused: {name}}} to leave it out"
    return BadDocument("unread field", f"field {name!r} is not read; {ways}")
