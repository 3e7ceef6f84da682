"""The repository's own rules: which package may import which, budgets, and that nothing is half
there."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
import runpy
from collections.abc import Sequence
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from shardwise.config import RunConfig
from shardwise.config.plugins import Folder
from shardwise.parallel.strategies import STRATEGIES
from tests.arrows import circles, graph_of
from tests.left_out import LAST_GREEN, NOT_QUICK, content_of
from tests.parity.cells import FAST

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "shardwise"
MODULES = sorted(SOURCE.rglob("*.py"))

ARROWS = {
    "models": {"kernels", "schedule"},
    "parallel": {"models", "kernels", "schedule"},
    "records": set(),
    "process": {"records"},
    "metrics": {"models", "records"},
    "data": set(),
    "presets": set(),
    "kernels": set(),
    "schedule": set(),
    "drawing": {"schedule"},
    "assembly": {"process", "models", "parallel", "metrics", "kernels", "schedule"},
    "checkpoint": {"assembly", "process", "models", "data", "parallel", "metrics", "records"},
    "planner": {
        "assembly",
        "process",
        "models",
        "parallel",
        "metrics",
        "schedule",
        "checkpoint",
        "drawing",
        "records",
    },
    "training": {
        "checkpoint",
        "assembly",
        "process",
        "models",
        "data",
        "parallel",
        "metrics",
        "records",
        "schedule",
    },
    "launch": {"training", "checkpoint", "assembly", "process", "parallel", "metrics", "records"},
    "proof": {
        "launch",
        "training",
        "checkpoint",
        "assembly",
        "process",
        "models",
        "parallel",
        "metrics",
        "records",
    },
    "benchmark": {"launch", "process", "records"},
    "report": {"records", "schedule", "drawing"},
    "interfaces": {"batches", "kernels", "schedule"},
    "batches": {"kernels"},
    "layouts": {"schedule"},
    "base": set(),
}
EVERYONE = {
    "config",
    "keys",
    "run_file",
    "batches",
    "interfaces",
    "ranges",
    "words",
    "layouts",
    "rules",
    "safety",
    "base",
}
MOST_LINES = {
    "config keys run_file ranges batches interfaces layouts rules words safety lab base": 5_713,
    "cli commands library __main__ __init__": 2_694,
    "presets": 512,
    "assembly training checkpoint process launch": 9_313,
    "models": 14_773,
    "parallel": 6_779,
    "data": 5_739,
    "kernels": 7_170,
    "planner schedule metrics": 10_847,
    "proof": 1_206,
    "benchmark report drawing records": 6_411,
}
"""The lines that each room may have, everything counted (docs/decisions/019-size.md)."""
FREE = {"cli", "commands", "library", "__main__", "__init__", "lab"}
LABORATORY = {"planner", "benchmark", "report", "proof", "drawing"}
HOUSES = {
    "lab": LABORATORY,
    "base": {
        *("batches", "interfaces", "layouts", "schedule", "words", "safety", "process", "records")
    },
    "config": {"keys", "run_file", "ranges", "rules", "presets"},
    "commands": {"cli", "library"},
}
"""The rooms in packages that hold several."""
FORBIDDEN = {
    "models": ("torch.distributed",),
    "base/records": ("torch", "transformers"),
    "config": ("torch", "transformers"),
    "base/words.py": ("torch", "transformers", "shardwise"),
    "base/safety.py": ("torch", "transformers"),
    "lab/benchmark": ("torch", "transformers"),
    "base/schedule": ("torch", "transformers", "matplotlib"),
    "lab/drawing": ("torch", "transformers"),
}


def imports(path: Path) -> list[str]:
    """Every absolute module name a file imports, inside functions too; a relative import is an
    error here."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import in line {node.lineno}"
            assert node.module is not None
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def package(path: Path) -> str:
    """The room of a file in the library: a package, a module, or a part of one of `HOUSES`."""
    return room_of(path.relative_to(SOURCE).with_suffix("").parts)


