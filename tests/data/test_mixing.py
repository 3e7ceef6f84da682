import json
import math
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from shardwise.config import RunConfig, UserError
from shardwise.data.loader import build_loaders
from shardwise.data.state import counts, merge_states
from tests.data.conftest import without_end
from tests.data.test_loader import over_ranks, predicted, rows_of

WriteCorpus = Callable[[Sequence[str]], str]
MakeConfig = Callable[..., RunConfig]


def labels(tokenizer: PreTrainedTokenizerFast, cfg: RunConfig, num_steps: int) -> list[str]:
    loaders = build_loaders(cfg, tokenizer, range(cfg.training.global_batch_size))
    rows = [row for batches in islice(loaders.train, num_steps) for row in rows_of(batches)]
    return [tokenizer.decode(predicted([row])) for row in rows]


def test_entries_are_read_by_weight(tokenizer, write_corpus, run_config):
    tokenizer = without_end(tokenizer)
    # 30 documents with "a" and 10 with "b", in rows of one document; weights 1 : 1. In 100 steps of
    # 4 rows are ten epochs of 40 draws, 20 of each entry.
    train = [
        write_corpus([f"{i:02}a" for i in range(30)]),
        write_corpus([f"{i:02}b" for i in range(10)]),
    ]
    keys = {"packing": "none", "sequence_length": 2, "global_batch_size": 4}
    mixed = labels(tokenizer, run_config(train, weights=[0.5, 0.5], **keys), 100)
    for epoch in range(10):
        read = mixed[40 * epoch : 40 * (epoch + 1)]
        assert [sum(text.endswith(entry) for text in read) for entry in "ab"] == [20, 20]
    assert mixed != labels(tokenizer, run_config(train, weights=[0.5, 0.5], seed=1, **keys), 100)
    # Without weights as often as an entry has documents; and weights are relative.
    plain = labels(tokenizer, run_config(train, **keys), 100)
    assert [sum(text.endswith(entry) for text in plain) for entry in "ab"] == [300, 100]
    assert mixed == labels(tokenizer, run_config(train, weights=[2.0, 2.0], **keys), 100)


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_mixture_is_the_same_on_any_number_of_ranks_and_resumes(
    tokenizer, write_corpus, run_config, workers
):
    train = [
        write_corpus([f"the a {i}" * (i % 5) for i in range(30)]),
        write_corpus([f"b {i}" for i in range(7)]),
    ]
    cfg = run_config(train, weights=[1, 5], sequence_length=8, global_batch_size=4, workers=workers)
    expected = [
        rows_of(batches) for batches in islice(build_loaders(cfg, tokenizer, range(4)).train, 12)
    ]
    first = [build_loaders(cfg, tokenizer, slots) for slots in over_ranks(4, 2)]
    steps = [[row for loaders in first for row in rows_of(next(loaders.train))] for _ in range(7)]
    state = json.loads(json.dumps(merge_states(loaders.state() for loaders in first)))
    then = build_loaders(cfg, tokenizer, range(4), state)
    steps += [rows_of(batches) for batches in islice(then.train, 5)]
    assert steps == expected
    for loaders in [*first, then]:
        loaders.train.close()


def test_held_out_documents_are_drawn_from_no_entry(tokenizer, write_corpus, run_config):
    tokenizer = without_end(tokenizer)
    train = [write_corpus([f"{i}a" for i in range(10)]), write_corpus([f"{i}b" for i in range(10)])]
    # Of each entry round(2.5) = 2 are held out.
    keys = {"packing": "none", "sequence_length": 1, "global_batch_size": 1, "weights": [1, 9]}
    cfg = run_config(train, validation=0.25, **keys)
    loaders = build_loaders(cfg, tokenizer, range(1))
    assert loaders.validation is not None
    shown = [
        {
            batch.input_ids[0, 0].item() * 1000 + batch.labels[0, 0].item()
            for batches in source
            for batch in batches
        }
        for source in (islice(loaders.train, 200), loaders.validation)
    ]
    assert [len(documents) for documents in shown] == [16, 4]
    assert not shown[0] & shown[1]


def test_weights_that_cannot_be_kept(tokenizer, write_corpus, run_config):
    one, two = write_corpus(["ab"]), write_corpus(["cd", "ef", "gh"])
    with pytest.raises(UserError, match=rf"^data\.train: {one} is in two entries; keep it in one"):
        build_loaders(run_config([one, two, one], weights=[1, 1, 1]), tokenizer, range(8))
    with pytest.raises(UserError, match=r"^data\.validation: .* 0\.75 .* one document"):
        build_loaders(run_config([one, two], weights=[1, 1], validation=0.75), tokenizer, range(8))


def test_a_run_says_which_documents_its_weights_never_read(tokenizer, write_corpus, run_config):
    large, small = write_corpus([f"{i:03}" for i in range(100)]), write_corpus(["abc"] * 10)
    keys: dict[str, Any] = {"sequence_length": 8, "global_batch_size": 2, "weights": [0.5, 0.5]}
    loaders = build_loaders(run_config([large, small], epochs=1.0, **keys), tokenizer, range(2))
    (note,) = loaders.notes
    assert f"45 of the 100 documents of {large} are never read" in note
    for _ in range(loaders.num_steps(range(2), lambda value: [value])):
        next(loaders.train)
    read = counts(loaders.state())
    # Of 110 draws 55 are of each.
    assert (read.epochs, read.epochs_by_entry) == (1.0, (0.55, 5.5))
    assert "1.00 epochs; by their weights 0.55, 5.50 epochs of the entries" in str(read)
    assert read.to_dict()["epochs_by_entry"] == [0.55, 5.5]
    more = build_loaders(run_config([large, small], epochs=2.0, **keys), tokenizer, range(2))
    assert more.notes == ()


@pytest.mark.parametrize("weight", [0.0, -1.0, 5e-324, math.inf, math.nan])
def test_what_is_no_weight(run_config: MakeConfig, weight: float) -> None:
    # 5e-324 is 0 where denormal numbers are flushed to 0, as in the processes of a run.
    with pytest.raises(UserError, match=r"^data\.train: the weights of .* of 1e-9 to 1e9$"):
        run_config(["unused"], weights=[weight])
