"""The section `data` of the run file."""

import json
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from shardwise.config.ranges import shown
from shardwise.config.section import KeyFacts, Section, require, with_facts

Format = Literal["text", "completion", "chat", "preference"]
"""Kinds of documents, by their fields."""

Fields = dict[str, str | list[str]]
"""The names in the data of the keys of FIELDS."""

FIELDS = ("prompt", "completion", "messages", "chosen", "rejected", "label", "unused")
"""Keys of `fields`: what fields of the data stand for; `unused` ones are left out on purpose."""


@dataclass(frozen=True)
class Entry(Section):
    """An entry of `data.train` or `data.validation` that has a format or a weight of its own."""

    path: str
    """A file, folder, glob pattern or dataset, as in an entry that is a text."""
    format: Format | None = None
    """null: the entry is read by `data.format`, `data.text_field`, `data.fields` and `data.tools`,
    except for what it gives itself. An entry with a format takes none of these four."""
    text_field: str | None = None
    """Replaces `data.text_field` for this entry."""
    fields: Fields | None = None
    """Replaces `data.fields` for this entry."""
    tools: str | None = None
    """Replaces `data.tools` for this entry."""
    weight: float | None = None
    """How often an entry of `train` is read, relative to the others; null: by its documents."""


Group = tuple[tuple[str, ...], "Data"]
"""Entries that are read alike, and the section `data` by which they are read."""


