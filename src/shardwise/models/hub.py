"""Whether the hub has a model, checked once per process."""

from __future__ import annotations

import functools
from pathlib import Path

from huggingface_hub import (
    get_hf_file_metadata,
    hf_hub_url,
    is_offline_mode,
    try_to_load_from_cache,
)
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    RepositoryNotFoundError,
)

from shardwise.config import UserError


@functools.cache
def ask_hub(name: str, file: str) -> None:
    """Raise UserError where `name` is no folder, and the hub lacks it or does not answer.

    transformers asks the same, but six times with a warning each, which takes half a minute where
    there is no network. Other answers of the hub, such as a file that is not there or terms that
    have to be accepted, are left to it.
    """
    if Path(name).is_dir() or is_offline_mode():
        return
    try:
        get_hf_file_metadata(hf_hub_url(name, file))
    except GatedRepoError:
        return  # a RepositoryNotFoundError, too
    except (RepositoryNotFoundError, HFValidationError):
        raise UserError(
            f"{name}: no such folder, nor a model that the hub hands out; correct it"
        ) from None
    except HfHubHTTPError:
        return
    except Exception as error:  # of the HTTP library, which differs between versions
        if isinstance(try_to_load_from_cache(name, file), str):
            return
        reason = " ".join(str(error).split())[:100]
        raise UserError(
            f"{name}: no such folder, and the hub does not answer ({reason}); correct the path, "
            "or connect to the hub"
        ) from None
