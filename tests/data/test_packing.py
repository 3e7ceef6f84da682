import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from shardwise.base.batches import IGNORED, Batch
from shardwise.config import Data, Model, Parallel, RunConfig, Training, UserError
from shardwise.data.formats import Encoder
from shardwise.data.packing import (
    PADDING,
    Document,
    RowLengths,
    empty_row,
    pack_joined,
    pack_none,
    to_batch,
    to_microbatches,
)
from shardwise.data.state import SlotState

FILL = 0


def batch_of(rows: list[np.ndarray]) -> Batch:
    return to_batch(np.stack(rows), range(len(rows)), step=1)


def documents_of(tokens: list[list[int]], targets: list[list[int]] | None = None) -> list[Document]:
    """Documents of these tokens; without `targets` every token is one."""
    masks = targets or [[1] * len(document) for document in tokens]
    return [
        Document(np.array(document, np.int32), np.array(mask, bool), SlotState(place=place))
        for place, (document, mask) in enumerate(zip(tokens, masks))
    ]


def none(documents: list[Document], sequence_length: int) -> list[np.ndarray]:
    return [row for row, _ in pack_none(documents, sequence_length, FILL)]


def joined(documents: list[Document], sequence_length: int) -> list[np.ndarray]:
    return [row for row, _ in pack_joined(documents, sequence_length, FILL)]


def targets(batch: Batch) -> list[int]:
    return batch.labels[batch.labels != IGNORED].tolist()


def test_none_cuts_a_long_document_and_fills_up() -> None:
    # Five tokens in rows of three: 10 -> 11 -> 12 -> 13 in the first row, 13 -> 14 in the second.
    # One token: no row.
    batch = batch_of(none(documents_of([[10, 11, 12, 13, 14], [20], [30, 31]]), 3))
    assert batch.input_ids.tolist() == [[10, 11, 12], [13, 14, FILL], [30, 31, FILL]]
    assert batch.labels.tolist() == [[11, 12, 13], [14, IGNORED, IGNORED], [31, IGNORED, IGNORED]]
    assert batch.document_ids.tolist() == [[0, 0, 0], [0, 0, -1], [0, 0, -1]]


def test_concat_joins_documents_and_counts_them_within_the_row() -> None:
    # 1 is the end-of-text token. The second row begins with the last token of the first, of the
    # second document.
    batch = batch_of(joined(documents_of([[10, 11, 1], [20, 21, 1], [30, 1]]), 4))
    assert batch.input_ids.tolist() == [[10, 11, 1, 20], [21, 1, 30, 1]]
    assert batch.labels.tolist() == [[11, 1, 20, 21], [1, 30, 1, IGNORED]]
    assert batch.document_ids.tolist() == [[0, 0, 0, 1], [0, 0, 1, 1]]


def test_batch_is_int64_contiguous_and_carries_slots_and_step():
    batch = to_batch(np.stack(joined(documents_of([[1, 2, 3, 4, 5]]), 2)), range(6, 8), step=7)
    for tensor in (batch.input_ids, batch.labels, batch.document_ids):
        assert tensor.dtype == torch.int64
        assert tensor.shape == (2, 2)
        assert tensor.is_contiguous()
    assert (batch.slots, batch.step, batch.num_target_tokens()) == ((6, 7), 7, 4)


def test_empty_row_has_no_target():
    batch = batch_of([empty_row(3, fill=9)])
    assert batch.input_ids.tolist() == [[9, 9, 9]]
    assert batch.labels.tolist() == [[IGNORED] * 3]
    assert batch.document_ids.tolist() == [[-1] * 3]


documents = st.lists(st.lists(st.integers(2, 99), min_size=1, max_size=20), max_size=8)


@given(documents, st.integers(1, 9))
def test_none_predicts_each_token_but_a_documents_first_once(documents, sequence_length):
    rows = none(documents_of(documents), sequence_length)
    predicted = targets(batch_of(rows)) if rows else []
    assert predicted == [token for tokens in documents for token in tokens[1:]]
    # Each target is predicted from the token before it in the same document.
    pairs = {pair for tokens in documents for pair in itertools.pairwise(tokens)}
    for batch in (batch_of([row]) for row in rows):
        seen = zip(batch.input_ids[0].tolist(), batch.labels[0].tolist())
        assert {(token, label) for token, label in seen if label != IGNORED} <= pairs


