"""Where documents begin, in the form that fla's kernels take, and without a wait of the host."""

from __future__ import annotations

import pytest
import torch

from shardwise.base.batches import Batch
from shardwise.kernels.packed import Packed, keep_on_host, packed
from shardwise.metrics.dispatch import Dispatches

DOCUMENTS = torch.tensor([[0, 0, 0, 4, 4], [7, 8, 8, 8, -1]])


def values(found: Packed) -> list[list[int]]:
    return [x.tolist() for x in found]


def test_rows_end_to_end():
    found = packed(DOCUMENTS.clone())
    ends = [0, 3, 5, 6, 9, 10]
    assert values(found) == [ends, ends, [0, 2], [1, 4]]
    dtypes = [x.dtype for x in found]
    assert dtypes == [torch.int32, torch.int64, torch.int64, torch.int64]
    one_row = packed(torch.zeros(1, 4, dtype=torch.int64))
    assert values(one_row) == [[0, 4], [0, 4], [0], [0]]


def test_a_state_belongs_to_the_first_document_of_its_row():
    states = torch.arange(1.0, 7.0).view(2, 3)
    found = packed(DOCUMENTS.clone()).states_of(states)
    assert found is not None
    assert found.tolist() == [[1, 2, 3], [0] * 3, [4, 5, 6], [0] * 3, [0] * 3]
    assert packed(DOCUMENTS.clone()).states_of(None) is None


@pytest.mark.parametrize("is_known", [True, False])
def test_the_host_waits_for_documents_that_it_does_not_know(is_known):
    documents = DOCUMENTS.clone()
    if is_known:
        keep_on_host(documents, DOCUMENTS.numpy())
    with Dispatches() as counts:
        first = packed(documents)
        assert packed(documents) is first
    assert counts.num_waits == (0 if is_known else 1)
    assert values(first) == values(packed(DOCUMENTS.clone()))


def test_a_batch_that_was_moved_is_known():
    batch = Batch(DOCUMENTS, DOCUMENTS, DOCUMENTS.clone(), (0, 1), step=1).to(torch.device("cpu"))
    with Dispatches() as counts:
        packed(batch.document_ids)
    assert counts.num_waits == 0