def room_of(names: Sequence[str]) -> str:
    first, second, *_ = *names, ""
    return second if second in HOUSES.get(first, ()) else first


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_arrows_go_one_way(path):
    here = package(path)
    for name in imports(path):
        if name.startswith("shardwise.") and here not in FREE:
            there = room_of(name.split(".")[1:])
            assert there in EVERYONE | {here} | ARROWS.get(here, set()), f"{path}: imports {name}"
        for where, forbidden in FORBIDDEN.items():
            if str(path.relative_to(SOURCE)).startswith(where):
                assert not any(name == f or name.startswith(f + ".") for f in forbidden), (
                    f"{path}: imports {name}"
                )


PLUGINS = "shardwise.config.plugins"


def test_modules_have_no_circles():
    """Whatever way one names another; see docs/decisions/036-rooms.md for what `PLUGINS` loads."""
    graph = graph_of(SOURCE)
    assert len(graph) == len(MODULES)
    loaded = {f"shardwise.parallel.{folder}" for folder in get_args(Folder)}
    assert loaded == {"shardwise.parallel.strategies", "shardwise.parallel.optimizers"}
    assert loaded < {*graph.successors(PLUGINS)}
    graph.remove_edges_from([(PLUGINS, loads) for loads in [*graph.successors(PLUGINS)]])
    assert circles(graph) == []


@pytest.mark.parametrize(
    "way",
    [
        "def f():\n    from shardwise.b import y",
        "if TYPE_CHECKING:\n    import shardwise.b",
        "x = import_module('shardwise.b')",
        "x = import_module(f'shardwise.{y}')",
        "from shardwise import y",
        "from shardwise.c.d import y",
    ],
)
def test_a_circle_is_found(tmp_path, way):
    source = tmp_path / "shardwise"
    (source / "c").mkdir(parents=True)
    files = {
        "__init__.py": "from shardwise.b import y",
        "a.py": way,
        "b.py": "from shardwise.a import x",
        "c/__init__.py": "from shardwise.b import y",
        "c/d.py": "y = 1",
    }
    for name, text in files.items():
        (source / name).write_text(text)
    assert [group for group in circles(graph_of(source)) if "shardwise.a" in group]
    (source / "a.py").write_text("x = 1")
    assert circles(graph_of(source)) == []


def test_the_library_shows_sixteen_names():
    names = {path.name for path in SOURCE.iterdir() if path.name != "__pycache__"}
    assert len(names) <= 16, sorted(names)


def test_the_house_imports_nothing_of_the_laboratory():
    """Imports inside functions and for types too."""
    found = {
        (str(path.relative_to(SOURCE)), name)
        for path in MODULES
        if package(path) not in LABORATORY | FREE
        for name in imports(path)
        if name == "shardwise.lab" or name.startswith("shardwise.lab.")
    }
    assert found == set()


def test_every_package_has_its_arrows():
    packages = {package(path) for path in MODULES}
    assert packages <= ARROWS.keys() | EVERYONE | FREE


def test_budgets():
    lengths = {path: num_lines(path) for path in MODULES}
    assert {str(path): n for path, n in lengths.items() if n > 400} == {}
    for packages, most in MOST_LINES.items():
        lines = sum(map(num_lines, (p for p in every_source() if package(p) in packages.split())))
        assert lines <= most, (packages, lines)
    named = {name for packages in MOST_LINES for name in packages.split()}
    assert named == {package(path) for path in every_source()}
    for path in (SOURCE / "parallel").glob("*.py"):
        assert lengths[path] <= 250, path
    loop = ast.parse((SOURCE / "training" / "loop.py").read_text(encoding="utf-8"))
    (train,) = (
        node for node in loop.body if isinstance(node, ast.FunctionDef) and node.name == "train"
    )
    assert train.end_lineno is not None
    assert train.end_lineno - train.lineno + 1 <= 60
    assert sum(len(dataclasses.fields(section)) for section in sections()) <= 126


