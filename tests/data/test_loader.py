import multiprocessing
from collections.abc import Callable, Sequence
from itertools import islice
from multiprocessing.context import ForkServerProcess

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from shardwise.base.batches import IGNORED, Batch
from shardwise.config import RunConfig, UserError
from shardwise.data.loader import build_loaders
from shardwise.data.order import Order, split
from shardwise.data.packing import PADDING
from shardwise.data.shares import CHUNK
from tests.data.conftest import without_end
from tests.left_out import some_now

Row = tuple[int, int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]
EOS = 1

WriteCorpus = Callable[[Sequence[str]], str]
MakeConfig = Callable[..., RunConfig]


def rows_of(batches: list[Batch]) -> list[Row]:
    """(step, slot, input_ids, labels, document_ids) of each row, also with other answers."""
    return [
        (
            batch.step,
            slot,
            *(tuple(t[row].tolist()) for t in (batch.input_ids, batch.labels, batch.document_ids)),
        )
        for given in batches
        for batch in (given, given.mismatched)
        if batch is not None
        for row, slot in enumerate(batch.slots)
    ]


def without_padding(row: Row) -> Row:
    """The row up to its last token: how much padding follows depends on its micro-batch."""
    step, slot, *columns = row
    length = sum(number != PADDING for number in row[4])
    return step, slot, *(column[:length] for column in columns)


def train_rows(
    cfg: RunConfig, tokenizer: PreTrainedTokenizerFast, slots: range, num_steps: int
) -> list[list[Row]]:
    return [
        rows_of(batches)
        for batches in islice(build_loaders(cfg, tokenizer, slots).train, num_steps)
    ]


def num_workers_alive() -> int:
    return sum(
        isinstance(process, ForkServerProcess) for process in multiprocessing.active_children()
    )


def over_ranks(batch_size: int, num_ranks: int) -> list[range]:
    share = batch_size // num_ranks
    return [range(rank * share, (rank + 1) * share) for rank in range(num_ranks)]


def predicted(rows: list[Row]) -> list[int]:
    return [label for row in rows for label in row[3] if label != IGNORED]


@st.composite
def corpora(draw: st.DrawFn) -> tuple[list[str], int]:
    """Texts, empty ones among them, and a global batch size, which may be larger than the texts."""
    batch_size = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    text = st.text("the cä\n", max_size=40)
    long_text = st.text("the cä\n", min_size=4, max_size=80)
    return draw(st.permutations([draw(long_text), *draw(st.lists(text, max_size=12))])), batch_size


def in_order(num_documents: int, seed: int, epoch: int) -> list[int]:
    """The numbers of the documents as the epoch has them."""
    numbers = np.arange(num_documents) + num_documents * (epoch - 1)
    return Order(split([num_documents], 0.0)[0], None, seed).documents(numbers)


def share_of(slot: int, num_slots: int, num_documents: int, seed: int, count: int) -> list[int]:
    """The first documents of a slot: those at slot, slot + G, ... of all epochs in a row."""
    numbers = np.arange(slot, slot + num_slots * count, num_slots)
    return Order(split([num_documents], 0.0)[0], None, seed).documents(numbers)


def divisors(number: int) -> st.SearchStrategy[int]:
    return st.sampled_from([d for d in range(1, number + 1) if number % d == 0])


packings = st.sampled_from(["none", "concat"])
all_packings = st.sampled_from(["none", "concat", "documents"])
lengths = st.integers(1, 12)


@given(
    data=st.data(),
    case=corpora(),
    packing=all_packings,
    sequence_length=lengths,
    seed=st.integers(-3, 3),
)
@settings(deadline=None, max_examples=15)
def test_ranks_and_micro_batches_share_one_global_batch(
    tokenizer, write_corpus, run_config, data, case, packing, sequence_length, seed
):
    texts, batch_size = case
    keys = {
        "packing": packing,
        "sequence_length": sequence_length,
        "seed": seed,
        "global_batch_size": batch_size,
    }
    train = write_corpus(texts)
    expected = train_rows(run_config(train, **keys), tokenizer, range(batch_size), 4)
    assert [[(row[0], row[1]) for row in rows] for rows in expected] == [
        [(step, slot) for slot in range(batch_size)] for step in (1, 2, 3, 4)
    ]
    ranks = over_ranks(batch_size, data.draw(divisors(batch_size)))
    cfg = run_config(train, micro_batch_size=data.draw(divisors(len(ranks[0]))), **keys)
    parts = [train_rows(cfg, tokenizer, slots, 4) for slots in ranks]
    actual = [[row for part in parts for row in part[step]] for step in range(4)]
    assert [[*map(without_padding, rows)] for rows in actual] == [
        [*map(without_padding, rows)] for rows in expected
    ]


