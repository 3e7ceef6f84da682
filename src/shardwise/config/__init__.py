"""The run file: the types and ranges of its keys.

The sections are plain frozen dataclasses, so a Python caller needs only this package;
`run_file.py` checks what comes from outside (a YAML file, command-line overrides).
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from shardwise.config.data import Data, Entry
from shardwise.config.launch import Launch
from shardwise.config.model import CALLERS, DType, Lora, Model
from shardwise.config.parallel import STRATEGY_NAMES, Parallel
from shardwise.config.preference import USED_BY, ObjectiveName, Preference
from shardwise.config.section import Section, UserError, require
from shardwise.config.training import (
    Checkpointing,
    Measure,
    Optimizer,
    Recomputation,
    Training,
    Way,
    way_of,
)

__all__ = [
    "CALLERS",
    "MOVED",
    "REMOVED",
    "STRATEGY_NAMES",
    "Checkpointing",
    "DType",
    "Data",
    "Entry",
    "Launch",
    "Lora",
    "Measure",
    "Model",
    "Optimizer",
    "Parallel",
    "Preference",
    "Recomputation",
    "RunConfig",
    "Section",
    "Training",
    "UserError",
    "Way",
    "require",
    "way_of",
]

MOVED = {
    "data.weights": "weight, a key of each entry of data.train: [{path: FILE, weight: 3}, ...]",
    "training.max_restarts": "launch.restarts",
    "training.timeout_seconds": "launch.timeout_seconds",
}
"""Keys of an earlier version's run files, and what they are called now."""
REMOVED: dict[str, Any] = {
    "data.weights": None,
    "lora.merged": False,
    "training.max_restarts": 0,
    "training.timeout_seconds": 600.0,
}
"""Keys of an earlier version's run files, each with the value that equals leaving it out."""


NOT_RECORDED = "(not recorded)"


@dataclass(frozen=True)
class RunConfig(Section):
    """One run: the model (model, lora), the data, how it is split (parallel), and the rest."""

    model: Model
    data: Data
    training: Training
    lora: Lora | None = None
    parallel: Parallel = field(default_factory=Parallel)
    optimizer: Optimizer = field(default_factory=Optimizer)
    preference: Preference = field(default_factory=Preference)
    measure: Measure = field(default_factory=Measure)
    launch: Launch = field(default_factory=Launch)

    @property
    def objective(self) -> ObjectiveName:
        """Name of what is minimised: `training.objective`."""
        return self.training.objective

    @property
    def reference(self) -> Literal["base", "start"] | None:
        """The model that the objective compares with; None: it compares with none."""
        if self.objective not in USED_BY["reference"]:
            return None
        is_new = self.lora is not None and not self.lora.path and self.trains_adapters_alone
        return self.preference.reference or ("base" if is_new else "start")

    @property
    def precomputes(self) -> bool:
        """Whether the reference computes before the first step alone."""
        return self.preference.reference_logprobs == "precompute"

    @property
    def keeps_start(self) -> bool:
        """Whether what is trained is held twice, as it was before the first step."""
        return self.reference == "start" and not self.precomputes

    @property
    def num_evaluations(self) -> int:
        """The forwards of a step without a backward: of its rows, and (kto) of other answers."""
        is_own = self.reference is not None and not self.precomputes
        return (1 + self.training.reads_labels) * is_own + self.training.reads_labels

    @property
    def reference_adapter(self) -> str | None:
        """The folder of the adapter that pairs of answers are compared with, if it has one."""
        return self.lora.path if self.lora is not None and self.reference == "start" else None

    @property
    def trains_adapters_alone(self) -> bool:
        """Whether the base itself stays as it is."""
        return self.lora is not None and not self.lora.modules_to_save

    def to_dict(self) -> dict[str, Any]:
        """Return the config as plain data: `run_file.parse_config(cfg.to_dict()) == cfg`."""
        return dataclasses.asdict(self)

    def recorded(self) -> dict[str, Any]:
        """Return it for files that others may read: `launch.environment` may hold secrets."""
        content = self.to_dict()
        content["launch"]["environment"] = dict.fromkeys(self.launch.environment, NOT_RECORDED)
        return content
