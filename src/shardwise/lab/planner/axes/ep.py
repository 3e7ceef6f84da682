"""Messages that mixtures of experts send under `parallel.ep`, by closed formulas.

A rank has N tokens of a micro-batch, each of which goes to k experts: N k rows leave for the ranks
of their experts, and R rows arrive from all ranks. R depends on the routing; all else does not.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from shardwise.assembly.describe import Description
from shardwise.config import RunConfig
from shardwise.lab.planner.axes.axis import AxisMessages, Traffic
from shardwise.lab.planner.divisions import Division
from shardwise.lab.planner.messages import Step
from shardwise.metrics.flops import rerun_of
from shardwise.models.counts import Unit
from shardwise.models.dtypes import hidden_dtype, product_dtype
from shardwise.models.expert_plan import experts_of, num_experts
from shardwise.models.names import hf_name
from shardwise.models.routed_experts import widths_of
from shardwise.models.spec import LayerSpec
from shardwise.models.tensor_cuts import unwrapped
from shardwise.parallel.sent import Messages
from shardwise.parallel.weights import Weight

COUNT_BYTES = 8
"""Bytes of the number of rows for an expert, an int64."""


@dataclass(frozen=True)
class Mixture:
    """The routed experts of a layer."""

    path: str
    """Name of the experts in the transformers model."""
    num_experts: int
    """E, on all ranks."""
    top_k: int
    """Experts of a token."""
    row_bytes: int
    """Bytes of a token on its way to an expert."""
    output_bytes: int
    """Bytes of what an expert makes of it."""
    has_backward: bool
    """Whether outputs have gradients, which go the way of the rows."""
    needs_input_gradient: bool
    """Whether rows have gradients, which go the way of the outputs."""
    is_rerun: bool
    """Whether the backward runs the forward again."""

    def sent(self, num_tokens: int, num_received: int, num_microbatches: int) -> tuple[int, int]:
        """Return the calls and bytes of a step's all-to-alls.

        `num_tokens`: N; `num_received`: R, of all micro-batches of the step together.
        """
        m, rows = num_microbatches, num_microbatches * num_tokens * self.top_k
        counts = m * COUNT_BYTES * self.num_experts
        times = 1 + self.is_rerun
        calls = 3 * m * times
        num_bytes = times * (counts + rows * self.row_bytes + num_received * self.output_bytes)
        if self.has_backward:
            calls += m
            num_bytes += rows * self.output_bytes
        if self.needs_input_gradient:
            calls += m
            num_bytes += num_received * self.row_bytes
        return calls, num_bytes


def mixtures_of(
    cfg: RunConfig, run: Description, layer: LayerSpec, unit: Unit, weights: Sequence[Weight]
) -> Iterator[Mixture]:
    """Yield the routed experts of a layer."""
    # `operators` saves what comes out of products, but nothing of a collective.
    is_rerun = rerun_of(unit, cfg.training.checkpointing) != "none"
    for path, experts in experts_of(run.hf, replace(run.spec, layers=(layer,))):
        num_in, num_out, itemsize = widths_of(unwrapped(experts))
        # A linear may lead from hidden states into narrower experts.
        is_narrower = num_in != run.spec.hidden_size
        row_dtype = product_dtype(cfg) if is_narrower else hidden_dtype(cfg)
        products = [weight for weight in unit.weights if weight.name.startswith(f"{path}.")]
        needs_input_gradient = all(weight.input_gradient for weight in products)
        is_trained = any(parameter.requires_grad for parameter in experts.parameters())
        yield Mixture(
            path=hf_name(path),
            num_experts=num_experts(experts),
            top_k=run.hf.config.num_experts_per_tok,
            row_bytes=num_in * row_dtype.itemsize,
            # Autocast leaves experts' products in the dtype of their weights.
            output_bytes=num_out * itemsize,
            has_backward=needs_input_gradient or is_trained,
            needs_input_gradient=needs_input_gradient,
            is_rerun=is_rerun,
        )


class ExpertMessages(AxisMessages):
    """Ranks with other experts, to which tokens go."""

    name = "ep"
    parts = staticmethod(mixtures_of)
    has_names = True

    def messages(self, step: Step) -> Iterator[Messages]:
        """Yield the all-to-alls of tokens that go to their experts' ranks and back."""
        for chunk in step.share.chunks:
            for mixture in chunk.sending["ep"]:
                received = step.num_received[mixture.path]
                calls, num_bytes = mixture.sent(step.num_tokens, received, step.num_microbatches)
                yield Messages("all-to-all", "ep", calls, num_bytes)

    def seconds(self, traffic: Traffic, division: Division, is_again: bool) -> float:
        """See AxisMessages."""
        routed = (2 + is_again) * traffic.routed_bytes
        sent = routed / division.cp * (division.ep - 1) / division.ep
        link = traffic.cluster.link_of(division.ep * division.tp)
        return sent / link.bandwidth / division.pp
