"""The run file: typed, strict, and the only way to say what a run does.

The sections are plain frozen dataclasses, so a Python caller needs nothing but this module; `run_file.py` checks what
comes from outside (a YAML file, command-line overrides).
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, get_args, get_type_hints

from shardwise.ranges import RANGES, missed_bound, shown

DType = Literal["float32", "bfloat16"]

REMOVED: dict[str, Any] = {"lora.merged": False}
"""Keys that a run file had in an earlier version, each with the value that equals leaving it out."""


class UserError(ValueError):
    """The user's mistake: one line that says what is wrong and how to mend it (exit code 2, no traceback)."""

    def __init__(self, message: str) -> None:
        super().__init__(
            " ".join(message.split())
        )  # other libraries' errors, told within, may be many lines


class Section:
    """Base of the sections: pydantic refuses keys that a section does not have."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}


def require(condition: bool, message: str) -> None:
    """UserError with `message` unless `condition` holds."""
    if not condition:
        raise UserError(message)


def check_ranges(name: str, section: object) -> None:
    """UserError for a value of this section that lies outside its range."""
    for key, (least, most) in RANGES.items():
        if key.startswith(f"{name}."):
            value = getattr(section, key.partition(".")[2])
            problem = missed_bound(value, least, most)
            require(not problem, f"{key} is {shown(value)}; give {problem}")


@dataclass(frozen=True)
class Model(Section):
    """What is trained."""

    path: str
    """Local folder or hub id: `config.json`, and safetensors unless `init` is `random`."""
    init: Literal["weights", "random"] = "weights"
    """`random`: weights are a function of (`training.seed`, module path), the same under every layout."""
    dtype: DType = "float32"
    """What the weights are stored in; parameters that a family keeps in float32 (such as `A_log`) stay so."""
    tokenizer: str | None = None
    """Folder or hub id of the tokenizer, where it does not lie in `path`."""
    router_aux_loss_coef: float = 0.0
    """Weight of the mixture-of-experts load-balancing loss (0: off)."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model folder."""
    sdpa_backend: Literal["auto", "flash", "efficient", "cudnn", "math"] = "auto"
    """Which of torch's attention kernels may run; one that cannot run here is an error, never replaced by another."""

    def __post_init__(self) -> None:
        check_ranges("model", self)


@dataclass(frozen=True)
class Lora(Section):
    """Low-rank adapters (arXiv 2106.09685) on a frozen model, through PEFT."""

    r: int = 8
    """Rank of the adapters."""
    alpha: float = 16.0
    """Scale: the adapter's output is multiplied by alpha / r (alpha / sqrt(r) with `rslora`)."""
    dropout: float = 0.0
    """Dropout on the adapter's input; the masks are a function of (seed, step, slot), equal under every layout."""
    targets: Literal["auto", "attention", "all-linear"] | list[str] = "auto"
    """Which linears get an adapter; `auto` reaches the recurrent layers' projections too. A list names modules."""
    rslora: bool = False
    """Rank-stabilised scaling (arXiv 2312.03732)."""
    modules_to_save: list[str] = field(default_factory=list)
    """Modules that are trained in full and saved beside the adapters."""
    dtype: Literal["float32", "model"] = "float32"
    """What the adapters are stored in: float32, or the model's own dtype."""
    kernel: Literal["auto", "torch", "triton", "cuda", "peft"] = "auto"
    """What computes plain LoRA linears: torch's products, Triton's kernels or CUDA C++'s, in fewer passes than PEFT's
    forward (`peft`). `auto`: `triton` on a GPU where it can run, else `torch`."""

    def __post_init__(self) -> None:
        check_ranges("lora", self)
        require(
            self.targets != [],
            "lora.targets is an empty list; name linears, or leave the section out",
        )
        require(
            0.0 <= self.dropout < 1.0, f"lora.dropout is {self.dropout}; give a value in [0, 1)"
        )


