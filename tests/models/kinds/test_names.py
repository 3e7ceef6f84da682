"""What a kind of block is called, and what its modules are called, stands in models/kinds and
models/families alone."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from shardwise.models import kinds
from shardwise.models.families import FAMILIES, spec_of
from shardwise.models.kinds import KINDS
from shardwise.models.kinds.base import Kind, no_cores
from tests.models.tiny import PLAIN, on_meta, tiny

SOURCE = Path(kinds.__file__).parents[2]
HOME = (SOURCE / "models" / "kinds", SOURCE / "models" / "families")
ALLOWED = {
    # It replaces the forward of one class of transformers, with the names of that class.
    "models/patches/forget_gate.py": {"f_a_proj", "f_b_proj", "A_log", "dt_bias"},
    "models/patches/xielu.py": {"alpha_p", "alpha_n"},
    # It walks that class, whose activation alone has weights.
    "models/operations.py": {"alpha_"},
    # It replaces the forwards of some classes of transformers, with the names of those and of
    # their modules.
    "models/patches/elementwise.py": {
        *("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3", "_norm"),
        *("input_linear", "output_linear", "gate_up_proj", "falcon_h1"),
        *(
            "cohere2",
            "gpt_oss",
            "kimi_linear",
            "lfm2",
            "nemotron_h",
            "olmo2",
            "phi3",
            "qwen3_next",
            "seed_oss",
        ),
    },
    # It replaces functions of these modules of transformers.
    "models/patches/cores.py": {
        *("cohere2", "deepseek_v3", "ernie4_5", "glm4", "gpt_oss", "olmo2", "phi3", "qwen3_next")
    },
    # It replaces the forward of transformers' classes of stacked experts, with their names.
    "models/routed_experts.py": {"gate_up_proj", "up_proj", "down_proj", "_bias"},
    # The bias of a stack has the stack's name with this end.
    "models/counts.py": {"_bias"},
    "models/weights.py": {"_bias"},
    # Folders name each expert's matrices where the class has stacks.
    "models/published.py": {"gate_up_proj", "gate_proj", "up_proj"},
    # It measures layers of each kind in small models of these families.
    "lab/planner/measured_models.py": {
        *("qwen3_5_text", "bamba", "qwen3", "full_attention"),
        *("kimi_linear", "jamba", "lfm2", "jet_nemotron", "conv"),
    },
    # The names of fla's module and functions of this operation.
    "kernels/kimi_delta_attention/__init__.py": {"kda"},
    # The share of the weights of norms that no step moves.
    "metrics/spacing.py": {"norm"},
    # The norm of all gradients.
    "lab/proof/harness.py": {"norm"},
    "lab/proof/prove.py": {"norm"},
}
"""By file, the names that it may have, and why."""
SUFFIXES = (".py", ".j2", ".js", ".css")


def plain(name: str) -> bool:
    """Whether a name is also an English word, which code may use for something else."""
    return re.search(r"[_\d]", name) is None


@cache
def names_of_kinds() -> dict[int, set[str]]:
    """The modules and parameters of the blocks of each kind in small models, by its identity."""
    found: dict[int, set[str]] = {id(kind): set() for kind in KINDS}
    for name in PLAIN:
        hf = on_meta(tiny(name))
        for layer in spec_of(hf.config, hf).layers:
            for block in layer.blocks:
                module = hf.get_submodule(f"{layer.name}.{block.path}")
                found[id(block.kind)] |= {
                    name.removesuffix(".weight").removesuffix(".bias")
                    for name, _ in module.named_parameters()
                }
    return found


def modules_of(kind: Kind) -> set[str]:
    """The names in a kind, without where they lie: `experts.up_proj` is `up_proj`."""
    return {name.rpartition(".")[2] for name in names_of_kinds()[id(kind)]}


NAMES = {name for kind in KINDS for name in (kind.name, *modules_of(kind)) if len(name) > 1} | {
    mixer.name for family in FAMILIES.values() for mixer in family.mixers.values()
}


def is_name(word: str) -> bool:
    """Whether a word is a name, or, where an underscore shows that some of it is missing, a part.

    `f"{x}_proj"`, `"in_proj_" + x` and `r"[qkv]_proj"` have parts.
    """
    if word.startswith("_") and len(word) > 1:
        return any(name.endswith(word) for name in NAMES)
    if word.endswith("_"):
        return len(word) > 2 and any(name.startswith(word) for name in NAMES)
    return word in NAMES or word in FAMILIES


def strings(tree: ast.AST) -> Iterator[ast.Constant]:
    """Yield strings that are not prose, which stands alone, as docstrings do."""
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            yield node


def identifiers(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield what code calls things, by line."""
    for node in ast.walk(tree):
        for field in ("id", "attr", "arg", "name", "asname"):
            if isinstance(word := getattr(node, field, None), str):
                yield from ((getattr(node, "lineno", 0), part) for part in word.split("."))


