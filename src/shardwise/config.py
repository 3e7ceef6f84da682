"""The run file: the types and ranges of its keys.

The sections are plain frozen dataclasses, so a Python caller needs only this module; `run_file.py`
checks what comes from outside (a YAML file, command-line overrides).
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from shardwise.ranges import RANGES, missed_bound, shown

DType = Literal["float32", "bfloat16"]

REMOVED: dict[str, Any] = {"lora.merged": False}
"""Keys of an earlier version's run files, each with the value that equals leaving it out."""


class UserError(ValueError):
    """The user's mistake: one line that names what is wrong and the way out (exit code 2)."""

    def __init__(self, message: str) -> None:
        # The message may quote another library's error, which has many lines.
        super().__init__(" ".join(message.split()))


def require(condition: bool, message: str) -> None:
    """Raise UserError with `message` unless `condition` holds."""
    if not condition:
        raise UserError(message)


class Section:
    """Base of the sections: it refuses unknown keys (by pydantic) and numbers out of range."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    def __post_init__(self) -> None:
        """Raise UserError for a number that is outside its range."""
        for key, (least, most) in RANGES.items():
            section, _, name = key.partition(".")
            if section == type(self).__name__.lower():
                value = getattr(self, name)
                problem = missed_bound(value, least, most)
                require(not problem, f"{key} is {shown(value)}; give {problem}")


@dataclass(frozen=True)
class Model(Section):
    """What is trained."""

    path: str
    """Local folder or hub id: `config.json`, and safetensors unless `init` is `random`."""
    init: Literal["weights", "random"] = "weights"
    """`random`: each weight is a function of `training.seed` and its name, under every layout."""
    dtype: DType = "float32"
    """Dtype of the weights; those that a family keeps in float32, such as `A_log`, stay so."""
    tokenizer: str | None = None
    """Folder or hub id of the tokenizer, where it is not in `path`."""
    router_aux_loss_coef: float = 0.0
    """Weight of the mixture-of-experts load-balancing loss (0: off)."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model folder."""
    sdpa_backend: Literal["auto", "flash", "efficient", "cudnn", "math"] = "auto"
    """The attention kernel of torch; one that cannot run here is an error, never replaced."""


