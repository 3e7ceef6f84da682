"""Notices of transformers that a user of shardwise does not need."""

from __future__ import annotations

import logging

import torch


def quiet_notices() -> None:
    """Drop two notices of transformers.

    One says that a recurrent layer runs on plain torch where there is no GPU to do otherwise; the
    other that transformers does not know a rope type, which `sizes.check_read` refuses.
    """
    logger = logging.getLogger("transformers.integrations.hub_kernels")
    if not torch.cuda.is_available() and _drop_fallback_notice not in logger.filters:
        logger.addFilter(_drop_fallback_notice)
    rope = logging.getLogger("transformers.modeling_rope_utils")
    if _drop_rope_notice not in rope.filters:
        rope.addFilter(_drop_rope_notice)


def _drop_fallback_notice(record: logging.LogRecord) -> bool:
    return "falling back to its reference" not in record.getMessage()


def _drop_rope_notice(record: logging.LogRecord) -> bool:
    return "Missing validation function" not in record.getMessage()