NO_NOUN = {"Of", "Those", "That", "As", "In", "By", "What"}


def test_annotations_are_postponed_only_where_types_are_imported_for_the_checker_alone():
    texts = {path: path.read_text(encoding="utf-8") for path in MODULES}
    postponed = {path for path, text in texts.items() if "\nfrom __future__ import" in text}
    assert {path for path in postponed if "TYPE_CHECKING" not in texts[path]} == set()


def test_docstrings_begin_with_a_noun_or_a_verb():
    found: dict[str, list[str]] = {}
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for part in node.body if isinstance(getattr(node, "body", None), list) else ():
                is_text = isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant)
                words = re.findall(r"\w+", str(part.value.value)) if is_text else []
                if words and words[0].capitalize() in NO_NOUN:
                    found.setdefault(package(path), []).append(f"{path}:{part.lineno}")
    assert found == {}


def test_comments_of_fields_begin_with_a_noun():
    """A field's comment stands behind its declaration: `weights: int  # bytes of the weights`."""
    found = []
    for path in MODULES:
        lines = path.read_text(encoding="utf-8").splitlines()
        for node in ast.walk(ast.parse("\n".join(lines))):
            if isinstance(node, ast.AnnAssign) and node.end_lineno is not None:
                begun = lines[node.end_lineno - 1].encode()[node.end_col_offset :].decode()
                words = re.findall(r"# *(\w+)", begun)
                if words and words[0].capitalize() in NO_NOUN:
                    found.append(f"{path}:{node.end_lineno}")
    assert found == []


def test_programs_that_measure_stay_few():
    programs = [*(ROOT / "tools").rglob("*.py"), *(ROOT / "tests" / "gpu").glob("*.py")]
    lines = sum(num_lines(path) for path in programs if not path.name.startswith("test_"))
    assert lines <= 10_740


def every_source() -> list[Path]:
    """All that counts as source: Python, style sheets, scripts, templates and YAML."""
    suffixes = (".py", ".css", ".js", ".j2", ".yaml")
    return [path for path in SOURCE.rglob("*") if path.suffix in suffixes]


def num_lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def sections() -> list[type]:
    found = []
    hints = get_type_hints(RunConfig)
    for field in dataclasses.fields(RunConfig):
        hint = hints[field.name]
        found += [cls for cls in (hint, *get_args(hint)) if dataclasses.is_dataclass(cls)]
    return found


SET_ELSEWHERE = {
    "forward": "to replace it is what a patch is: names and modules stay",
    "nf": "transformers' number of a Conv1D's outputs, which a rank has some of",
    "grad": "torch's gradient",
    "padding_idx": "torch's row of an embedding without a gradient, of which a rank has its part",
    "grad_dtype": "torch's dtype of a gradient that is added up",
    "_gradient_predivide_factor": "fsdp1 has no public switch from means to sums",
    "_gradient_postdivide_factor": "fsdp1 has no public switch from means to sums",
    "require_backward_grad_sync": "ddp's switch, outside of its `no_sync` context",
    "find_packed_sequence_indices": "transformers has no switch for its search, see masks.py",
    "recompile_limit": "a setting of torch.compile",
    "fail_on_recompile_limit_hit": "a setting of torch.compile",
    "activation_memory_budget": "a setting of torch.compile",
    "buffer": "the receive buffer of torch's pipeline stage",
    "_disable_adapters": "PEFT's switch; its method would change what requires a gradient, too",
    "_attn_implementation": "transformers makes no mask for attention that it does not know",
    **dict.fromkeys(
        ("move", "group", "neighbours", "num_others", "sizes"),
        "what torch's autograd functions keep for their backward",
    ),
    **dict.fromkeys(
        ("isolated", "router_loss", "loss_in_head", "experts", "preferences"),
        "a field of CausalLM that a patch sets",
    ),
    **dict.fromkeys(
        ("microbatches", "loss_scale", "router_total"), "a field of Stage, set before each step"
    ),
    **dict.fromkeys(
        ("used", "batch", "rows", "tokens", "unpack"), "a field of DropoutState, for one forward"
    ),
    "offloaded_bytes": "a field of ModelPart, which its offload counts up",
    "arrived": "a field of zero's Bucket",
    "compute": "a field of RoutedExperts, which expert parallelism wraps",
    "data": "what a weight on disk is seen as: values in memory, or a stand-in",
    "step": "the optimizer's own, which goes unit by unit where its states lie on disk",
    "whole": "a field of Float8: how ranks add up the gradients that they round",
}
"""The attributes that a strategy or a patch sets on something other than itself, and why.

A fact of a parameter belongs into `ParallelModel.parameter_facts`, a fact of a module into an
argument of what reads it."""


