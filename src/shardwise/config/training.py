"""How the weights are updated, for how long, and what is measured."""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from shardwise.config.optimizers import OptimizerName
from shardwise.config.preference import ObjectiveName
from shardwise.config.section import KeyFacts, Section, require, with_facts

Way = Literal["none", "operators", "full"]
"""How much of one layer a backward computes again."""
MOST_GIB = 1_000_000
Every = int | Literal["epoch"]
"""The steps between two of something that recurs (0: it does not), or the end of each epoch."""


@dataclass(frozen=True)
class Optimizer(Section):
    """How the weights are updated."""

    facts: ClassVar[KeyFacts] = KeyFacts(timed=False, decides="work")

    name: OptimizerName = with_facts("adamw", reported=True)
    """How weights are updated."""
    lr: float = with_facts(2e-4, between=(0, 1_000_000), reported=True)
    """Peak learning rate."""
    lora_b_lr_ratio: float = with_facts(1.0, between=(0.001, 1_000_000))
    """The learning rate of LoRA's factors B, also those of experts, as a multiple of `lr` (LoRA+,
    arXiv 2402.12354)."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's decay rates of the first and second moment."""
    eps: float = with_facts(1e-8, between=(0, 1_000_000))
    """AdamW's epsilon."""
    weight_decay: float = with_facts(0.0, between=(0, 1_000_000))
    """For weight matrices, LoRA factors included. Norms, biases, scalars of recurrent layers,
    routers of experts, and linears that set how fast a state decays or is written (such as Gated
    DeltaNet's a and b) have none. In a module of the caller, all with two dims or more have it."""
    warmup_steps: int = with_facts(0, between=(0, 1_000_000_000))
    """Steps over which the learning rate rises linearly, from lr / warmup_steps in the first to lr
    in the last of them."""
    warmup_ratio: float = with_facts(0.0, between=(0, 1))
    """The same as a share of `training.steps`, rounded to the nearest step."""
    lr_schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """The learning rate after the warm-up. `cosine`, `linear`: it falls from lr in the first step
    to 0 in the step after the last one. `constant`: it stays. `wsd` (warm-up, stable, decay; arXiv
    2404.06395): it stays, and falls linearly in the last steps."""
    decay_ratio: float = with_facts(0.1, between=(0, 1))
    """wsd: the share of `training.steps` in which the learning rate falls, rounded to the nearest
    step. The fall begins after the warm-up at the earliest."""
    min_lr_ratio: float = with_facts(0.0, between=(0, 1))
    """The share of lr to which the learning rate falls, in place of 0."""
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
class Recomputation(Section):
    """Layers that are computed again, or the memory by which they are chosen."""

    budget_gib: float | None = None
    """The most GiB that a rank may need: the layers are chosen that cost least to compute again."""
    full: tuple[int, ...] = ()
    """The layers, from 0, of which only the input is kept."""
    operators: tuple[int, ...] = ()
    """The layers of which the outputs of products are kept."""

    def __post_init__(self) -> None:
        super().__post_init__()
        key, budget, layers = "training.checkpointing", self.budget_gib, self.full + self.operators
        require(
            budget is None or 0 < budget <= MOST_GIB,
            f"{key}: budget_gib is {budget}; give a positive number of GiB, at most {MOST_GIB:,}",
        )
        require(
            budget is None or not layers,
            f"{key} has budget_gib, which chooses the layers, and layers; leave one out",
        )
        require(
            budget is not None or bool(layers),
            f"{key} names no layer; give budget_gib, or layers as full or operators, or none",
        )
        twice = sorted({layer for layer in layers if layers.count(layer) > 1})
        require(not twice, f"{key} names layer {twice[0] if twice else 0} twice; leave one out")
        require(
            all(layer >= 0 for layer in layers),
            f"{key} names layer {min(layers, default=0)}; layers are numbered from 0",
        )

    def way_of(self, layer: int) -> Way:
        """Return what is computed again of a layer, whose number counts from the lowest one."""
        assert self.budget_gib is None, "the layers have not been chosen"
        return "full" if layer in self.full else "operators" if layer in self.operators else "none"


