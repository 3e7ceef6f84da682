"""The dtypes in which a run computes."""

from __future__ import annotations

import torch

from shardwise.config import RunConfig


def autocast_dtype(precision: str) -> torch.dtype | None:
    """Return the dtype of matrix products by `training.precision`; None: that of the operands."""
    return None if precision == "float32" else getattr(torch, precision)


def product_dtype(cfg: RunConfig) -> torch.dtype:
    """Return the dtype of a run's matrix products and of what they give."""
    return autocast_dtype(cfg.training.precision) or hidden_dtype(cfg)


def hidden_dtype(cfg: RunConfig) -> torch.dtype:
    """Return the dtype of hidden states between layers: that of the weights, autocast or not.

    The residual sum adds the output of products, in the dtype of autocast, to embeddings. float16
    products of bfloat16 weights add up in float32, but not yet after the embedding; a rule refuses
    them in a pipeline.
    """
    return getattr(torch, cfg.model.dtype)
