"""Form of a rule, and the words that several rules share."""

from collections.abc import Callable
from dataclasses import dataclass

from shardwise.base.layouts import (
    AdapterFacts,
    Facts,
    ModelFacts,
    StrategyFacts,
    layout_of,
    strategy_facts,
)
from shardwise.config import Parallel, RunConfig, Training
from shardwise.config.optimizers import UpdateFacts, update_facts


@dataclass(frozen=True)
class Case:
    """Case that a rule decides: a run file, and what is known beside it."""

    cfg: RunConfig
    facts: Facts

    @property
    def parallel(self) -> Parallel:
        """The section `parallel` of the run file."""
        return self.cfg.parallel

    @property
    def strategy(self) -> StrategyFacts:
        """The facts of the data-parallel strategy."""
        return strategy_facts(self.parallel)

    @property
    def update(self) -> UpdateFacts:
        """The facts of the optimizer."""
        return update_facts(self.cfg.optimizer.name)

    @property
    def training(self) -> Training:
        """The section `training` of the run file."""
        return self.cfg.training

    @property
    def model(self) -> ModelFacts:
        """The facts of the model, which rules on models rely on."""
        assert self.facts.model is not None, "a rule on models is asked without one"
        return self.facts.model

    @property
    def adapters(self) -> AdapterFacts:
        """The facts of the adapters, which rules on adapters rely on."""
        assert self.facts.adapters is not None, "a rule on adapters is asked without any"
        return self.facts.adapters


Text = str | Callable[[Case], str]
"""Part of a message: a template whose fields are `cfg`, its sections `parallel` and `training`,
`adapters`, `model`, `strategy`, `layout` and `optimizer`, its name, or a function."""


@dataclass(frozen=True)
class Rule:
    """One reason for which a run may not begin."""

    name: str
    applies: Callable[[Case], bool]
    problem: Text
    """Sentence that says what is wrong, with the key of the run file."""
    way_out: Text
    """Sentence that says what the user can do instead."""
    why: str
    """The reason, with the test that shows it where there is one."""

    def message(self, case: Case) -> str:
        """Return one line to the user."""
        cfg = case.cfg
        fields: dict[str, object] = {"cfg": cfg, "parallel": cfg.parallel, "training": cfg.training}
        fields |= {"adapters": case.facts.adapters, "model": case.facts.model}
        fields |= {"optimizer": cfg.optimizer.name, "strategy": case.strategy}
        fields["layout"] = layout_of(cfg.parallel)
        texts = (self.problem, self.way_out)
        return "; ".join(
            text.format(**fields) if isinstance(text, str) else text(case) for text in texts
        )


def dotted(version: tuple[int, int]) -> str:
    """Return a version as it is written: 2.13."""
    return ".".join(map(str, version))


def multiples(number: int, unit: int) -> str:
    """Return the multiples of `unit` around `number`, as a way out: "4 or 8"."""
    below = number // unit * unit
    return " or ".join(str(size) for size in (below, below + unit) if size)


def either(choices: list[str]) -> str:
    """Return choices as a way out: "1, 2 or 4"."""
    *others, last = choices
    return f"{', '.join(others)} or {last}" if others else last
