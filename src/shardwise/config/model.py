"""The sections `model` and `lora` of the run file."""

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from shardwise.config.section import KeyFacts, Section, require, with_facts

DType = Literal["float32", "bfloat16"]
Attention = Literal[
    "auto", "eager", "sdpa", "flash_attention_2", "flash", "efficient", "cudnn", "math"
]
CALLERS = "given by the caller"
"""`model.path` and `data.train` of a loop of the caller with a module or rows of its own."""


@dataclass(frozen=True)
class Model(Section):
    """The model that is trained."""

    facts: ClassVar[KeyFacts] = KeyFacts(decides="work")

    path: str = with_facts(resumable=True, timed=False, reported=True)
    """Local folder or hub id: `config.json`, and safetensors unless `init` is `random`."""
    init: Literal["weights", "random"] = with_facts("weights", timed=False)
    """`random`: each weight is a function of `training.seed` and its name, under every layout."""
    dtype: DType = with_facts("float32", timed=False, decides=None, rounds=True, reported=True)
    """Dtype of the weights; those that a family keeps in float32, such as `A_log`, stay so."""
    base: Literal["none", "nf4", "int8", "fp8", "mxfp4", "nvfp4", "int4"] = "none"
    """How LoRA's frozen matrices of layers are stored: in `dtype`, or in 4 or 8 bits with scales
    (docs/guides/quantised-bases.md)."""
    tokenizer: str | None = with_facts(None, resumable=True, timed=False)
    """Folder or hub id of the tokenizer, where it is not in `path`."""
    router_bias_rate: float = with_facts(0.0, between=(0, 1), timed=False)
    """How much the bias on a router's scores changes in a step, up where an expert got fewer tokens
    than the mean and down where it got more (arXiv 2408.15664); 0 leaves it as it is."""
    router_aux_loss_coef: float = with_facts(0.0, between=(0, 1_000_000))
    """Weight of the mixture-of-experts load-balancing loss (0: off)."""
    expert_capacity: float | None = with_facts(None, between=(0.001, 1_000_000))
    """The most tokens that an expert takes of a row in training, as a multiple of its equal share
    T k / E of them, rounded up; later ones are dropped. null: none is dropped."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model folder."""
    attention: Attention = with_facts("auto", resumable=True, decides=None, rounds=True)
    """Attention of transformers: `eager`, `sdpa` or `flash_attention_2`, or one kernel of torch's
    for `sdpa`. `auto`: `sdpa`, in a class without it `eager`. What cannot run here is an
    error, never replaced."""
    slow_cores: Literal["refuse", "allow"] = with_facts("refuse", resumable=True, timed=False)
    """On a GPU: whether recurrent layers may run in plain torch where no package has their
    kernel."""

    @property
    def takes_flash(self) -> bool:
        """Whether attention is by FlashAttention, whatever else a device has."""
        return self.attention in ("flash", "flash_attention_2")

    @property
    def is_callers(self) -> bool:
        """Whether it is a module of the caller, which no folder holds."""
        return self.path == CALLERS


@dataclass(frozen=True)
class Lora(Section):
    """Low-rank adapters (arXiv 2106.09685) on a frozen model, through PEFT."""

    facts: ClassVar[KeyFacts] = KeyFacts(decides="work", by_adapter=True)

    path: str | None = with_facts(None, timed=False, by_adapter=False)
    """Folder with a PEFT adapter to start from; rank, scale and what is adapted are the folder's.
    Null: drawn factors."""
    r: int = with_facts(8, between=(1, 65_536), timed=False, reported=True)
    """Rank of the adapters."""
    alpha: float = with_facts(16.0, between=(-1_000_000, 1_000_000), timed=False)
    """Scale: the adapter's output is multiplied by alpha / r (alpha / sqrt(r) with `rslora`)."""
    dropout: float = with_facts(0.0, by_adapter=False)
    """Dropout on the adapter's input; a mask is a function of seed, step, row and place, under
    every layout."""
    targets: (
        Literal["auto", "attention", "all-linear"] | list[str] | dict[str, list[int | float] | None]
    ) = with_facts("auto", timed=False, reported=True)
    """The linears that get an adapter; `auto` includes the projections of recurrent layers. A list
    names modules; a mapping gives some of them a rank and alpha of their own: `{q_proj: null,
    k_proj: [4, 8]}`."""
    experts: Literal["each", "shared"] = "each"
    """Adapters on routed experts: factors of its own for each expert, or one pair for all experts
    of a stack, which the saved adapter repeats for each."""
    rslora: bool = with_facts(False, timed=False)
    """Rank-stabilised scaling (arXiv 2312.03732)."""
    dora: bool = False
    """Give each row of an adapted matrix a trained length beside its direction (arXiv
    2402.09353)."""
    modules_to_save: list[str] = with_facts(factory=list, timed=False)
    """Modules that are trained in full and saved beside the adapters."""
    dtype: Literal["float32", "model"] = with_facts("float32", timed=False, by_adapter=False)
    """Dtype of the adapters: float32, or the model's."""
    kernel: Literal["auto", "torch", "triton", "peft"] = with_facts(
        "auto", resumable=True, decides=None, rounds=True, by_adapter=False
    )
    """The kernel of plain LoRA linears. `torch` and `triton` need fewer passes than PEFT's forward
    (`peft`). `auto`: `triton` on a GPU where it can run, else `torch`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.targets), "lora.targets is an empty list; name linears, or give auto")
        for name, size in self.sizes.items():
            is_size = len(size) == 2 and 1 <= size[0] <= 65_536 and size[0] % 1 == 0
            require(
                is_size and math.isfinite(size[1]),
                f"lora.targets: {name} has {size}; give a rank from 1 to 65,536 and an alpha, or "
                "null",
            )
        in_range = 0.0 <= self.dropout < 1.0
        require(in_range, f"lora.dropout is {self.dropout}; give a value in [0, 1)")

    @property
    def names(self) -> list[str]:
        """The entries of `targets` that name modules."""
        return [] if isinstance(self.targets, str) else list(self.targets)

    @property
    def sizes(self) -> dict[str, list[int | float]]:
        """Rank and alpha of the entries of `targets` that have their own."""
        entries = self.targets.items() if isinstance(self.targets, dict) else ()
        return {name: size for name, size in entries if size is not None}

    def with_rank_at_most(self, most: int) -> "Lora":
        """Return adapters of the same scales, of ranks of at most `most`."""

        def smaller(rank: float, alpha: float) -> tuple[int, float]:
            share = min(1.0, most / rank)
            return int(min(rank, most)), alpha * (share**0.5 if self.rslora else share)

        r, alpha = smaller(self.r, self.alpha)
        sizes = {name: [*smaller(*size)] for name, size in self.sizes.items()}
        targets = self.targets | sizes if isinstance(self.targets, dict) else self.targets
        return replace(self, r=r, alpha=alpha, targets=targets)
