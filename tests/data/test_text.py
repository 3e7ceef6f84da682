import bz2
import errno
import gzip
import io
import json
import lzma
import os
import pickle
import stat
import sys
import zipfile
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from shardwise.config import Data, Model, UserError
from shardwise.data import corpus as corpus_files
from shardwise.data.corpus import open_corpus
from shardwise.data.files import find_files
from shardwise.data.record import BadDocument
from shardwise.data.text import BLOCK, SAMPLES, STRIDE, index_files
from shardwise.data.tokenizer import load_tokenizer


def write(path: Path, content: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_folder_gives_text_files_at_any_depth_sorted(tmp_path):
    wanted = [write(tmp_path / name, "x") for name in ("a.txt", "b/c.jsonl", "b/d/e.md", "f.py")]
    for name in ("image.png", ".hidden.txt", ".git/config.txt", "b/__pycache__/c.pyc"):
        write(tmp_path / name, "x")
    assert find_files(str(tmp_path)) == wanted


def test_files_globs_and_folders_together_give_each_file_once(tmp_path):
    a, b, c = (write(tmp_path / name, "x") for name in ("a.txt", "b.log", "sub/c.txt"))
    patterns = [
        str(tmp_path / "sub" / ".." / "a.txt"),
        str(tmp_path / "*"),
        str(a),
        str(tmp_path / "**" / "*.txt"),
    ]
    files = find_files(patterns)
    assert [file.resolve() for file in files] == [a, b, c]


def test_order_does_not_depend_on_how_paths_are_spelt(tmp_path, monkeypatch):
    write(tmp_path / "a.txt", "x"), write(tmp_path / "b.txt", "x")
    monkeypatch.chdir(tmp_path)
    spelt = find_files(
        [str(tmp_path / "b.txt"), "a.txt"]
    )  # "/..." sorts before "a": by spelling, b would be first
    assert [file.name for file in spelt] == ["a.txt", "b.txt"]


def test_existing_path_with_glob_characters_is_taken_literally(tmp_path):
    file = write(tmp_path / "part[1].txt", "x")
    assert find_files(str(file)) == [file]


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        ("gone.txt", "data.train: gone.txt matches no file; .*"),
        (["here.txt", "*.jsonl"], r"data.train: \*.jsonl matches no file; .*"),
        ("empty", "data.train: empty has no file .*; .*"),
        ([], "data.train is an empty list; .*"),
        ("::train", "data.train: ::train matches no file; .*"),
    ],
)
def test_pattern_without_files(tmp_path, monkeypatch, patterns, message):
    write(tmp_path / "here.txt", "x")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=f"^{message}$"):
        find_files(patterns)


