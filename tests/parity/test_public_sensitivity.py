"""Defects that other training systems had in public, planted one at a time as in
test_sensitivity.py: each must turn a cell red. Those that are not in another file of such bugs;
public_defects.toml lists all of them, with links."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwise.assembly import build
from shardwise.base.batches import IGNORED
from shardwise.checkpoint import export
from shardwise.models import routed_experts, router_loss
from shardwise.models.adapters import lora
from shardwise.models.families import FAMILIES
from shardwise.models.names import is_adapter
from shardwise.models.patches import lora_kernel
from shardwise.parallel import clip, context_parallel, ddp, tensor_parallel
from shardwise.parallel.place import axes_of, local
from shardwise.parallel.reduce import sum_over_copies
from shardwise.training import step
from tests.models.adapters import test_lora
from tests.parity.features.dora import FIXED as DORA
from tests.parity.features.spread_experts import FIXED as EXPERTS
from tests.parity.features.tensors import cell as tensor
from tests.parity.harness import Cell
from tests.parity.test_sensitivity import check_caught, in_place_of, planted


def weigh_each_forward(weight: Callable[[Tensor, float], Tensor]) -> None:
    """Multiply the sum of losses of each forward by a weight.

    The weight is made of how many targets the forward has on this rank, and of the scale, by which
    a step multiplies the sum, times the micro-batches of all ranks.
    """
    run = build.run_in_turn

    def weighted(pm, microbatches, scale, train):
        if not train:
            return run(pm, microbatches, scale, train)
        (part,) = pm.parts
        number = len(microbatches) * dist.get_world_size()

        def weigh(module, args, loss):
            return loss * weight(args[0].num_target_tokens().clamp(min=1), scale * number)

        hook = part.register_forward_hook(weigh)
        try:
            return run(pm, microbatches, scale, train)
        finally:
            hook.remove()

    build.run_in_turn = weighted


def each_micro_batch_divided_by_its_own_targets():
    weigh_each_forward(lambda targets, scale: 1 / (scale * targets))


def each_share_of_a_row_divided_by_its_own_targets():
    def weight(targets, scale):
        whole = targets.to(torch.float64)
        dist.all_reduce(whole)  # of the row: all ranks share it
        return whole / dist.get_world_size() / targets

    weigh_each_forward(weight)


def labels_shifted_after_rows_are_cut():
    tokens_of = context_parallel.tokens_of

    def shifted_late(*args):
        batch = tokens_of(*args)
        following = batch.input_ids.roll(-1, 1)
        following[:, -1] = IGNORED  # the next token is on another rank
        labels = following.where(batch.labels != IGNORED, IGNORED)
        return replace(batch, labels=labels, on_host=None)

    context_parallel.tokens_of = shifted_late


def clipped_with_the_loss_scale():
    clip = step.clip_by_global_norm

    def too_early(parameters, mesh, facts, most, scale, *others):
        parameters = list(parameters)
        clip(parameters, mesh, facts, most, 1.0, *others)
        return clip(parameters, mesh, facts, None, scale, *others)

    step.clip_by_global_norm = too_early


def schedule_that_counts_each_ranks_steps():
    make = build.make_lr_schedule

    def too_fast(*args):
        schedule = make(*args)
        once = schedule.step
        schedule.step = lambda: [once() for _ in range(dist.get_world_size())]
        return schedule

    build.make_lr_schedule = too_fast


def replicated_gradients_counted_by_each_tensor_rank():
    sharded_axes = clip.sharded_axes

    def always_over_tp(parameter, facts):
        return tuple({*sharded_axes(parameter, facts), "tp"})

    clip.sharded_axes = always_over_tp


def frozen_norms_trained_under_tensor_parallelism():
    def apply(pm, mesh, cfg, spec):
        pm = tensor_parallel.apply(pm, mesh, cfg, spec)
        for part in pm.parts:
            for name, parameter in part.named_parameters():
                parameter.requires_grad_(parameter.requires_grad or "norm" in name)
        return pm

    def adapters_alone(hf, cfg, state, *args):
        save(hf, cfg, {name: state[name] for name in state if is_adapter(name)}, *args)

    in_place_of("tensor", apply)
    save = export.save_adapter  # which refuses what is no adapter
    export.save_adapter = adapters_alone


def gradients_of_experts_times_their_ranks():
    def multiplied(parameters, mesh):
        parameters = list(parameters)
        sum_over_copies(parameters, mesh)
        for parameter in parameters:
            if "ep" in axes_of(parameter):
                local(parameter.grad).mul_(mesh.size("ep"))

    ddp.sum_over_copies = multiplied


def adapters_of_experts_counted_by_each_rank():
    adapter_of = routed_experts.RoutedExperts._adapter

    def complete_on_each(self, name):
        views = adapter_of(self, name)
        is_cut = isinstance(self.module._parameters[name], DTensor)  # not so in the reference
        is_summed = is_cut and "down" in name
        return views._replace(scale=views.scale * dist.get_world_size()) if is_summed else views

    routed_experts.RoutedExperts._adapter = complete_on_each


def router_loss_whole_in_each_micro_batch():
    call = router_loss.RouterLoss.__call__
    router_loss.RouterLoss.__call__ = lambda self, batch: 2 * call(self, batch)


def shards_of_other_ranks_not_saved():
    full_tensor = export.full_tensor

    def of_first_rank(portable):
        full = full_tensor(portable).clone()
        if isinstance(portable, DTensor):
            full[len(portable.to_local()) :] = 0
        return full

    export.full_tensor = of_first_rank


def magnitudes_not_trained():
    with_magnitude = lora_kernel.with_magnitude
    lora_kernel.with_magnitude = lambda y, magnitude, *others: with_magnitude(
        y, magnitude.detach(), *others
    )


BUGS = (
    (each_micro_batch_divided_by_its_own_targets, Cell("llama", "ddp", "lora", 2)),
    (
        each_share_of_a_row_divided_by_its_own_targets,
        Cell("llama", "cp", "lora", 4, "isolated-ring"),
    ),
    (labels_shifted_after_rows_are_cut, Cell("llama", "cp", "lora", 4, "isolated-ring")),
    (clipped_with_the_loss_scale, Cell("llama", "ddp", "full", 2, "float16")),
    (schedule_that_counts_each_ranks_steps, Cell("llama", "ddp", "lora", 2)),
    (replicated_gradients_counted_by_each_tensor_rank, tensor("llama", "tp", "lora")),
    (frozen_norms_trained_under_tensor_parallelism, tensor("llama", "tp", "lora")),
    (gradients_of_experts_times_their_ranks, EXPERTS[0]),
    (adapters_of_experts_counted_by_each_rank, tensor("qwen3_next", "tp-sp", "lora", "experts")),
    (router_loss_whole_in_each_micro_batch, Cell("qwen3_next", "ddp", "lora", 2)),
    (shards_of_other_ranks_not_saved, Cell("olmo_hybrid", "fsdp2", "lora", 2)),
    (magnitudes_not_trained, DORA[5]),
)


@pytest.mark.parametrize(("bug", "cell"), planted(BUGS))
def test_a_planted_bug_is_caught(bug, cell):
    check_caught(bug, cell)


Patch = pytest.MonkeyPatch


def recurrent_layers_left_out(patch: Patch) -> None:
    choose = lora._choose
    patch.setattr(
        lora,
        "_choose",
        lambda *args: [weight for weight in choose(*args) if weight.name.split(".")[-1] in QKVO],
    )


QKVO = ("q_proj", "k_proj", "v_proj", "o_proj")


def adapters_that_the_layer_reads_past(patch: Patch) -> None:
    (kind,) = (block.kind for block in FAMILIES["jamba"].blocks if block.kind.bypassed)
    patch.setitem(vars(kind), "bypassed", ())


@pytest.mark.parametrize(
    ("mistake", "test"),
    [
        (
            recurrent_layers_left_out,
            partial(test_lora.test_what_each_choice_of_targets_covers, "tiny-nemotron_h"),
        ),
        (
            adapters_that_the_layer_reads_past,
            partial(
                test_lora.test_every_adapter_is_alive_and_nothing_else_is_trained,
                "tiny-jamba",
                "all-linear",
            ),
        ),
    ],
)
def test_a_mistake_fails_a_test_of_one_process(mistake, test, monkeypatch):
    test()
    mistake(monkeypatch)
    with pytest.raises(AssertionError):
        test()
