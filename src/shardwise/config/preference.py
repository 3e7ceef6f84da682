"""The section `preference` of the run file: how a model learns from pairs of answers."""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from shardwise.config.section import KeyFacts, Section, with_facts

ObjectiveName = Literal["sft", "dpo", "kto", "orpo", "simpo"]
"""Objectives of a run: the cross entropy of target tokens, a loss of answers with a label (kto), or
one of pairs of answers."""

BETAS: dict[str, float] = {"dpo": 0.1, "kto": 0.1, "orpo": 0.1, "simpo": 2.0}
"""`preference.beta` of each objective where the run file gives none."""

USED_BY: dict[str, tuple[ObjectiveName, ...]] = {
    "beta": ("dpo", "kto", "orpo", "simpo"),
    "loss": ("dpo",),
    "label_smoothing": ("dpo", "simpo"),
    "margin": ("simpo",),
    "sft_weight": ("dpo", "simpo"),
    "reference": ("dpo", "kto"),
    "reference_logprobs": ("dpo", "kto"),
    "undesirable_weight": ("kto",),
}
"""The objectives that read each key of the section."""


PAIR_METRICS = (
    "rewards/chosen",
    "rewards/rejected",
    "rewards/accuracies",
    "rewards/margins",
    "logps/chosen",
    "logps/rejected",
    "kl",
)
"""Means over the pairs, or answers with a label, of a step, by the names that TRL gives them: the
rewards of both sides, the share of pairs whose chosen side has the larger one, the difference of
the rewards, and both sides' log-probabilities, sums or (orpo, simpo) means over tokens. Answers
with a label have no pair to be ahead in, and alone `kl`, the estimate that their rewards are
compared with."""


def metrics_of(objective: ObjectiveName) -> tuple[str, ...]:
    """Return those of PAIR_METRICS that an objective reports."""
    other = "rewards/accuracies" if objective == "kto" else "kl"
    return tuple(name for name in PAIR_METRICS if name != other)


@dataclass(frozen=True)
class Preference(Section):
    """Keys that only the objectives of preferences have (`training.objective`)."""

    facts: ClassVar[KeyFacts] = KeyFacts(timed=False, decides="work", for_own_loop=False)

    beta: float | None = with_facts(None, between=(1e-6, 1_000_000))
    """Factor of rewards; orpo: the weight of the odds ratio. null: 0.1, simpo 2.0."""
    loss: Literal["sigmoid", "hinge", "ipo"] = "sigmoid"
    """dpo: the loss of the difference of two rewards. `ipo` takes means over tokens, not sums."""
    label_smoothing: float = with_facts(0.0, between=(0, 0.5))
    """The share of pairs whose label is taken to be wrong (conservative DPO; loss `sigmoid`)."""
    margin: float = with_facts(1.0, between=(0, 1_000_000))
    """simpo: how much larger the reward of the chosen answer should be (the paper's gamma)."""
    sft_weight: float = with_facts(0.0, between=(0, 1_000_000))
    """Weight of the mean cross entropy of the chosen answers' tokens, which is added."""
    reference: Literal["base", "start"] | None = None
    """dpo, kto: the model whose log-probabilities are subtracted. `base`: the base model, which is
    the trained one with its adapters off. `start`: the model as the first step finds it; what is
    trained is kept once more, sharded alike. null: `base` with new adapters alone, else `start`."""
    reference_logprobs: Literal["step", "precompute"] = with_facts(
        "step", timed=False, decides=None, for_own_loop=False
    )
    """dpo, kto: when the reference computes: in each step, or before the first one, once for all
    answers of the run, into a file in `training.output_dir`, which a resume reads. Then no copy of
    weights is kept, and a step has no other forward; kto: one."""
    undesirable_weight: float = with_facts(1.0, between=(0, 1_000_000))
    """kto: the weight of the losses of undesirable answers, where that of desirable ones is 1."""

    def in_each_step(self) -> "Preference":
        """Return the keys with a reference that computes in each step."""
        return replace(self, reference_logprobs="step")
