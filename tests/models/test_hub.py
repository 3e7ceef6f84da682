"""The hub is asked once for what is no folder, and a run ends at once where it has nothing."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

from shardwise.config import Model, UserError
from shardwise.models import hub, load


@pytest.fixture
def asked(monkeypatch) -> list[str]:
    """The addresses that the hub was asked for; it is reached in vain."""
    urls: list[str] = []
    answer(monkeypatch, ConnectionError("no network"), urls)
    return urls


def answer(monkeypatch: pytest.MonkeyPatch, error: Exception, urls: list[str]) -> None:
    def get(url: str) -> None:
        urls.append(url)
        raise error

    hub.ask_hub.cache_clear()
    monkeypatch.setattr(hub, "is_offline_mode", lambda: False)
    monkeypatch.setattr(hub, "get_hf_file_metadata", get)


def test_without_a_network_a_mistyped_name_is_refused_after_one_question(asked):
    with pytest.raises(
        UserError, match=r"^lama: the path of the model .*not answer \(no network\)"
    ):
        load.read_config(Model("lama"))
    assert len(asked) == 1


def test_a_mistyped_tokenizer_is_refused_before_it_is_loaded(asked, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"^nobody/nothing: model.tokenizer is no folder"):
        load.read_config(Model(str(tmp_path), tokenizer="nobody/nothing"))
    assert len(asked) == 1


def test_what_was_downloaded_before_needs_no_network(asked, monkeypatch):
    monkeypatch.setattr(hub, "try_to_load_from_cache", lambda name, file: f"cache/{name}/{file}")
    hub.ask_hub("owner/name", "config.json", "it")
    assert len(asked) == 1


def test_a_folder_is_not_asked_for(asked, tmp_path):
    hub.ask_hub(str(tmp_path), "config.json", "it")
    assert asked == []


@pytest.mark.parametrize(
    ("kind", "refused"),
    [(RepositoryNotFoundError, True), (GatedRepoError, False), (HfHubHTTPError, False)],
)
def test_only_a_name_that_the_hub_does_not_know_is_refused(kind, refused, asked, monkeypatch):
    response = SimpleNamespace(headers={}, request=None)
    answer(monkeypatch, kind("an answer", response=response), asked)
    if refused:
        with pytest.raises(UserError, match="nor one that the hub hands out"):
            hub.ask_hub("owner/name", "config.json", "it")
    else:
        hub.ask_hub("owner/name", "config.json", "it")
