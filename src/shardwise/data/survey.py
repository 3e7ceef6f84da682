"""Counts of what documents come to in tokens: all of a source, or a sample of it, before a run
reads them.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from shardwise.data.corpus import Corpus, CorpusPart
from shardwise.data.formats import Encoder
from shardwise.data.record import BadDocument
from shardwise.data.slots import Documents, encoded
from shardwise.data.state import SlotState
from shardwise.data.state import describe as describe_left_out

SAMPLE = 100
"""The documents that a run reads before its first step, to say what becomes of them."""
MOST_TOKENS = 1_000_000
"""A sample ends with the document that reaches so many tokens."""
MOST_SOURCES = 20
"""With more files, tables and data sets, those of a group of entries are counted together."""


@dataclass
class Survey:
    """Counts of the documents of a source that were read."""

    name: str
    num_documents: int | None
    """All that the source has; None for a stream."""
    share: float | None = None
    """The share of the documents of an epoch that are its own; None where it is not known."""
    read: int = 0
    tokens: int = 0
    """Tokens that rows have, of the documents that have a target."""
    targets: int = 0
    cut: int = 0
    """Documents longer than a row, which are cut, split or left out."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Documents without a target, or turns where each turn is a document, by reason."""
    longest: int = 0
    """Tokens of the longest document, before it is cut."""
    where: str = ""
    """The place of the longest document."""

    def add(
        self,
        documents: Documents,
        encoder: Encoder,
        numbers: Iterable[int],
        most_tokens: float = MOST_TOKENS,
    ) -> "Survey":
        """Read the documents of these numbers, up to the one that reaches so many tokens.

        UserError for one that cannot be used.
        """
        for number in numbers:
            if self.tokens >= most_tokens:
                break
            self.read += 1
            try:
                record, group, texts = encoded(documents, number, encoder)
            except BadDocument as error:
                self.left_out[error.reason] += 1
                continue
            cut = encoder.cut(texts, SlotState())
            used = [document for document in cut if document.has_target()]
            self.left_out += encoder.left_out(record, cut, group)
            self.cut += any(document.is_long for document in cut)
            self.tokens += sum(map(len, used))
            self.targets += sum(int(document.targets.sum()) for document in used)
            lengths = [len(tokens) for tokens, _ in texts]  # both sides have one row
            length = sum(lengths) if encoder.data.is_preference else max(lengths, default=0)
            if length > self.longest:
                self.longest, self.where = length, documents.where(number)
        return self

    def mean(self, count: int) -> float:
        """Return a count for each document of an epoch, of all sources, that this source gives."""
        return (self.share or 0.0) * count / max(self.read, 1)

    @property
    def scale(self) -> float:
        """How many documents of the source stand for one that was read."""
        return (self.num_documents or self.read) / max(self.read, 1)

    def to_dict(self) -> dict[str, Any]:
        """Return the counts as plain data, those of the documents that were read."""
        return {**vars(self), "left_out": dict(self.left_out)}

    def __str__(self) -> str:
        all_of = "" if self.num_documents is None else f" of {self.num_documents:,}"
        parts = [f"{self.read:,}{all_of} documents have {self.tokens:,} tokens"]
        parts.append(f"{self.targets / max(self.tokens, 1):.0%} of them targets")
        parts.append(f"{self.cut / max(self.read, 1):.0%} are longer than a row")
        left_out = sum(self.left_out.values())
        reasons = f" ({describe_left_out(self.left_out)})" if left_out else ""
        return f"{', '.join(parts)}, {left_out:,} left out{reasons}"


def spread(numbers: range, most: int) -> list[int]:
    """Return at most so many of these numbers, evenly spaced from the first to the last."""
    if len(numbers) <= most:
        return list(numbers)
    return [numbers[i * (len(numbers) - 1) // max(most - 1, 1)] for i in range(most)]


def sample(corpus: Corpus, encoder: Encoder) -> str:
    """Return in words what a sample of the documents comes to."""
    survey = Survey("data.train", len(corpus))
    return f"{survey.name}: {survey.add(corpus, encoder, spread(range(len(corpus)), SAMPLE))}"


def sources_of(corpus: Corpus) -> list[CorpusPart]:
    """Return the sources of a corpus, of many those of each group of entries as one."""
    parts = list(corpus.parts())
    if len(parts) <= MOST_SOURCES:
        return parts
    joined: list[CorpusPart] = []
    for group in dict.fromkeys(part.group for part in parts):
        members = [part for part in parts if part.group == group]
        numbers = range(members[0].numbers.start, members[-1].numbers.stop)
        joined.append(
            CorpusPart(f"{members[0].name} and {len(members) - 1:,} others", group, numbers)
        )
    return joined