def test_what_is_no_regular_file_is_refused_by_name(tmp_path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    os.mknod(tmp_path / "s.jsonl", stat.S_IFSOCK | 0o600)
    for path in (tmp_path / "pipe.jsonl", tmp_path / "s.jsonl", "/dev/zero"):
        with pytest.raises(UserError, match=rf"^{path}: .*cannot be read twice"):
            find_files(str(path))
    with pytest.raises(UserError, match=r"\.jsonl: .*cannot be read twice"):
        find_files(str(tmp_path / "*.jsonl"))
    with pytest.raises(UserError, match="has no file"):  # a folder gives regular files only
        find_files(str(tmp_path))


def test_links_that_go_in_a_circle(tmp_path):
    file = write(tmp_path / "a" / "b" / "c.jsonl", "{}\n")
    (tmp_path / "a" / "aside").symlink_to(tmp_path / "a" / "b")
    assert [path.resolve() for path in find_files(str(tmp_path / "a" / "**" / "*.jsonl"))] == [
        file.resolve()
    ]
    for name in ("one", "two", "three"):
        (file.parent / name).symlink_to(tmp_path / "a")
    assert find_files(str(tmp_path / "a")) == [file]  # links are not followed
    with pytest.raises(UserError, match=r"a link to a folder above it"):
        find_files(str(tmp_path / "*" / "**" / "*.jsonl"))
    (tmp_path / "itself").symlink_to(tmp_path / "itself")
    with pytest.raises(UserError, match=r"data.train: .*itself.: cannot be read"):
        find_files(str(tmp_path / "itself"))


@pytest.mark.parametrize("name", ["a" * 5000, "a\0b"])
def test_names_that_none_can_have(name):
    with pytest.raises(UserError, match=r"^data.train: .*: cannot be read \(") as caught:
        open_corpus(name, Data(train=name))
    assert len(str(caught.value)) < 300


def test_files_without_permission(tmp_path, monkeypatch):
    path = write(tmp_path / "a.jsonl", "{}\n")

    def refuse(*_args: object, **_keys: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    for name in ("open", "stat"):  # whoever runs the tests as root has every permission
        monkeypatch.setattr(Path, name, refuse)
        with pytest.raises(
            UserError, match=r"a.jsonl.*: cannot (be read|read the file) \(Permission denied\)"
        ):
            open_corpus(str(path), Data(train=str(path)))


def test_link_that_leads_nowhere(tmp_path):
    (tmp_path / "a.jsonl").symlink_to(tmp_path / "none")
    for pattern in ("a.jsonl", "*.jsonl"):
        with pytest.raises(UserError, match=r"a.jsonl: cannot read the file \(No such file"):
            find_files(str(tmp_path / pattern))


def test_documents_are_lines_and_whole_files(tmp_path):
    lines = [
        json.dumps({"text": "one\ntwo"}),
        "",
        "  \t",
        json.dumps({"text": "drei äöü", "other": 1}, ensure_ascii=False),
    ]
    jsonl = write(
        tmp_path / "a.jsonl", "\n".join(lines) + "\r\n" + json.dumps({"text": ""})
    )  # no newline at the end
    text = write(tmp_path / "b.txt", "first line\r\nsecond line\n")
    empty = write(tmp_path / "c.txt", "")
    corpus = index_files([jsonl, text, empty])
    assert [corpus[i]["text"] for i in range(len(corpus))] == [
        "one\ntwo",
        "drei äöü",
        "",
        "first line\r\nsecond line\n",
    ]


def test_byte_order_mark_is_not_text(tmp_path):
    jsonl = write(tmp_path / "a.jsonl", b'\xef\xbb\xbf\n\n\xef\xbb\xbf{"text": "a"}\n')
    text = write(tmp_path / "b.txt", b"\xef\xbb\xbfb")
    corpus = index_files([jsonl, text])
    assert [corpus[0], corpus[1]] == [{"text": "a"}, {"text": "b"}]


def test_index_holds_no_text(tmp_path):
    path = write(
        tmp_path / "a.jsonl", "".join(json.dumps({"text": "x" * 10_000}) + "\n" for _ in range(100))
    )
    corpus = index_files([path])
    assert corpus[99] == {"text": "x" * 10_000}
    assert (
        len(pickle.dumps(corpus)) < 1_000
    )  # the places of 4 documents, and the names; the text is 1 MB


def test_documents_are_found_from_the_places_that_are_kept(tmp_path: Path) -> None:
    # Files that end before, at and after a STRIDE-th document, with blank lines everywhere and a
    # plain text between.
    paths, expected = [], []
    for number, count in enumerate([STRIDE - 1, 1, STRIDE, 0, 2 * STRIDE + 3, 1, 7]):
        texts = [f"{number} {'x' * (i % 5)} {i}" for i in range(count)]
        lines = "".join(
            "\n" * (i % 3) + json.dumps({"text": text}) + "\n" for i, text in enumerate(texts)
        )
        paths.append(write(tmp_path / f"{number}.jsonl", lines + "\n"))
        expected += texts
        if number == 2:
            paths.append(write(tmp_path / "plain.txt", "plain"))
            expected.append("plain")
    corpus = index_files(paths)
    assert [corpus[i]["text"] for i in range(len(corpus))] == expected
    assert len(corpus.offsets) == -(-len(expected) // STRIDE)


def test_file_that_has_become_shorter(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"text": "a"}\n' * 3)
    corpus = index_files([path])
    write(path, '{"text": "a"}\n')
    with pytest.raises(UserError, match=rf"^{path}: the file has changed") as caught:
        corpus[2]
    assert not isinstance(caught.value, BadDocument)  # else it would be left out without a word


def test_file_that_grows_while_it_is_read(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"text": "a"}\n' * 3)
    corpus = index_files([path])
    with path.open("a") as file:
        file.write('{"text": "b"}\n')
    assert (len(corpus), corpus[2]) == (3, {"text": "a"})
    path.write_text('{"text"\n' * 3)
    with pytest.raises(UserError, match="has changed"):
        corpus[1]


def test_documents_have_a_place(tmp_path: Path) -> None:
    # 30,000 lines of 67 bytes lie before the one asked for: 2 MB, so newlines are counted over
    # several reads.
    line = json.dumps({"text": "x" * 54}) + "\n"
    jsonl = write(
        tmp_path / "a.jsonl", line * 20_000 + "\n" + line * 10_001
    )  # a blank line counts as a line
    text = write(tmp_path / "b.txt", "b")
    corpus = index_files([jsonl, text])
    assert [corpus.where(i) for i in (0, 30_000, 30_001)] == [
        f"{jsonl}:1",
        f"{jsonl}:30002",
        str(text),
    ]


def test_plain_text_is_the_field_that_is_asked_for(tmp_path):
    assert index_files([write(tmp_path / "a.txt", "a")], text_field="body")[0] == {"body": "a"}


def test_fingerprint_is_that_of_places_sizes_and_text(tmp_path):
    def fingerprint(name: str, *contents: str) -> str:
        paths = [
            write(tmp_path / name / f"{i}.jsonl", content) for i, content in enumerate(contents)
        ]
        return index_files(paths).fingerprint()

    line, last = '{"text": "a"}\n', '{"text": "b"}\n'
    same = fingerprint("a", line * 32 + last)
    assert fingerprint("same", line * 32 + last) == same
    others = [
        fingerprint("b", last * 32 + line),
        fingerprint("c", line * 32, last),
        fingerprint("d", line * 31 + '{"text": "aa"}\n{"text":"b"}\n'),
        fingerprint("e", line * 32 + '{"text": "bb"}\n'),
        fingerprint("f", line * 32 + last + last),
    ]
    assert len({same, *others}) == 6


@pytest.mark.parametrize("size", [BLOCK - 1, SAMPLES * BLOCK, 100 * BLOCK])
def test_fingerprint_looks_at_blocks_of_a_file(tmp_path, size):
    path = write(tmp_path / "a.txt", b"x" * size)
    before = index_files([path]).fingerprint()
    # All of a file up to SAMPLES blocks; of a larger one the first block, the last, and those
    # between.
    last = size - BLOCK
    seen = (
        [0, size // 2, size - 1]
        if size <= SAMPLES * BLOCK
        else [0, last // 17 + 1, 9 * last // 17, size - 1]
    )
    for place in seen:
        write(path, b"x" * place + b"y" + b"x" * (size - place - 1))
        assert index_files([path]).fingerprint() != before, place
    write(path, b"x" * size)
    assert index_files([path]).fingerprint() == before


@pytest.mark.parametrize("name", ["a.jsonl", "a.JSONL", "a.ndjson", "a.NDJson"])
def test_json_lines_are_known_by_names_in_any_case(tmp_path, name):
    path = write(tmp_path / name, '{"text": "a"}\n{"text": "b"}\n')
    (file,) = find_files(str(tmp_path))
    corpus = index_files([file])
    assert [corpus[i] for i in range(len(corpus))] == [{"text": "a"}, {"text": "b"}]
    assert corpus.where(1) == f"{path}:2"


@pytest.mark.parametrize(
    "content",
    [
        '{"text": "a"}',
        '{"text": "a"}\n[1]\n',
        "{\n}\n",
        "\n\n",
        b"\xff\n{}\n",
        "{" * 2**21,
        "[1]\n[2]\n",
    ],
)
def test_text_that_is_not_json_lines_is_text(tmp_path, content):
    assert len(index_files([write(tmp_path / "a.txt", content)])) == 1


def test_json_lines_under_another_name_are_refused(tmp_path):
    path = write(tmp_path / "a.txt", '\n{"text": "a"}\n\n{"text": "b"}\nand so on')
    with pytest.raises(UserError, match=rf"^{path}: .*JSON objects.* \.jsonl"):
        index_files([path])


STRINGS = ["plain", 'a "quote"', "back\\slash\\", "[{,}]", "new\nline", "äöü", ""]


@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("indent", [None, 1])
def test_items_of_a_json_file(tmp_path: Path, indent: int | None, mark: str) -> None:
    # Right by json.loads of the whole file. More items than one in STRIDE has a kept place for.
    rows = [{"text": text, "n": [1, {"a": [text, None]}]} for text in STRINGS * 12]
    whole = write(tmp_path / "a.json", mark + json.dumps(rows, indent=indent))
    values = write(
        tmp_path / "b.json", mark + "\n".join(json.dumps(r, indent=indent) for r in rows)
    )
    for path in (whole, values):
        corpus = index_files([path])
        assert [corpus[i] for i in range(len(corpus))] == rows
    assert index_files([whole]).where(1) == f"{whole}:{1 if indent is None else 14}"
    odd = index_files([write(tmp_path / "c.json", '[{"text": "a"}, "b", 3, [4], {"text" 5}]')])
    assert (len(odd), odd[0]) == (5, {"text": "a"})
    for number in range(1, 5):
        with pytest.raises(BadDocument, match=r"not an object|not JSON"):
            odd[number]
    assert len(index_files([write(tmp_path / "d.json", mark)])) == 0


@pytest.mark.parametrize("content", ['[{"text": "a"}', '[{"text": "a"}, {"te'])
def test_json_that_is_cut_off(tmp_path, content):
    with pytest.raises(UserError, match=r"a\.json: its JSON is cut off"):
        index_files([write(tmp_path / "a.json", content)])
    with pytest.raises(UserError, match=r"b\.json: something follows"):
        index_files([write(tmp_path / "b.json", '[{"text": "a"}]\n[1]')])


def test_a_folder_says_what_it_leaves_out(tmp_path, capsys):
    line = '{"text": "a"}\n'
    read = {"a.jsonl": line, "b/c.json": f"[{line}]", "d.json": line * 2, "e.csv": "text\na\n"}
    others = {"f.jsonl.gz": "x", "g.xlsx": "x", "package.json": "{}", "LICENSE": "x", ".h": "x"}
    for name, content in (read | others).items():
        write(tmp_path / "all" / name, content)
    assert [file.name for file in find_files(str(tmp_path / "all"))] == [
        name.rpartition("/")[2] for name in read
    ]
    kinds = "1 .gz, 1 .xlsx, 1 LICENSE, 1 .json"
    note = f"note: data.train: {tmp_path}/all has files that are not read: {kinds}\n"
    assert sorted(capsys.readouterr().err) == sorted(note)
    write(tmp_path / "none" / "a.jsonl.gz", "x")
    with pytest.raises(UserError, match=r"has no file of .*only 1 \.gz"):
        find_files(str(tmp_path / "none"))
    write(tmp_path / "whole" / "a.jsonl", line)
    find_files(str(tmp_path / "whole"))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
def test_files_that_are_no_text_are_known_by_their_first_bytes(tmp_path, name):
    line = b'{"text": "a"}\n'
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("a.jsonl", line)
    parquet = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a"]}), parquet)
    for content, what in {
        gzip.compress(line): "gzip -d",
        lzma.compress(line): "xz -d",
        bz2.compress(line): "bzip2 -d",
        archive.getvalue(): "zip archive",
        parquet.getvalue(): r"\.parquet",
        pickle.dumps({"text": "a"}): "pickle",
        line.decode().encode("utf-16"): "iconv -f UTF-16",
        b"\x28\xb5\x2f\xfd\x24": "zstd -d",
    }.items():
        with pytest.raises(UserError, match=rf"^{tmp_path / name}: .* by its first bytes .*{what}"):
            index_files([write(tmp_path / name, content)])


def test_json_that_is_nested_without_end(tmp_path):
    deep = '{"text": ' + "[" * 100_000
    corpus = index_files(
        [write(tmp_path / "a.jsonl", f"{deep}\n"), write(tmp_path / "b.txt", f"{deep}\n{deep}\n")]
    )
    with pytest.raises(BadDocument, match=r"^not JSON \("):
        corpus[0]
    assert corpus[1]["text"].startswith(deep)


def test_file_that_vanishes(tmp_path):
    path = write(tmp_path / "a.txt", "a")
    corpus = index_files([path])
    path.unlink()
    message = rf"^{path}: cannot read the file \(No such file or directory\); "
    with pytest.raises(UserError, match=message):
        corpus[0]
    with pytest.raises(UserError, match=message):
        index_files([path])


def test_load_tokenizer_from_the_model_folder_or_its_own(tmp_path, tokenizer):
    tokenizer.save_pretrained(tmp_path / "here")
    for model in (
        Model(path=str(tmp_path / "here")),
        Model(path="gone", tokenizer=str(tmp_path / "here")),
    ):
        loaded = load_tokenizer(model)
        assert loaded("the cat")["input_ids"] == tokenizer("the cat")["input_ids"]
        assert loaded.eos_token_id == tokenizer.eos_token_id


def test_folder_without_tokenizer_files_has_none(tmp_path: Path) -> None:
    # transformers makes a qwen3 tokenizer of one token from this; nothing must be trained on that.
    write(tmp_path / "config.json", json.dumps({"model_type": "qwen3"}))
    with pytest.raises(UserError, match=r"empty vocabulary; .*model\.tokenizer"):
        load_tokenizer(Model(path=str(tmp_path)))


@pytest.mark.parametrize(
    ("content", "is_named"), [(b"\n\x0e\n\x05<unk>", True), (b"IQ== 0\n", False)]
)
def test_a_tokenizer_of_sentencepiece_asks_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, is_named: bool
) -> None:
    # transformers asks for tiktoken, whichever of the two kinds of file it is.
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    write(tmp_path / "tokenizer.model", content)
    write(tmp_path / "config.json", json.dumps({"model_type": "llama"}))
    settings = {"tokenizer_class": "LlamaTokenizer"}
    write(tmp_path / "tokenizer_config.json", json.dumps(settings))
    with pytest.raises(UserError) as caught:
        load_tokenizer(Model(path=str(tmp_path)))
    assert ("pip install sentencepiece" in str(caught.value)) == is_named


def test_unloadable_tokenizer_is_one_line(tmp_path):
    for path, where in (
        (str(tmp_path), ""),
        (str(tmp_path / "no/such/folder"), "is no folder here, and from the hub "),
    ):
        with pytest.raises(UserError) as caught:
            load_tokenizer(Model(path=path))
        message = str(caught.value)
        assert message.startswith(f"{path}: {where}no tokenizer ")
        assert "\n" not in message
        assert "model.tokenizer" in message


def test_a_folder_of_many_files_resolves_each_folder_once_and_says_that_it_opens_them(
    tmp_path, monkeypatch, capsys
):
    for index in range(60):
        write(tmp_path / "data" / str(index % 3) / f"{index:02}.txt", f"text {index}")
    (tmp_path / "data" / "0" / "link.txt").symlink_to(tmp_path / "data" / "1" / "01.txt")
    opened, calls, resolve, opens = [], [], Path.resolve, Path.open
    monkeypatch.setattr(Path, "resolve", lambda path: calls.append(path) or resolve(path))
    monkeypatch.setattr(corpus_files, "MANY_FILES", 60)
    monkeypatch.setattr(Path, "open", lambda path, mode: opened.append(path) or opens(path, mode))
    found = open_corpus(str(tmp_path / "data"), Data("unused"))
    assert len(found) == 60  # the link is one of them
    assert len(calls) <= 2 * 2 + 3  # the link, for the files and for their origins; three folders
    assert len(opened) == 60
    assert capsys.readouterr().out.startswith("opening 60 files of text")
    names = [found.where(number)[-6:] for number in range(60)]
    assert names == sorted(names, key=lambda name: (int(name[:2]) % 3, name))
