"""The shares of one run, each read off the model once, however many formulas ask for it."""

from collections.abc import Sequence
from typing import Any

from shardwise.assembly.describe import Description
from shardwise.config import RunConfig
from shardwise.lab.planner.messages import Share
from shardwise.lab.planner.share import boundaries_of, share_of


class Shares:
    """The shares of a pipeline's ranks that are first along every other axis, each made once."""

    def __init__(
        self,
        cfg: RunConfig,
        run: Description,
        boundaries: Sequence[int] | None = None,
        parts: dict[object, Any] | None = None,
    ) -> None:
        """Take a run; `boundaries` (by default those that the run would choose), `parts`: see
        `share_of`.
        """
        self.cfg, self.run = cfg, run
        self._parts: dict[object, Any] = {} if parts is None else parts
        self.boundaries = boundaries_of(cfg, run) if boundaries is None else boundaries
        self._by_stage: dict[int, Share] = {}

    def place(self, stage: int) -> dict[str, int]:
        """Return the coordinates of the rank at a place along `pp`."""
        return {**dict.fromkeys(self.run.sizes, 0), "pp": stage}

    def of(self, stage: int) -> Share:
        """Return the share of the rank at a place along `pp`."""
        if stage not in self._by_stage:
            place = self.place(stage)
            self._by_stage[stage] = share_of(
                self.cfg, self.run, place, self.boundaries, self._parts
            )
        return self._by_stage[stage]
