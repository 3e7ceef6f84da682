"""Known bugs of pipelines, planted one at a time as in test_sensitivity.py: each must turn a parity
cell red."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from shardwise.assembly import build, order
from shardwise.models import stage
from shardwise.models.families.base import StageFacts
from shardwise.models.patches import embedding
from shardwise.models.slot_dropout import DropoutState
from shardwise.parallel import activation_checkpoint, clip, ddp, pipeline_parallel, pipeline_stage
from shardwise.parallel.reduce import sum_over
from tests.parity.features.pipelines import cell
from tests.parity.harness import Cell
from tests.parity.test_sensitivity import check_caught, fsdp_mean_instead_of_sum, planted


def one_stage_keeps_stale_gradients():
    make = build.make_optimizer

    def keeping(*args):
        optimizer = make(*args)
        if dist.get_rank() == 1:
            optimizer.zero_grad = lambda set_to_none=True: None
        return optimizer

    build.make_optimizer = keeping


def labels_of_another_micro_batch():
    forward = stage.Stage.forward

    def turned(self, carried, microbatch):
        other = len(self.microbatches) - 1 - microbatch
        return forward(self, carried, other if self.spec.last else microbatch)

    stage.Stage.forward = turned


def loss_counted_on_two_stages():
    run = pipeline_parallel._Runner.run
    pipeline_parallel._Runner.run = lambda self, *args: sum_over(
        run(self, *args), self.mesh, ["pp"]
    )


def a_layer_in_two_stages():
    cut = order.stages

    def overlapping(hf, spec, boundaries, chunks, *others):
        (chunk,) = chunks
        if chunk == 0:
            boundaries = [boundaries[0], *(edge + 1 for edge in boundaries[1:-1]), boundaries[-1]]
        return cut(hf, spec, boundaries, chunks, *others)

    order.stages = overlapping


def norm_of_one_stage_only():
    clip.sum_over = lambda tensor, mesh, axes: sum_over(tensor, mesh, set(axes) - {"pp"})


def after_tying(change):
    tie = pipeline_parallel._tie
    pipeline_parallel._tie = lambda pm, mesh, spec: change(pm, tie(pm, mesh, spec), mesh)


def tied_gradient_summed_on_one_side_only():
    def change(pm, tied, mesh):
        *_, add_up = tied.reduce_grads

        def once():
            held = {parameter: parameter.grad.clone() for _, parameter in pm.named_parameters()}
            add_up()
            if mesh.dense.get_local_rank("pp"):
                for parameter, gradient in held.items():
                    parameter.grad = gradient

        return replace(tied, reduce_grads=(*pm.reduce_grads, once))

    after_tying(change)


def tied_gradient_counted_twice_in_the_norm():
    after_tying(lambda pm, tied, mesh: replace(tied, make_optimizer=pm.make_optimizer))


def tied_gradients_exchanged_before_zero_reduces_them():
    def change(pm, tied, mesh):
        *_, add_up = tied.reduce_grads
        return replace(tied, reduce_grads=(add_up, *pm.reduce_grads))

    after_tying(change)


def embedding_multiplier_applied_by_every_stage():
    share = stage._share

    def forgetful(hf, spec, own, family, shared):
        return share(hf, spec, own, replace(family, cut=StageFacts()), shared)

    stage._share = forgetful


def positions_added_by_every_stage():
    share = stage._share
    stage._share = lambda hf, spec, *args: share(hf, replace(spec, positions=None), *args)


def router_losses_of_lower_stages_lost():
    stage._AddLoss.apply = lambda hidden, loss, scale: hidden


def router_losses_of_lower_stages_not_scaled():
    apply = stage._AddLoss.apply
    stage._AddLoss.apply = lambda hidden, loss, scale: apply(hidden, loss, 1.0)


def lowest_trained_stage_gets_no_gradient_of_its_input():
    init = pipeline_stage.ScheduledStage.__init__

    def trusting(self, *args, **options):
        init(self, *args, **options)
        self.trained = True

    pipeline_stage.ScheduledStage.__init__ = trusting
    embedding.HALVING = ()
    pipeline_parallel.HALVING = ()


def no_gradient_through_a_frozen_stage():
    init = pipeline_stage.ScheduledStage.__init__

    def short_sighted(self, part, *args, **options):
        init(self, part, *args, **options)
        self.trained = any(parameter.requires_grad for parameter in part.parameters())

    pipeline_stage.ScheduledStage.__init__ = short_sighted


def one_buffer_for_all_micro_batches():
    allocate = pipeline_stage.ScheduledStage._allocate

    def again(self, infos):
        allocate(self, infos)
        for info in infos:
            if info.buffer is not None:
                info.buffer = self.__dict__.setdefault("first", info.buffer).detach()

    pipeline_stage.ScheduledStage._allocate = again


def gradients_not_summed_over_replicas():
    ddp.sum_over_copies = lambda parameters, mesh: None


def evaluated_with_dropout():
    train = torch.nn.Module.train
    pipeline_parallel.Part.train = lambda self, mode=True: train(self, True)


def recomputed_with_the_masks_of_a_later_micro_batch():
    wrap = activation_checkpoint._recomputed
    activation_checkpoint._recomputed = lambda forward, state, contexts: wrap(
        forward, DropoutState(0), contexts
    )


PLAIN = cell("llama", "1f1b", "lora")
TIED = cell("qwen3_5_text", "1f1b", "full", variant="tied")
TIED_SHARDS = Cell("qwen3_5_text", "pp-zero1", "full", 4, "tied", "1f1b")
ROUTED = cell("qwen3_next", "interleaved-1f1b", "full")

BUGS: tuple[tuple[Callable[[], None], Cell], ...] = (
    (one_stage_keeps_stale_gradients, PLAIN),
    (labels_of_another_micro_batch, PLAIN),
    (loss_counted_on_two_stages, PLAIN),
    (a_layer_in_two_stages, PLAIN),
    (norm_of_one_stage_only, PLAIN),
    (one_buffer_for_all_micro_batches, cell("llama", "gpipe", "full")),
    (tied_gradient_summed_on_one_side_only, TIED),
    *((tied_gradient_counted_twice_in_the_norm, tied) for tied in (TIED, TIED_SHARDS)),
    (tied_gradients_exchanged_before_zero_reduces_them, TIED_SHARDS),
    *(
        (embedding_multiplier_applied_by_every_stage, cell(name, "1f1b", "lora"))
        for name in ("granitemoehybrid", "afmoe")
    ),
    (positions_added_by_every_stage, cell("gpt2", "1f1b", "full")),
    (router_losses_of_lower_stages_lost, ROUTED),
    (router_losses_of_lower_stages_not_scaled, ROUTED),
    (
        lowest_trained_stage_gets_no_gradient_of_its_input,
        cell("llama", "zbv", "lora", variant="upper"),
    ),
    (no_gradient_through_a_frozen_stage, cell("llama", "1f1b", "lora", variant="lower")),
    (gradients_not_summed_over_replicas, Cell("llama", "pp-ddp", "lora", 4, schedule="zbv")),
    (fsdp_mean_instead_of_sum, Cell("llama", "pp-fsdp2", "full", 4, schedule="1f1b")),
    (
        recomputed_with_the_masks_of_a_later_micro_batch,
        cell("llama", "1f1b", "lora", variant="checkpointing-dropout"),
    ),
    (
        evaluated_with_dropout,
        cell("qwen3_5_text", "interleaved-zero-bubble", "lora", variant="dropout"),
    ),
)


@pytest.mark.parametrize(("bug", "cell"), planted(BUGS))
def test_planted_bug_is_caught(bug, cell):
    check_caught(bug, cell)
