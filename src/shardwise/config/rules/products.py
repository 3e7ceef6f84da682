"""Rules on products in 8-bit floating point, and on copies of weights in 16 bits."""

from shardwise.config.rules.rule import Case, Rule

WAY_OUT = "set training.matmul to default"


def _kernel(case: Case) -> str:
    return "auto" if case.cfg.lora is None else case.cfg.lora.kernel


RULES = (
    Rule(
        "copies of weights in the dtype that they have",
        applies=lambda case: (
            case.training.casts_weights
            and (case.training.precision == "float32" or case.cfg.model.dtype != "float32")
        ),
        problem=(
            "training.cast weights computes with copies of float32 weights in 16 bits, but "
            "model.dtype is {cfg.model.dtype} and training.precision {training.precision}"
        ),
        way_out="set model.dtype to float32 and precision to bfloat16, or cast to products",
        why="the key would have no effect",
    ),
    Rule(
        "copies of frozen weights",
        applies=lambda case: case.training.casts_weights and case.cfg.lora is not None,
        problem="training.cast weights would hold a frozen base twice, in float32 and in 16 bits",
        way_out="set model.dtype to bfloat16 and cast to products: factors are float32 anyway",
        why="what is never updated needs no float32",
    ),
    Rule(
        "copies of flat weights",
        applies=lambda case: case.training.casts_weights and case.strategy.is_flat,
        problem="training.cast weights does not reach the flat weights of {parallel.data}",
        way_out="use fsdp2, which gathers the copies",
        why="torch gives its views to a layer beside the place that others read",
    ),
    Rule(
        "products in 8 bits of a stored base",
        applies=lambda case: case.training.is_fp8 and case.cfg.model.base != "none",
        problem=(
            "training.matmul is {training.matmul}, which would round the weights of model.base "
            "{cfg.model.base} a second time"
        ),
        way_out="set model.base to none, or training.matmul to default",
        why="no cell of the parity matrix runs both",
    ),
    Rule(
        "products in 8 bits with a kernel for others",
        applies=lambda case: case.training.is_fp8 and _kernel(case) in ("triton", "cuda"),
        problem=(
            "training.matmul is {training.matmul}, but lora.kernel {cfg.lora.kernel} multiplies in "
            "the dtype of training.precision"
        ),
        way_out="set lora.kernel to auto, torch or peft",
        why="the kernel adds the adapter's output within the product",
    ),
    Rule(
        "compiled products in 8 bits under cp",
        applies=lambda case: (
            case.training.is_fp8 and case.training.is_compiled and case.parallel.cp > 1
        ),
        problem=(
            "training.matmul is {training.matmul}: under parallel.cp, its largest values are "
            "reduced inside the code that training.compile compiles"
        ),
        way_out="set training.compile to none, or training.matmul to default",
        why="such a run did not end",
    ),
    Rule(
        "products in 8 bits with checkpointing of operators",
        applies=lambda case: case.training.is_fp8 and case.training.keeps_operators,
        problem=(
            "training.checkpointing operators keeps the results of products, but not of those that "
            "training.matmul {training.matmul} makes"
        ),
        way_out="use full, none or a list of layer kinds",
        why="no cell of the parity matrix runs both",
    ),
)

MODEL_RULES = (
    Rule(
        "copies of weights of a family that is not listed",
        applies=lambda case: case.training.casts_weights and not case.model.is_listed,
        problem=(
            "training.cast is weights, but {model.family} is not a family that shardwise knows "
            "(`shardwise models` lists them)"
        ),
        way_out="set cast to products",
        why="it may read weights outside the forwards that make copies, as Mamba2's class does",
    ),
    Rule(
        "products in 8 bits of a family that is not listed",
        applies=lambda case: (
            case.training.is_fp8 and not (case.model.is_listed or case.model.is_own)
        ),
        problem=(
            "training.matmul is {training.matmul}, but {model.family} is not a family that "
            "shardwise knows (`shardwise models` lists them)"
        ),
        way_out=WAY_OUT,
        why="which of its linears are gates is not known",
    ),
    Rule(
        "no linear for products in 8 bits",
        applies=lambda case: (
            case.training.is_fp8 and case.model.is_listed and case.model.num_float8_linears == 0
        ),
        problem=(
            "training.matmul is {training.matmul}, but no linear of this model has sizes that are "
            "multiples of 16"
        ),
        way_out=WAY_OUT,
        why="the key would have no effect",
    ),
)
