"""Known bugs, planted into the project's own code one at a time: each must turn an unmodified
parity cell red.

A bug is planted inside the forked ranks only, so that the reference and every other test run the
code as it is.
"""

# No `from __future__ import annotations`: DDP checks a hook's annotations as objects.
import traceback
from collections.abc import Callable, Iterable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from shardwise.assembly import build, order
from shardwise.base.interfaces import Mesh, ParameterFacts
from shardwise.checkpoint import export
from shardwise.kernels.lora_linear import torch_backend
from shardwise.models import documents, router_loss, slot_dropout
from shardwise.models.adapters import lora
from shardwise.models.part import ModelPart
from shardwise.models.patches import lora_kernel
from shardwise.models.patches import loss as loss_patch
from shardwise.parallel import (
    activation_offload,
    clip,
    ddp,
    flat,
    fsdp1,
    fsdp2,
    offload,
    place,
    zero,
)
from shardwise.training import step
from tests.distributed import run_ranks
from tests.parity.cells import FAST
from tests.parity.harness import Cell, Outcome, compare, run_cell, verdict
from tests.parity.public_defects import red_of
from tests.parity.references import reference


def missing_world_size_factor():
    def mean_hook(
        group: dist.ProcessGroup, bucket: dist.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        future = dist.all_reduce(
            bucket.buffer() / group.size(), group=group, async_op=True
        ).get_future()
        return future.then(lambda done: bucket.buffer().copy_(done.value()[0]))

    ddp.sum_hook = mean_hook


def after_fsdp2(change):
    def apply(pm, mesh, cfg, spec):
        return change(fsdp2.apply(pm, mesh, cfg, spec), mesh)

    in_place_of("fsdp2", apply)


def in_place_of(name, apply):
    """Let ORDER do something else in the place of a strategy."""
    for group in ("BEFORE_LOADING", "AFTER_LOADING"):
        entries = getattr(order, group)
        changed = (
            entry._replace(apply=apply) if entry.name == name else entry for entry in entries
        )
        setattr(order, group, tuple(changed))


def fsdp_mean_instead_of_sum():
    def change(pm, mesh):
        for module in pm.parts[0].modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(mesh.data_size)
        return pm

    after_fsdp2(change)


def flat_mean_instead_of_sum():
    wrap = fsdp1._wrap

    def dividing(unit, mesh, ignored):
        wrapper = wrap(unit, mesh, ignored)
        wrapper._gradient_postdivide_factor = mesh.data_size
        return wrapper

    fsdp1._wrap = dividing


def norm_of_this_ranks_flat_pieces_only():
    flat.ParameterFacts = lambda **_: ParameterFacts()


def updated_shards_not_gathered():
    zero.Shards.gather = lambda self: None


def last_gradient_kept_instead_of_added():
    finish = zero.Shards.finish

    def replacing(self):
        for bucket, _, _ in self.pending:
            for entry in bucket.entries:
                entry.shard.grad = None
        finish(self)

    zero.Shards.finish = replacing


def states_under_the_names_of_other_parameters():
    apply = zero.apply

    def swapping(pm, mesh, in_backward):
        make = pm.make_optimizer

        def make_optimizer(named):
            by_shape = {}
            for name, shard in named:
                by_shape.setdefault(shard.shape, []).append(name)
            turned = {
                name: names[i - 1] for names in by_shape.values() for i, name in enumerate(names)
            }
            return make([(turned[name], shard) for name, shard in named])

        return apply(replace(pm, make_optimizer=make_optimizer), mesh, in_backward)

    zero.apply = swapping


def whole_gradients_left_on_every_rank():
    reduce = zero.Shards.reduce

    def leaving(self, bucket):
        gradients = [entry.whole.grad.clone() for entry in bucket.entries]
        reduce(self, bucket)
        for entry, gradient in zip(bucket.entries, gradients):
            entry.whole.grad = gradient

    zero.Shards.reduce = leaving


def offloaded_update_not_copied_back():
    offload.Copies.update_weights = lambda self: None


def adapters_not_reduced():
    def local_hook(
        group: dist.ProcessGroup, bucket: dist.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    ddp.sum_hook = local_hook


def replicas_not_reduced():
    after_fsdp2(
        lambda pm, mesh: replace(
            pm, set_sync=lambda sync: pm.parts[0].set_requires_all_reduce(False)
        )
    )


def frozen_parameter_given_a_gradient():
    inject = lora.inject

    def leaky(hf, *args):
        coverage = inject(hf, *args)
        next(
            p for n, p in hf.named_parameters() if "layers.1" in n and not p.requires_grad
        ).requires_grad_(True)
        return coverage

    lora.inject = leaky


def same_rows_on_every_rank():
    Mesh.slots = lambda self, size: range(size // self.data_size)


def local_token_count():
    def of_this_rank(pm, microbatches, mesh):
        tokens = sum(int(batch.num_target_tokens()) for batch in microbatches)
        return tokens, tokens

    step.count_targets = of_this_rank


def clip_by_the_local_norm():
    clip.sharded_axes = lambda tensor, facts: ()


def replicas_counted_again_in_the_norm():
    sharded = clip.sharded_axes
    clip.sharded_axes = lambda tensor, facts: ("dp_replicate", *sharded(tensor, facts))


def stale_gradient_kept():
    make = build.make_optimizer

    def keeping(*args):
        optimizer = make(*args)
        optimizer.zero_grad = lambda set_to_none=True: None
        return optimizer

    build.make_optimizer = keeping


def schedule_that_stands_still():
    build.make_lr_schedule = lambda cfg, optimizer, steps, done: torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda done: 1.0
    )


def never_clipped():
    clip = step.clip_by_global_norm
    step.clip_by_global_norm = lambda parameters, mesh, facts, most, *others: clip(
        parameters, mesh, facts, None, *others
    )


def loss_scale_not_divided_out():
    clip = step.clip_by_global_norm
    step.clip_by_global_norm = lambda parameters, mesh, facts, most, scale, *others: clip(
        parameters, mesh, facts, most, 1.0, *others
    )


def overflow_seen_by_one_rank_only():
    overflown = clip.global_norm

    def partly(*args):
        norm = overflown(*args)
        return norm if dist.get_rank() == 1 else torch.nan_to_num(norm, nan=1.0, posinf=1.0)

    clip.global_norm = partly


def norms_decayed():
    build.decayed = lambda hf, spec: {name for name, _ in hf.named_parameters()}


def adapter_dropped_from_the_save():
    save = export.save_adapter

    def lossy(hf, cfg, state, *args):
        save(hf, cfg, {name: torch.zeros_like(tensor) for name, tensor in state.items()}, *args)

    export.save_adapter = lossy


def weights_one_row_off_in_the_shards():
    fill = place.fill
    build.fill = lambda target, full: fill(
        target, full.roll(1, 0) if isinstance(target, DTensor) else full
    )


def mask_by_place_instead_of_slot():
    seed = slot_dropout.stable_seed
    slot_dropout.stable_seed = lambda *parts: seed(*parts[:2], *(slot % 2 for slot in parts[2:]))


def scale_left_out_of_the_adapters_backward():
    gradients_of = torch_backend.output_gradients
    torch_backend.output_gradients = lambda dys, b, h, scales, *others: gradients_of(
        dys, b, h, [1.0 for _ in scales], *others
    )


def mask_of_the_backward_another_than_the_forwards():
    gradient = torch_backend.factor_gradient
    torch_backend.factor_gradient = lambda g, x, drop: gradient(
        g, x, replace(drop, seeds=drop.seeds + 1)
    )


def dropout_left_out_of_the_inputs_gradient():
    gradient = torch_backend.input_gradient
    torch_backend.input_gradient = lambda dys, weights, g, a, drop: gradient(
        dys, weights, g, a, None
    )


def projection_handed_anothers_output():
    compute = lora_kernel._Shared._compute

    def swapped(self, layers, x):
        ys = compute(self, layers, x)
        return (*ys[:-2], ys[-1], ys[-2]) if len(ys) > 1 and ys[-1].shape == ys[-2].shape else ys

    lora_kernel._Shared._compute = swapped


def state_runs_on_into_the_next_document():
    tokens = ModelPart.tokens
    ModelPart.tokens = lambda self: replace(tokens(self), documents=None)


def boundaries_of_an_earlier_micro_batch():
    find, first = documents.documents_of, []

    def first_found(document_ids, device):
        first.append(document_ids)
        return find(first[0], device)

    documents.documents_of = first_found


def router_loss_pooled_over_the_forward():
    call = router_loss.RouterLoss.__call__

    def pooled(self, batch):
        flat = {
            name: getattr(batch, name).reshape(1, -1)
            for name in ("input_ids", "labels", "document_ids")
        }
        return call(self, replace(batch, **flat))

    router_loss.RouterLoss.__call__ = pooled


def ignored_rows_counted():
    loss = loss_patch.linear_cross_entropy
    loss_patch.linear_cross_entropy = lambda hidden, weight, labels, **options: loss(
        hidden, weight, labels.clamp(min=0), **options
    )


def scale_of_the_logits_applied_twice():
    loss = loss_patch.linear_cross_entropy
    loss_patch.linear_cross_entropy = lambda *args, scale, **options: loss(
        *args, scale=scale**2, **options
    )


def last_microbatch_only():
    run = build.run_in_turn
    build.run_in_turn = lambda pm, microbatches, scale, train: run(
        pm, microbatches[-1:], scale, train
    )


def views_at_the_start_of_what_was_moved():
    def first(kept: Any) -> torch.Tensor:
        kept = kept if isinstance(kept, torch.Tensor) else kept._replace(offset=0)
        return _back(kept)

    _back = activation_offload._back
    activation_offload._back = first


def taken_for_what_had_its_address_before():
    def known(self: Any, tensor: torch.Tensor, layer: Any) -> Any:
        storage = tensor.untyped_storage()
        key = storage.data_ptr(), 0  # of a storage that may have gone
        if key not in self.known:
            self.known[key] = activation_offload.Moved(storage, self)
        return self.known[key]

    activation_offload.Offload._move = known


BUGS: tuple[tuple[Callable[[], None], Cell], ...] = (
    (missing_world_size_factor, Cell("llama", "ddp", "lora", 2)),
    (fsdp_mean_instead_of_sum, Cell("llama", "fsdp2", "full", 2)),
    (flat_mean_instead_of_sum, Cell("llama", "fsdp1", "lora", 2)),
    (norm_of_this_ranks_flat_pieces_only, Cell("llama", "fsdp1", "lora", 2)),
    (updated_shards_not_gathered, Cell("llama", "zero1", "full", 2)),
    (last_gradient_kept_instead_of_added, Cell("llama", "zero2", "lora", 2)),
    (states_under_the_names_of_other_parameters, Cell("llama", "zero1", "full", 2)),
    (whole_gradients_left_on_every_rank, Cell("llama", "zero2", "lora", 2)),
    (offloaded_update_not_copied_back, Cell("llama", "fsdp2", "full", 2, "offload-optimizer")),
    (adapters_not_reduced, Cell("llama", "ddp", "lora", 2)),
    (replicas_not_reduced, Cell("llama", "hsdp", "lora", 4)),
    (frozen_parameter_given_a_gradient, Cell("qwen3_next", "ddp", "lora", 2)),
    (same_rows_on_every_rank, Cell("llama", "ddp", "lora", 2)),
    (local_token_count, Cell("llama", "ddp", "lora", 2)),
    (clip_by_the_local_norm, Cell("llama", "fsdp2", "full", 2)),
    (replicas_counted_again_in_the_norm, Cell("llama", "hsdp", "lora", 4)),
    (stale_gradient_kept, Cell("llama", "ddp", "lora", 2)),
    (schedule_that_stands_still, Cell("llama", "ddp", "lora", 2)),
    (never_clipped, Cell("llama", "ddp", "lora", 2)),
    (loss_scale_not_divided_out, Cell("llama", "ddp", "full", 2, "float16")),
    (overflow_seen_by_one_rank_only, Cell("llama", "fsdp2", "full", 2, "float16")),
    (norms_decayed, Cell("llama", "fsdp2", "full", 2)),
    (adapter_dropped_from_the_save, Cell("olmo_hybrid", "fsdp2", "lora", 2)),
    (weights_one_row_off_in_the_shards, Cell("llama", "fsdp2", "full", 2)),
    (mask_by_place_instead_of_slot, Cell("qwen3_5_text", "ddp", "lora", 4, "dropout")),
    (scale_left_out_of_the_adapters_backward, Cell("llama", "ddp", "lora", 2)),
    (
        mask_of_the_backward_another_than_the_forwards,
        Cell("qwen3_5_text", "ddp", "lora", 4, "dropout"),
    ),
    (dropout_left_out_of_the_inputs_gradient, Cell("qwen3_5_text", "ddp", "lora", 4, "dropout")),
    (projection_handed_anothers_output, Cell("llama", "ddp", "lora", 2)),
    (state_runs_on_into_the_next_document, Cell("olmo_hybrid", "fsdp2", "full", 2, "isolated")),
    (boundaries_of_an_earlier_micro_batch, Cell("olmo_hybrid", "fsdp2", "full", 2, "isolated")),
    (router_loss_pooled_over_the_forward, Cell("qwen3_next", "ddp", "lora", 2)),
    (ignored_rows_counted, Cell("llama", "fsdp2", "full", 2)),
    (scale_of_the_logits_applied_twice, Cell("granitemoehybrid", "fsdp2", "lora", 2)),
    (last_microbatch_only, Cell("llama", "ddp", "lora", 2)),
    (views_at_the_start_of_what_was_moved, Cell("qwen3_5_text", "fsdp2", "full", 2, "activations")),
    (
        taken_for_what_had_its_address_before,
        Cell("qwen3_5_text", "fsdp2", "full", 2, "activations"),
    ),
)


def planted(bugs: Iterable[tuple[Callable[[], None], Cell]]) -> list[Any]:
    """Return bugs and the cells that must be red with them, as parameters of a test.

    `make parity` plants them all. `make test` plants the first, which shows that a proof of this
    subject can fail; that the others can still be planted the test below shows.
    """
    return [
        pytest.param(
            bug, cell, id=f"{bug.__name__}-{cell.id}", marks=[pytest.mark.slow] * (place > 0)
        )
        for place, (bug, cell) in enumerate(bugs)
    ]


SUBJECTS = sorted(path.stem for path in Path(__file__).parent.glob("test_*sensitivity.py"))


@pytest.mark.parametrize("subject", SUBJECTS)
def test_what_bugs_replace_is_still_there(subject):
    for bug in {bug for bug, _ in import_module(f"{__package__}.{subject}").BUGS}:
        run_ranks(1, bug)


@pytest.mark.parametrize(("bug", "cell"), planted(BUGS))
def test_planted_bug_is_caught(bug, cell):
    check_caught(bug, cell)


def check_caught(bug: Callable[[], None], cell: Cell) -> None:
    """That the unmodified cell is red with the bug, as public_defects.toml says if it has it."""
    assert cell in FAST, "a bug must be caught by what `make test` runs"
    expected = reference(cell.reference())  # before the bug exists anywhere
    outcomes = run_ranks(cell.nproc, _run_with, bug, cell)
    guarded = [outcome for outcome in outcomes if isinstance(outcome, str)]
    assert all("/src/shardwise/" in where for where in guarded), guarded
    errors = verdict(compare(outcomes, expected)) if not guarded else []
    guards = [f"an assertion in {Path(where).name}" for where in guarded[:1]]
    red = ", ".join(guards or [error.split()[0] for error in errors])
    claimed = red_of(bug.__name__, cell.id)
    if claimed is not None and red != "an assertion in step.py":  # a loss that is not finite
        assert red == claimed, f"{red} in {cell.id}, where {claimed} is claimed"
    assert guarded or verdict(compare(outcomes, expected)), f"unnoticed in {cell.id}"


def _run_with(bug: Callable[[], None], cell: Cell) -> Outcome | str:
    bug()
    try:
        return run_cell(cell)
    except (
        AssertionError,
        step.NonFiniteLossError,
    ) as error:  # the library's own guard has caught it: say where
        return traceback.extract_tb(error.__traceback__)[-1].filename
