"""A stage of torch's pipelines that records its times and saves work and memory.

It runs no backward where nothing is trained, and keeps a message only while it is needed.
"""

import logging
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, schedules

from shardwise.base.schedule.orders import Kind
from shardwise.models.part import ModelPart


class Clock:
    """Moments on one device, in seconds from a step's start. Only `seconds` waits for a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._start = self.now()

    def start(self, group: dist.ProcessGroup) -> None:
        """Start the clocks of all ranks of the pipeline together, on other nodes too."""
        dist.barrier(group)
        self._start = self.now()

    def now(self) -> Any:
        """Return the moment of the call."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, moment: Any) -> float:
        """Return the seconds from the step's start to `moment`."""
        if self.device.type != "cuda":
            return moment - self._start
        moment.synchronize()
        return self._start.elapsed_time(moment) / 1e3


@contextmanager
def errors_as_they_are() -> Generator[None]:
    """Raise what a stage raises, which torch puts into another error, and log no schedule."""
    logging.getLogger(schedules.__name__).setLevel(logging.CRITICAL)
    try:
        yield
    except RuntimeError as error:
        raise error.__cause__ or error from None


class ScheduledStage(PipelineStage):
    """One chunk of the model in torch's schedules.

    `input` and `output` are like what enters and leaves for a micro-batch, on any device, so that
    torch need not run the stage to see it. Each requires a gradient if something below it is
    trained; no gradient is sent to where none is required. `is_batched`: whether the schedule sends
    in one batch with what it receives, and waits for both.
    """

    def __init__(
        self,
        part: ModelPart,
        chunk: int,
        num_chunks: int,
        input: torch.Tensor,
        output: torch.Tensor,
        group: dist.ProcessGroup,
        clock: Clock,
        is_batched: bool = False,
    ) -> None:
        super().__init__(
            part, chunk, num_chunks, clock.device, input_args=input, output_args=output, group=group
        )
        self.clock, self.is_batched = clock, is_batched
        self.sent: dict[Kind, dict[int, list[dist.Work]]] = {"F": {}, "B": {}}
        """Messages that may be under way: outputs and gradients, by micro-batch."""
        self.backward_half = part.backward_half
        # Whether this or an earlier stage has trainable parameters.
        self.trained = output.requires_grad
        self.moments: list[tuple[Kind, int, Any, Any]] = []

    @property
    def runs_backward(self) -> bool:
        """Whether micro-batches that run forward run backward, too."""
        return self.trained and self.has_backward

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Do as torch's stage does; without a backward it keeps the latest output only."""
        if not self.runs_backward:
            self.fwd_cache.clear()
        start = self.clock.now()
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        if self.has_backward:
            self.moments.append(("F", fwd_chunk_id, start, self.clock.now()))
        if not self.runs_backward:
            self._free(self.args_recv_info[fwd_chunk_id])
        return output

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: torch.Tensor | None = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        """Do as torch's stage does, except where nothing here or below is trained."""
        if not self.has_backward:
            return
        if not self.trained:
            self.bwd_cache[bwd_chunk_id] = (None,)
            return
        self._await("F", bwd_chunk_id)
        start = self.clock.now()
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        kind: Kind = "B" if full_backward else "I"
        self.moments.append((kind, bwd_chunk_id, start, self.clock.now()))
        for kept in self.backward_state.get(bwd_chunk_id, ((),))[0]:
            # A first half sets it; it is what is sent, and the second half does not read it.
            kept.grad = None
        if loss is not None:
            # The schedule keeps the loss to the end of the step, without its graph.
            loss.detach_()
        self._free(self.grad_recv_info[bwd_chunk_id])
        self._free(self.args_recv_info[bwd_chunk_id])

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Do as torch's stage does."""
        if self.has_backward:
            start = self.clock.now()
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
            self.moments.append(("W", bwd_chunk_id, start, self.clock.now()))

    def backward_maybe_with_nosync(self, backward_type: Any, *args: Any, **kwargs: Any) -> Any:
        """Do as torch's stage does; the LoRA linears see which half of a backward runs."""
        with self.backward_half.running(backward_type):
            return super().backward_maybe_with_nosync(backward_type, *args, **kwargs)

    # Between two stages of one rank torch passes gradients on in an evaluation, too, which has
    # none.

    def get_local_bwd_output(self, mb_index: int) -> tuple[torch.Tensor | None, ...]:
        """Do as torch's stage does."""
        return super().get_local_bwd_output(mb_index) if self.has_backward else (None,)

    def set_local_bwd_input(
        self, next_stage_bwd_outputs: tuple[torch.Tensor | None, ...], mb_index: int
    ) -> None:
        """Do as torch's stage does."""
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    # torch allocates a receive buffer for each micro-batch before the first step, and keeps them
    # all. Here these are on meta; one is allocated when it is to be filled, and freed with the
    # micro-batch's activations.

    def _prepare_forward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any:
        with self._on_meta():
            return super()._prepare_forward_infra(num_microbatches, *args, **kwargs)

    def _setup_backward_recv_info(self, num_microbatches: int) -> None:
        with self._on_meta():
            super()._setup_backward_recv_info(num_microbatches)

    @contextmanager
    def _on_meta(self) -> Generator[None]:
        device, self.device = self.device, torch.device("meta")
        yield
        self.device = device

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Do as torch's stage does."""
        self._allocate(self.args_recv_info[fwd_chunk_id])
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Do as torch's stage does."""
        if self.has_backward and not self.is_last:
            self._allocate(self.grad_recv_info[bwd_chunk_id])
        return super().get_bwd_recv_ops(bwd_chunk_id)

    # torch's schedules keep what they send to the end of a step, except 1F1B's. Here a message is
    # dropped when its answer comes, or, where none comes, before the next one is sent. To wait for
    # it blocks no rank for ever: torch lists each receive where it lists the send. gloo has no
    # poll: `is_completed` of what it sends is False until somebody waits.

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Send the output, and leave nothing to the schedule."""
        if not self.runs_backward:
            self._await("F")
        return self._send("F", fwd_chunk_id, super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Send the gradient of the input, and leave nothing to the schedule."""
        self._await("B")
        return self._send("B", bwd_chunk_id, super().get_bwd_send_ops(bwd_chunk_id))

    def _send(self, kind: Kind, microbatch: int, ops: list[dist.P2POp]) -> list[dist.P2POp]:
        if self.is_batched:
            return ops
        # A tensor [B, T, D] goes to the rank of the next chunk, or of the one below.
        works = [dist.isend(op.tensor, op.peer, op.group) for op in ops]
        self.sent[kind][microbatch] = [work for work in works if work is not None]
        return []

    def _await(self, kind: Kind, microbatch: int | None = None) -> None:
        """Wait for what was sent of a micro-batch, or of all, and drop it."""
        for number in [*self.sent[kind]] if microbatch is None else [microbatch]:
            for work in self.sent[kind].pop(number, ()):
                work.wait()

    def clear_runtime_states(self) -> None:
        """Do as torch's stage does, after the last messages."""
        for kind in self.sent:
            self._await(kind)
        super().clear_runtime_states()

    def _allocate(self, infos: Sequence[Any]) -> None:
        for info in infos:
            meta = info.tensor_meta
            if meta is not None and not info.is_root_arg:
                info.buffer = torch.empty(meta.shape, dtype=meta.dtype, device=self.device)

    def _free(self, infos: Sequence[Any]) -> None:
        for info in infos:
            info.buffer = None
