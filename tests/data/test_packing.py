import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from shardwise.config import Data, UserError
from shardwise.data.packing import Encoder, empty_row, pack_concat, pack_none, to_batch
from shardwise.interfaces import IGNORED, Batch

FILL = 0


def batch_of(rows: list[np.ndarray]) -> Batch:
    return to_batch(np.stack(rows), range(len(rows)), step=1)


def targets(batch: Batch) -> list[int]:
    return batch.labels[batch.labels != IGNORED].tolist()


def test_none_cuts_a_long_document_and_fills_up() -> None:
    # Five tokens in rows of three: 10 -> 11 -> 12 -> 13 in the first row, 13 -> 14 in the second. One token: no row.
    batch = batch_of(list(pack_none([[10, 11, 12, 13, 14], [20], [30, 31]], 3, FILL)))
    assert batch.input_ids.tolist() == [[10, 11, 12], [13, 14, FILL], [30, 31, FILL]]
    assert batch.labels.tolist() == [[11, 12, 13], [14, IGNORED, IGNORED], [31, IGNORED, IGNORED]]
    assert batch.document_ids.tolist() == [[0, 0, 0], [0, 0, -1], [0, 0, -1]]


def test_concat_joins_documents_and_counts_them_within_the_row() -> None:
    # 1 is the end-of-text token. The second row begins with the last token of the first, of the second document.
    batch = batch_of(list(pack_concat([[10, 11, 1], [20, 21, 1], [30, 1]], 4, FILL)))
    assert batch.input_ids.tolist() == [[10, 11, 1, 20], [21, 1, 30, 1]]
    assert batch.labels.tolist() == [[11, 1, 20, 21], [1, 30, 1, IGNORED]]
    assert batch.document_ids.tolist() == [[0, 0, 0, 1], [0, 0, 1, 1]]


def test_batch_is_int64_contiguous_and_carries_slots_and_step() -> None:
    batch = to_batch(np.stack(list(pack_concat([[1, 2, 3, 4, 5]], 2, FILL))), range(6, 8), step=7)
    for tensor in (batch.input_ids, batch.labels, batch.document_ids):
        assert tensor.dtype == torch.int64
        assert tensor.shape == (2, 2)
        assert tensor.is_contiguous()
    assert (batch.slots, batch.step, batch.num_target_tokens()) == ((6, 7), 7, 4)


def test_empty_row_has_no_target() -> None:
    batch = batch_of([empty_row(3, fill=9)])
    assert batch.input_ids.tolist() == [[9, 9, 9]]
    assert batch.labels.tolist() == [[IGNORED] * 3]
    assert batch.document_ids.tolist() == [[-1] * 3]


documents = st.lists(st.lists(st.integers(2, 99), max_size=20), max_size=8)


@given(documents, st.integers(1, 9))
def test_none_predicts_each_token_but_a_documents_first_once(documents: list[list[int]], sequence_length: int) -> None:
    rows = list(pack_none(documents, sequence_length, FILL))
    predicted = targets(batch_of(rows)) if rows else []
    assert predicted == [token for tokens in documents for token in tokens[1:]]
    # Each target is predicted from the token before it in the same document.
    pairs = {pair for tokens in documents for pair in itertools.pairwise(tokens)}
    for batch in (batch_of([row]) for row in rows):
        seen = zip(batch.input_ids[0].tolist(), batch.labels[0].tolist())
        assert {(token, label) for token, label in seen if label != IGNORED} <= pairs


@given(documents, st.integers(1, 9))
def test_concat_predicts_each_token_of_the_joined_stream_but_the_first_once(
    documents: list[list[int]], sequence_length: int
) -> None:
    joined = [token for tokens in documents for token in tokens]
    owners = [number for number, tokens in enumerate(documents) for _ in tokens]
    rows = list(pack_concat(documents, sequence_length, FILL))
    assert len(rows) == -(-max(len(joined) - 1, 0) // sequence_length)
    assert [token for row in rows for token in targets(batch_of([row]))] == joined[1:]
    for index, row in enumerate(rows):
        start = index * sequence_length
        held = owners[start : start + sequence_length + 1]
        assert row[0, : len(held)].tolist() == joined[start : start + sequence_length + 1]
        assert row[1].tolist() == [owner - held[0] for owner in held] + [-1] * (sequence_length + 1 - len(held))


@pytest.mark.parametrize(("packing", "end"), [("none", []), ("concat", [1])])
def test_encoder_ends_documents_where_they_are_joined(
    tokenizer: PreTrainedTokenizerFast, packing: str, end: list[int]
) -> None:
    encoder = Encoder.of(tokenizer, Data(train="unused", packing=packing))
    the, space = tokenizer("the ")["input_ids"]
    assert encoder.tokens("the the") == [the, space, the, *end]
    assert encoder.tokens("the<eos>") == [the, 1]  # a document that ends with the token itself gets no second one
    assert encoder.tokens("") == []


def test_long_document_gives_no_warning(
    tokenizer: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    short = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<eos>", model_max_length=4)
    encoder = Encoder.of(short, Data(train="unused"))
    assert len(encoder.tokens("abcdefgh")) == 9
    assert (caplog.records, capfd.readouterr().err) == ([], "")


def test_special_tokens_that_packing_needs(tokenizer: PreTrainedTokenizerFast) -> None:
    backend = tokenizer.backend_tokenizer
    bare, only_pad, only_eos = (
        PreTrainedTokenizerFast(tokenizer_object=backend, **special)
        for special in ({}, {"pad_token": "<pad>"}, {"eos_token": "<eos>"})
    )
    none, concat = Data(train="unused", packing="none"), Data(train="unused", packing="concat")
    assert Encoder.of(only_eos, concat).fill == 1
    assert Encoder.of(only_pad, none).fill == 0
    with pytest.raises(UserError, match=r"^data\.packing concat joins documents by eos_token, which the tokenizer lac"):
        Encoder.of(only_pad, concat)
    with pytest.raises(UserError, match=r"^the tokenizer has neither pad_token nor eos_token to fill up rows with; "):
        Encoder.of(bare, none)