@given(documents, st.integers(1, 9))
def test_concat_predicts_each_token_of_the_joined_stream_but_the_first_once(
    documents, sequence_length
):
    stream = [token for tokens in documents for token in tokens]
    owners = [number for number, tokens in enumerate(documents) for _ in tokens]
    rows = joined(documents_of(documents), sequence_length)
    assert len(rows) == -(-max(len(stream) - 1, 0) // sequence_length)
    assert [token for row in rows for token in targets(batch_of([row]))] == stream[1:]
    for index, row in enumerate(rows):
        start = index * sequence_length
        row_owners = owners[start : start + sequence_length + 1]
        assert row[0, : len(row_owners)].tolist() == stream[start : start + sequence_length + 1]
        padding = [-1] * (sequence_length + 1 - len(row_owners))
        assert row[1].tolist() == [owner - row_owners[0] for owner in row_owners] + padding


@pytest.mark.parametrize("packing", ["none", "concat"])
def test_encoder_ends_every_text(tokenizer, packing):
    encoder = Encoder.of(tokenizer, Data(train="unused", packing=packing))
    the, space = tokenizer("the ")["input_ids"]
    for text, tokens in (
        ("the the", [the, space, the, 1]),
        ("the<eos>", [the, 1]),  # a document that ends with the token itself gets no second one
        ("", []),
    ):
        document = encoder.documents({"text": text}, SlotState())[0]
        assert document.tokens.tolist() == tokens
        assert document.targets.tolist() == [True] * len(tokens)


def test_long_document_gives_no_warning(tokenizer, caplog, capfd):
    short = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer, eos_token="<eos>", model_max_length=4
    )
    encoder = Encoder.of(short, Data(train="unused"))
    assert len(encoder.documents({"text": "abcdefgh"}, SlotState())[0]) == 9
    assert (caplog.records, capfd.readouterr().err) == ([], "")


def test_special_tokens_that_packing_needs(tokenizer):
    backend = tokenizer.backend_tokenizer
    bare, only_pad, only_eos = (
        PreTrainedTokenizerFast(tokenizer_object=backend, **special)
        for special in ({}, {"pad_token": "<pad>"}, {"eos_token": "<eos>"})
    )
    none, concat = Data(train="unused", packing="none"), Data(train="unused", packing="concat")
    assert Encoder.of(only_eos, concat).fill == 1
    assert Encoder.of(only_pad, none).fill == 0
    with pytest.raises(UserError, match=r"^data\.packing concat .* eos_token"):
        Encoder.of(only_pad, concat)
    with pytest.raises(UserError, match=r"pad_token .* eos_token .*; "):
        Encoder.of(bare, none)


