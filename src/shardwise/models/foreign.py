"""Errors of transformers on a config.json that it cannot use, as one line with the keys it read."""

import re
import traceback
from collections.abc import Generator
from contextlib import contextmanager

import torch
from transformers import PretrainedConfig

from shardwise.config import UserError

WAY_OUT = "correct it, or give a model of a family that `shardwise models` lists"
_OF_PYTHON = (TypeError, AttributeError, LookupError, ArithmeticError, AssertionError, NameError)
"""Errors whose text is of Python's types and names; that of others is written for people."""


@contextmanager
def foreign(
    path: str, config: PretrainedConfig, doing: str, way_out: str = WAY_OUT
) -> Generator[None]:
    """Turn whatever transformers' code raises in this context into a UserError of one line.

    `doing` says what it cannot do, such as "build the model". Only code of others may run in it: an
    error of ours has a traceback. Lack of memory passes through.
    """
    try:
        yield
    except (UserError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise UserError(
            f"{path}: transformers cannot {doing} of config.json "
            f"({config.model_type}: {reason(error, config)}); {way_out}"
        ) from None


def reason(error: Exception, config: PretrainedConfig | None = None) -> str:
    """Return why other code has failed: its own words, or where it stopped and the keys there."""
    if "Unrecognized configuration class" in str(error):
        return "it has no causal language model"
    if isinstance(error, RecursionError):
        return "it is nested too deep"
    if not isinstance(error, _OF_PYTHON) and str(error):
        return ". ".join(str(error).split(". ")[:2])[:300]
    places = [
        (frame.f_code.co_qualname, summary.line or "")
        for (frame, _), summary in zip(
            traceback.walk_tb(error.__traceback__), traceback.extract_tb(error.__traceback__)
        )
        if frame.f_globals.get("__name__", "").startswith("transformers")
        and not frame.f_code.co_name.startswith("__getattr")
    ]
    if not places:
        return f"{type(error).__name__}: {str(error)[:100]}"
    function, line = places[-1]
    keys = dict.fromkeys(re.findall(r"\bconfig\.(\w+)", line))
    values = [f"{key} is {getattr(config, key)!r:.80}" for key in keys if hasattr(config, key)]
    return f"{function} stops" + (f", where {', '.join(values)}" if values else "")
