"""The dtypes in which a run computes."""

from dataclasses import replace

import torch
from transformers import PreTrainedModel

from shardwise.config import Model, RunConfig
from shardwise.models.alike import known
from shardwise.models.load import build_meta


def autocast_dtype(cfg: RunConfig) -> torch.dtype | None:
    """Return the dtype to which autocast casts the operands of products; None: it casts none."""
    training = cfg.training
    is_cast = training.precision != "float32" and not training.casts_weights
    return getattr(torch, training.precision) if is_cast else None


def product_dtype(cfg: RunConfig) -> torch.dtype:
    """Return the dtype of a run's matrix products and of what they give."""
    return autocast_dtype(cfg) or hidden_dtype(cfg)


def hidden_dtype(cfg: RunConfig) -> torch.dtype:
    """Return the dtype of hidden states between layers: that in which weights are read, autocast or
    not.

    The residual sum adds the output of products, in the dtype of autocast, to embeddings. float16
    products of bfloat16 weights add up in float32, but not yet after the embedding; a rule refuses
    them in a pipeline.
    """
    is_cast = cfg.training.casts_weights
    return getattr(torch, cfg.training.precision if is_cast else cfg.model.dtype)


def copied_names(cfg: RunConfig, hf: PreTrainedModel) -> frozenset[str]:
    """Return the names of what a layer reads in 16 bits under `training.cast: weights`.

    They are what the class has in 16 bits when it is built so. Buffers that a folder has stay as
    they are: biases on the scores of routers grow by less than 16 bits tell apart.
    """
    model, precision = cfg.model, cfg.training.precision
    return known(hf, ("copied", model, precision), lambda: _copied_names(model, precision, hf))


def _copied_names(model: Model, precision: str, hf: PreTrainedModel) -> frozenset[str]:
    built = build_meta(replace(model, dtype=precision), hf.config)
    tensors: dict[str, torch.Tensor] = {}
    tensors |= built.named_parameters(remove_duplicate=False)  # a tied one by both names
    kept = built.state_dict().keys()
    tensors |= {name: buffer for name, buffer in built.named_buffers() if name not in kept}
    dtype = getattr(torch, precision)
    return frozenset(name for name, tensor in tensors.items() if tensor.dtype == dtype)
