"""Which layers of a run are computed again, where a budget of memory has chosen them."""

from dataclasses import dataclass, replace
from typing import Any

from shardwise.base.words import runs, size
from shardwise.config import Recomputation, RunConfig, Way


@dataclass(frozen=True)
class Chosen:
    """The layers that are computed again, in which way; the same on every rank."""

    budget_bytes: int
    ways: tuple[Way, ...]
    """One for each layer, from the lowest up."""
    split: tuple[int, ...] | None
    """The layers of each pipeline stage, for which the choice is made; None without a pipeline."""
    peak_bytes: tuple[int, ...]
    """The bytes that a rank of each place in the pipeline needs, by formulas."""
    moments: tuple[str, ...]
    """When these peaks are."""
    price: int
    """The price of all that is computed again, by `source`."""
    most: int
    """The price of computing every layer again."""
    source: str
    """Where prices come from."""

    def numbers(self, way: Way) -> tuple[int, ...]:
        """Return the numbers of the layers that are run in a way."""
        return tuple(number for number, own in enumerate(self.ways) if own == way)

    def applied(self, cfg: RunConfig) -> RunConfig:
        """Return the run with the layers by number in place of the budget."""
        full, operators = self.numbers("full"), self.numbers("operators")
        chosen = Recomputation(full=full, operators=operators) if full or operators else "none"
        cfg = replace(cfg, training=replace(cfg.training, checkpointing=chosen))
        if self.split is None:
            return cfg
        return replace(cfg, parallel=replace(cfg.parallel, split=[*self.split]))

    @property
    def layers(self) -> str:
        """The layers by way, as a text."""
        ways: tuple[Way, ...] = ("full", "operators", "none")
        texts = ((way, runs(self.numbers(way))) for way in ways)
        return "; ".join(f"{way}: layers {numbers}" for way, numbers in texts if numbers)

    def __str__(self) -> str:
        fullest = max(range(len(self.peak_bytes)), key=self.peak_bytes.__getitem__)
        share = self.price / self.most if self.most else 0.0
        return (
            f"recomputation within {size(self.budget_bytes)}: {self.layers}; {share:.1%} of what "
            f"full computes again, by {self.source}; predicted peak "
            f"{size(self.peak_bytes[fullest])} ({self.moments[fullest]})"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the record's field `recomputation`."""
        return {
            "budget_bytes": self.budget_bytes,
            "full": list(self.numbers("full")),
            "operators": list(self.numbers("operators")),
            "none": list(self.numbers("none")),
            "split": None if self.split is None else list(self.split),
            "predicted_peak_bytes": list(self.peak_bytes),
            "share_of_full": self.price / self.most if self.most else 0.0,
            "prices": self.source,
        }
