"""Notices of transformers that a user of shardwise does not need."""

import logging
from collections.abc import Generator
from contextlib import contextmanager

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


@contextmanager
def held_notices() -> Generator[None]:
    """Hold what transformers logs until the body has ended well, and then log each line once.

    Beside an error, which is one line, nothing is logged.
    """
    held: dict[str, logging.LogRecord] = {}
    handlers = list(logging.getLogger("transformers").handlers)

    def hold(record: logging.LogRecord) -> bool:
        held.setdefault(record.getMessage(), record)
        return False

    for handler in handlers:
        handler.addFilter(hold)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(hold)
    for message in held.keys() - _LOGGED:
        _LOGGED.add(message)
        for handler in handlers:
            handler.handle(held[message])


_LOGGED: set[str] = set()


def _drop_fallback_notice(record: logging.LogRecord) -> bool:
    return "falling back to its reference" not in record.getMessage()


def _drop_rope_notice(record: logging.LogRecord) -> bool:
    return "Missing validation function" not in record.getMessage()
