"""A tokenizer whose normalizer multiplies texts is refused, and no other one."""

from __future__ import annotations

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers
from transformers import PreTrainedTokenizerFast

from shardwise.config import Model, UserError
from shardwise.data.tokenizer import load_tokenizer

HARMLESS = {
    "none": None,
    "bert": normalizers.BertNormalizer(),
    "unicode": normalizers.Sequence([normalizers.NFKD(), normalizers.StripAccents()]),
    "sentencepiece": normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    ),
    "quotes": normalizers.Sequence([normalizers.Replace("\u2026", "...")] * 20),
}
MULTIPLYING = {
    "doubled": normalizers.Sequence([normalizers.Replace("a", "aa")] * 40),
    "nested": normalizers.Sequence(
        [normalizers.Sequence([normalizers.Replace("a", "aa")] * 8)] * 5
    ),
    "twice": normalizers.Sequence([normalizers.Replace("a", "a" * 50)] * 2),
    "at once": normalizers.Replace("e", "x" * 10**6),
    "any letter": normalizers.Sequence([normalizers.Replace(Regex("."), "zz")] * 30),
    "a rare letter": normalizers.Sequence([normalizers.Replace("\xdf", "\xdf\xdf")] * 30),
    "in front": normalizers.Prepend("y" * 10**6),
}


def saved(normalizer: object, folder: object) -> Model:
    made = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    made.normalizer = normalizer  # ty: ignore[invalid-assignment]
    PreTrainedTokenizerFast(tokenizer_object=made, unk_token="?").save_pretrained(str(folder))
    return Model(str(folder))


@pytest.mark.parametrize("name", MULTIPLYING)
def test_a_normalizer_that_multiplies_is_refused(name, tmp_path):
    with pytest.raises(UserError, match="normalizer of its tokenizer makes texts more than"):
        load_tokenizer(saved(MULTIPLYING[name], tmp_path))


@pytest.mark.parametrize("name", HARMLESS)
def test_other_normalizers_are_taken(name, tmp_path):
    assert load_tokenizer(saved(HARMLESS[name], tmp_path)).get_vocab()
