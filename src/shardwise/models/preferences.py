"""Losses of pairs of answers, from the log-probabilities of their tokens.

A row holds the pairs k = 0, 1, ... of documents 2k (the chosen side) and 2k + 1 (the rejected one),
both of the same prompt. A side has the sum of the log-probabilities of its answer's tokens, so a
loss of a pair is no sum over tokens: where ranks hold different tokens of a row, sums are complete
before anything else is computed of them.
Sources: DPO arXiv 2305.18290; conservative DPO, ericmitchell.ai/cdpo.pdf; hinge arXiv 2305.10425;
IPO arXiv 2310.12036, with means over tokens as its authors meant; ORPO arXiv 2403.07691; SimPO
arXiv 2405.14734.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch.nn import functional as F

from shardwise.base.batches import Batch
from shardwise.config import RunConfig
from shardwise.config.preference import BETAS, PAIR_METRICS, Preference


class Sides(NamedTuple):
    """Numbers that pairs are compared by: [..., 2] each, the chosen side first."""

    logps: torch.Tensor
    """Sums over the tokens of an answer."""
    num_tokens: torch.Tensor

    @property
    def means(self) -> torch.Tensor:
        """Means over the tokens of an answer."""
        return self.logps / self.num_tokens.clamp(min=1)


class Losses(NamedTuple):
    """Losses of pairs, and what is reported of them."""

    losses: torch.Tensor
    """[...]."""
    rewards: torch.Tensor
    """[..., 2], without a gradient."""
    logps: torch.Tensor
    """[..., 2]: log-probabilities as the objective reads them, sums or means over tokens."""


def dpo(sides: Sides, reference: torch.Tensor, keys: Preference, beta: float) -> Losses:
    """Compare how much more likely each answer is than by the reference, [..., 2] sums."""
    ratios = sides.logps - reference
    rewards = beta * ratios.detach()
    if keys.loss == "ipo":
        ratios = ratios / sides.num_tokens.clamp(min=1)
    difference = ratios[..., 0] - ratios[..., 1]
    if keys.loss == "ipo":
        losses = (difference - 1 / (2 * beta)).square()
    elif keys.loss == "hinge":
        losses = torch.relu(1 - beta * difference)
    else:
        losses = _smoothed(beta * difference, keys.label_smoothing)
    return Losses(losses, rewards, sides.logps)


def orpo(sides: Sides, keys: Preference, beta: float) -> Losses:
    """Compare the odds of both answers, by the mean log-probability of a token."""
    means = sides.means.clamp(max=-1e-7)  # the odds of a certain answer are infinite
    odds = means - torch.log(-torch.expm1(means))
    losses = -beta * F.logsigmoid(odds[..., 0] - odds[..., 1])
    return Losses(losses, beta * means.detach(), means)


def simpo(sides: Sides, keys: Preference, beta: float) -> Losses:
    """Compare the mean log-probabilities of both answers' tokens, with a margin."""
    means = sides.means
    difference = beta * (means[..., 0] - means[..., 1]) - keys.margin
    losses = _smoothed(difference, keys.label_smoothing)
    return Losses(losses, beta * means.detach(), means)


def _smoothed(difference: torch.Tensor, share: float) -> torch.Tensor:
    """Return the loss of labels of which a share is wrong."""
    right = -F.logsigmoid(difference)
    return right if share == 0 else right.lerp(-F.logsigmoid(-difference), share)


