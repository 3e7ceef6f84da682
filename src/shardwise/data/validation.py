"""The rows of the validation set, the same for every layout."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from shardwise.base.batches import Batch
from shardwise.config import Training, UserError
from shardwise.data.corpus import Corpus
from shardwise.data.formats import LONGER_ROWS, TOO_LONG, Encoder
from shardwise.data.packing import Document, RowLengths, to_microbatches
from shardwise.data.slots import read_documents
from shardwise.data.state import Counts, SlotState, describe
from shardwise.data.streaming import StreamPass


@dataclass(eq=False)
class Validation:
    """The rank's micro-batches (`step` is 0) of each global batch of the validation set.

    Every rank has equally many. Row r goes to slot r mod G of global batch r // G (G is the global
    batch size), and missing rows at the end are padding. A row is known only when all documents
    before it are tokenised. So every rank tokenises all documents (or `eval_batches` global
    batches), and does so in each evaluation, since it would take memory to keep the rows.
    """

    corpus: Corpus | StreamPass
    documents: Callable[[], Iterable[int]]
    encoder: Encoder
    training: Training
    slots: range
    lengths: RowLengths
    read: Counts = field(default_factory=lambda: Counts(0, 0, 0, {}))
    """Counts of what the last evaluation has read, the same on every rank."""
    _all: Counts = field(init=False)

    def __iter__(self) -> Iterator[list[Batch]]:
        batch_size, size = self.training.global_batch_size, self.training.micro_batch_size
        padding = self.encoder.padding()
        limit = self.training.eval_batches * batch_size or None
        rows = itertools.islice(self.encoder.rows(self._documents()), limit)
        num_rows, end = 0, SlotState()
        while taken := list(itertools.islice(rows, batch_size)):
            num_rows, end = num_rows + len(taken), taken[-1][1]
            self.read = Counts(num_rows, end.begun, end.finished, end.skipped, end.long)
            batch = [row for row, _ in taken] + [padding] * (batch_size - len(taken))
            rank_rows = [batch[slot] for slot in self.slots]
            yield to_microbatches(rank_rows, self.slots, size, 0, self.lengths)
        if num_rows != limit:
            # Everything was read, also the documents behind the last row that were left out.
            self.read = replace(self._all, rows=num_rows)
        if num_rows == 0:
            skipped = describe(self.read.skipped)
            what = f"data.validation: no document has a target (left out: {skipped})"
            is_short = set(self.read.skipped) == {TOO_LONG}
            raise UserError(f"{what}; {LONGER_ROWS if is_short else 'give other documents'}")

    def _documents(self) -> Iterator[Document]:
        skipped, count, num_long = Counter[str](), 0, 0
        numbers = self.documents()
        others = itertools.repeat(None)
        if self.encoder.reads_labels:  # no stream, whose records are read once
            numbers = [*numbers]
            others = [*numbers[1:], *numbers[:1]]
        for count, (number, other) in enumerate(zip(numbers, others), 1):
            start = SlotState(place=count - 1)
            read, left_out = read_documents(self.corpus, number, self.encoder, start, other)
            num_long += any(document.is_long for document in read)
            skipped += left_out
            for document in read:
                start = replace(document.start, long=num_long, skipped=dict(skipped))
                yield replace(document, start=start)
        self._all = Counts(0, count, count, dict(skipped), num_long)
