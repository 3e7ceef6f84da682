"""Whether the path of a model leads to one, here or on the hub."""

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

from shardwise.base.safety import is_hub_name
from shardwise.config import UserError


def check_source(path: str) -> None:
    """Raise UserError unless a model's path is a folder with a config.json, or one of the hub."""
    if is_hub_name(path):
        ask_hub(path, "config.json", "the path of the model")


@functools.cache
def ask_hub(name: str, file: str, what: str) -> None:
    """Raise UserError where `name` is no folder, and the hub lacks it or does not answer.

    `what`: the words for it, such as its key in the run file. The hub is asked once in a process:
    transformers asks six times with a warning each, which takes half a minute where there is no
    network. Other answers of the hub, such as a file that is not there or terms that have to be
    accepted, are left to it.
    """
    if Path(name).is_dir() or is_offline_mode():
        return
    try:
        get_hf_file_metadata(hf_hub_url(name, file))
    except GatedRepoError:
        return  # a RepositoryNotFoundError, too
    except (RepositoryNotFoundError, HFValidationError):
        raise UserError(
            f"{name}: {what} is no folder with a {file}, nor one that the hub hands out; correct it"
        ) from None
    except HfHubHTTPError:
        return
    except Exception as error:  # of the HTTP library, which differs between versions
        if isinstance(try_to_load_from_cache(name, file), str):
            return
        reason = " ".join(str(error).split())[:100]
        raise UserError(
            f"{name}: {what} is no folder with a {file}, and the hub does not answer ({reason}); "
            "correct it, or connect to the hub"
        ) from None
