import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from shardwise.config import Model, UserError
from shardwise.data.text import Corpus, find_files, index_corpus, load_tokenizer, permutation, split


def write(path: Path, content: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def corpus_of(num_documents: int) -> Corpus:
    return Corpus((), np.zeros(num_documents, np.int32), np.zeros(num_documents, np.int64), "text")


def test_folder_gives_text_files_at_any_depth_sorted(tmp_path: Path) -> None:
    wanted = [write(tmp_path / name, "x") for name in ("a.txt", "b/c.jsonl", "b/d/e.md", "f.py")]
    for name in ("image.png", ".hidden.txt", ".git/config.txt", "b/__pycache__/c.pyc"):
        write(tmp_path / name, "x")
    assert find_files(str(tmp_path)) == wanted


def test_files_globs_and_folders_together_give_each_file_once(tmp_path: Path) -> None:
    a, b, c = (write(tmp_path / name, "x") for name in ("a.txt", "b.log", "sub/c.txt"))
    patterns = [str(tmp_path / "sub" / ".." / "a.txt"), str(tmp_path / "*"), str(a), str(tmp_path / "**" / "*.txt")]
    files = find_files(patterns)
    assert [file.resolve() for file in files] == [a, b, c]


def test_order_does_not_depend_on_how_paths_are_spelt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a.txt", "x"), write(tmp_path / "b.txt", "x")
    monkeypatch.chdir(tmp_path)
    spelt = find_files([str(tmp_path / "b.txt"), "a.txt"])  # "/..." sorts before "a": by spelling, b would be first
    assert [file.name for file in spelt] == ["a.txt", "b.txt"]


def test_existing_path_with_glob_characters_is_taken_literally(tmp_path: Path) -> None:
    file = write(tmp_path / "part[1].txt", "x")
    assert find_files(str(file)) == [file]


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        ("gone.txt", "data.train: gone.txt matches no file; give existing files, folders or glob patterns"),
        (["here.txt", "*.jsonl"], r"data.train: \*.jsonl matches no file; .*"),
        ("empty", "data.train: empty holds no text file; .*"),
        ([], "data.train is an empty list; .*"),
    ],
)
def test_pattern_without_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patterns: str | list[str], message: str
) -> None:
    write(tmp_path / "here.txt", "x")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=f"^{message}$"):
        find_files(patterns)


def test_documents_are_lines_and_whole_files(tmp_path: Path) -> None:
    lines = [
        json.dumps({"text": "one\ntwo"}),
        "",
        "  \t",
        json.dumps({"text": "drei äöü", "other": 1}, ensure_ascii=False),
    ]
    jsonl = write(tmp_path / "a.jsonl", "\n".join(lines) + "\r\n" + json.dumps({"text": ""}))  # no newline at the end
    text = write(tmp_path / "b.txt", "first line\r\nsecond line\n")
    empty = write(tmp_path / "c.txt", "")
    corpus = index_corpus([jsonl, text, empty])
    assert [corpus[i] for i in range(len(corpus))] == ["one\ntwo", "drei äöü", "", "first line\r\nsecond line\n"]


def test_byte_order_mark_is_not_text(tmp_path: Path) -> None:
    jsonl = write(tmp_path / "a.jsonl", b'\xef\xbb\xbf{"text": "a"}\n')
    text = write(tmp_path / "b.txt", b"\xef\xbb\xbfb")
    corpus = index_corpus([jsonl, text])
    assert [corpus[0], corpus[1]] == ["a", "b"]


def test_index_holds_no_text(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", "".join(json.dumps({"text": "x" * 10_000}) + "\n" for _ in range(100)))
    corpus = index_corpus([path])
    assert corpus[99] == "x" * 10_000
    assert len(pickle.dumps(corpus)) < 3_000  # 100 documents of 12 bytes, and the names; the text is 1 MB


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"text": "a"', "not JSON .*; mend or remove the line"),
        ('["a"]', "a JSON list, not an object; mend or remove the line"),
        ('{"content": "a", "id": 1}', "no field 'text'; set data.text_field to one of the line's fields: content, id"),
        ('{"text": null}', "field 'text' holds a NoneType, not a string; mend or remove the line"),
        (r'{"text": "\ud800"}', "field 'text' escapes half a surrogate pair; mend or remove the line"),
        (b'{"text": "\xff"}', r"not UTF-8 \(byte 11\); convert the file, for example with iconv"),
    ],
)
def test_bad_line_is_named_by_file_and_line(tmp_path: Path, line: str | bytes, problem: str) -> None:
    content = b'{"text": "a"}\n\n' + (line.encode() if isinstance(line, str) else line) + b'\n{"text": "b"}\n'
    path = write(tmp_path / "a.jsonl", content)
    corpus = index_corpus([path])
    assert (corpus[0], corpus[2]) == ("a", "b")
    with pytest.raises(UserError, match=f"^{path}:3: {problem}$"):  # the blank line 2 counts as a line
        corpus[1]


