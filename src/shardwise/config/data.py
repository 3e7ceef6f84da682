"""The section `data` of the run file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from shardwise.config.section import Section, require
from shardwise.ranges import shown


@dataclass(frozen=True)
class Data(Section):
    """The data that it is trained on."""

    train: str | list[str]
    """Files, folders or glob patterns: JSON, CSV, Parquet or plain text (one document per file); or
    the name or folder of a `datasets` dataset. `FOLDER::SPLIT` names one of several splits."""
    weights: list[float] | None = None
    """How often each entry of `train` is read, relative to the others; null: by its number of
    documents."""
    max_documents: int | None = None
    """Use the first documents of `train` alone, so many at most; with `weights`, of each entry.
    The share for validation is taken of these."""
    streaming: bool = False
    """Read data sets of `datasets` from first to last, without a download or an index, in a buffer
    that shuffles. Each process reads the whole stream; a resume reads it again up to its place."""
    validation: float | str | list[str] = 0.0
    """The share of the documents that is held out, or separate files."""
    format: Literal["text", "completion", "chat"] = "text"
    """`text`: every token is a target, also the end-of-text token behind it. `completion`: fields
    `prompt` and `completion`; the tokens of the completion are targets. `chat`: field `messages`,
    written by a chat template; `train_on` says which tokens are targets."""
    chat_template: str | None = None
    """Chat: a file with the Jinja template; null: the tokenizer's own."""
    template_arguments: dict[str, Any] | None = None
    """Chat: variables of the template, such as `enable_thinking: false`."""
    tools: str | None = None
    """Chat: the tools that a dialogue offers: a `.json` file, the same for all dialogues, or the
    field of each document that has them; null: the field `tools`, where a document has it."""
    train_on: Literal["assistant", "last", "all"] = "assistant"
    """Chat: the targets are all turns of the assistant, its last one, or every token. A message
    of the assistant with false for `train`, `training` or `loss`, or `"weight": 0`, is none."""
    turns: Literal["together", "separate"] = "together"
    """Chat: `separate` makes a document of each turn that is trained on, with the turns before it
    written as they are at inference. It is meant for templates that leave out earlier thinking."""
    text_field: str = "text"
    """The field that holds the document (format `text`)."""
    fields: dict[str, str | list[str]] | None = None
    """Names of the fields in the data that stand for `prompt`, `completion` or `messages`, such as
    `{prompt: [instruction, input], completion: output}`: the texts of a list that are not empty
    are joined by an empty line, and messages follow each other, the last field's alone as targets.
    `unused` names fields that are left out on purpose."""
    on_error: Literal["fail", "skip"] = "fail"
    """A document that cannot be used ends the run, or is skipped and counted."""
    sequence_length: int = 512
    """Tokens in a row; with the label of its last token, a row reads one token more."""
    packing: Literal["auto", "none", "concat", "isolated", "documents"] = "auto"
    """`none`: a row holds one document (a long one continues in the next row). `concat`: documents
    are joined by the end-of-text token and cut into full rows; a document sees the one before it
    in its row. `isolated`: rows as with `concat`, but no layer of any kind carries anything from
    one document into the next. `documents`: a row holds whole documents, isolated in the same way.
    `auto`: `concat` for texts, else `documents`."""
    long: Literal["cut", "split", "skip"] = "cut"
    """Packing `documents`: a document longer than a row is cut to its beginning, split into several
    documents, or skipped. The record counts these documents."""
    workers: int = 0
    """Worker processes per rank that tokenise; the batches do not depend on their number."""

    def columns(self, name: str) -> tuple[str, ...]:
        """Return the names in the data of `prompt`, `completion` or `messages`."""
        columns = (self.fields or {}).get(name, name)
        return (columns,) if isinstance(columns, str) else tuple(columns)

    @property
    def unused(self) -> tuple[str, ...]:
        """The fields of the data, or flags of its messages, that are left out on purpose."""
        return self.columns("unused") if "unused" in (self.fields or {}) else ()

    @property
    def packed(self) -> Literal["none", "concat", "isolated", "documents"]:
        """How rows are packed: `packing`, where `auto` goes by the format."""
        if self.packing == "auto":
            return "concat" if self.format == "text" else "documents"
        return self.packing

    @property
    def keeps_documents_apart(self) -> bool:
        """Whether no layer carries anything from one document of a row into the next."""
        return self.packed in ("isolated", "documents")

    def __post_init__(self) -> None:
        super().__post_init__()
        for key, entries in (("train", self.train), ("validation", self.validation)):
            texts = [entries] if isinstance(entries, str) else entries
            # An empty path is the folder in which the command runs.
            is_empty = isinstance(texts, list) and not all(text.strip() for text in texts)
            require(not is_empty, f"data.{key} has an empty name; give files, or . for this folder")
        if self.weights is not None:
            num_entries = 1 if isinstance(self.train, str) else len(self.train)
            require(
                len(self.weights) == num_entries,
                f"data.weights has {len(self.weights)} numbers; give one for each of the "
                f"{num_entries} entries of data.train",
            )
            are_shares = all(1e-9 <= weight <= 1e9 for weight in self.weights)
            require(
                are_shares, f"data.weights is {shown(self.weights)}; give numbers of 1e-9 to 1e9"
            )
        unknown = sorted(set(self.fields or {}) - {"prompt", "completion", "messages", "unused"})
        require(
            not unknown,
            f"data.fields names {', '.join(unknown)}; give names for prompt, completion, messages "
            "or unused, and for a text data.text_field",
        )
        require(
            all(self.columns(name) for name in self.fields or {}),
            "data.fields has an empty list; name the fields of the data",
        )
        arguments = self.template_arguments
        try:
            is_plain = json.loads(json.dumps(arguments)) == arguments
        except (TypeError, ValueError):
            is_plain = False
        require(
            is_plain,
            "data.template_arguments has a value that is no text, number, switch, list or mapping "
            "with text as keys; put dates in quotes",
        )
        if isinstance(self.validation, int | float):
            in_range = 0.0 <= self.validation < 1.0
            require(in_range, f"data.validation is {self.validation}; give a share in [0, 1)")