@dataclass(frozen=True)
class Data(Section):
    """What it is trained on."""

    train: str | list[str]
    """Files, folders or glob patterns: JSONL, Parquet or plain text (one document a file); or the name or folder
    of a `datasets` dataset."""
    weights: list[float] | None = None
    """How often each entry of `train` is read, relative to the others; none: as often as it has documents."""
    validation: float | str | list[str] = 0.0
    """Share of the documents held out, or files of their own."""
    format: Literal["text", "completion", "chat"] = "text"
    """`text`: every token is a target. `completion`: fields `prompt` and `completion`, targets are the
    completion's. `chat`: field `messages`, rendered by a chat template; `train_on` says what is a target."""
    chat_template: str | None = None
    """Chat: a file with the Jinja template; null: the tokenizer's own."""
    template_arguments: dict[str, Any] | None = None
    """Chat: variables of the template, such as `enable_thinking: false`."""
    tools: str | None = None
    """Chat: the tools that a dialogue offers: a `.json` file, the same for all, or a field of each document."""
    train_on: Literal["assistant", "last", "all"] = "assistant"
    """Chat: targets are all turns of the assistant, the last one, or every token. A message with
    `"train": false` or `"weight": 0` is never one."""
    turns: Literal["together", "separate"] = "together"
    """Chat: `separate` makes a document of each turn that is trained on, with the turns before it
    written as they are at inference; for templates that leave out the thinking of earlier turns."""
    text_field: str = "text"
    """The field that holds the document (format `text`)."""
    on_error: Literal["fail", "skip"] = "fail"
    """What to do with a document that cannot be used: stop and name it, or leave it out and count it."""
    sequence_length: int = 512
    """Tokens in a row, labels shifted already: a row reads `sequence_length` + 1 tokens."""
    packing: Literal["auto", "none", "concat", "isolated", "documents"] = "auto"
    """`none`: a row holds one document (a long one goes on in the next row). `concat`: documents are joined by the
    end-of-text token and cut into full rows; a row may see the end of the document before. `isolated`: rows as with
    `concat`, but no layer of any kind carries anything from one document into the next. `documents`: a row holds
    whole documents, isolated from one another. `auto`: `concat` for texts, else `documents`."""
    long: Literal["cut", "split", "skip"] = "cut"
    """Packing `documents`: what becomes of a document longer than a row: its beginning is used, it becomes several
    documents, or it is left out. The record counts them."""
    workers: int = 0
    """Worker processes that tokenise, per rank; the batches do not depend on it."""

    @property
    def packed(self) -> Literal["none", "concat", "isolated", "documents"]:
        """How rows are packed: `packing`, where `auto` goes by the format."""
        if self.packing == "auto":
            return "concat" if self.format == "text" else "documents"
        return self.packing

    @property
    def keeps_documents_apart(self) -> bool:
        """Whether no layer carries anything from one document of a row into the next."""
        return self.packed in ("isolated", "documents")

    def __post_init__(self) -> None:
        check_ranges("data", self)
        if self.weights is not None:
            num = 1 if isinstance(self.train, str) else len(self.train)
            require(
                len(self.weights) == num,
                f"data.weights has {len(self.weights)} numbers; give one for each of the {num} entries of data.train",
            )
            require(
                all(0 < weight < math.inf for weight in self.weights),
                f"data.weights is {shown(self.weights)}; give positive numbers",
            )
        if isinstance(self.validation, int | float):
            require(
                0.0 <= self.validation < 1.0,
                f"data.validation is {self.validation}; give a share in [0, 1)",
            )