@given(
    case=corpora(), packing=all_packings, sequence_length=lengths, num_ranks=st.sampled_from([1, 2])
)
@settings(deadline=None, max_examples=2)
def test_workers_do_not_change_the_batches(
    tokenizer, write_corpus, run_config, case, packing, sequence_length, num_ranks
):
    texts, half = case
    keys = {"packing": packing, "sequence_length": sequence_length, "global_batch_size": 2 * half}
    train = write_corpus([text * 2 for text in texts])
    for slots in over_ranks(2 * half, num_ranks):
        without, again, with_workers = (
            train_rows(run_config(train, workers=workers, **keys), tokenizer, slots, 3)
            for workers in (0, 0, 2)
        )
        assert without == again == with_workers


@pytest.mark.filterwarnings(
    "ignore:This DataLoader will create 3 worker processes"
)  # on a machine of two cores
@pytest.mark.parametrize("workers", some_now((1, 2, 3, 7), (7,)))
def test_any_number_of_workers_gives_the_same_batches(tokenizer, write_corpus, run_config, workers):
    train = write_corpus([f"the text number {i} " * (i % 7) for i in range(40)])
    keys = {"sequence_length": 16, "global_batch_size": 6}
    slots = range(
        3, 6
    )  # three slots: two workers share them unequally, of seven workers only three start
    expected = train_rows(run_config(train, **keys), tokenizer, slots, 10)
    assert train_rows(run_config(train, workers=workers, **keys), tokenizer, slots, 10) == expected


