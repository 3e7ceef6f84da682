"""Answers that a command has computed before, in files of the user's cache, so that it imports
neither torch nor transformers again.

The name of a file is a digest of all that its answer depends on: what is asked, the files of the
model's folder, this library's source, the installed packages, and the GPUs that are visible.
"""

import contextlib
import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shardwise.base.safety import cache_folder, write_atomically

LIBRARIES = ("torch", "transformers", "peft")
MOST_FILES = 200
"""Answers that are kept; the oldest are deleted."""
WHOLE_BYTES = 2**20
"""Files of a model's folder up to this size count with their content, larger ones with their size
and times."""
_SOURCE = Path(__file__).parents[1]
_VARIABLES = re.compile(r"(CUDA|HIP|ROCR|NVIDIA|HF|TRANSFORMERS|TORCH|PYTORCH|TRITON|SHARDWISE)_")


def kept(asked: Any, folders: Iterable[str], compute: Callable[[], Any]) -> Any:
    """Return what `compute` returns, as plain data of JSON, or what it has returned before.

    `asked`: the question, plain data. `folders`: those whose files are read for the answer. It is
    computed where one of them is no folder here, such as a name on the hub. So it is in a process
    that has imported torch, which may have changed what is computed, and where a library runs from
    a source tree, whose version does not tell what it computes.
    """
    folders = [*folders]
    path = None if "torch" in sys.modules else _path_of(asked, folders)
    if path is None:
        return compute()
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["digest"] == _digest(content["answer"]):
            return content["answer"]
    answer = json.loads(json.dumps(compute()))
    if path == _path_of(asked, folders):  # nothing has changed meanwhile
        _write(path, json.dumps({"digest": _digest(answer), "answer": answer}))
    return answer


def version_of(name: str) -> str | None:
    """Return the version of the package that would be imported, without what follows a `+`; None
    where there is none, or its source tree would be imported.
    """
    info = _info_of(name)
    return None if info is None else info.name.split("-")[1].removesuffix(".dist").split("+")[0]


def _path_of(asked: Any, folders: Iterable[str]) -> Path | None:
    """Return where the answer is kept. It is not, and None, where a file cannot be read, which the
    answer may not need, or where the user has no home for a cache.
    """
    try:
        return _named_by_all(asked, folders)
    except (OSError, RuntimeError):
        return None


def _named_by_all(asked: Any, folders: Iterable[str]) -> Path | None:
    libraries = [_info_of(name) for name in LIBRARIES]
    if None in libraries or not all(map(os.path.isdir, folders)):
        return None
    depends = {
        "asked": asked,
        "folders": [[*_content(folder)] for folder in folders],
        "source": _source_digest(),
        "python": sys.version,
        "libraries": [(str(info), info.stat().st_mtime_ns) for info in libraries if info],
        "packages": sorted(_packages()),
        "devices": sorted(name for name in os.listdir("/dev") if name.startswith(("nvidia", "kfd")))
        if os.path.isdir("/dev")
        else [],
        "variables": {k: v for k, v in sorted(os.environ.items()) if _VARIABLES.match(k)},
    }
    return cache_folder() / "answers" / f"{_digest(depends)}.json"


def _info_of(name: str) -> Path | None:
    """Return the folder `NAME-VERSION.dist-info` beside a package that would be imported."""
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        return None
    found = [*Path(spec.origin).parents[1].glob(f"{name}-*.dist-info")]
    return found[0] if len(found) == 1 else None


def _packages() -> Iterator[str]:
    """Yield the names and versions of what is installed; layers take kernels from some of it."""
    for folder in sys.path:
        with contextlib.suppress(OSError):
            yield from (name for name in os.listdir(folder or ".") if name.endswith("-info"))


def _content(folder: str) -> Iterator[tuple[object, ...]]:
    for path in sorted(Path(folder).iterdir()):
        status = path.stat()
        facts = (path.name, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        if path.is_file() and status.st_size <= WHOLE_BYTES:
            facts = (path.name, hashlib.sha256(path.read_bytes()).hexdigest())
        yield facts


def _source_digest() -> str:
    whole = hashlib.sha256()
    for path in sorted(_SOURCE.rglob("*")):
        if path.suffix != ".pyc" and path.is_file():
            whole.update(f"{path.relative_to(_SOURCE)}\0{path.stat().st_size}\0".encode())
            whole.update(path.read_bytes())
    return whole.hexdigest()


def _write(path: Path, content: str) -> None:
    """Write a file, and delete the oldest beyond MOST_FILES; nothing where the disk refuses it."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(path, content)
        by_age = sorted(path.parent.glob("*.json"), key=lambda file: file.stat().st_mtime)
        for file in by_age[:-MOST_FILES]:
            file.unlink(missing_ok=True)


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()
