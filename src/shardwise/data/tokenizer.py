"""Load the tokenizer of a model."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.config import Model, UserError
from shardwise.data.text import read_text
from shardwise.safety import warn_of_code

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(model: Model, chat_template: str | None = None) -> PreTrainedTokenizerBase:
    """Load the tokenizer of `model.tokenizer`, or else of `model.path`.

    The file `chat_template` replaces its own chat template: it is saved with what is trained. A
    local folder is read without a request to the hub. UserError where there is no tokenizer, or
    one without a vocabulary, which transformers makes from a `config.json` alone.
    """
    from transformers import AutoTokenizer

    warn_of_code(model)
    source = model.tokenizer or model.path
    is_local = Path(source).is_dir()
    options: dict[str, Any] = {
        "trust_remote_code": model.trust_remote_code,
        "local_files_only": is_local,
    }
    way_out = "set model.tokenizer to a folder or hub id that has one"
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(source, **options)
    except Exception as error:  # a damaged file can raise anything in transformers
        what = f"{type(error).__name__}: {str(error)[:200]}"
        where = "" if is_local else "is no folder here, and from the hub "
        message = f"{source}: {where}no tokenizer could be loaded ({what}); {way_out}"
        raise UserError(message) from None
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        raise UserError(f"{source}: no tokenizer files, or an empty vocabulary; {way_out}")
    if chat_template is not None:
        tokenizer.chat_template = read_text(chat_template, "data.chat_template")
    return tokenizer


def tokens_and_places(
    tokenizer: PreTrainedTokenizerBase, text: str, **options: Any
) -> tuple[list[int], list[tuple[int, int]]]:
    """Return the tokens of a text, and the characters [start, end) that each stands for.

    White space that a special token strips from its sides is not part of it.
    """
    encoded = tokenizer(
        text,
        return_offsets_mapping=True,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
        **options,
    )
    tokens, places = list(encoded["input_ids"]), list(encoded["offset_mapping"])
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