def test_strategies_and_patches_hang_nothing_on_others():
    written: set[str] = set()
    used = ("slot_dropout", "router_loss", "routed_experts", "capacity", "documents", "masks")
    by_patches = (SOURCE / "models" / f"{name}.py" for name in used)
    patches = (*SOURCE.glob("models/patches/*.py"), *by_patches)
    for path in (*SOURCE.glob("parallel/*.py"), *patches):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                is_own = isinstance(node.value, ast.Name) and node.value.id == "self"
                written |= set() if is_own else {node.attr}
    assert written == SET_ELSEWHERE.keys()


def test_config_page_is_what_the_code_says():
    tool = runpy.run_path(str(ROOT / "tools" / "config_reference.py"))
    committed = (ROOT / "docs" / "reference" / "config.md").read_text(encoding="utf-8")
    assert committed == tool["page"](), "run python -m tools.config_reference"
    keys = [
        f"{cls.__name__.lower()}.{f.name}" for cls in sections() for f in dataclasses.fields(cls)
    ]
    assert [key for key in keys if f"`{key}`" not in committed] == []


def test_compatibility_page_is_what_the_code_and_the_results_say():
    tool = runpy.run_path(str(ROOT / "tools" / "compatibility.py"))
    committed = (ROOT / "docs" / "reference" / "compatibility.md").read_text(encoding="utf-8")
    assert committed == tool["page"](), "run python -m tools.compatibility"


def test_every_strategy_has_a_test_and_a_page():
    strategies = [name for name, strategy in STRATEGIES.items() if strategy.axis is not None]
    assert strategies
    layouts = {cell.layout for cell in FAST}
    for name in strategies:
        assert name in layouts, f"no parity cell for {name}"
        page = f"{'zero' if name.startswith('zero') else name}.md"  # one page for two stages
        assert (ROOT / "docs" / "concepts" / page).exists(), name


def test_every_test_file_mirrors_a_module():
    folders = {path.parent.name for path in (ROOT / "tests").glob("*/test_*.py")}
    others = {"parity", "integration", "gpu", "fuzz", "clusters", "faults", "tools", "oracles"}
    assert folders <= {package(path) for path in MODULES} | others


def test_what_pytest_passes_over_here_is_run_by_make():
    (_, folder) = re.findall(
        r'norecursedirs = \["(.+)", "(.+)"\]', (ROOT / "pyproject.toml").read_text()
    )[0]
    assert list((ROOT / "tests" / "kernels" / folder).glob("test_*.py"))
    command = rf"/python -m pytest .*tests/kernels/{folder}\n"
    assert re.search(command, (ROOT / "Makefile").read_text())


def test_pins_were_run_since_their_files_changed():
    """Else `make test` runs them again each time: `make pins`."""
    for file, state in json.loads(LAST_GREEN.read_text()).items():
        assert state["content"] == content_of(ROOT / file), file


def test_what_make_test_quick_leaves_out_exists():
    assert [path for path in NOT_QUICK if not (ROOT / path).exists()] == []


def test_links_and_paths_in_the_docs_exist():
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+?)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page}: {target}"
