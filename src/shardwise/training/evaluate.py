"""Validation loss, equal under every layout, and a greedy sample."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

from shardwise.config import RunConfig, UserError
from shardwise.interfaces import IGNORED, Batch, Mesh, ParallelModel
from shardwise.parallel.reduce import sum_over
from shardwise.training.step import LOSS_AXES, count_targets
from shardwise.training.watchdog import beat

SAMPLE_TOKENS = 48
"""How far `training.sample` is continued."""


@dataclass(frozen=True)
class Evaluation:
    """Loss over a whole validation set: the mean over its target tokens, whatever batch they came in."""

    step: int  # optimizer steps done before it
    loss: float
    perplexity: float  # exp(loss); infinite where that overflows
    tokens: int


def evaluate(pm: ParallelModel, batches: Iterable[Sequence[Batch]], mesh: Mesh, step: int) -> Evaluation:
    """Evaluate without gradients or dropout, and without the router loss."""
    total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    tokens = 0
    for microbatches in batches:
        microbatches = [batch.to(mesh.device) for batch in microbatches]
        total += pm.run(pm, microbatches, 1.0, False)
        tokens += count_targets(microbatches, mesh)
        beat()
    loss = (sum_over(total, mesh, LOSS_AXES) / tokens).item()
    if not math.isfinite(loss):
        raise UserError(f"validation loss after step {step} is {loss}; lower optimizer.lr or look at the weights")
    return Evaluation(step, loss, math.exp(loss) if loss < 700 else math.inf, tokens)


def encode_prompt(cfg: RunConfig, tokenizer: PreTrainedTokenizerBase, positions: int | None) -> list[int] | None:
    """The tokens of `training.sample`, if one is asked for: called before training, so that no mistake costs a run.

    UserError where there is none, or they and those to come are more than the `positions` that a model has learned.
    """
    if cfg.training.sample is None:
        return None
    ids = list(tokenizer(cfg.training.sample)["input_ids"])
    if not ids:
        raise UserError(f"training.sample {cfg.training.sample!r} has no tokens; give at least a word to continue")
    if positions is not None and len(ids) + SAMPLE_TOKENS - 1 > positions:  # the last new token is not read any more
        raise UserError(
            f"training.sample has {len(ids)} tokens and is continued by {SAMPLE_TOKENS}, but the model has learned "
            f"only {positions} positions; shorten it, or leave it out"
        )
    return ids


@torch.no_grad()
def greedy_sample(pm: ParallelModel, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], mesh: Mesh) -> str:
    """The text of `prompt` and of the most likely next tokens, SAMPLE_TOKENS of them or up to the end of text.

    Every rank computes the same sample, since a sharded model's forward is a collective. Each token costs a whole
    forward: there is no cache, so that the path is the trained one.
    """
    for part in pm.parts:
        part.eval()
    ids = list(prompt)
    for _ in range(SAMPLE_TOKENS):
        row = torch.tensor([ids], device=mesh.device)
        batch = Batch(row, torch.full_like(row, IGNORED), torch.zeros_like(row), slots=(0,), step=0)
        ids.append(pm.next_token(pm, batch))
        beat()
        if ids[-1] == tokenizer.eos_token_id:
            break
    return str(tokenizer.decode(ids))