@dataclass(frozen=True)
class Parallel(Section):
    """How it is split over processes."""

    data: Literal["single", "ddp", "zero1", "zero2", "zero3", "fsdp1", "fsdp2"] = "single"
    """Data-parallel strategy over the processes that the other axes leave; `zero3` is another name of `fsdp2`."""
    dp_replicate: int = 1
    """fsdp2: number of replicas of the sharded model (HSDP); what is left of the world is `dp_shard`."""
    reshard_after_forward: bool = True
    """fsdp2: free a layer's gathered weights after its forward and gather them again for its backward."""
    fsdp1_wrap: Literal["separate", "naive"] = "separate"
    """fsdp1: `separate`, trainable and frozen weights lie in flat parameters of their own; `naive`, one per layer, in
    which frozen weights take memory for gradients as if they were trained."""
    offload: Literal["none", "optimizer", "all"] = "none"
    """fsdp2: keep the optimizer (its states and its step), or it and the sharded weights and gradients, on the CPU."""
    tp: int = 1
    """Tensor: number of ranks over which the weights of each layer are sharded."""
    sequence_parallel: bool = False
    """Tensor: between the blocks of layers, a rank holds 1/tp of the tokens."""
    pp: int = 1
    """Pipeline: number of ranks that the layers are spread over."""
    schedule: Literal[
        "gpipe",
        "1f1b",
        "interleaved-1f1b",
        "looped-bfs",
        "interleaved-zero-bubble",
        "zbv",
        "dualpipe-v",
    ] = "1f1b"
    """Pipeline: in which order a rank runs its micro-batches' forwards and backwards."""
    virtual_stages: int | None = None
    """Pipeline: stages per rank; null: 1 for gpipe and 1f1b, 2 for the others."""
    split: Literal["balanced", "uniform", "parameters"] | list[int] = "balanced"
    """Pipeline: `balanced`, the shortest step by measured costs (`shardwise split --profile`) or else by FLOPs;
    `uniform`, as many layers in each stage; `parameters`, as many parameters; or the numbers of layers."""
    memory_limit_gib: float | None = None
    """Pipeline: what a rank may hold of weights, gradients, optimizer states and activations in flight, in GiB."""

    @property
    def num_virtual(self) -> int:
        """Pipeline stages per rank."""
        return self.virtual_stages or (1 if self.schedule in ("gpipe", "1f1b") else 2)

    def __post_init__(self) -> None:
        if self.data == "zero3":
            object.__setattr__(self, "data", "fsdp2")
        check_ranges("parallel", self)
        require(
            self.memory_limit_gib is None or self.memory_limit_gib > 0,
            f"parallel.memory_limit_gib is {self.memory_limit_gib}; give a positive number, or leave it out",
        )


@dataclass(frozen=True)
class Optimizer(Section):
    """How the weights are updated."""

    name: Literal["adamw", "sgd"] = "adamw"
    """AdamW (arXiv 1711.05101), or SGD without momentum."""
    lr: float = 2e-4
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's decay rates of the first and second moment."""
    eps: float = 1e-8
    """AdamW's epsilon."""
    weight_decay: float = 0.0
    """On weight matrices, LoRA factors among them; not on norms, biases, recurrent scalars, and the linears that route
    tokens (of experts) or set how fast a state decays and is written (such as Gated DeltaNet's a and b)."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises linearly: lr / warmup_steps in the first, lr in the last of them."""
    lr_schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """How it falls from lr in the first step after the warm-up towards 0, which the step after the last would have."""
    max_grad_norm: float | None = 1.0
    """Clip by the global norm over all ranks' shards; null: do not clip."""

    def __post_init__(self) -> None:
        check_ranges("optimizer", self)
        require(
            all(0 <= b < 1 for b in self.betas),
            f"optimizer.betas is {list(self.betas)}; give two in [0, 1)",
        )
        require(
            self.max_grad_norm is None or self.max_grad_norm > 0,
            f"optimizer.max_grad_norm is {self.max_grad_norm}; give a positive number, or null for no clipping",
        )


