"""Dropouts whose masks do not depend on the layout: see models/slot_dropout.py."""

import torch

from shardwise.config import RunConfig
from shardwise.models.part import ModelPart
from shardwise.models.slot_dropout import replace_dropouts


def apply(part: ModelPart, cfg: RunConfig, device: torch.device) -> None:
    """Let every dropout of a part draw its masks by row."""
    replace_dropouts(part.hf, part.dropout)