def words_of(text: str) -> Iterator[str]:
    """Yield the words of a text that may be names; what a regex escapes is none of them."""
    without_links = re.sub(r"\S+://\S+", "", text)
    without_escapes = re.sub(r"\\[a-zA-Z]", " ", without_links)
    yield from (word for word in re.findall(r"[\w-]+", without_escapes) if not plain(word))


def names_in(path: Path) -> set[tuple[int, str]]:
    """The names that a file has, by line."""
    if path.suffix != ".py":
        lines = enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        return {(line, word) for line, text in lines for word in words_of(text) if is_name(word)}
    tree = ast.parse(path.read_text(encoding="utf-8"))
    called = {(n, word) for n, word in identifiers(tree) if word in NAMES and not plain(word)}
    texts = [(node.lineno, node.value) for node in strings(tree)]
    written = {(n, word) for n, text in texts for word in (text, *words_of(text)) if is_name(word)}
    return called | written


def test_no_name_stands_elsewhere():
    found: dict[str, set[tuple[int, str]]] = {}
    for path in sorted(SOURCE.rglob("*")):
        if path.suffix in SUFFIXES and not any(path.is_relative_to(home) for home in HOME):
            file = str(path.relative_to(SOURCE))
            names = {(n, word) for n, word in names_in(path) if word not in ALLOWED.get(file, ())}
            if names:
                found[file] = names
    assert found == {}


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ('"""A docstring with q_proj."""', set()),
        ('x = "mlp"', {"mlp"}),
        ('y.q_proj = "an mlp, and a moe"', {"q_proj"}),
        ('z = f"{x}.in_proj"', {"in_proj"}),
        ('z = f"{x}_proj"', {"_proj"}),
        ('z = "in_proj_" + x', {"in_proj_"}),
        (r'z = re.compile(r"\bq_proj\b|[qkv]_proj")', {"q_proj", "_proj"}),
        ('z = config.model_type == "llama"', {"llama"}),
        ('z = getattr(layer, "self_attn.o_proj")', {"o_proj"}),
        ('z = kind == "gated_delta_net"', {"gated_delta_net"}),
    ],
)
def test_the_search_finds_names(code, names, tmp_path):
    file = tmp_path / "some.py"
    file.write_text(code + "\n")
    assert {word for _, word in names_in(file)} == names


def test_the_search_reads_templates(tmp_path):
    file = tmp_path / "page.j2"
    file.write_text("<p>\n{{ layer.q_proj }}</p>\n")
    assert names_in(file) == {(2, "q_proj")}


def test_what_may_have_names_needs_them():
    for file, names in ALLOWED.items():
        assert names == {word for _, word in names_in(SOURCE / file)}, file


def test_all_kinds_are_listed():
    files = {path.stem for path in HOME[0].glob("*.py")} - {"__init__", "base"}
    made = [
        value
        for name in files
        for value in vars(getattr(kinds, name)).values()
        if isinstance(value, Kind)
    ]
    assert set(map(id, made)) == set(map(id, KINDS))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind.name}-{KINDS.index(kind)}")
def test_a_kind_speaks_of_its_own_modules(kind):
    marked = {*kind.gates, *kind.gating, *kind.rates, *kind.bypassed, *kind.experts}
    assert marked <= names_of_kinds()[id(kind)]
    assert kind.cores is no_cores or kind.mixes_tokens
    assert kind.split is not None
    assert list(inspect.signature(kind.split).parameters) == ["block", "num_ranks"]


@pytest.mark.parametrize("name", PLAIN)
def test_kinds_are_families_kinds(name):
    family = FAMILIES[on_meta(tiny(name)).config.model_type]
    assert {id(block.kind) for block in family.blocks} <= set(map(id, KINDS))


def test_every_kind_is_some_familys():
    assert {id(kind) for kind in KINDS} == {
        id(b.kind) for family in FAMILIES.values() for b in family.blocks
    }
