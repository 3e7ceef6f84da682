"""Losses of answers, in pairs or with labels, from the log-probabilities of their tokens.

A row holds the pairs k = 0, 1, ... of documents 2k (the chosen side) and 2k + 1 (the rejected one),
both of the same prompt; of an answer with a label it holds one of the two. A side has the sum of
the log-probabilities of its answer's tokens, so a loss of a pair is no sum over tokens: where ranks
hold different tokens of a row, sums are complete before anything else is computed of them.
Sources: DPO arXiv 2305.18290; conservative DPO, ericmitchell.ai/cdpo.pdf; hinge arXiv 2305.10425;
IPO arXiv 2310.12036, with means over tokens as its authors meant; ORPO arXiv 2403.07691; SimPO
arXiv 2405.14734; KTO arXiv 2402.01306, equation 8.
"""

from collections.abc import Generator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch.nn import functional as F

from shardwise.base.batches import Batch
from shardwise.config import RunConfig
from shardwise.config.preference import BETAS, PAIR_METRICS, Preference


class Sides(NamedTuple):
    """Numbers that answers are compared by: [..., 2] each, the chosen side first."""

    logps: torch.Tensor
    """Sums over the tokens of an answer."""
    num_tokens: torch.Tensor

    @property
    def means(self) -> torch.Tensor:
        """Means over the tokens of an answer."""
        return self.logps / self.num_tokens.clamp(min=1)

    @property
    def exist(self) -> torch.Tensor:
        """The answers that there are, [..., 2] bool."""
        return self.num_tokens > 0


class Losses(NamedTuple):
    """Losses of pairs, and what is reported of them."""

    losses: torch.Tensor
    """[...], or [..., 2] where answers have labels."""
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


def kto(
    sides: Sides, reference: torch.Tensor, keys: Preference, beta: float, kl: torch.Tensor
) -> Losses:
    """Compare how much more likely each answer is than by the reference with an estimate of it.

    `kl` is that of answers to other prompts, a scalar.
    """
    ratios = sides.logps - reference
    ahead = torch.stack([ratios[..., 0] - kl, kl - ratios[..., 1]], -1)
    weights = ahead.new_tensor([1.0, keys.undesirable_weight])
    return Losses(weights * torch.sigmoid(-beta * ahead), beta * ratios.detach(), sides.logps)


def _smoothed(difference: torch.Tensor, share: float) -> torch.Tensor:
    """Return the loss of labels of which a share is wrong."""
    right = -F.logsigmoid(difference)
    return right if share == 0 else right.lerp(-F.logsigmoid(-difference), share)


Sums = dict[tuple[int, ...], Sides]
"""Sums over answers of a pass without a gradient, by the slots of a micro-batch."""


class Preferences:
    """The loss of answers on the part that has the head, and what it has seen of them."""

    def __init__(self, cfg: RunConfig, device: torch.device) -> None:
        """Take the objective of a run; `totals` are on `device`."""
        self.objective = cfg.objective
        self.keys = cfg.preference
        given = self.keys.beta
        self.beta = BETAS[self.objective] if given is None else given
        self.sft_weight = 1.0 if self.objective == "orpo" else self.keys.sft_weight
        self.token_weight = 0.0
        """`sft_weight` times pairs over the chosen answers' tokens, of the global batch."""
        self.kept: Sums | None = None
        """Where the sums of a pass go; None: the pass has a loss."""
        self.reference: Sums = {}
        """The reference's sums of the step."""
        self.kl = torch.zeros((), device=device)
        """The estimate that the ratios of a step are compared with (kto)."""
        self.totals = torch.zeros(len(TOTALS), device=device)
        """The sums of TOTALS since they were taken; each rank of several that hold tokens of the
        same rows has its share."""

    def weigh(self, num_pairs: int, num_chosen: int) -> None:
        """Let the tokens of chosen answers, so many, have a mean where pairs, so many, have one."""
        self.token_weight = self.sft_weight * num_pairs / max(num_chosen, 1)

    def compare_with(self, reference: Sums, kl: torch.Tensor | None) -> None:
        """Take the reference's sums of a step and, of answers with a label, the estimate."""
        self.reference = reference
        self.kl = self.kl if kl is None else kl

    @contextmanager
    def keeping(self, sums: Sums) -> Generator[None]:
        """Keep the sums of passes in `sums`; their loss is 0."""
        self.kept = sums
        try:
            yield
        finally:
            self.kept = None

    def loss(self, losses: torch.Tensor, places: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return the sum over the batch's pairs or answers, a scalar; 0 where sums are kept.

        losses [targets] float32: the cross entropy of this rank's target tokens; places [targets]:
        where they are in `labels.flatten()`.
        """
        sides = _sides(losses, places, batch)
        if self.kept is not None:
            self.kept[batch.slots] = Sides(sides.logps.detach(), sides.num_tokens)
            return losses.new_zeros(())
        found = self._compared(sides, batch.slots)
        share = 1.0 if batch.neighbours is None else 1 / batch.neighbours.size
        self._count(found, sides.exist, share)
        exist = sides.exist if found.losses.dim() == sides.exist.dim() else sides.exist.all(-1)
        total = torch.where(exist, found.losses, 0.0).sum()
        if self.token_weight:
            chosen = torch.where(exist, sides.logps[..., 0], 0.0)
            total = total - self.token_weight * chosen.sum()
        # Each rank of several has the gradient of its tokens, and its share of the value.
        return total if share == 1.0 else total.detach() * share + (total - total.detach())

    def _compared(self, sides: Sides, slots: tuple[int, ...]) -> Losses:
        if self.objective == "orpo":
            return orpo(sides, self.keys, self.beta)
        if self.objective == "simpo":
            return simpo(sides, self.keys, self.beta)
        reference = self.reference.pop(slots).logps
        if self.objective == "kto":
            return kto(sides, reference, self.keys, self.beta, self.kl)
        return dpo(sides, reference, self.keys, self.beta)

    def _count(self, found: Losses, exist: torch.Tensor, share: float) -> None:
        """Add TOTALS up."""
        ahead = exist.all(-1) & (found.rewards[..., 0] > found.rewards[..., 1])
        columns = [found.rewards, found.logps.detach(), torch.ones_like(found.rewards)]
        sums = [torch.where(exist, column, 0).flatten(0, -2).sum(0) for column in columns]
        sums += [ahead.sum()[None], self.kl * exist.sum()[None]]
        self.totals += share * torch.cat(sums)


TOTALS = ("reward", "reward", "logp", "logp", "number", "number", "ahead", "kl")
"""Names of sums: of the chosen and of the rejected answers each, of pairs, and of all answers."""


def metrics(totals: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return PAIR_METRICS from the sums of TOTALS; NaN where there is no such answer."""
    sums, (ahead, kl) = totals[:6].view(3, 2), totals[6:]
    rewards, logps, numbers = sums[0] / sums[2], sums[1] / sums[2], sums[2]
    margin, means = rewards[0] - rewards[1], (*logps, kl / numbers.sum())
    found = (*rewards, ahead / numbers[0], margin, *means)
    return dict(zip(PAIR_METRICS, found, strict=True))


def _sides(losses: torch.Tensor, places: torch.Tensor, batch: Batch) -> Sides:
    """Return what the answers of a batch are compared by, [B, pairs, 2].

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
    # What rows with fewer answers lack has a number that no loss is infinite of.
    return Sides(torch.where(num_tokens > 0, logps, -1.0), num_tokens)