@dataclass(frozen=True)
class Data(Section):
    """The data that it is trained on."""

    facts: ClassVar[KeyFacts] = KeyFacts(decides="work", for_own_loop=False)

    train: str | list[str | Entry] = with_facts(
        resumable=True, timed=False, reported=True, for_own_loop=True
    )
    """Files, folders or glob patterns: JSON, CSV, Parquet or plain text (one document per file); or
    the name or folder of a `datasets` dataset. `FOLDER::SPLIT` names one of several splits. An
    entry of the list may be a mapping: `path`, and `format`, `text_field`, `fields` or `tools` of
    its own, or a `weight`, by which it is read more or less often than the others."""
    max_documents: int | None = with_facts(None, between=(1, 1_000_000_000_000), timed=False)
    """Use the first documents of `train` alone, so many at most; of entries with weights, of each.
    The share for validation is taken of these."""
    streaming: bool = with_facts(False, timed=False)
    """Read data sets of `datasets` from first to last, without a download or an index, in a buffer
    that shuffles. Each process reads the whole stream; a resume reads it again up to its place."""
    validation: float | str | list[str | Entry] = with_facts(0.0, timed=False)
    """The share of the documents that is held out, or separate files, as in `train`."""
    format: Format = with_facts("text", timed=False)
    """`text`: every token is a target, also the end-of-text token behind it. `completion`: fields
    `prompt` and `completion`; the tokens of the completion are targets. `chat`: field `messages`,
    written by a chat template; `train_on` says which tokens are targets. `preference`: pairs, with
    `prompt`, `chosen` and `rejected`."""
    chat_template: str | None = with_facts(None, timed=False)
    """Chat: a file with the Jinja template; null: the tokenizer's own."""
    template_arguments: dict[str, Any] | None = with_facts(None, timed=False, rows=True)
    """Chat: variables of the template, such as `enable_thinking: false`."""
    tools: str | None = with_facts(None, timed=False)
    """Chat: the tools that a dialogue offers: a `.json` file, the same for all dialogues, or the
    field of each document that has them; null: the field `tools`, where a document has it."""
    train_on: Literal["assistant", "last", "all"] = with_facts("assistant", timed=False, rows=True)
    """Chat: the targets are all turns of the assistant, its last one, or every token. A message
    of the assistant with false for `train`, `training` or `loss`, or `"weight": 0`, is none."""
    train_on_thinking: Literal["all", "filled", "none"] = with_facts("all", timed=False, rows=True)
    """Chat: whether a block of thinking at the beginning of a turn is a target: always; only where
    it has words, and not the empty `<think></think>` that a template writes; or never."""
    turns: Literal["together", "separate"] = with_facts("together", timed=False, rows=True)
    """Chat: `separate` makes a document of each turn that is trained on, with the turns before it
    written as they are at inference. It is meant for templates that leave out earlier thinking."""
    text_field: str = with_facts("text", timed=False)
    """The field that holds the document (format `text`)."""
    fields: Fields | None = with_facts(None, timed=False)
    """Names of the fields in the data that stand for `prompt`, `completion`, `messages`, `chosen`,
    `rejected` or `label`, such as `{prompt: [instruction, input], completion: output}`: the texts
    of a list that are not empty are joined by an empty line, and messages follow each other, the
    last field's alone as targets. `unused` names fields that are left out on purpose."""
    on_error: Literal["fail", "skip"] = with_facts("fail", timed=False)
    """A document that cannot be used ends the run, or is skipped and counted."""
    sequence_length: int = with_facts(
        512, between=(1, 16_777_216), reported=True, for_own_loop=True, rows=True
    )
    """Tokens in a row; with the label of its last token, a row reads one token more."""
    packing: Literal["auto", "none", "concat", "isolated", "documents"] = with_facts(
        "auto", reported=True, for_own_loop=True
    )
    """`none`: a row holds one document (a long one continues in the next row), and a micro-batch
    ends with its longest one. `concat`: documents are joined by the end-of-text token and cut into
    full rows; a document sees the one before it in its row. `isolated`: rows as with `concat`, but
    no layer of any kind carries anything from one document into the next. `documents`: a row holds
    whole documents, isolated in the same way. `auto`: `concat` where all is text, else
    `documents`."""
    long: Literal["cut", "split", "skip"] = with_facts("cut", timed=False, rows=True)
    """Packing `documents`: a document longer than a row is cut to its beginning, split into several
    documents, or skipped; of a pair the beginning of the prompt is cut, then the ends of both
    answers. The record counts these documents."""
    workers: int = with_facts(0, between=(0, 1_024), resumable=True, timed=False, decides=None)
    """Worker processes per rank that tokenise; the batches do not depend on their number."""

    def columns(self, name: str) -> tuple[str, ...]:
        """Return the names in the data of one of FIELDS."""
        columns = (self.fields or {}).get(name, name)
        return (columns,) if isinstance(columns, str) else tuple(columns)

    @property
    def named(self) -> frozenset[str]:
        """The keys of FIELDS that `fields` gives names for."""
        return frozenset(self.fields or ())

    def as_chat(self) -> "Data":
        """Return the section by which records with `messages` are read."""
        fields = {name: value for name, value in (self.fields or {}).items() if name == "unused"}
        return replace(self, format="chat", fields=fields or None)

    @property
    def unused(self) -> tuple[str, ...]:
        """The fields of the data, or flags of its messages, that are left out on purpose."""
        return self.columns("unused") if "unused" in self.named else ()

    def entries(self, key: Literal["train", "validation"]) -> list[str | Entry]:
        """Return the entries of `train` or `validation`; none where a share is held out."""
        entries = getattr(self, key)
        if isinstance(entries, int | float):
            return []
        return [entries] if isinstance(entries, str) else entries

    @property
    def shares(self) -> tuple[float, ...] | None:
        """How often each entry of `train` is read, relative to the others; None: by its size."""
        entries = self.entries("train")
        weights = (e.weight for e in entries if isinstance(e, Entry) and e.weight is not None)
        return tuple(weights) or None

    def groups(self, key: Literal["train", "validation"]) -> list[Group]:
        """Return the entries of `train` or `validation` in groups that are read alike.

        A mapping is a group by itself. Entries that are texts are one group, whose files are read
        in the order of their names.
        """
        entries = self.entries(key)
        texts = tuple(entry for entry in entries if isinstance(entry, str))
        groups = [(texts, self._read_by(Entry("")))] if texts else []
        mappings = [entry for entry in entries if isinstance(entry, Entry)]
        return [*groups, *(((entry.path,), self._read_by(entry)) for entry in mappings)]

    def _read_by(self, entry: Entry) -> "Data":
        """Return the section by which an entry is read: with its own keys in place of others."""
        names = ("text_field", "fields", "tools")
        own = {name: getattr(entry, name) for name in names if getattr(entry, name) is not None}
        if entry.format is not None:
            plain = Data("all", format=entry.format)
            own = {name: getattr(plain, name) for name in names} | own | {"format": entry.format}
        return replace(self, train="all", validation=0.0, packing=self.packed, **own)

    @property
    def formats(self) -> frozenset[Format]:
        """The formats of the documents that are trained on."""
        entries = self.entries("train")
        return frozenset((isinstance(e, Entry) and e.format) or self.format for e in entries)

    @property
    def is_preference(self) -> bool:
        """Whether documents are pairs or labelled answers, as all of a run are, or none."""
        return "preference" in self.formats

    @property
    def packed(self) -> Literal["none", "concat", "isolated", "documents"]:
        """How rows are packed: `packing`, where `auto` goes by the format."""
        if self.packing == "auto":
            return "concat" if self.formats == {"text"} else "documents"
        return self.packing

    @property
    def keeps_documents_apart(self) -> bool:
        """Whether no layer carries anything from one document of a row into the next."""
        return self.packed in ("isolated", "documents") or self.is_preference

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("train", "validation"):
            entries = self.entries(key)
            paths = [entry if isinstance(entry, str) else entry.path for entry in entries]
            # An empty path is the folder in which the command runs.
            is_empty = any(not path.strip() for path in paths)
            require(not is_empty, f"data.{key} has an empty name; give files, or . for this folder")
            for entry in entries:
                if isinstance(entry, Entry):
                    _check_fields(f"data.{key}: {entry.path}: fields", entry.fields)
            self._check_weights(key)
        _check_fields("data.fields", self.fields)
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

    def _check_weights(self, key: Literal["train", "validation"]) -> None:
        """Raise UserError unless all entries of `train` have a weight, or none has one."""
        entries = self.entries(key)
        weights = [getattr(entry, "weight", None) for entry in entries]
        given = [weight for weight in weights if weight is not None]
        if not given:
            return
        is_read = key == "train"
        require(is_read, "data.validation has a weight, but is read whole; leave it out")
        are_all = len(given) == len(entries)
        some = f"data.train: {len(given)} of {len(entries)} entries have a weight"
        require(are_all, f"{some}; give each of them one, as in {{path: FILE, weight: 1}}")
        are_shares = all(1e-9 <= weight <= 1e9 for weight in given)
        what = f"data.train: the weights of its entries are {shown(given)}"
        require(are_shares, f"{what}; give numbers of 1e-9 to 1e9")


def _check_fields(name: str, fields: Fields | None) -> None:
    """Raise UserError where the fields of the section or of an entry name what no format reads."""
    unknown = sorted(set(fields or {}) - set(FIELDS))
    known = f"give names for {', '.join(FIELDS)}, and for a text its text_field"
    require(not unknown, f"{name} names {', '.join(unknown)}; {known}")
    is_empty = not all((fields or {}).values())
    require(not is_empty, f"{name} has an empty list; name the fields of the data")
