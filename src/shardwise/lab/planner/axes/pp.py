"""Messages between the stages of a pipeline, by closed formulas."""

from collections.abc import Iterator

from shardwise.lab.planner.axes.axis import AxisMessages
from shardwise.lab.planner.messages import Step
from shardwise.parallel.sent import Messages
from shardwise.parallel.weights import gradient_bytes


class PipelineMessages(AxisMessages):
    """Stages, of which neighbours exchange hidden states and their gradients."""

    name = "pp"

    def messages(self, step: Step) -> Iterator[Messages]:
        """Yield BTD per micro-batch and cut: hidden states up, and their gradient down.

        Once a step the first and the last stage exchange gradients, or shards, of a tied weight.
        """
        m = step.num_microbatches
        for chunk in step.share.chunks:
            downwards = chunk.receives_from if chunk.needs_input_gradient else None
            for receiver in (chunk.sends_to, downwards):
                if receiver is not None:
                    yield Messages("send", "pp", m, m * step.hidden_bytes, receiver)
        if (tied := step.share.tied) is not None:
            numel = tied.padded_numel // step.num_pieces(tied, "optimizer")
            num_bytes = gradient_bytes(step.cfg, numel, tied.itemsize)
            is_first = any(chunk.spec.first for chunk in step.share.chunks)
            yield Messages("send", "pp", 1, num_bytes, step.sizes["pp"] - 1 if is_first else 0)
