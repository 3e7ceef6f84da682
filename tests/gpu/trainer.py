"""Trains run after run in one process: `python -m tests.gpu.trainer GDN`.

A request is `{"do": "train", "run": PATH, "overrides": [...]}`, the answer a status and a reason.
"""

from __future__ import annotations

import sys

from tests.gpu import kernels


def main(gdn: str) -> None:
    """Answer requests until the process that asks has ended."""
    kernels.choose(gdn)  # before transformers is imported
    import torch

    import shardwise
    from shardwise.metrics.memory import free_cache
    from tests.gpu.rounds import Channel

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    channel = Channel()
    while (request := channel.read())["do"] == "train":
        reply = {"status": "ok", "reason": ""}
        try:
            shardwise.train(request["run"], overrides=request["overrides"])
        except shardwise.UserError as error:
            reply = {"status": "refused", "reason": str(error)}
        except shardwise.RunFailed as error:
            reply = {"status": "failed", "reason": str(error)}
        channel.write(reply)
        free_cache(device)


if __name__ == "__main__":
    main(*sys.argv[1:])
