"""Read what the text of a chat template says of itself."""

import functools
import itertools
from typing import Any

from shardwise.config import UserError

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
"""The roles that every chat template may handle. A template can have others (`known_roles`)."""

LIST_TOKENS = ("string", "comma")
"""The tokens of a list of strings in a template, by the names of Jinja's lexer."""


@functools.cache
def marks_turns(template: str) -> bool:
    """Return whether a chat template has `{% generation %}` outside of comments and raw text."""
    for token, after in itertools.pairwise(template_tokens(template)):
        if token.type == "block_begin" and (after.type, after.value) == ("name", "generation"):
            return True
    return False


@functools.cache
def known_roles(template: str) -> tuple[str, ...]:
    """Return ROLES, and the strings with which a chat template compares by `==` or `in` a list.

    A template writes any other role into the text as it is, and its words are never targets.
    """
    compared: list[str] = []
    before, in_list = "", False
    for token in template_tokens(template):
        if token.type == "string" and (in_list or before == "eq"):
            compared.append(token.value)
        opens_list = before == "in" and token.type in ("lbracket", "lparen")
        in_list = opens_list or (in_list and token.type in LIST_TOKENS)
        before = token.value if token.type == "name" else token.type
    return (*ROLES, *sorted(set(compared) - set(ROLES)))


@functools.cache
def names_in(template: str) -> frozenset[str]:
    """Return the names and strings in a chat template, such as those of the fields it reads."""
    tokens = template_tokens(template)
    return frozenset(token.value for token in tokens if token.type in ("name", "string"))


def template_tokens(template: str) -> list[Any]:
    """Return Jinja's tokens of a chat template; UserError where it is not valid Jinja."""
    import jinja2

    try:
        return list(jinja2.Environment().lexer.tokenize(template))
    except jinja2.TemplateSyntaxError as error:
        what = f"the chat template is not valid Jinja ({error})"
        raise UserError(f"{what}; correct it") from None
