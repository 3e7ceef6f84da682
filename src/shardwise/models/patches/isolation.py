"""Packing that isolates documents: in every mixer, each document has a row of its own.

Restarting position ids keeps documents apart in attention only; the state of recurrent layers and
the window of convolutions run on into the next document. So the rows of a micro-batch are unpacked
before a mixer and packed again after it. Each document starts at position 0 and from zero state,
whatever the mixer computes. It needs no mask, since its padding comes after it and mixers are
causal. What works token by token (norms, MLPs, experts) stays packed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import PreTrainedModel

from shardwise.base.batches import Batch
from shardwise.config import RunConfig
from shardwise.models.names import in_use
from shardwise.models.patches.dropout import DropoutState
from shardwise.models.patches.rotary import scaled_by_length
from shardwise.models.spec import ModelSpec

if TYPE_CHECKING:
    from shardwise.models.causal_lm import CausalLM


@dataclass(frozen=True)
class Documents:
    """The places of a micro-batch's tokens when each document has a row of its own.

    Documents of 1 token, of 2, of 3-4, of 5-8, ... make a group each, padded to the longest one in
    it. So the rows of all groups hold fewer than twice the tokens, and a mixer runs at most
    1 + log2(T) times.
    """

    places: torch.Tensor
    """The place of each token in the rows of all groups, joined end to end: [B*T] int64."""
    shapes: tuple[tuple[int, int], ...]
    """The number of documents of each group, and the tokens of the longest."""

    def unpack(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return [documents, longest, ...] of each group, zero where padded, of x [B, T, ...]."""
        flat = x.flatten(0, 1)
        sizes = [documents * longest for documents, longest in self.shapes]
        joined = flat.new_zeros(sum(sizes), *flat.shape[1:]).index_copy(0, self.places, flat)
        return [
            part.view(*shape, *flat.shape[1:])
            for part, shape in zip(joined.split(sizes), self.shapes)
        ]

    def repack(self, groups: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return [B*T, ...] of the groups' tensors, without the padding: undo `unpack`."""
        return torch.cat([group.flatten(0, 1) for group in groups]).index_select(0, self.places)


@dataclass(frozen=True)
class IsolatedBatch(Batch):
    """A batch with its documents, which are found once, outside the layers.

    A layer that is computed again takes them from the batch. If it found them itself, forward and
    recomputation could run different operations, which checkpointing forbids.
    """

    documents: Documents | None


def documents_of(document_ids: np.ndarray, device: torch.device) -> Documents | None:
    """Return the documents of rows [B, T] for `device`; None where every row is one document.

    What fills a row up counts as a document.
    """
    # The host must know where documents begin, to give tensors their shapes.
    begins_here = np.ones(document_ids.shape, bool)
    begins_here[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    begins = [int(place) for place in np.flatnonzero(begins_here)]
    if len(begins) == len(document_ids):
        return None
    lengths = [end - begin for begin, end in pairwise([*begins, document_ids.size])]
    groups: dict[int, list[int]] = {}
    for document, length in enumerate(lengths):
        groups.setdefault((length - 1).bit_length(), []).append(document)
    shifts, shapes, taken = [0] * len(begins), [], 0
    for members in groups.values():
        longest = max(lengths[document] for document in members)
        shapes.append((len(members), longest))
        for document in members:
            shifts[document] = taken - begins[document]
            taken += longest
    places = torch.from_numpy(np.arange(document_ids.size) + np.repeat(shifts, lengths))
    return Documents(places.to(device, non_blocking=True), tuple(shapes))


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


def with_documents(batch: Batch) -> IsolatedBatch:
    """Return the batch as the mixers of an isolated model need it."""
    documents = documents_of(batch.documents_on_host, batch.device)
    return IsolatedBatch(**vars(batch), documents=documents)


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