def test_line_number_far_into_a_file(tmp_path: Path) -> None:
    # 30,000 lines of 67 bytes lie before the bad one: 2 MB, so newlines are counted over several reads.
    path = write(tmp_path / "a.jsonl", (json.dumps({"text": "x" * 54}) + "\n") * 30_000 + "bad\n")
    with pytest.raises(UserError, match=r"a\.jsonl:30001: not JSON"):
        index_corpus([path])[30_000]


def test_text_file_that_is_not_utf8(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", b"gr\xfc\xdfe")
    with pytest.raises(UserError, match=rf"^{path}: not UTF-8 \(byte 3\); convert the file, for example with iconv$"):
        index_corpus([path])[0]


def test_text_field_is_configurable(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"text": "a", "body": "b"}')
    assert index_corpus([path], text_field="body")[0] == "b"


def test_empty_corpus(tmp_path: Path) -> None:
    files = [write(tmp_path / "a.jsonl", "\n  \n"), write(tmp_path / "b.txt", "")]
    with pytest.raises(UserError, match=r"^data\.train: no document in 2 files; give files that are not empty$"):
        index_corpus(files)


def test_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a\.json: \.json is not read; rename it to \.jsonl"):
        index_corpus([write(tmp_path / "a.json", "[]")])


def test_file_that_vanishes(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "a")
    corpus = index_corpus([path])
    path.unlink()
    message = f"^{path}: cannot read the file \\(No such file or directory\\); check the path and its permissions$"
    with pytest.raises(UserError, match=message):
        corpus[0]
    with pytest.raises(UserError, match=message):
        index_corpus([path])


def test_permutation_is_a_function_of_seed_and_epoch() -> None:
    orders = [permutation(50, seed, epoch).tolist() for seed in (0, 1, -1) for epoch in (0, 1, 2)]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert len({tuple(order) for order in orders}) == 9
    assert permutation(50, 1, 2).tolist() == permutation(50, 1, 2).tolist()


def test_permutation_is_pinned() -> None:
    # Not derived: the value at the first release. A change of it changes the batches of everybody's runs.
    assert permutation(8, seed=0, epoch=1).tolist() == [7, 4, 5, 1, 6, 2, 0, 3]


def test_permutation_is_uniform() -> None:
    # 6 orders of 3 numbers over 6,000 epochs: 1,000 each, standard deviation sqrt(6000 * 1/6 * 5/6) = 29.
    counts: dict[tuple[int, ...], int] = {}
    for epoch in range(6_000):
        order = tuple(permutation(3, 0, epoch).tolist())
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 6
    assert all(abs(count - 1_000) < 6 * 29 for count in counts.values())


@pytest.mark.parametrize(("size", "share", "held_out"), [(100, 0.02, 2), (10, 0.01, 1), (2, 0.9, 1), (3, 0.99, 2)])
def test_split_parts_the_documents(size: int, share: float, held_out: int) -> None:
    train, validation = split(corpus_of(size), share, seed=0)
    assert len(validation) == held_out
    assert sorted([*train, *validation]) == list(range(size))
    again = split(corpus_of(size), share, seed=0)
    assert (again[0].tolist(), again[1].tolist()) == (train.tolist(), validation.tolist())


def test_split_is_drawn_by_the_seed() -> None:
    assert len({tuple(split(corpus_of(100), 0.1, seed)[1].tolist()) for seed in range(5)}) == 5


def test_split_of_one_document() -> None:
    with pytest.raises(UserError, match=r"the whole corpus is one document; give validation files of their own, or 0$"):
        split(corpus_of(1), 0.5, seed=0)


def test_load_tokenizer_from_the_model_folder_or_its_own(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.save_pretrained(tmp_path / "here")
    for model in (Model(path=str(tmp_path / "here")), Model(path="gone", tokenizer=str(tmp_path / "here"))):
        loaded = load_tokenizer(model)
        assert loaded("the cat")["input_ids"] == tokenizer("the cat")["input_ids"]
        assert loaded.eos_token_id == tokenizer.eos_token_id


def test_folder_without_tokenizer_files_has_none(tmp_path: Path) -> None:
    # transformers makes a qwen3 tokenizer of one token from this; nothing must be trained on that.
    write(tmp_path / "config.json", json.dumps({"model_type": "qwen3"}))
    with pytest.raises(UserError, match=r"no tokenizer files here, or an empty vocabulary; set model\.tokenizer to"):
        load_tokenizer(Model(path=str(tmp_path)))


def test_unloadable_tokenizer_is_one_line(tmp_path: Path) -> None:
    for path in (str(tmp_path), str(tmp_path / "no/such/folder")):
        with pytest.raises(UserError) as caught:
            load_tokenizer(Model(path=path))
        message = str(caught.value)
        assert message.startswith(f"{path}: no tokenizer could be loaded (")
        assert "\n" not in message
        assert message.endswith("set model.tokenizer to a folder or hub id that has one")
