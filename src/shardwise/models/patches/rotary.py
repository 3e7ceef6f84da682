"""Rotary positions whose frequencies depend on a length: that of each document, not of a row.

transformers takes the frequencies of `longrope` and of `dynamic` (NTK) by the highest position of a
forward, and `dynamic` keeps those of the longest row so far. So padding, other documents and
earlier batches would change how a document is rotated. Here transformers' function is called once
for each length that has other frequencies, as of a new model, and each token takes those of its
document.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from shardwise.base.batches import Batch
from shardwise.config import RunConfig, require
from shardwise.models.causal_lm import CausalLM
from shardwise.models.slot_dropout import DropoutState

Angles = tuple[torch.Tensor, ...]
"""Cosines and sines, [1 or B, T, H] each."""


def apply(part: CausalLM, cfg: RunConfig, device: torch.device) -> None:
    """Let such rotary embeddings of a part go by documents."""
    isolated = cfg.data.keeps_documents_apart
    for module in scaled_by_length(part.hf):
        module.forward = _by_document(module, module.forward, part.dropout, isolated)


def scaled_by_length(hf: nn.Module) -> list[Any]:
    """Return the modules of a model whose frequencies depend on a length."""
    return [m for m in hf.modules() if any(_is_scaled(rope_type) for rope_type in _types(m))]


def _types(module: Any) -> list[Any]:
    """Return the kinds of positions that a module computes: one, or one for each type of layer."""
    rope_type = vars(module).get("rope_type")
    return [*rope_type.values()] if isinstance(rope_type, dict) else [rope_type]


def _is_scaled(rope_type: Any) -> bool:
    return isinstance(rope_type, str) and (rope_type == "longrope" or "dynamic" in rope_type)


def _by_document(
    module: Any, forward: Callable[..., Any], state: DropoutState, isolated: bool
) -> Callable[..., Any]:
    """Return the forward of a module that rotates each token as if its document were alone."""

    def at(top: int, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None) -> Angles:
        """Return what a new model computes for rows whose highest position is `top`."""
        _reset(module)
        last = torch.full_like(position_ids[..., :1], top)
        kind = {} if layer_type is None else {"layer_type": layer_type}
        angles = forward(x, torch.cat([position_ids, last], -1), **kind)
        angles = (angles,) if isinstance(angles, torch.Tensor) else angles
        return tuple(part[:, :-1] for part in angles)

    def by_document(
        x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None
    ) -> Any:
        batch = state.batch
        rope_type = module.rope_type if layer_type is None else module.rope_type[layer_type]
        if not isinstance(batch, Batch) or not _is_scaled(rope_type):
            return forward(x, position_ids, **({"layer_type": layer_type} if layer_type else {}))
        begins, lengths = _documents(batch, isolated)
        require(
            position_ids.shape[-1] == lengths.shape[1],
            f"rope_type {rope_type} is not known by document where positions are not those of "
            "tokens; give a model whose config has another rope_type",
        )
        tops, numbers = _classes(lengths, *_limit(module, layer_type))
        if isolated and batch.positions is None:  # a share of a row has those of documents
            position_ids = position_ids - torch.from_numpy(begins).to(x.device)
        token_numbers = torch.from_numpy(numbers).to(x.device)
        found: Angles = ()
        for number, top in enumerate(tops):
            is_here = token_numbers == number
            # Where all rows are alike, one is enough.
            ids = position_ids * is_here if isolated or len(tops) > 1 else position_ids
            angles = at(top, x, ids.clamp(max=top), layer_type)
            both = zip(angles, found)
            found = tuple(torch.where(is_here[..., None], new, old) for new, old in both) or angles
        return found if len(found) > 1 else found[0]

    return by_document


def _documents(batch: Batch, isolated: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return where the document of each of a rank's tokens begins in its row and how long it is,
    [B, T] each. A row is one where they are not isolated; padding has the length 0.
    """
    neighbours = batch.neighbours
    ids = batch.documents_on_host
    if neighbours is not None:
        ids = neighbours.document_ids.numpy(force=True)
    if not isolated:
        ids = ids.clip(max=0)
    places, changes = np.arange(ids.shape[1]), ids[:, 1:] != ids[:, :-1]
    is_first, is_last = (np.pad(changes, ((0, 0), side), constant_values=True) for side in _SIDES)
    begins = np.maximum.accumulate(np.where(is_first, places, 0), 1)
    ends = np.minimum.accumulate(np.where(is_last, places, len(places))[:, ::-1], 1)[:, ::-1]
    lengths = np.where(ids < 0, 0, ends + 1 - begins)
    if batch.positions is None:
        return begins, lengths
    columns = batch.positions[0].numpy(force=True)
    return begins[:, columns], lengths[:, columns]


_SIDES = ((1, 0), (0, 1))


def _limit(module: Any, layer_type: str | None) -> tuple[int, bool]:
    """Return the longest document with the usual frequencies, and whether all longer ones have the
    same.
    """
    rope_type, parameters = module.rope_type, module.config.rope_parameters
    if layer_type is not None:
        rope_type, parameters = rope_type[layer_type], parameters[layer_type]
    if rope_type == "longrope":
        return parameters["original_max_position_embeddings"], True
    return module.original_max_seq_len, False


def _classes(lengths: np.ndarray, limit: int, is_one: bool) -> tuple[list[int], np.ndarray]:
    """Return the highest position of each class of lengths with the same frequencies, and the
    number of each token's class, [B, T].
    """
    keys = np.where(lengths <= limit, 0, limit + 1 if is_one else lengths)
    found, numbers = np.unique(keys, return_inverse=True)
    numbers = numbers.reshape(keys.shape)
    return [max(int(lengths[keys == key].max()), 1) - 1 for key in found], numbers


def _reset(module: Any) -> None:
    """Undo what earlier forwards have left of frequencies."""
    for name, value in module.named_buffers():
        if name.endswith("original_inv_freq"):
            usual = name.replace("original_", "")
            module._buffers[usual] = value.clone()
    for name in vars(module):
        if name.endswith("max_seq_len_cached"):
            setattr(module, name, module.original_max_seq_len)