@dataclass(frozen=True)
class Lora(Section):
    """Low-rank adapters (arXiv 2106.09685) on a frozen model, through PEFT."""

    r: int = 8
    """Rank of the adapters."""
    alpha: float = 16.0
    """Scale: the adapter's output is multiplied by alpha / r (alpha / sqrt(r) with `rslora`)."""
    dropout: float = 0.0
    """Dropout on the adapter's input; a mask is a function of seed, step, row and place, under
    every layout."""
    targets: Literal["auto", "attention", "all-linear"] | list[str] = "auto"
    """The linears that get an adapter; `auto` includes the projections of recurrent layers. A list
    names modules."""
    rslora: bool = False
    """Rank-stabilised scaling (arXiv 2312.03732)."""
    modules_to_save: list[str] = field(default_factory=list)
    """Modules that are trained in full and saved beside the adapters."""
    dtype: Literal["float32", "model"] = "float32"
    """Dtype of the adapters: float32, or the model's."""
    kernel: Literal["auto", "torch", "triton", "cuda", "peft"] = "auto"
    """The kernel of plain LoRA linears. `torch`, `triton` and `cuda` (C++) need fewer passes than
    PEFT's forward (`peft`). `auto`: `triton` on a GPU where it can run, else `torch`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.targets != [], "lora.targets is an empty list; name linears, or give auto")
        in_range = 0.0 <= self.dropout < 1.0
        require(in_range, f"lora.dropout is {self.dropout}; give a value in [0, 1)")


@dataclass(frozen=True)
class Data(Section):
    """The data that it is trained on."""

    train: str | list[str]
    """Files, folders or glob patterns: JSONL, Parquet or plain text (one document per file); or the
    name or folder of a `datasets` dataset."""
    weights: list[float] | None = None
    """How often each entry of `train` is read, relative to the others; null: by its number of
    documents."""
    validation: float | str | list[str] = 0.0
    """The share of the documents that is held out, or separate files."""
    format: Literal["text", "completion", "chat"] = "text"
    """`text`: every token is a target. `completion`: fields `prompt` and `completion`; the tokens
    of the completion are targets. `chat`: field `messages`, written by a chat template; `train_on`
    says which tokens are targets."""
    chat_template: str | None = None
    """Chat: a file with the Jinja template; null: the tokenizer's own."""
    template_arguments: dict[str, Any] | None = None
    """Chat: variables of the template, such as `enable_thinking: false`."""
    tools: str | None = None
    """Chat: the tools that a dialogue offers: a `.json` file, the same for all dialogues, or the
    field of each document that has them."""
    train_on: Literal["assistant", "last", "all"] = "assistant"
    """Chat: the targets are all turns of the assistant, its last one, or every token. A message
    of the assistant with `"train": false` or `"weight": 0` is no target."""
    turns: Literal["together", "separate"] = "together"
    """Chat: `separate` makes a document of each turn that is trained on, with the turns before it
    written as they are at inference. It is meant for templates that leave out earlier thinking."""
    text_field: str = "text"
    """The field that holds the document (format `text`)."""
    fields: dict[str, str] | None = None
    """Names of the fields in the data that stand for `prompt`, `completion` or `messages`, such as
    `{prompt: instruction, completion: output}`."""
    on_error: Literal["fail", "skip"] = "fail"
    """A document that cannot be used ends the run, or is skipped and counted."""
    sequence_length: int = 512
    """Tokens in a row; with the label of its last token, a row reads one token more."""
    packing: Literal["auto", "none", "concat", "isolated", "documents"] = "auto"
    """`none`: a row holds one document (a long one continues in the next row). `concat`: documents
    are joined by the end-of-text token and cut into full rows; a document sees the one before it
    in its row. `isolated`: rows as with `concat`, but no layer of any kind carries anything from
    one document into the next. `documents`: a row holds whole documents, isolated in the same way.
    `auto`: `concat` for texts, else `documents`."""
    long: Literal["cut", "split", "skip"] = "cut"
    """Packing `documents`: a document longer than a row is cut to its beginning, split into several
    documents, or skipped. The record counts these documents."""
    workers: int = 0
    """Worker processes per rank that tokenise; the batches do not depend on their number."""

    def column(self, name: str) -> str:
        """Return the name in the data of `prompt`, `completion` or `messages`."""
        return (self.fields or {}).get(name, name)

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
        super().__post_init__()
        if self.weights is not None:
            num_entries = 1 if isinstance(self.train, str) else len(self.train)
            require(
                len(self.weights) == num_entries,
                f"data.weights has {len(self.weights)} numbers; give one for each of the "
                f"{num_entries} entries of data.train",
            )
            positive = all(0 < weight < math.inf for weight in self.weights)
            require(positive, f"data.weights is {shown(self.weights)}; give positive numbers")
        unknown = sorted(set(self.fields or {}) - {"prompt", "completion", "messages"})
        require(
            not unknown,
            f"data.fields names {', '.join(unknown)}; give names for prompt, completion or "
            "messages, and for a text data.text_field",
        )
        arguments = self.template_arguments
        try:
            is_plain = json.loads(json.dumps(arguments)) == arguments
        except (TypeError, ValueError):
            is_plain = False
        require(
            is_plain,
            "data.template_arguments has a value that is no text, number, switch, list or mapping "
            "with text as keys; put dates in quotes",
        )
        if isinstance(self.validation, int | float):
            in_range = 0.0 <= self.validation < 1.0
            require(in_range, f"data.validation is {self.validation}; give a share in [0, 1)")


