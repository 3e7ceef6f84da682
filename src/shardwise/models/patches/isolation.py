"""Packing that isolates documents: in every mixer, each document has a row of its own.

Restarting position ids keeps documents apart in attention only; the state of recurrent layers and
the window of convolutions run on into the next document. So the rows of a micro-batch are unpacked
before a mixer and packed again after it. Each document starts at position 0 and from zero state,
whatever the mixer computes. It needs no mask, since its padding comes after it and mixers are
causal. What works token by token (norms, MLPs, experts) stays packed.
"""

from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from shardwise.config import RunConfig
from shardwise.models.causal_lm import CausalLM
from shardwise.models.documents import IsolatedBatch
from shardwise.models.names import in_use
from shardwise.models.patches.rotary import scaled_by_length
from shardwise.models.slot_dropout import DropoutState
from shardwise.models.spec import ModelSpec


def apply(part: CausalLM, cfg: RunConfig, device: torch.device) -> None:
    """Keep documents apart in every mixer of a part, with `data.packing: isolated`."""
    if cfg.data.keeps_documents_apart:
        part.isolated = True
        if cfg.parallel.cp > 1:
            return  # A rank has a piece of a document; all cores keep documents apart themselves.
        isolate(part.hf, part.spec, part.dropout)


def isolate(hf: PreTrainedModel, spec: ModelSpec, state: DropoutState) -> None:
    """Wrap the forward of every mixer of `hf`; a rule has refused kinds that are not proven.

    `state.batch` must be one `with_documents`.
    """
    by_document = bool(scaled_by_length(hf))
    for layer in spec.layers:
        assert layer.keeps_documents_apart, (
            f"{layer.kind}: a rule refuses it with data.packing isolated"
        )
        for block in layer.mixers:
            if block.kind.mixes_tokens and not block.kind.functions:
                mixer = in_use(hf.get_submodule(f"{layer.name}.{block.path}"))
                mixer.forward = _isolated(mixer.forward, state, by_document)


def _isolated(
    forward: Callable[..., Any], state: DropoutState, by_document: bool = False
) -> Callable[..., Any]:
    """Return a mixer's forward that takes packed rows and computes each document by itself.

    `by_document`: the angles that it is given are those of each document, see rotary.py.
    """

    def isolated(hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        assert isinstance(state.batch, IsolatedBatch)
        documents = state.batch.documents
        if documents is None:
            return forward(hidden_states, **kwargs)
        try:
            outs = []
            for group, rows in enumerate(documents.unpack(hidden_states)):
                state.unpack = lambda mask, group=group: documents.unpack(mask)[group]
                changed = _from_position_0(kwargs, rows.shape[1])
                if by_document and (angles := kwargs.get("position_embeddings")) is not None:
                    size = hidden_states.shape[:2]
                    parts = (documents.unpack(x.expand(*size, -1)) for x in angles)
                    changed["position_embeddings"] = tuple(part[group] for part in parts)
                outs.append(forward(rows, **changed))
        finally:  # checkpointing ends a recomputation by an error once it has all tensors
            state.unpack = None
        if isinstance(outs[0], tuple):  # attention: its output, and weights that are None
            return documents.repack([out for out, _ in outs]).view(hidden_states.shape), None
        return documents.repack(outs).view(hidden_states.shape)

    return isolated


def _from_position_0(kwargs: dict[str, Any], length: int) -> dict[str, Any]:
    """Return a mixer's other arguments for rows of `length` tokens that begin at position 0."""
    changed = dict(kwargs)
    mask, angles = kwargs.get("attention_mask"), kwargs.get("position_embeddings")
    if mask is not None:  # a window's, [1 or B, 1, T, T], equal for all rows
        changed["attention_mask"] = mask[:1, :, :length, :length]
    if kwargs.get("position_ids") is not None:
        changed["position_ids"] = kwargs["position_ids"][:1, :length]
    if angles is not None:  # cosines and sines, [1 or B, T, H]
        changed["position_embeddings"] = tuple(part[:1, :length] for part in angles)
    return changed
