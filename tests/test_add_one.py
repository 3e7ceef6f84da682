"""How many files of src a new key, family, kind, strategy or optimizer touches, by those there."""

from __future__ import annotations

import ast

import pytest

from shardwise.config.keys import all_keys
from shardwise.models.families import FAMILIES
from shardwise.parallel.optimizers import OPTIMIZERS
from shardwise.parallel.strategies import STRATEGIES
from tests.added import SOURCE, files_that_read, files_with, pairs_read

KEYS = (
    *("training.check_copies_every", "training.offload_activations", "training.async_save"),
    *("optimizer.lora_b_lr_ratio", "optimizer.decay_ratio", "measure.print_seconds"),
)
BESIDE_FAMILIES = {
    "models/families/servers.py",  # what servers read of adapters, where that was looked up
    "lab/planner/measured_models.py",  # the models whose kinds of layers a calibration measures
    "models/__init__.py",  # makes jet_nemotron known to transformers
}
CHOSEN = {
    "adamw": {"config/training.py"},  # the default
    "fsdp2": {"config/parallel.py"},  # which zero3 is another name of
    "sgd": {"lab/proof/small_run.py"},  # by which every layout is proven
    "single": {"config/parallel.py"},
}
"""The files that choose one of those that there are: a new one needs none of them."""


@pytest.mark.parametrize("key", KEYS)
def test_a_key_is_named_where_it_is_declared_alone(key):
    assert files_with(key) | files_with(key.partition(".")[2]) == set()


def test_most_keys_are_named_where_they_are_declared_alone():
    named = [len(files_with(key)) for key in all_keys()]
    assert named.count(0) >= 69
    assert sum(named) <= 92


MOST_READERS = {
    30: "training.global_batch_size",
    29: "data.sequence_length",
    28: "training.output_dir training.checkpointing",
    25: "training.micro_batch_size parallel.cp",
    24: "parallel.tp",
    20: "model.path parallel.ep parallel.offload",
    19: "parallel.pp",
    17: "parallel.schedule",
    16: "model.base",
    15: "training.device",
    13: "parallel.sequence_parallel model.dtype training.precision",
    12: "parallel.split",
    10: "launch.nodes launch.processes",
    9: "model.init parallel.reshard_after_forward launch.timeout_seconds",
    8: "training.seed training.loss parallel.data parallel.dp_replicate",
    7: ("data.train training.offload_activations lora.path optimizer.name"),
    6: (
        "training.accumulation model.trust_remote_code training.compile model.tokenizer "
        "training.matmul "
        "training.epochs training.resume "
        "parallel.memory_limit_gib optimizer.max_grad_norm"
    ),
    5: (
        "model.attention model.expert_capacity data.tools lora.r "
        "launch.environment launch.container launch.mounts"
    ),
    4: (
        "data.streaming data.validation data.format data.chat_template "
        "data.on_error training.steps training.check_copies_every lora.targets lora.dtype "
        "lora.kernel optimizer.lr_schedule measure.warmup_steps launch.min_nodes"
    ),
    3: (
        "model.router_aux_loss_coef data.max_documents data.turns data.text_field "
        "training.eval_every training.memory_checkpoint_every lora.alpha lora.dropout "
        "lora.experts lora.dora parallel.fsdp1_wrap parallel.cp_attention optimizer.lr "
        "optimizer.lora_b_lr_ratio measure.memory measure.nudge_weights launch.restarts "
        "launch.before launch.slurm launch.resources"
    ),
    2: (
        "model.router_bias_rate data.train_on data.packing training.patience "
        "training.save_every training.keep_best training.async_save training.overwrite "
        "lora.modules_to_save parallel.offload_folder parallel.speeds optimizer.weight_decay "
        "optimizer.warmup_ratio measure.trackers"
    ),
}
"""The keys that several files read or name beside their declaration, by how many: each may only
fall, and a new key has one at most. In all 726 on 2026-12-01, of 117 keys."""


def test_few_files_read_a_key():
    most = {key: number for number, keys in MOST_READERS.items() for key in keys.split()}
    assert most.keys() <= {*all_keys()}
    found = {key: files_that_read(key) | files_with(key) for key in all_keys()}
    more = {key: sorted(files) for key, files in found.items() if len(files) > most.get(key, 1)}
    assert more == {}
    fewer = {key: len(found[key]) for key, number in most.items() if len(found[key]) < number}
    assert fewer == {}, "lower their numbers in MOST_READERS"


@pytest.mark.parametrize(
    "text",
    [
        "cfg.training.seed",
        "self.cfg.training.seed",
        "replace(cfg.training, seed=1)",
        "Training('out', seed=1)",
    ],
)
def test_a_reader_is_seen(text):
    assert ("training", "seed") in pairs_read(ast.parse(text))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_one_file(name):
    files = files_with(name) - BESIDE_FAMILIES
    assert len(files) == 1 or all(file.startswith(f"models/families/{name}/") for file in files)


@pytest.mark.parametrize("name", ["gated_delta_net", "jet_block", "kda", "mamba", "mamba2"])
def test_a_kind_is_one_file_and_its_kernel(name):
    """Families name their kinds, and a kind may be built on another one."""
    homes = ("models/families/", "models/kinds/", "kernels/")
    assert {file for file in files_with(name) if not file.startswith(homes)} == set()
    assert f"models/kinds/{name}.py" in files_with(name)


def outside(name: str, folder: str) -> set[str]:
    """Return the files with a name but for those beside its own, which may build on it."""
    found = files_with(name)
    assert f"{folder}/{name}.py" in found
    return {file for file in found if not file.startswith(f"{folder}/")} - CHOSEN.get(name, set())


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_is_one_file_and_what_it_runs(name):
    assert outside(name, "parallel/strategies") <= {f"parallel/{name}.py"}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_is_two_files_at_most(name):
    assert outside(name, "parallel/optimizers") <= {f"parallel/{name}.py"}


SIZES = {"tp", "pp", "cp", "ep", "sequence_parallel"}
OF_AXES = ("lab/planner/axes/", "parallel/tensor_", "parallel/context_", "parallel/expert_")


def is_size(node: ast.AST) -> bool:
    match node:
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name in SIZES
        case ast.Subscript(slice=ast.Constant(value=name)):
            return name in SIZES
        case ast.Call(args=[ast.Constant(value=name), *_]):
            return name in SIZES
    return False


def test_sizes_of_axes_are_compared_in_few_places():
    """See docs/decisions/036-rooms.md; an axis's own files are free."""
    found = [
        f"{file}:{node.lineno}"
        for path in SOURCE.rglob("*.py")
        for file in [path.relative_to(SOURCE).as_posix()]
        if not file.startswith((*OF_AXES, "parallel/pipeline_"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Compare) and any(map(is_size, (node.left, *node.comparators)))
    ]
    assert len(found) <= 108, found
