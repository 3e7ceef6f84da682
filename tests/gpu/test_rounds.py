"""A loop that runs in rounds which another process asks for."""

from __future__ import annotations

from typing import Any

import torch

from tests.gpu.rounds import Rounds


class Script:
    """A channel with requests written down beforehand."""

    def __init__(self, *requests: dict[str, Any]) -> None:
        self.requests, self.replies, self.steps_taken = list(requests), [], 0

    def read(self) -> dict[str, Any]:
        return self.requests.pop(0)

    def write(self, reply: dict[str, Any]) -> None:
        self.replies.append((self.steps_taken, reply))


def test_a_loop_takes_the_steps_it_is_asked_for():

    asked = {"do": "steps", "figures": True, "memory": False}
    script = Script(
        {**asked, "steps": 2, "lead_in": 0}, {**asked, "steps": 3, "lead_in": 1}, {"do": "stop"}
    )
    rounds = Rounds(script, torch.device("cpu"))  # ty: ignore[invalid-argument-type]
    while rounds.more():
        script.steps_taken += 1
        rounds.note(float(script.steps_taken), 1.0)
    assert [taken for taken, _ in script.replies] == [2, 6]
    assert [reply["losses"] for _, reply in script.replies] == [[1.0, 2.0], [3.0, 4.0, 5.0, 6.0]]
    assert rounds.request == {"do": "stop"}