Checkpointing = Literal["none", "full", "operators"] | list[str] | Recomputation
"""`training.checkpointing`; a list has kinds of layers."""


def way_of(checkpointing: Checkpointing, layer: int, kind: str) -> Way:
    """Return what is computed again of a layer of this number, from 0, and this kind."""
    if isinstance(checkpointing, Recomputation):
        return checkpointing.way_of(layer)
    if isinstance(checkpointing, list):
        return "full" if kind in checkpointing else "none"
    return checkpointing


@dataclass(frozen=True)
class Training(Section):
    """How long, in what numerics, and where the results go."""

    output_dir: str = with_facts(
        resumable=True, timed=False, never_set="the bench gives each round a folder"
    )
    """Folder for everything that the run writes; one that holds another run is refused."""
    objective: ObjectiveName = with_facts("sft", timed=False, decides="work", for_own_loop=False)
    """`sft`: the cross entropy of target tokens. `dpo`, `orpo`, `simpo`: a loss of pairs of a
    chosen and a rejected answer; `kto`: of answers with a label, desirable or not
    (`data.format: preference`, section `preference`)."""
    steps: int | None = with_facts(
        None, between=(1, 1_000_000_000), timed=False, decides="work", reported=True
    )
    """Optimizer steps; null: 100, or as many as `epochs` come to."""
    epochs: float | None = with_facts(
        None, between=(1e-06, 1_000_000), timed=False, decides="work", for_own_loop=False
    )
    """How often all documents are read, instead of `steps`. The documents are tokenised once more
    before the first step, to count the steps."""
    global_batch_size: int = with_facts(
        8, between=(1, 1_000_000), timed=False, decides="work", reported=True, rows=True
    )
    """Rows in an optimizer step, over all ranks and micro-batches."""
    micro_batch_size: int = with_facts(
        1, between=(1, 1_000_000), resumable=True, searched=True, reported=True
    )
    """Rows in one forward and backward on one rank."""
    precision: Literal["float32", "bfloat16", "float16"] = with_facts(
        "float32", rounds=True, reported=True
    )
    """`bfloat16`, `float16`: matrix products in that dtype (autocast); weights, reductions and the
    optimizer keep theirs. float16 scales the loss so that small gradients do not become 0, and
    skips a step whose gradients overflow."""
    cast: Literal["products", "weights"] = with_facts("products", rounds=True)
    """Numbers that are cast to `precision`. `products`: the operands of each matrix product, by
    autocast; hidden states keep the dtype of the weights. `weights`: a copy of a layer's weights
    before it computes; hidden states have `precision`, too, and fsdp2 gathers the copies. It is for
    full training, as with FSDP2's MixedPrecisionPolicy, Megatron and DeepSpeed."""
    matmul: Literal["default", "fp8_tensorwise", "fp8_rowwise"] = with_facts("default", rounds=True)
    """`fp8_tensorwise`, `fp8_rowwise`: the products of the layers' linears in 8-bit floating point,
    with one scale of an operand or one for each of its rows (docs/guides/fp8.md). `default`: in
    the dtype of `precision`."""
    accumulation: Literal["model", "float32"] = with_facts("model", rounds=True)
    """Dtype in which gradients add up over micro-batches: the weights' own, or float32."""
    checkpointing: Literal["none", "full", "operators"] | list[str] | Recomputation = with_facts(
        "none", resumable=True, searched=True, reported=True
    )
    """`full`: keep only each layer's input, and compute the layer again in the backward.
    `operators`: keep the outputs of matrix products and attention, and compute the rest again. A
    list names the kinds of layers that are computed again. `{budget_gib: 12}`: of the ways in which
    each rank's peak is at most so many GiB, the one that computes least again. `{full: [0, 1],
    operators: [2]}`: the layers of these numbers."""
    offload_activations: bool = False
    """Keep in CPU memory what the layers' forwards leave for their backwards."""
    compile: Literal["none", "inductor", "reduce-overhead", "max-autotune", "aot_eager"] = (
        with_facts("none", resumable=True, rounds=True)
    )
    """Compile each decoder layer with torch.compile and this backend. `reduce-overhead`: inductor,
    and what a layer queues on a GPU is recorded and replayed as one CUDA graph. `max-autotune`:
    inductor, which times more kernels for each product."""
    loss: Literal["auto", "chunked", "triton", "plain"] = with_facts(
        "auto", resumable=True, rounds=True
    )
    """`chunked`: cross entropy that never holds all logits. `triton`: the same, with Triton's
    kernels for all except matrix products. `auto`: `triton` on a GPU where it is installed, else
    `chunked`. `plain`: all logits, then torch's cross entropy."""
    seed: int = with_facts(
        0,
        between=(-9_223_372_036_854_775_808, 9_223_372_036_854_775_807),
        timed=False,
        decides="work",
        reported=True,
        rows=True,
    )
    """Seed of random weights, the order of documents, and dropout."""
    eval_every: int | Literal["epoch"] = with_facts(
        0, between=(0, 1_000_000_000), resumable=True, timed=False, for_own_loop=False
    )
    """Steps between evaluations (0: only before step 1 and after the last). `epoch`: one at the end
    of each of `epochs`. Slots read their documents at their own pace, so that end is a step and not
    a document: of N steps over E epochs, epoch k ends after step N k / E, rounded."""
    eval_batches: int = with_facts(
        0, between=(0, 1_000_000_000), resumable=True, timed=False, for_own_loop=False
    )
    """Global batches in an evaluation (0: the whole validation set)."""
    patience: int = with_facts(
        0,
        between=(0, 1_000_000_000),
        resumable=True,
        timed=False,
        never_set="every cell takes the same steps",
    )
    """Stop after so many evaluations in a row whose loss is not below the lowest before (0: never).
    The evaluation before step 1 does not count."""
    save_every: int | Literal["epoch"] = with_facts(
        0, between=(0, 1_000_000_000), resumable=True, timed=False
    )
    """Steps between checkpoints, and one after the last step (0: none). `epoch`: at the steps of
    `eval_every: epoch`."""
    keep_last: int = with_facts(2, between=(1, 1_000_000_000), resumable=True, timed=False)
    """The number of latest checkpoints that are kept."""
    keep_best: bool = with_facts(False, resumable=True, timed=False)
    """Save after each evaluation that is the best so far, and keep that checkpoint;
    `checkpoints/best` is a link to it. The result at the end has its weights."""
    async_save: bool = with_facts(False, resumable=True, timed=False)
    """Write checkpoints while training continues, from a copy in CPU memory."""
    memory_checkpoint_every: int = with_facts(
        0, between=(0, 1_000_000_000), resumable=True, timed=False
    )
    """Steps between checkpoints in the memory of the nodes, each with a copy on the next node (0:
    none). They outlive the processes, or one node; `resume: auto` reads them where they are not
    older than those on disk."""
    resume: str | None = with_facts(
        None, resumable=True, timed=False, never_set="a cell starts from the beginning"
    )
    """`latest`: resume from the newest checkpoint in `output_dir`. `latest-good`: from the newest
    undamaged one. `auto`: the same, or from scratch where there is none, so that one command may
    run again and again. Or a checkpoint's folder."""
    check_copies_every: int = with_facts(0, between=(0, 1_000_000_000), resumable=True, timed=False)
    """Steps between comparisons of the weights that several ranks hold copies of, which must have
    the same bits; also before each checkpoint (0: never). A difference ends the run."""
    sample: str | None = with_facts(None, resumable=True, timed=False, for_own_loop=False)
    """A prompt that is continued greedily after training; with `data.format: chat` it is a user's
    message, which is answered."""
    device: Literal["auto", "cpu", "cuda"] = with_facts(
        "auto", resumable=True, timed=False, rounds=True
    )
    """`auto`: GPUs where there are any."""
    overwrite: bool = with_facts(
        False, resumable=True, timed=False, never_set="the bench gives each round a folder"
    )
    """Replace the files of another run in `output_dir`."""

    def __post_init__(self) -> None:
        require(bool(self.output_dir), "training.output_dir is empty; name a folder")
        super().__post_init__()
        require(
            self.checkpointing != [],
            "training.checkpointing is an empty list; name kinds of layers, or give none",
        )

    def is_due(self, every: Every, step: int, num_steps: int) -> bool:
        """Return whether what recurs `every` so often is due after a step of so many."""
        if every != "epoch":
            return every > 0 and step % every == 0
        assert self.epochs is not None, "a rule refuses it"
        epoch = min(round(step * self.epochs / num_steps), int(self.epochs))  # the nearest end
        return epoch > 0 and step == round(num_steps * epoch / self.epochs)

    @property
    def budget_bytes(self) -> int | None:
        """The bytes by which layers are chosen that are computed again; None without a budget."""
        chosen = self.checkpointing
        gib = chosen.budget_gib if isinstance(chosen, Recomputation) else None
        return None if gib is None else int(gib * 2**30)

    @property
    def has_preferences(self) -> bool:
        """Whether the loss compares answers, of pairs or with labels."""
        return self.objective != "sft"

    @property
    def reads_labels(self) -> bool:
        """Whether the loss is one of answers with a label."""
        return self.objective == "kto"

    @property
    def is_fp8(self) -> bool:
        """Whether products of linears are in FP8."""
        return self.matmul != "default"

    @property
    def casts_weights(self) -> bool:
        """Whether layers compute with copies of their weights in `precision`."""
        return self.cast == "weights"

    def in_float32(self) -> "Training":
        """Return it with products in float32."""
        return replace(self, precision="float32", cast="products")

    @property
    def is_compiled(self) -> bool:
        """Whether decoder layers are compiled."""
        return self.compile != "none"

    @property
    def is_graphed(self) -> bool:
        """Whether decoder layers are CUDA graphs."""
        return self.compile == "reduce-overhead"

    @property
    def keeps_activations(self) -> bool:
        """Whether a backward finds on its device all that its forward has left."""
        return self.checkpointing == "none" and not self.offload_activations

    @property
    def keeps_operators(self) -> bool:
        """Whether the outputs of products are kept of some layer that is computed again."""
        chosen = self.checkpointing
        return chosen == "operators" or (
            isinstance(chosen, Recomputation) and bool(chosen.operators)
        )

    @property
    def num_steps(self) -> int | None:
        """The optimizer steps of a run; None where only its documents say what `epochs` come to."""
        if self.steps is None and self.epochs is None:
            return 100
        return self.steps


