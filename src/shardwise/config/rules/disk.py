"""Rules on `parallel.offload: disk`, beside that on its strategies."""

from shardwise.config.rules.rule import Case, Rule


def _is_disk(case: Case) -> bool:
    return case.parallel.offload == "disk"


def _casts_weights(case: Case) -> bool:
    is_wide = case.cfg.model.dtype == "float32" and case.training.precision != "float32"
    return is_wide or case.training.is_fp8


RULES = (
    Rule(
        "offload_folder without offload to disk",
        applies=lambda case: case.parallel.offload_folder is not None and not _is_disk(case),
        problem="parallel.offload_folder is for offload disk, and offload is {parallel.offload}",
        way_out="leave it out, or set offload to disk",
        why="the key would have no effect",
    ),
    Rule(
        "offload to disk with offload of activations",
        applies=lambda case: _is_disk(case) and case.training.offload_activations,
        problem="training.offload_activations keeps the weights that parallel.offload disk lets go",
        way_out="set training.checkpointing to full instead, or offload to none",
        why="of torch's hooks on what autograd keeps, only the inner ones are called",
    ),
    Rule(
        "offload to disk with compile",
        applies=lambda case: _is_disk(case) and case.training.is_compiled,
        problem="training.compile is {training.compile}, which is not proven with offload disk",
        way_out="set compile to none, or offload to none",
        why="no cell of the parity matrix runs both",
    ),
    Rule(
        "offload to disk with weights of another dtype than products",
        applies=lambda case: _is_disk(case) and _casts_weights(case),
        problem=(
            "with training.precision {training.precision} and matmul {training.matmul}, casts of "
            "all weights would be kept for the backward, and parallel.offload disk keeps none"
        ),
        way_out="set model.dtype to that of precision, and matmul to default",
        why="autograd and autocast keep each cast until the backward or the end of the forward",
    ),
    Rule(
        "offload to disk with async_save",
        applies=lambda case: _is_disk(case) and case.training.async_save,
        problem="training.async_save copies to memory what parallel.offload disk has on disk",
        way_out="leave one of them out",
        why="the copy may be larger than the memory",
    ),
    Rule(
        "offload to disk with checkpoints in memory",
        applies=lambda case: _is_disk(case) and case.training.memory_checkpoint_every > 0,
        problem="training.memory_checkpoint_every keeps in memory what offload disk has on disk",
        way_out="leave one of them out",
        why="the copy may be larger than the memory",
    ),
)
