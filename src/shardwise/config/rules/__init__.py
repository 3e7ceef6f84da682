"""Every rule of what may run together.

`refusals` answers whether a run may begin, from its run file and a few facts, and imports neither
torch nor transformers. The parser of run files, the launcher, `train`, `split`, `models` and the
parity matrix all ask here. No other module refuses a combination, so a new strategy brings its
rules as rows of a list here.
"""

from collections.abc import Iterator

from shardwise.base.layouts import Facts, ModelFacts, layout_names, parallel_of, strategy_facts
from shardwise.config import Data, Model, RunConfig, Training, UserError
from shardwise.config.rules import (
    adapters,
    bases,
    compiled,
    context,
    experts,
    models,
    optimizers,
    preferences,
    products,
    ranks,
    recomputation,
    run_file,
)
from shardwise.config.rules.rule import Case, Rule

RULES: dict[str, tuple[Rule, ...]] = {
    "run file": (
        *run_file.RULES,
        *recomputation.RULES,
        *preferences.RULES,
        *adapters.ON_THE_RUN_FILE,
    ),
    "grid": (*ranks.GRID_RULES, *experts.GRID_RULES),
    "adapters": adapters.RULES,
    "model": (
        *models.RULES,
        *context.MODEL_RULES,
        *experts.MODEL_RULES,
        *bases.MODEL_RULES,
        *compiled.MODEL_RULES,
        *products.MODEL_RULES,
        *optimizers.MODEL_RULES,
        *recomputation.MODEL_RULES,
    ),
    "step": (*ranks.STEP_RULES, *compiled.STEP_RULES),
}
"""The rules by what they ask for. A group may rely on the groups before it, so it is asked only
where no earlier group refuses."""


def refusals(
    cfg: RunConfig, facts: Facts | None = None, but: str = ""
) -> Iterator[tuple[str, str]]:
    """Yield the name and the message of every rule of the first group that forbids a run.

    Without `facts` only the rules on the run file are asked; without `facts.model` or
    `facts.adapters`, all except those on models or on adapters. Nor is the group `but`.
    """
    case = Case(cfg, facts or Facts(num_ranks=1))
    unknown = {"model": case.facts.model is None, "adapters": case.facts.adapters is None}
    for group, rules in RULES.items():
        if group == but or unknown.get(group, facts is None and group != "run file"):
            continue
        refused = [(rule.name, rule.message(case)) for rule in rules if rule.applies(case)]
        if refused:
            yield from refused
            return


def check(cfg: RunConfig, facts: Facts | None = None, but: str = "") -> None:
    """Raise UserError with the message of the first rule that forbids a run.

    `but`: a group that is not asked yet, since what comes first for the user is not known yet.
    """
    for _, message in refusals(cfg, facts, but):
        raise UserError(message)


def offered_layouts(model: ModelFacts | None = None) -> tuple[str, ...]:
    """Return the layouts that no rule refuses, with two ranks along each axis.

    Without `model`, they are those that are offered for a listed family.
    """
    return tuple(name for name in layout_names() if not refusals_of(name, model))


def refusals_of(layout: str, model: ModelFacts | None = None) -> list[str]:
    """Return why a layout is not offered, with two ranks along each axis; empty if it is."""
    # The smallest run that has a row and a micro-batch for every rank.
    cfg = RunConfig(
        Model("any"),
        Data("any", sequence_length=64),
        Training("any", global_batch_size=8),
        parallel=parallel_of(layout),
    )
    facts = Facts(num_ranks=_ranks_of(layout), model=model)
    return [message for _, message in refusals(cfg, facts)]


def _ranks_of(name: str) -> int:
    axes = parallel_of(name)
    return (
        axes.ranks_of_a_model * axes.dp_replicate * (1 if strategy_facts(axes).axis is None else 2)
    )