@dataclass(frozen=True)
class Training(Section):
    """How much, with what, and where the results go."""

    output_dir: str
    """Folder for everything a run leaves; one that holds another run is refused."""
    steps: int = 100
    """Optimizer steps."""
    global_batch_size: int = 8
    """Rows in an optimizer step, over all ranks and micro-batches."""
    micro_batch_size: int = 1
    """Rows in one forward and backward on one rank."""
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    """`bfloat16`, `float16`: matrix products in that dtype (autocast); weights, reductions and optimizer keep theirs.
    float16 scales the loss so that small gradients survive, and skips a step whose gradients overflow."""
    accumulation: Literal["model", "float32"] = "model"
    """Dtype in which gradients add up over micro-batches: the weights' own, or float32."""
    checkpointing: Literal["none", "full", "operators"] | list[str] = "none"
    """`full`: keep only each layer's input and compute the layer again in the backward. `operators`: keep the outputs
    of matrix products and attention, compute the rest again. A list names the kinds of layers to compute again."""
    compile: Literal["none", "inductor", "aot_eager"] = "none"
    """Compile each decoder layer with torch.compile and this backend."""
    loss: Literal["auto", "chunked", "triton", "plain"] = "auto"
    """`chunked`: cross entropy without ever holding all logits. `triton`: the same, with Triton's kernels for what is
    not a matrix product. `auto`: `triton` on a GPU where it is installed, else `chunked`. `plain`: logits first, then
    torch's cross entropy."""
    seed: int = 0
    """Of random weights, document order and dropout."""
    eval_every: int = 0
    """Steps between evaluations (0: only before step 1 and at the end)."""
    eval_batches: int = 0
    """Global batches in an evaluation (0: the whole validation set)."""
    save_every: int = 0
    """Steps between checkpoints; the last step has one too (0: none)."""
    keep_last: int = 2
    """How many of the latest checkpoints are kept."""
    keep_best: bool = False
    """Save after each evaluation that is the best so far, and keep that checkpoint; `checkpoints/best` leads to it."""
    async_save: bool = False
    """Write checkpoints while training goes on, from a copy in CPU memory."""
    resume: str | None = None
    """`latest`: go on from the newest checkpoint in `output_dir`; `latest-good`: from the newest that is whole; `auto`:
    the same, or from the start where there is none yet (the same command may run again); or a checkpoint's folder."""
    max_restarts: int = 0
    """How often a group of processes is started again, from the last checkpoint, after one of them died."""
    timeout_seconds: float = 600.0
    """How long a step, or a wait for others (in a save too), may take before the run ends with every rank's stacks."""
    sample: str | None = None
    """A prompt to continue greedily when training ends; with `data.format: chat`, what a user says, to be answered."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`: a GPU where there is one."""
    overwrite: bool = False
    """Replace what another run left in `output_dir`."""

    def __post_init__(self) -> None:
        require(bool(self.output_dir), "training.output_dir is empty; name a folder")
        check_ranges("training", self)
        require(
            self.checkpointing != [],
            "training.checkpointing is an empty list; name kinds of layers, or give none",
        )


@dataclass(frozen=True)
class Measure(Section):
    """What is measured and where it is told."""

    warmup_steps: int = 3
    """Steps left out of every time figure."""
    memory: bool = True
    """Measure peak memory, in one more step that is not timed and does not train."""
    reverse_microbatches: bool = False
    """Take a step's micro-batches in reverse order: they add up in another order, and nothing else differs."""
    nudge_weights: bool = False
    """Begin with about half of the weights moved by one unit in their last place (float32): with the key above a noise
    control, what rounding alone does to a loss curve."""
    trackers: list[Literal["tensorboard", "wandb", "mlflow", "trackio"]] = field(
        default_factory=list
    )
    """Experiment trackers; all but TensorBoard must be installed by you."""

    def __post_init__(self) -> None:
        check_ranges("measure", self)


@dataclass(frozen=True)
class RunConfig(Section):
    """One run: what is trained (model, lora), on what (data), how it is split (parallel), and the rest."""

    model: Model
    data: Data
    training: Training
    lora: Lora | None = None
    parallel: Parallel = field(default_factory=Parallel)
    optimizer: Optimizer = field(default_factory=Optimizer)
    measure: Measure = field(default_factory=Measure)

    def to_dict(self) -> dict[str, Any]:
        """The resolved config as plain data: `run_file.parse_config(cfg.to_dict()) == cfg`."""
        return dataclasses.asdict(self)


def flat(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run file as `section.key` -> value; a section without keys, such as `lora: null`, keeps its name."""
    values: dict[str, Any] = {}
    for section, keys in run.items():
        if isinstance(keys, Mapping):
            values |= {f"{section}.{key}": value for key, value in keys.items()}
        else:
            values[section] = keys
    return values


def nearest(name: str, known: Sequence[str], what: str = "keys") -> str:
    """What to tell somebody who wrote `name` where only `known` names would do."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {near[0]}?" if near else f"known {what}: {', '.join(known)}"


def known_keys(*section: str) -> list[str]:
    """The keys of a section of the run file; without an argument the sections."""
    cls: Any = RunConfig
    for part in section:
        hint = get_type_hints(cls)[part]
        cls = next((arg for arg in get_args(hint) if dataclasses.is_dataclass(arg)), hint)
    return [f.name for f in dataclasses.fields(cls)]
