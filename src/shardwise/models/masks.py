"""Attention masks that transformers makes: never from position ids."""

from collections.abc import Generator
from contextlib import contextmanager

import torch
from transformers import masking_utils


@contextmanager
def without_packed_rows() -> Generator[None]:
    """Let transformers make causal masks without looking for packed documents.

    It takes position ids that do not grow by 1 for the border of a document. Here documents are
    known (documents.py), and the host would wait for the device to compare the positions. A base
    model looks the function up in transformers at each forward and has no switch for it.
    """
    search = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = _no_packed_rows  # ty: ignore[invalid-assignment]
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = search


def _no_packed_rows(position_ids: torch.Tensor) -> None:
    return None
