"""Validation loss, equal under every layout, and a greedy sample."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from transformers import PreTrainedTokenizerBase

from shardwise.config import RunConfig, UserError
from shardwise.interfaces import IGNORED, Batch, Evaluation, Mesh, ParallelModel
from shardwise.process.watchdog import beat
from shardwise.training.not_finite import explain, look_through
from shardwise.training.step import count_targets, sum_loss

SAMPLE_TOKENS = 48
"""How far `training.sample` is continued."""


def evaluate(
    pm: ParallelModel, batches: Iterable[Sequence[Batch]], mesh: Mesh, step: int
) -> Evaluation:
    """Evaluate without gradients or dropout, and without the router loss."""
    total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    tokens = 0
    for microbatches in batches:
        microbatches = [batch.to(mesh.device) for batch in microbatches]
        total += pm.run(pm, microbatches, 1.0, False)
        tokens += count_targets(microbatches, mesh)
        beat()
    loss = (sum_loss(total, mesh) / tokens).item()
    if not math.isfinite(loss):
        explained = explain(look_through(pm), just_loaded=step == 0, trained=step > 0)
        raise UserError(f"validation loss after step {step} is {loss}; {explained}")
    return Evaluation(step, loss, math.exp(loss) if loss < 700 else math.inf, tokens)


def encode_prompt(
    cfg: RunConfig, tokenizer: PreTrainedTokenizerBase, positions: int | None
) -> list[int] | None:
    """The tokens of `training.sample`, if one is asked for: called before training, so that no mistake costs a run.

    Where the data are chats, the prompt is what a user says, as the chat template writes it, and the assistant answers.
    UserError where there is none, or they and those to come are more than the `positions` that a model has learned.
    """
    prompt = cfg.training.sample
    if prompt is None:
        return None
    ids = list(
        _chat_tokens(tokenizer, prompt)
        if cfg.data.format == "chat"
        else tokenizer(prompt)["input_ids"]
    )
    if not ids:
        raise UserError(
            f"training.sample {prompt!r} has no tokens; give at least a word to continue"
        )
    if (
        positions is not None and len(ids) + SAMPLE_TOKENS - 1 > positions
    ):  # the last new token is not read any more
        raise UserError(
            f"training.sample has {len(ids)} tokens and is continued by {SAMPLE_TOKENS}, but the model has learned "
            f"only {positions} positions; shorten it, or leave it out"
        )
    return ids


def _chat_tokens(tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    import jinja2  # a chat template needs it, nothing else here does

    messages = [{"role": "user", "content": prompt}]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except (jinja2.TemplateError, TypeError, ValueError) as error:
        raise UserError(
            f"training.sample: the tokenizer's chat template refuses a user's message alone ({error}); leave it out"
        ) from None
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@torch.no_grad()
def greedy_sample(
    pm: ParallelModel, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], mesh: Mesh
) -> str:
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