def test_isolated_documents_do_not_predict_one_anothers_first_token(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    # a b EOS c d EOS e f EOS in rows of 2: the second row begins with the EOS that ends the first
    # document, from which c must not be predicted, and goes on with c, from which d is. The third
    # row ends before e, its target if joined.
    encoder = Encoder.of(tokenizer, Data(train="unused", packing="isolated", sequence_length=2))
    a, b, c, d, e, f = tokenizer("abcdef")["input_ids"]
    documents = [
        encoder.documents({"text": text}, SlotState(place=place))[0]
        for place, text in enumerate(("ab", "cd", "ef"))
    ]
    batch = batch_of([row for row, _ in encoder.rows(documents)])
    assert batch.input_ids.tolist() == [[a, b], [1, c], [d, 1], [e, f]]
    assert batch.labels.tolist() == [[b, 1], [IGNORED, d], [1, IGNORED], [f, 1]]
    assert batch.document_ids.tolist() == [[0, 0], [0, 1], [0, 0], [0, 0]]


@pytest.mark.parametrize("sequence_length", [2, 4, 5])
def test_isolated_rows_are_those_of_concat(tokenizer, sequence_length):
    texts = ["abcdefg", "h", "ijk", "lmnopqrstuvw"]
    rows = {}
    for packing in ("concat", "isolated"):
        encoder = Encoder.of(
            tokenizer, Data(train="unused", packing=packing, sequence_length=sequence_length)
        )
        documents = [
            encoder.documents({"text": text}, SlotState(place=place))[0]
            for place, text in enumerate(texts)
        ]
        rows[packing] = [(batch_of([row]), at) for row, at in encoder.rows(documents)]
    assert len(rows["isolated"]) == len(
        rows["concat"]
    )  # at these lengths no row is left without a target
    for (isolated, at), (concat, at_concat) in zip(rows["isolated"], rows["concat"]):
        assert at == at_concat
        assert torch.equal(isolated.input_ids, concat.input_ids)
        assert torch.equal(isolated.document_ids, concat.document_ids)
        # The label belongs to the next position: ignored exactly where that one has another
        # document.
        following = [*concat.document_ids[0, 1:].tolist(), None]
        for position in range(sequence_length - 1):
            same = concat.document_ids[0, position] == following[position]
            expected = concat.labels[0, position] if same else IGNORED
            assert isolated.labels[0, position] == expected


def test_row_without_a_target_is_left_out() -> None:
    # Rows of 2: tokens 0-2, 2-4, 4-6 of the stream; only tokens 5 and 6 are targets.
    for pack in (none, joined):
        (row,) = pack(documents_of([[10, 11, 12, 13, 14, 15, 16]], [[0, 0, 0, 0, 0, 1, 1]]), 2)
        batch = batch_of([row])
        assert (batch.input_ids.tolist(), batch.labels.tolist()) == ([[14, 15]], [[15, 16]])


@given(
    counts=st.lists(st.integers(1, 40), min_size=4, max_size=4),
    length=st.integers(8, 40),
    multiple=st.integers(1, 12),
    is_of_step=st.booleans(),
)
def test_microbatches_end_with_their_longest_document(counts, length, multiple, is_of_step):
    rows = none(documents_of([list(range(1, count + 2)) for count in counts]), length)[:4]
    full, cut = (
        to_microbatches(rows, range(len(rows)), 2, 1, RowLengths(length, up_to, is_of_step))
        for up_to in (None, multiple)
    )
    lengths = []
    for whole, batch in zip(full, cut, strict=True):
        width = batch.input_ids.shape[1]
        lengths.append(width)
        for name in ("input_ids", "labels", "document_ids"):
            assert torch.equal(getattr(batch, name), getattr(whole, name)[:, :width])
        assert whole.document_ids[:, width:].eq(PADDING).all()
        assert whole.labels[:, width:].eq(IGNORED).all()
        used = int(whole.document_ids.ne(PADDING).any(0).sum())
        assert width == min(length, -(-used // multiple) * multiple) or is_of_step
    if is_of_step:
        used = max(int(batch.document_ids.ne(PADDING).any(0).sum()) for batch in full)
        assert set(lengths) == {min(length, -(-used // multiple) * multiple)}


@pytest.mark.parametrize(
    ("parallel", "compile", "packing", "expected"),
    [
        ({}, "none", "none", RowLengths(512, 8, False)),
        ({}, "none", "concat", RowLengths(512, None, False)),
        ({}, "inductor", "none", RowLengths(512, None, False)),
        ({"tp": 3, "sequence_parallel": True}, "none", "none", RowLengths(512, 24, False)),
        ({"pp": 2}, "none", "none", RowLengths(512, 8, True)),
        ({"cp": 2}, "none", "none", RowLengths(512, 128, False)),
        ({"cp": 2, "tp": 3}, "none", "none", RowLengths(512, 384, False)),
    ],
)
def test_lengths_are_what_the_axes_can_cut(parallel, compile, packing, expected):
    cfg = RunConfig(
        model=Model("model"),
        data=Data("texts.txt", packing=packing, sequence_length=512),
        parallel=Parallel(**parallel),
        training=Training("out", compile=compile),
    )
    assert RowLengths.of(cfg) == expected
