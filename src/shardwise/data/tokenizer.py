"""Load the tokenizer of a model."""

from __future__ import annotations

import functools
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.base.safety import check_no_pipes, warn_of_code
from shardwise.config import Model, UserError
from shardwise.data.files import read_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST_GROWTH = 64
"""Times as long as it was, a normalizer may make a text; Unicode's forms make one letter 18."""


def load_tokenizer(model: Model, chat_template: str | None = None) -> PreTrainedTokenizerBase:
    """Load the tokenizer of `model.tokenizer`, or else of `model.path`.

    The file `chat_template` replaces its own chat template: it is saved with what is trained. A
    local folder is read without a request to the hub. UserError where there is no tokenizer, or
    one without a vocabulary, which transformers makes from a `config.json` alone.
    """
    from transformers import AutoTokenizer

    warn_of_code(model)
    source = model.tokenizer or model.path
    check_no_pipes(source)
    is_local = Path(source).is_dir()
    options: dict[str, Any] = {
        "trust_remote_code": model.trust_remote_code,
        "local_files_only": is_local,
    }
    way_out = "set model.tokenizer to a folder or hub id that has one"
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(source, **options)
    except Exception as error:  # a damaged file can raise anything in transformers
        if _needs_sentencepiece(Path(source) / "tokenizer.model"):
            need = f"{source}: its tokenizer.model needs sentencepiece, which is not installed"
            raise UserError(f"{need}; pip install sentencepiece") from None
        what = f"{type(error).__name__}: {str(error)[:200]}"
        where = "" if is_local else "is no folder here, and from the hub "
        message = f"{source}: {where}no tokenizer could be loaded ({what}); {way_out}"
        raise UserError(message) from None
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        raise UserError(f"{source}: no tokenizer files, or an empty vocabulary; {way_out}")
    _check_growth(source, tokenizer)
    if chat_template is not None:
        tokenizer.chat_template = read_text(chat_template, "data.chat_template")
    return tokenizer


def _needs_sentencepiece(path: Path) -> bool:
    """Return whether a file is of sentencepiece, which is missing; transformers asks for tiktoken.

    Those of tiktoken are lines of text, and sentencepiece's begin with the byte of a first field.
    """
    if not path.is_file() or importlib.util.find_spec("sentencepiece") is not None:
        return False
    with path.open("rb") as file:
        return file.read(1) == b"\n"


PLAIN = {"return_attention_mask": False, "return_token_type_ids": False, "verbose": False}
"""Options of a tokenizer whose tokens alone are needed."""


def tokens_of(tokenizer: PreTrainedTokenizerBase, text: str, is_open: bool = False) -> list[int]:
    """Return the tokens of a text, with those that the tokenizer adds around any text.

    `is_open`: the text is to be continued, so nothing is added at its end.
    """
    tokens = list(tokenizer(text, **PLAIN)["input_ids"])
    end = len(tokens) - (len(_around(tokenizer)[1]) if is_open else 0)
    twice = _twice(tokenizer, tokens)
    return [token for index, token in enumerate(tokens[:end]) if index not in twice]


def _twice(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> set[int]:
    """Return the indices of tokens to drop, so that none is added that the text has already.

    What a chat template has written may begin with the token that the tokenizer adds in front.
    """
    before, after = _around(tokenizer)
    begin, end = len(before), len(tokens) - len(after)
    own = tokens[begin:end]
    front, back = _overlap(before, own), _overlap(after[::-1], own[::-1])
    return {begin + index for index in front} | {end - 1 - index for index in back}


def _overlap(added: list[int], own: list[int]) -> range:
    """Return the tokens to drop, counted from the first one of the text.

    They are the last ones that are added, where the text begins with these. Of a text that begins
    with the first ones alone, its own are dropped, which keeps the order of all.
    """
    counts = range(min(len(added), len(own)), 0, -1)
    for count in counts:
        if own[:count] == added[-count:]:
            return range(-count, 0)
    return range(next((count for count in counts if own[:count] == added[:count]), 0))


@functools.cache
def _around(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Return the tokens that a tokenizer adds before and behind any text."""
    alone, added = (
        list(tokenizer("a", add_special_tokens=is_added, **PLAIN)["input_ids"])
        for is_added in (False, True)
    )
    for begin in range(len(added) - len(alone) + 1):
        if alone and added[begin : begin + len(alone)] == alone:
            return added[:begin], added[begin + len(alone) :]
    return [], []


def _check_growth(source: str, tokenizer: Any) -> None:
    """Raise UserError if a normalizer makes a letter, or what it looks for, many times as long.

    Each of its steps runs alone on what those before it gave: a chain of them, which could fill the
    memory with the first letter, is left as soon as that has grown too much.
    """
    from tokenizers import Tokenizer

    normalizer = getattr(getattr(tokenizer, "backend_tokenizer", None), "normalizer", None)
    # What pickle would keep is its part of tokenizer.json.
    steps = [] if normalizer is None else [*_steps(json.loads(normalizer.__getstate__()))]
    patterns = [step.get("pattern", {}).get("String", "") for step in steps]
    starts = [*map(chr, range(32, 127)), *filter(None, patterns)]
    texts, model = starts, {"type": "WordLevel", "vocab": {}, "unk_token": "?"}
    for step in steps:
        grows = len(step.get("content", step.get("prepend", ""))) > MOST_GROWTH
        if not grows:
            alone = Tokenizer.from_str(json.dumps({"model": model, "normalizer": step})).normalizer
            texts = [alone.normalize_str(text) for text in texts]
            grows = any(len(b) > MOST_GROWTH * len(a) for a, b in zip(starts, texts, strict=True))
        if grows:
            raise UserError(
                f"{source}: the normalizer of its tokenizer makes texts more than {MOST_GROWTH} "
                "times as long, which fills the memory; give another tokenizer (model.tokenizer)"
            )


def _steps(normalizer: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if normalizer["type"] != "Sequence":
        yield normalizer
    else:
        for step in normalizer["normalizers"]:
            yield from _steps(step)


def tokens_and_places(
    tokenizer: PreTrainedTokenizerBase, text: str, add_special_tokens: bool = True
) -> tuple[list[int], list[tuple[int, int]]]:
    """Return the tokens of a text, and the characters [start, end) that each stands for.

    White space that a special token strips from its sides is not part of it.
    """
    options = {"add_special_tokens": add_special_tokens, "return_offsets_mapping": True, **PLAIN}
    encoded = tokenizer(text, **options)
    tokens, places = list(encoded["input_ids"]), list(encoded["offset_mapping"])
    if add_special_tokens:
        twice = _twice(tokenizer, tokens)
        kept = [index for index in range(len(tokens)) if index not in twice]
        tokens, places = [tokens[index] for index in kept], [places[index] for index in kept]
    stripping = _stripping(tokenizer)
    for index, token in enumerate(tokens):
        if token in stripping:
            start, end = places[index]
            written = text[start:end]
            start += len(written) - len(written.lstrip())
            places[index] = start, start + len(written.strip())
    return tokens, places


@functools.cache
def _stripping(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the special tokens that strip white space from the text beside them."""
    added: dict[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    return frozenset(number for number, token in added.items() if token.lstrip or token.rstrip)


def find_tokenizer(*sources: str) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer of the first of these folders or hub ids that has one, or return None.

    UserError where it cannot be loaded.
    """
    from transformers.utils import cached_file

    for source in sources:
        for name in ("tokenizer_config.json", "tokenizer.json"):
            try:
                cached_file(source, name)
            except OSError:
                continue
            return load_tokenizer(Model(source))
    return None