@dataclass(frozen=True)
class Measure(Section):
    """Measurements, and where they are reported."""

    facts: ClassVar[KeyFacts] = KeyFacts(timed=False)

    warmup_steps: int = with_facts(
        3,
        between=(0, 1_000_000_000),
        resumable=True,
        never_varied="all cells are measured in the same way",
    )
    """Steps left out of every time figure."""
    memory: bool = with_facts(
        True, resumable=True, never_varied="all cells are measured in the same way"
    )
    """Measure peak memory, in one more step after training that is not timed."""
    reverse_microbatches: bool = with_facts(
        False, resumable=True, is_noise=True, never_varied="the noise controls vary it"
    )
    """Run the micro-batches of a step in reverse order: only the order of sums differs."""
    nudge_weights: bool = with_facts(
        False, is_noise=True, never_varied="the noise controls vary it"
    )
    """Move about half of the initial weights by one unit in their last place (float32). With
    `reverse_microbatches` it is the noise control: how far rounding alone moves a loss curve."""
    print_seconds: float = with_facts(30.0, between=(0, 1_000_000_000), resumable=True)
    """Seconds between lines of progress where the output is no terminal, as in the log of a job (0:
    a line after each step)."""
    trackers: list[Literal["tensorboard", "wandb", "mlflow", "trackio"]] = with_facts(
        factory=list, resumable=True
    )
    """Experiment trackers, whose packages you install."""