@given(case=corpora(), sequence_length=lengths, seed=st.integers(0, 3))
@settings(deadline=None, max_examples=15)
def test_packing_none_predicts_each_token_once_an_epoch(
    tokenizer, write_corpus, run_config, case, sequence_length, seed
):
    texts, batch_size = case
    texts = [
        texts[i % len(texts)] + str(i) for i in range(max(len(texts), batch_size))
    ]  # a document for each slot
    cfg = run_config(
        write_corpus(texts),
        packing="none",
        sequence_length=sequence_length,
        seed=seed,
        global_batch_size=batch_size,
    )
    documents = [[*tokenizer(text)["input_ids"], EOS] for text in texts]
    # Two epochs of each slot's share, by the rule that the module states.
    numbers = in_order(len(texts), seed, 1) + in_order(len(texts), seed, 2)
    shares = [[documents[i] for i in numbers[slot::batch_size]] for slot in range(batch_size)]
    num_rows = [
        sum(-(-(len(tokens) - 1) // sequence_length) for tokens in share) for share in shares
    ]
    steps = train_rows(cfg, tokenizer, range(batch_size), max(num_rows))
    for slot, share in enumerate(shares):
        stream = [rows[slot] for rows in steps][: num_rows[slot]]
        assert predicted(stream) == [token for tokens in share for token in tokens[1:]]


@given(case=corpora(), sequence_length=lengths, seed=st.integers(0, 3))
@settings(deadline=None, max_examples=15)
def test_packing_concat_reproduces_the_joined_stream(
    tokenizer, write_corpus, run_config, case, sequence_length, seed
):
    texts, batch_size = case
    texts = [texts[i % len(texts)] for i in range(max(len(texts), batch_size))]
    cfg = run_config(
        write_corpus(texts),
        sequence_length=sequence_length,
        seed=seed,
        global_batch_size=batch_size,
    )
    steps = train_rows(cfg, tokenizer, range(batch_size), 6)
    for slot in range(batch_size):
        joined: list[int] = []
        for i in share_of(slot, batch_size, len(texts), seed, 20 * 6 * sequence_length):
            joined += [*tokenizer(texts[i])["input_ids"], EOS] if texts[i] else []
        stream = [rows[slot] for rows in steps]
        assert [stream[0][2][0], *predicted(stream)] == joined[: 6 * sequence_length + 1]
        for row in stream:
            # A document begins after each end-of-text token, and at the row's first position.
            ends = [token == EOS for token in row[2]]
            assert list(row[4]) == [sum(ends[:position]) for position in range(sequence_length)]


@pytest.mark.parametrize("packing", ["none", "concat", "isolated", "documents"])
def test_fewer_texts_than_rows_are_read_whole_by_each_slot(
    tokenizer, write_corpus, run_config, packing
):
    texts = ["abcdefghijkl", "ABCDEFGHIJKL"]
    cfg = run_config(write_corpus(texts), packing=packing, sequence_length=12, global_batch_size=5)
    loaders = build_loaders(cfg, tokenizer, range(5))
    rows = rows_of(next(loaders.train))
    read = [tokenizer.decode([row[2][0], *predicted([row])]) for row in rows]
    # The documents 0 to 4 of the epochs, two in each.
    expected = [texts[i] for epoch in (1, 2, 3) for i in in_order(2, 0, epoch)][:5]
    assert [text.removesuffix("<eos>") for text in read] == expected
    assert all(text.endswith("<eos>") for text in read)
    (note,) = loaders.notes
    assert "2 documents are fewer than the 5 rows" in note


def test_each_epoch_has_its_own_order(tokenizer, write_corpus, run_config):
    tokenizer = without_end(tokenizer)
    texts = [f"{letter}{letter}" for letter in "abcdefghij"]
    cfg = run_config(write_corpus(texts), packing="none", sequence_length=1, global_batch_size=1)
    labels = [predicted(rows)[0] for rows in train_rows(cfg, tokenizer, range(1), 30)]
    epochs = [labels[:10], labels[10:20], labels[20:]]
    assert all(len(set(epoch)) == 10 for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


@given(data=st.data(), case=corpora(), packing=packings, sequence_length=lengths)
@settings(deadline=None, max_examples=15)
def test_validation_reads_each_document_once_on_any_number_of_ranks(
    tokenizer, write_corpus, run_config, data, case, packing, sequence_length
):
    texts, batch_size = case
    keys = {"packing": packing, "sequence_length": sequence_length, "global_batch_size": batch_size}
    cfg = run_config(
        write_corpus(["some text to train on" * 9]), validation=write_corpus(texts), **keys
    )
    documents = [[*tokenizer(text)["input_ids"], EOS] for text in texts if text]
    wanted = (
        [token for tokens in documents for token in tokens][1:]
        if packing == "concat"
        else [token for tokens in documents for token in tokens[1:]]
    )
    ranks = over_ranks(batch_size, data.draw(divisors(batch_size)))
    loaders = [build_loaders(cfg, tokenizer, slots).validation for slots in ranks]
    assert [rows_of(batches) for batches in loaders[0]] == [
        rows_of(batches) for batches in loaders[0]
    ]
    rows = [row for parts in zip(*loaders, strict=True) for part in parts for row in rows_of(part)]
    assert predicted(rows) == wanted  # in order: rank after rank within a global batch
    filled_up = [set(row[4]) == {-1} for row in rows]
    assert filled_up == sorted(
        filled_up
    )  # ignored rows come last, and are fewer than a global batch
    assert sum(filled_up) < batch_size
    assert {row[0] for row in rows} == {0}


def test_validation_is_cut_to_eval_batches(tokenizer, write_corpus, run_config):
    tokenizer = without_end(tokenizer)
    train, validation = write_corpus(["abc" * 20]), write_corpus(["x" * 101])
    keys = {
        "validation": validation,
        "packing": "none",
        "sequence_length": 10,
        "global_batch_size": 4,
    }
    # 100 targets in rows of 10 are 10 rows: three global batches of 4, two rows of the last one
    # ignored.
    for eval_batches, num_batches in ((0, 3), (2, 2), (3, 3), (9, 3)):
        loaders = build_loaders(
            run_config(train, eval_batches=eval_batches, **keys), tokenizer, range(2, 4)
        )
        assert loaders.validation is not None
        batches = list(loaders.validation)
        assert len(batches) == num_batches
    assert [batch.num_target_tokens() for batch in batches[-1]] == [
        0,
        0,
    ]  # global rows 8 and 9 are slots 0 and 1


def test_validation_share_is_not_trained_on(tokenizer, write_corpus, run_config):
    tokenizer = without_end(tokenizer)
    texts = [f"{letter}{letter}" for letter in "abcdefghij"]
    cfg = run_config(
        write_corpus(texts), validation=0.3, packing="none", sequence_length=1, global_batch_size=1
    )
    loaders = build_loaders(cfg, tokenizer, range(1))
    assert loaders.validation is not None
    held_out = {label for batches in loaders.validation for label in predicted(rows_of(batches))}
    trained = {
        label for batches in islice(loaders.train, 14) for label in predicted(rows_of(batches))
    }
    assert (len(held_out), len(trained)) == (3, 7)
    assert not held_out & trained


def test_no_validation(tokenizer, write_corpus, run_config):
    assert build_loaders(run_config(write_corpus(["abc"])), tokenizer, range(1)).validation is None


def test_run_generator_is_left_alone(
    tokenizer: PreTrainedTokenizerFast, write_corpus: WriteCorpus, run_config: MakeConfig
) -> None:
    # DataLoader draws a seed from the global generator unless it is given one.
    before = torch.get_rng_state()
    train_rows(run_config(write_corpus(["abc" * 300]), workers=1), tokenizer, range(1), 1)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_document_is_the_same_one_line_from_workers(tokenizer, tmp_path, run_config, workers):
    path = tmp_path / "a.jsonl"
    path.write_text(
        '{"text": "fine"}\n' * 20 + '{"content": "not fine"}\n' + '{"text": "fine"}\n' * 20
    )
    cfg = run_config(str(path), workers=workers, sequence_length=4, global_batch_size=4)
    batches = build_loaders(cfg, tokenizer, range(4)).train
    message = rf"^{path}:21: no field 'text'; .*data\.text_field .* content$"
    with pytest.raises(UserError, match=message):  # noqa: PT012
        for _ in range(100):  # 41 documents of 5 tokens are 13 steps of 4 x 4 targets
            next(batches)
    assert num_workers_alive() == 0


def test_closing_ends_the_workers(tokenizer, write_corpus, run_config):
    cfg = run_config(write_corpus(["abc" * 300]), workers=2, sequence_length=4, global_batch_size=4)
    batches = build_loaders(cfg, tokenizer, range(4)).train
    assert num_workers_alive() == 0  # they start with the first step
    next(batches)
    assert num_workers_alive() == 2
    batches.close()
    assert num_workers_alive() == 0


@pytest.mark.parametrize(("texts", "batch_size"), [([""], 1), ([""], 4), (["", "", "x"], 3)])
def test_corpus_too_small_for_the_slots(tokenizer, write_corpus, run_config, texts, batch_size):
    tokenizer = without_end(tokenizer)
    cfg = run_config(write_corpus(texts), packing="none", global_batch_size=batch_size)
    message = (
        rf"slot 0 of training.global_batch_size {batch_size} .* {len(texts)} documents; .* \d+"
    )
    with pytest.raises(UserError, match=message):
        next(build_loaders(cfg, tokenizer, range(batch_size)).train)


def test_slot_passes_over_empty_documents(tokenizer, write_corpus, run_config):
    tokenizer = without_end(tokenizer)
    cfg = run_config(
        write_corpus(["", "ab", "", ""]), packing="none", sequence_length=1, global_batch_size=4
    )
    ab = tokenizer("b")["input_ids"]
    assert [predicted(rows) for rows in train_rows(cfg, tokenizer, range(4), 2)] == [ab * 4, ab * 4]


def test_validation_files_that_are_trained_on(tokenizer, write_corpus, run_config):
    path = write_corpus(["abc"])
    with pytest.raises(UserError, match=rf"^data\.validation: {path} is in data\.train too"):
        build_loaders(run_config(path, validation=[path]), tokenizer, range(1))


def test_places_are_drawn_a_few_at_a_time(tokenizer, write_corpus, run_config, monkeypatch):
    tokenizer = without_end(tokenizer)
    drawn, documents = [], Order.documents
    monkeypatch.setattr(
        Order, "documents", lambda *args: drawn.append(len(args[1])) or documents(*args)
    )
    # Documents of one row each for four slots, of which CHUNK are drawn at once.
    cfg = run_config(
        write_corpus(["ab"] * 4 * (CHUNK + 2)),
        packing="none",
        sequence_length=1,
        global_batch_size=4,
    )
    train_rows(cfg, tokenizer, range(4), num_steps=CHUNK + 3)
    assert drawn == [2 * CHUNK] * 8  # the last ones in two epochs; with each the one behind it


def test_validation_without_a_target(tokenizer, write_corpus, run_config):
    tokenizer = without_end(tokenizer)
    cfg = run_config(write_corpus(["abc"]), validation=write_corpus(["", "x"]), packing="none")
    loaders = build_loaders(cfg, tokenizer, range(1))
    assert loaders.validation is not None
    with pytest.raises(
        UserError, match=r"^data\.validation: no document .*\(left out: 2 no target\)"
    ):
        list(loaders.validation)


def test_validation_pattern_without_files(tokenizer, write_corpus, run_config):
    with pytest.raises(UserError, match=r"^data\.validation: gone\.jsonl matches no file"):
        build_loaders(
            run_config(write_corpus(["abc"]), validation="gone.jsonl"), tokenizer, range(1)
        )
