"""A step of preferences: the reference's pass over its micro-batches, then the pass that trains.

The reference is the trained model with its adapters off, or with the values that it started from in
the place of what is trained. So its pass is an evaluation of the same parts under the same layout.
With answers that have labels (kto), both evaluate the rows with other documents' answers before.
Memory: of the values to start from, a copy of what a rank holds. Communication: what evaluations
send, and three numbers of each rank's rows to all, with labels five.
"""

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from shardwise.base.batches import IGNORED, AnyBatch, Batch, Objective
from shardwise.base.interfaces import Mesh, ParallelModel, Storage
from shardwise.config import RunConfig
from shardwise.config.preference import metrics_of
from shardwise.models.causal_lm import CausalLM
from shardwise.models.expert_plan import biases_of
from shardwise.models.names import adapter_layers
from shardwise.models.preferences import TOTALS, Preferences, Sides, Sums, metrics
from shardwise.models.spec import ModelSpec
from shardwise.parallel.reduce import sum_over


def apply(pm: ParallelModel, mesh: Mesh, cfg: RunConfig, spec: ModelSpec) -> ParallelModel:
    """Let the part with the head return losses of answers, and the reference run before it."""
    parts = [part for part in pm.parts if isinstance(part, CausalLM)]
    for part in parts:
        if part.spec.last:
            part.preferences = Preferences(cfg, mesh.device)
    with_head = [part.preferences for part in parts if part.preferences is not None]
    run, reference = pm.run, _reference(pm, parts, cfg)

    def sums_of(pm: ParallelModel, batches: Sequence[AnyBatch]) -> Sums:
        """Evaluate batches, and return what the rank with the head has of them."""
        kept: Sums = {}
        with ExitStack() as stack:
            for preferences in with_head:
                stack.enter_context(preferences.keeping(kept))
            run(pm, batches, 1.0, False)
        return kept

    def run_pairs(
        pm: ParallelModel, microbatches: Sequence[AnyBatch], loss_scale: float, train: bool
    ) -> torch.Tensor:
        _weigh_tokens(pm, microbatches, parts, mesh)
        if reference is not None:
            others = [m for b in microbatches if isinstance(b, Batch) and (m := b.mismatched)]
            policy = sums_of(pm, others) if others else {}
            found = objective.reference_of(pm, microbatches)
            kl = None
            if others:
                kl = _estimate(policy, objective.reference_of(pm, others), mesh)
            for preferences in with_head:
                preferences.compare_with(found, kl)
        return run(pm, microbatches, loss_scale, train)

    def reference_pass(pm: ParallelModel, batches: Sequence[AnyBatch]) -> Sums:
        assert reference is not None
        with reference():
            return sums_of(pm, batches)

    objective = PairsObjective(with_head, mesh, cfg, reference_pass)
    return replace(pm, run=run_pairs, objective=objective)


def _estimate(policy: Sums, reference: Sums, mesh: Mesh) -> torch.Tensor:
    """Return the estimate of the divergence from the reference: the mean over the global batch of
    how much more likely other documents' answers are, and at least 0.
    """
    ratio = torch.zeros(2, device=mesh.device)  # their sum and their number
    for slots, sides in policy.items():
        ratios = torch.where(sides.exist, sides.logps - reference[slots].logps, 0.0)
        ratio += torch.stack([ratios.sum(), sides.exist.sum()])
    total, number = sum_over(ratio, mesh, mesh.ROW_AXES)
    return (total / number.clamp(min=1)).clamp(min=0)


