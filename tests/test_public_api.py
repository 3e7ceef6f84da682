"""What is public has a docstring that says what it does, and importing the library is cheap."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import shardwise

SOURCE = Path(__file__).parents[1] / "src" / "shardwise"
MODULES = [
    path
    for path in sorted(SOURCE.rglob("*.py"))
    if path.stat().st_size and path.name != "__main__.py"
]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_public_names_have_docstrings_and_types(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert ast.get_docstring(tree), f"{path} has no docstring"
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{path}: {node.name} has no docstring"
        # Arguments of Triton's kernels are values on the device: Python has no types for them.
        if isinstance(node, ast.FunctionDef) and "triton.jit" not in map(
            ast.unparse, node.decorator_list
        ):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            assert node.returns is not None, f"{path}: {node.name} does not say what it returns"
            assert all(a.annotation for a in arguments), (
                f"{path}: {node.name} has an argument without a type"
            )


def test_import_is_light():
    heavy = "{'torch', 'transformers', 'pydantic'}"
    imports = "import sys, shardwise, shardwise.config; dir(shardwise)"
    code = f"{imports}; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_a_first_run_is_written_without_heavy_imports(tmp_path):
    """Neither torch nor transformers, nor what other commands need."""
    (tmp_path / "chats.jsonl").write_text('{"text": "a"}\n')
    words = ["init", "--recipe", "lfm2-1.2b-fsdp2", "--data", "chats.jsonl"]
    heavy = "{'torch', 'transformers', 'huggingface_hub', 'shardwise.launch.local'}"
    code = f"import sys; from shardwise.commands import cli; cli.main({words}); "
    code += f"print({heavy} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert done.stdout.splitlines()[-1] == "set()"
    assert "A GPU holds at most 1.2 GiB" in (tmp_path / "run.yaml").read_text()


def test_public_names_are_there_for_users_and_checkers():
    for name in shardwise.__all__:
        assert getattr(shardwise, name).__doc__, name
    tree = ast.parse((SOURCE / "__init__.py").read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    imported = [alias.asname for node in block.body for alias in node.names]
    assert sorted(imported) == shardwise.__all__ == sorted(shardwise._MODULES)
    with pytest.raises(AttributeError, match="no attribute 'tarin'"):
        shardwise.tarin  # noqa: B018
