"""torch's PipelineStage, but it notes when it did what, runs no backward where there is nothing to train, and keeps no
receive buffer for longer than needed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, schedules

from shardwise.models.causal_lm import CausalLM
from shardwise.schedule.orders import Kind


class Clock:
    """Moments on one device, in seconds from the step's start; a GPU is not waited for until they are asked for."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._start = self.now()

    def start(self, group: dist.ProcessGroup) -> None:
        """A step begins, on all ranks of the pipeline together: their clocks, on other nodes too, start here."""
        dist.barrier(group)
        self._start = self.now()

    def now(self) -> Any:
        """The moment of the call."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, moment: Any) -> float:
        """From the step's start to `moment`."""
        if self.device.type != "cuda":
            return moment - self._start
        moment.synchronize()
        return self._start.elapsed_time(moment) / 1e3


@contextmanager
def errors_as_they_are() -> Generator[None]:
    """What a stage raises, which torch would put into an error of its own, beside a log of the whole schedule."""
    logging.getLogger(schedules.__name__).setLevel(logging.CRITICAL)
    try:
        yield
    except RuntimeError as error:
        raise error.__cause__ or error from None


class Stage(PipelineStage):
    """One chunk of the model in torch's schedules.

    `input` and `output` are like what comes in and goes out of a micro-batch, on any device, so that torch need not
    try; each requires a gradient if something below it is trained, and no gradient is sent to where none is required.
    """

    def __init__(
        self,
        part: CausalLM,
        chunk: int,
        num_chunks: int,
        input: torch.Tensor,
        output: torch.Tensor,
        group: dist.ProcessGroup,
        clock: Clock,
    ) -> None:
        super().__init__(
            part, chunk, num_chunks, clock.device, input_args=input, output_args=output, group=group
        )
        self.clock = clock
        self.backward_half = part.backward_half
        self.trained = output.requires_grad  # something in it or below
        self.moments: list[tuple[Kind, int, Any, Any]] = []

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """As torch's."""
        start = self.clock.now()
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        if self.has_backward:
            self.moments.append(("F", fwd_chunk_id, start, self.clock.now()))
        else:
            self._free(self.args_recv_info[fwd_chunk_id])
        return output

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: torch.Tensor | None = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        """As torch's; nothing where no gradient is wanted here or below."""
        if not self.has_backward:
            return
        if not self.trained:
            self.fwd_cache.pop(bwd_chunk_id)
            self.bwd_cache[bwd_chunk_id] = (None,)
        else:
            start = self.clock.now()
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
            self.moments.append(
                ("B" if full_backward else "I", bwd_chunk_id, start, self.clock.now())
            )
            if loss is not None:
                loss.detach_()  # the schedule keeps it to the end of the step; its graph is done
            self._free(self.grad_recv_info[bwd_chunk_id])
        self._free(self.args_recv_info[bwd_chunk_id])

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """As torch's."""
        if self.has_backward:
            start = self.clock.now()
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
            self.moments.append(("W", bwd_chunk_id, start, self.clock.now()))

    def backward_maybe_with_nosync(self, backward_type: Any, *args: Any, **kwargs: Any) -> Any:
        """As torch's; tells the LoRA linears of the part which half of a backward runs."""
        with self.backward_half.running(backward_type):
            return super().backward_maybe_with_nosync(backward_type, *args, **kwargs)

    # Between two stages of one rank torch hands gradients over in an evaluation too, where there are none.

    def get_local_bwd_output(self, mb_index: int) -> tuple[torch.Tensor | None, ...]:
        """As torch's."""
        return super().get_local_bwd_output(mb_index) if self.has_backward else (None,)

    def set_local_bwd_input(
        self, next_stage_bwd_outputs: tuple[torch.Tensor | None, ...], mb_index: int
    ) -> None:
        """As torch's."""
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    # torch allocates a buffer for what comes in of each micro-batch before the first step, and keeps them all. Here one
    # is allocated when it is to be filled, and freed with the micro-batch's activations.

    def _prepare_forward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any:
        prepared = super()._prepare_forward_infra(num_microbatches, *args, **kwargs)
        for infos in self.args_recv_info.values():
            self._free(infos)
        return prepared

    def _setup_backward_recv_info(self, num_microbatches: int) -> None:
        super()._setup_backward_recv_info(num_microbatches)
        for infos in self.grad_recv_info.values():
            self._free(infos)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """As torch's."""
        self._allocate(self.args_recv_info[fwd_chunk_id])
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """As torch's."""
        if self.has_backward and not self.is_last:
            self._allocate(self.grad_recv_info[bwd_chunk_id])
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def _allocate(self, infos: Sequence[Any]) -> None:
        for info in infos:
            if info.tensor_meta is not None and not info.is_root_arg:
                info.buffer = torch.empty(
                    info.tensor_meta.shape, dtype=info.tensor_meta.dtype, device=self.device
                )

    def _free(self, infos: Sequence[Any]) -> None:
        for info in infos:
            info.buffer = None