@dataclass(frozen=True)
class Parallel(Section):
    """How the run is split over processes."""

    data: Literal["single", "ddp", "zero1", "zero2", "zero3", "fsdp1", "fsdp2"] = "single"
    """The data-parallel strategy, over the processes that the other axes leave; `zero3` is another
    name of `fsdp2`."""
    dp_replicate: int = 1
    """fsdp2: the number of replicas of the sharded model (HSDP); each is sharded over the rest."""
    reshard_after_forward: bool = True
    """fsdp2: free a layer's gathered weights after its forward, and gather them again for its
    backward."""
    fsdp1_wrap: Literal["separate", "naive"] = "separate"
    """fsdp1: `separate`: each layer has a flat parameter of trainable weights and one of frozen
    weights. `naive`: it has one of all, in which frozen weights need memory for gradients too."""
    offload: Literal["none", "optimizer", "all"] = "none"
    """fsdp2: what stays on the CPU: the optimizer's states and step, or these and the sharded
    weights and gradients."""
    tp: int = 1
    """Tensor: the number of ranks over which each layer's weights are sharded."""
    sequence_parallel: bool = False
    """Tensor: between the blocks of layers, each rank holds 1/tp of the tokens."""
    pp: int = 1
    """Pipeline: the number of ranks over which the layers are distributed."""
    schedule: Literal[
        "gpipe",
        "1f1b",
        "interleaved-1f1b",
        "looped-bfs",
        "interleaved-zero-bubble",
        "zbv",
        "dualpipe-v",
    ] = "1f1b"
    """Pipeline: the order in which a rank runs the forwards and backwards of micro-batches."""
    virtual_stages: int | None = None
    """Pipeline: stages per rank; null: 1 for gpipe and 1f1b, 2 for the other schedules."""
    split: Literal["balanced", "uniform", "parameters"] | list[int] = "balanced"
    """Pipeline: `balanced`: the shortest step, by measured costs (`shardwise split --profile`) or
    else by FLOPs. `uniform`: equal numbers of layers. `parameters`: equal numbers of parameters.
    A list gives the number of layers in each stage."""
    memory_limit_gib: float | None = None
    """Pipeline: the most GiB that a rank may hold of weights, gradients, optimizer states and
    activations in flight."""

    @property
    def num_virtual(self) -> int:
        """Pipeline stages per rank."""
        return self.virtual_stages or (1 if self.schedule in ("gpipe", "1f1b") else 2)

    def __post_init__(self) -> None:
        if self.data == "zero3":
            object.__setattr__(self, "data", "fsdp2")
        super().__post_init__()
        limit = self.memory_limit_gib
        require(
            limit is None or limit > 0,
            f"parallel.memory_limit_gib is {limit}; give a positive number, or leave it out",
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
    """For weight matrices, LoRA factors included. Norms, biases, scalars of recurrent layers,
    routers of experts, and linears that set how fast a state decays or is written (such as Gated
    DeltaNet's a and b) have none."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises linearly, from lr / warmup_steps in the first to lr
    in the last of them."""
    lr_schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """The learning rate after the warm-up: it falls from lr in the first step to 0 in the step
    after the last one, or stays constant."""
    max_grad_norm: float | None = 1.0
    """Clip by the global norm over all ranks' shards; null: do not clip."""

    def __post_init__(self) -> None:
        super().__post_init__()
        in_range = all(0 <= beta < 1 for beta in self.betas)
        require(in_range, f"optimizer.betas is {list(self.betas)}; give two in [0, 1)")
        norm = self.max_grad_norm
        require(
            norm is None or norm > 0,
            f"optimizer.max_grad_norm is {norm}; give a positive number, or null for no clipping",
        )


@dataclass(frozen=True)
class Training(Section):
    """How long, in what numerics, and where the results go."""

    output_dir: str
    """Folder for everything that the run writes; one that holds another run is refused."""
    steps: int = 100
    """Optimizer steps."""
    global_batch_size: int = 8
    """Rows in an optimizer step, over all ranks and micro-batches."""
    micro_batch_size: int = 1
    """Rows in one forward and backward on one rank."""
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    """`bfloat16`, `float16`: matrix products in that dtype (autocast); weights, reductions and the
    optimizer keep theirs. float16 scales the loss so that small gradients do not become 0, and
    skips a step whose gradients overflow."""
    accumulation: Literal["model", "float32"] = "model"
    """Dtype in which gradients add up over micro-batches: the weights' own, or float32."""
    checkpointing: Literal["none", "full", "operators"] | list[str] = "none"
    """`full`: keep only each layer's input, and compute the layer again in the backward.
    `operators`: keep the outputs of matrix products and attention, and compute the rest again. A
    list names the kinds of layers that are computed again."""
    compile: Literal["none", "inductor", "aot_eager"] = "none"
    """Compile each decoder layer with torch.compile and this backend."""
    loss: Literal["auto", "chunked", "triton", "plain"] = "auto"
    """`chunked`: cross entropy that never holds all logits. `triton`: the same, with Triton's
    kernels for all except matrix products. `auto`: `triton` on a GPU where it is installed, else
    `chunked`. `plain`: all logits, then torch's cross entropy."""
    seed: int = 0
    """Seed of random weights, the order of documents, and dropout."""
    eval_every: int = 0
    """Steps between evaluations (0: only before step 1 and after the last)."""
    eval_batches: int = 0
    """Global batches in an evaluation (0: the whole validation set)."""
    save_every: int = 0
    """Steps between checkpoints, and one after the last step (0: none)."""
    keep_last: int = 2
    """The number of latest checkpoints that are kept."""
    keep_best: bool = False
    """Save after each evaluation that is the best so far, and keep that checkpoint;
    `checkpoints/best` is a link to it."""
    async_save: bool = False
    """Write checkpoints while training continues, from a copy in CPU memory."""
    resume: str | None = None
    """`latest`: resume from the newest checkpoint in `output_dir`. `latest-good`: from the newest
    undamaged one. `auto`: the same, or from scratch where there is none, so that one command may
    run again and again. Or a checkpoint's folder."""
    max_restarts: int = 0
    """How often the processes are started again, from the last checkpoint, after one has died."""
    timeout_seconds: float = 600.0
    """How long a step, or a rank's wait for others, may take before the run ends and prints every
    rank's stacks."""
    sample: str | None = None
    """A prompt that is continued greedily after training; with `data.format: chat` it is a user's
    message, which is answered."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`: GPUs where there are any."""
    overwrite: bool = False
    """Replace the files of another run in `output_dir`."""

    def __post_init__(self) -> None:
        require(bool(self.output_dir), "training.output_dir is empty; name a folder")
        super().__post_init__()
        require(
            self.checkpointing != [],
            "training.checkpointing is an empty list; name kinds of layers, or give none",
        )


@dataclass(frozen=True)
class Measure(Section):
    """What is measured, and where it is reported."""

    warmup_steps: int = 3
    """Steps left out of every time figure."""
    memory: bool = True
    """Measure peak memory, in one more step after training that is not timed."""
    reverse_microbatches: bool = False
    """Run the micro-batches of a step in reverse order: only the order of sums differs."""
    nudge_weights: bool = False
    """Move about half of the initial weights by one unit in their last place (float32). With
    `reverse_microbatches` it is the noise control: how far rounding alone moves a loss curve."""
    trackers: list[Literal["tensorboard", "wandb", "mlflow", "trackio"]] = field(
        default_factory=list
    )
    """Experiment trackers, whose packages you install."""


@dataclass(frozen=True)
class RunConfig(Section):
    """One run: the model (model, lora), the data, how it is split (parallel), and the rest."""

    model: Model
    data: Data
    training: Training
    lora: Lora | None = None
    parallel: Parallel = field(default_factory=Parallel)
    optimizer: Optimizer = field(default_factory=Optimizer)
    measure: Measure = field(default_factory=Measure)

    def to_dict(self) -> dict[str, Any]:
        """Return the config as plain data: `run_file.parse_config(cfg.to_dict()) == cfg`."""
        return dataclasses.asdict(self)
