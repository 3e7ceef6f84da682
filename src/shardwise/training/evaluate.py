"""Validation loss, equal under every layout, and a greedy sample."""

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from shardwise.base.batches import IGNORED, AnyBatch, Batch
from shardwise.base.interfaces import Evaluation, Mesh, ParallelModel
from shardwise.base.process.watchdog import beat
from shardwise.config import RunConfig, UserError, require
from shardwise.data.chat_format import ChatFormat
from shardwise.data.tokenizer import tokens_of
from shardwise.training.not_finite import explain, look_through
from shardwise.training.step import count_targets, sum_loss

SAMPLE_TOKENS = 48
"""The number of new tokens in a sample."""


def evaluate(
    pm: ParallelModel, batches: Iterable[Sequence[AnyBatch]], mesh: Mesh, step: int
) -> Evaluation:
    """Return the loss on `batches`, one list of micro-batches for each global batch.

    It is the mean over their target tokens, or pairs, on all ranks, without gradients, dropout and
    the router loss. Raises UserError where it is not finite.
    """
    total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    tokens, divisor = 0, 0
    for microbatches in batches:
        microbatches = [batch.to(mesh.device) for batch in microbatches]
        total += pm.run(pm, microbatches, 1.0, False)
        counts = count_targets(pm, microbatches, mesh)
        tokens, divisor = tokens + counts[0], divisor + counts[1]
        beat()
    require(divisor > 0, "an evaluation has no target; give rows of which one has a label")
    mean = sum_loss(total, mesh) / divisor
    # Rank 0's 8 bytes go to all: to save and to stop, every rank must see the same loss, and the
    # ranks of a tensor axis have computed it each for themselves.
    dist.broadcast(mean, 0)
    loss = mean.item()
    if not math.isfinite(loss):
        explained = explain(look_through(pm), just_loaded=step == 0, trained=step > 0)
        raise UserError(f"validation loss after step {step} is {loss}; {explained}")
    metrics = dict(zip(pm.objective.names, pm.objective.take().tolist()))
    perplexity = math.exp(loss) if loss < 700 else math.inf
    return Evaluation(step, loss, None if metrics else perplexity, tokens, metrics)


def encode_prompt(
    cfg: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    positions: int | None,
    num_rows: int | None = None,
) -> list[int] | None:
    """Return the tokens of `training.sample`, None where it is not given.

    Where chats are trained on, the prompt is a user's message, as the chat template writes it with
    the tools of the file `data.tools`, for the assistant to answer. It is called before training,
    so that a mistake does not cost a run. UserError if the prompt has no token, or if it and its
    continuation exceed the `positions` that the model has learned (None: no limit).
    """
    prompt = cfg.training.sample
    if prompt is None:
        return None
    chats = [keys for _, keys in cfg.data.groups("train") if keys.format == "chat"]
    if chats:
        ids = ChatFormat.of(tokenizer, chats[0]).prompt(prompt)
    else:
        ids = tokens_of(tokenizer, prompt, is_open=True)
    require(
        num_rows is None or max(ids, default=0) < num_rows,
        f"training.sample {prompt!r} has a token without an embedding of the model; take it out",
    )
    require(
        bool(ids), f"training.sample {prompt!r} has no tokens; give at least a word to continue"
    )
    num_read = len(ids) + SAMPLE_TOKENS - 1  # the model does not read the last new token
    require(
        positions is None or num_read <= positions,
        f"training.sample has {len(ids)} tokens and is continued by {SAMPLE_TOKENS}, but the model "
        f"has learned only {positions} positions; shorten it, or leave it out",
    )
    return ids


@torch.no_grad()
def greedy_sample(
    pm: ParallelModel, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], mesh: Mesh
) -> str:
    """Return the text of `prompt` and its most likely continuation.

    It has SAMPLE_TOKENS new tokens, or ends at the end of text. Every rank computes the same
    sample, since the forward of a sharded model is a collective. Each token costs a whole forward:
    without a cache, the code is the one that is trained.
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