class Preferences:
    """The loss of pairs on the part that has the head, and what it has seen of them."""

    def __init__(self, cfg: RunConfig, device: torch.device) -> None:
        """Take the objective of a run; `totals` are on `device`."""
        self.objective = cfg.objective
        self.keys = cfg.preference
        given = self.keys.beta
        self.beta = BETAS[self.objective] if given is None else given
        self.sft_weight = 1.0 if self.objective == "orpo" else self.keys.sft_weight
        self.token_weight = 0.0
        """`sft_weight` times pairs over the chosen answers' tokens, of the global batch."""
        self.is_reference = False
        """Whether the forward is the reference's, whose sums are kept for the one that follows."""
        self.reference: dict[tuple[int, ...], torch.Tensor] = {}
        """[B, pairs, 2]: the reference's sums, by the slots of a micro-batch."""
        self.totals = torch.zeros(len(PAIR_METRICS) + 1, device=device)
        """The sums over pairs of PAIR_METRICS, and behind them their number; each rank of several
        that hold tokens of the same rows has its share."""

    def weigh(self, num_pairs: int, num_chosen: int) -> None:
        """Let the tokens of chosen answers, so many, have a mean where pairs, so many, have one."""
        self.token_weight = self.sft_weight * num_pairs / max(num_chosen, 1)

    @contextmanager
    def keeping_sums(self) -> Generator[None]:
        """Keep the sums of a pass, the reference's, for the one that follows; its loss is 0."""
        self.reference.clear()
        self.is_reference = True
        try:
            yield
        finally:
            self.is_reference = False

    def loss(self, losses: torch.Tensor, places: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return the sum over the batch's pairs, a scalar; 0 where the forward is the reference's.

        losses [targets] float32: the cross entropy of this rank's target tokens; places [targets]:
        where they are in `labels.flatten()`.
        """
        sides, is_pair = _sides(losses, places, batch)
        if self.is_reference:
            self.reference[batch.slots] = sides.logps.detach()
            return losses.new_zeros(())
        if self.objective == "dpo":
            found = dpo(sides, self.reference.pop(batch.slots), self.keys, self.beta)
        else:
            found = (orpo if self.objective == "orpo" else simpo)(sides, self.keys, self.beta)
        share = 1.0 if batch.neighbours is None else 1 / batch.neighbours.size
        self._count(found, is_pair, share)
        total = torch.where(is_pair, found.losses, 0.0).sum()
        if self.token_weight:
            chosen = torch.where(is_pair, sides.logps[..., 0], 0.0)
            total = total - self.token_weight * chosen.sum()
        # Each rank of several has the gradient of its tokens, and its share of the value.
        return total if share == 1.0 else total.detach() * share + (total - total.detach())

    def _count(self, found: Losses, is_pair: torch.Tensor, share: float) -> None:
        chosen, rejected = found.rewards.unbind(-1)
        columns = [chosen, rejected, chosen > rejected, chosen - rejected]
        columns += [*found.logps.detach().unbind(-1), is_pair]
        sums = [torch.where(is_pair, column, 0).sum(dtype=torch.float32) for column in columns]
        self.totals += share * torch.stack(sums)


def _sides(losses: torch.Tensor, places: torch.Tensor, batch: Batch) -> tuple[Sides, torch.Tensor]:
    """Return what the pairs of a batch are compared by, [B, pairs, 2], and which of them exist.

    Sums over the tokens of other ranks (`batch.neighbours`) are in it: 8 bytes for each side.
    """
    num_rows, length = batch.labels.shape
    num_sides = 2 * batch.most_pairs
    side = (batch.document_ids.flatten()[places] + num_sides * (places // length))[None]
    is_in = side == torch.arange(num_rows * num_sides, device=side.device)[:, None]
    logps = torch.where(is_in, -losses, 0.0).sum(1)  # not by index_add_, whose order is a GPU's
    num_tokens = is_in.sum(1, dtype=logps.dtype)
    if batch.neighbours is not None:
        # [2, B sides], from every rank of the rows to all.
        own = torch.stack([logps.detach(), num_tokens])
        others = batch.neighbours.total(own) - own
        logps, num_tokens = logps + others[0], num_tokens + others[1]
    shape = num_rows, batch.most_pairs, 2
    logps, num_tokens = logps.view(shape), num_tokens.view(shape)
    is_pair = (num_tokens > 0).all(-1)
    # What rows with fewer pairs lack has a number that no loss is infinite of.
    return Sides(torch.where(is_pair[..., None], logps, -1.0), num_tokens), is_pair