class PairsObjective(Objective):
    """The mean over the pairs, or the answers with a label, of a global batch."""

    def __init__(
        self,
        with_head: Sequence[Preferences],
        mesh: Mesh,
        cfg: RunConfig,
        reference_pass: Callable[[ParallelModel, Sequence[AnyBatch]], Sums],
    ) -> None:
        """Take what has seen answers on this rank, if anything has, and the reference's pass."""
        self.mesh, self.with_head = mesh, with_head
        self.names = metrics_of(cfg.objective)
        self.reference_pass = reference_pass
        self.computed: Callable[[Batch], torch.Tensor] | None = None
        """The reference's sums of a batch, [B, pairs, 2], where they were computed before."""

    def reference_of(self, pm: ParallelModel, batches: Sequence[AnyBatch]) -> Sums:
        """Return the reference's sums by the slots of batches; those of other ranks are missing."""
        if self.computed is None:
            return self.reference_pass(pm, batches)
        given = [batch for batch in batches if isinstance(batch, Batch)]
        sums = {b.slots: self.computed(b).to(self.mesh.device, non_blocking=True) for b in given}
        return {slots: Sides(logps, torch.ones_like(logps)) for slots, logps in sums.items()}

    def count(self, batch: AnyBatch) -> torch.Tensor:
        """Return the target tokens, those of chosen answers, and the pairs, [3]."""
        assert isinstance(batch, Batch)
        is_target = batch.labels != IGNORED
        pairs = (batch.document_ids.amax(1) + 2) // 2
        chosen = is_target & (batch.document_ids % 2 == 0)
        return torch.stack([is_target.sum(), chosen.sum(), pairs.sum()])

    def take(self) -> torch.Tensor:
        """Return the metrics of all answers since the last call: 32 bytes of each rank to all."""
        totals = torch.zeros(len(TOTALS), device=self.mesh.device)
        for preferences in self.with_head:
            totals += preferences.totals
            preferences.totals.zero_()
        sum_over(totals, self.mesh, ("pp", *self.mesh.gradient_axes))
        found = metrics(totals)
        return torch.stack([found[name] for name in self.names])


def _weigh_tokens(
    pm: ParallelModel, microbatches: Sequence[AnyBatch], parts: Iterable[CausalLM], mesh: Mesh
) -> None:
    """Let losses of tokens be means over the global batch, where its loss is a mean over pairs."""
    count = torch.stack([pm.objective.count(batch) for batch in microbatches]).sum(0)
    tokens, chosen, pairs = sum_over(count, mesh, mesh.ROW_AXES).tolist()
    for part in parts:
        if part.router_loss is not None:
            part.router_loss.weigh(pairs / max(tokens, 1))
        if part.preferences is not None:
            part.preferences.weigh(pairs, chosen)


def _reference(
    pm: ParallelModel, parts: Sequence[CausalLM], cfg: RunConfig
) -> Callable[[], AbstractContextManager[None]] | None:
    """Return a context in which the model is the reference; None without one.

    It is called when weights have their values of the first step.
    """
    if cfg.reference is None:
        return None
    if cfg.reference == "start" and not cfg.keeps_start:
        return nullcontext  # it computes before the first step alone
    if cfg.reference == "base":
        layers = [layer for part in parts for layer in adapter_layers(part.hf).values()]
        return lambda: _adapters_off(layers)
    storage = pm.storage
    trained = [(p, storage.values(p.detach()).clone()) for p in pm.trained().values()]
    # Beside what is trained, biases of routers move. Other buffers may be whole weights of a base.
    biases = [(b, b.clone()) for part in parts for _, b in biases_of(part.hf, part.spec)]
    return lambda: _exchanged(trained, biases, storage)


@contextmanager
def _adapters_off(layers: Iterable[Any]) -> Generator[None]:
    # PEFT's own switch would also change what requires a gradient.
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


@contextmanager
def _exchanged(
    pairs: Iterable[tuple[nn.Parameter, torch.Tensor]],
    biases: Iterable[tuple[torch.Tensor, torch.Tensor]],
    storage: Storage,
) -> Generator[None]:
    """Exchange the values of parameters and biases with others, in place, and back at the end."""

    @torch.no_grad()
    def exchange() -> None:
        for parameter, others in pairs:
            values = storage.values(parameter.detach())
            kept = values.clone()
            values.copy_(others)
            storage.change(parameter, values)
            others.copy_(kept)
        for bias, others in biases:
            kept = bias.clone()
            bias.copy_(others)
            others.copy_(kept)

    exchange()
    try:
        yield
    finally:
        exchange()
