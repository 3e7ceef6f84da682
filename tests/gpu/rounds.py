"""A training loop that runs in rounds which another process asks for (processes.py).

So two programs can be timed by turns. Requests and replies are JSON objects, one per line, on stdin
and on what was stdout when the process started: `{"do": "build", "checkpointing": "none"}`,
`{"do": "steps", "steps": 5, ...}` (see `Rounds.more`) and `{"do": "stop"}`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import torch

from shardwise.metrics.memory import PeakMemory, free_cache


class Channel:
    """The line to the process that asks."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what libraries print goes to stderr

    def read(self) -> dict[str, Any]:
        """Return the next request; it is `stop` where the asking process has ended."""
        line = sys.stdin.readline()
        return json.loads(line) if line else {"do": "stop"}

    def write(self, reply: dict[str, Any]) -> None:
        """Answer the last request."""
        self._out.write(json.dumps(reply) + "\n")
        self._out.flush()


class Rounds:
    """The rounds of a loop: counts its steps, times them, and waits for requests in between."""

    def __init__(self, channel: Channel, device: torch.device) -> None:
        self.channel, self.device = channel, device
        self.request: dict[str, Any] = {"do": ""}
        self.steps_left = 0
        self.figures: dict[str, list[float]] = {}
        self.memory: PeakMemory | None = None
        self.start = 0.0

    def wait(self) -> dict[str, Any]:
        """Return the next request."""
        self.request = self.channel.read()
        return self.request

    def more(self) -> bool:
        """Return whether to take one more step; call it before each. False ends the loop.

        A round is `lead_in` steps and then `steps` timed ones, from before the first of these to
        before the step that would follow; the device is waited for at both ends only. With
        `memory`, peak memory is measured instead. After a round the allocator's cache is freed, so
        that the two programs never need the device's memory at once; the lead-in step fills it
        again.
        """
        if self.steps_left == 0:
            if self.request["do"] == "steps":
                self._report()
            if self.wait()["do"] != "steps":
                return False
            self.steps_left = self.request["lead_in"] + self.request["steps"]
            self.figures = {"losses": [], "grad_norms": []}
        if self.steps_left == self.request["steps"]:
            if self.request["memory"]:
                self.memory = PeakMemory(self.device).__enter__()
            self._synchronize()
            self.start = time.perf_counter()
        self.steps_left -= 1
        return True

    @property
    def wants_figures(self) -> bool:
        """Whether loss and gradient norm of the steps are asked for."""
        return bool(self.request.get("figures"))

    def note(self, loss: float, grad_norm: float) -> None:
        """Keep loss and gradient norm of the last step."""
        self.figures["losses"].append(loss)
        self.figures["grad_norms"].append(grad_norm)

    def _report(self) -> None:
        self._synchronize()
        reply: dict[str, Any] = {"seconds": time.perf_counter() - self.start, **self.figures}
        if self.memory is not None:
            self.memory.__exit__(None, None, None)
            names = ("entry_bytes", "peak_bytes", "exit_bytes")
            reply = {name: getattr(self.memory, name) for name in names}
            self.memory = None
        free_cache(self.device)
        self.channel.write(reply)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
