"""Known bugs of expert parallelism, planted one at a time as in test_sensitivity.py: each must turn
a cell red."""

from contextlib import contextmanager

import pytest
import torch

from shardwise.assembly import routing
from shardwise.base.interfaces import Mesh
from shardwise.checkpoint import export
from shardwise.kernels.grouped_linear import StackedAdapter
from shardwise.models import expert_plan, routed_experts
from shardwise.models.capacity import Capacity
from shardwise.models.tensor_cuts import DimCut, even
from shardwise.parallel import clip, ddp, expert_axis, expert_parallel, fsdp2, tensor_modules
from shardwise.parallel.place import axes_of, local
from shardwise.parallel.reduce import sum_over_copies
from tests.parity.features.spread_experts import FIXED
from tests.parity.test_sensitivity import check_caught, planted

FULL, ADAPTERS, LIMITED, SHARED, BALANCED, IN_A_ROW, WITH_BIASES = FIXED


def weights_of_the_router_not_multiplied():
    forward = routed_experts.RoutedExperts.forward

    def alike(self, hidden, indices, weights):
        return forward(self, hidden, indices, torch.ones_like(weights))

    routed_experts.RoutedExperts.forward = alike


def rows_returned_as_the_experts_had_them():
    take_rows = expert_axis.take_rows
    calls = []

    def only_before(x, order, back):
        calls.append(order)
        return take_rows(x, order, back) if len(calls) % 2 else x

    expert_axis.take_rows = only_before


def rows_taken_for_sorted_by_expert():
    expert_axis.take_rows = lambda x, order, back: x


def gradient_of_rows_not_sent_back():
    expert_axis._Exchanged.backward = staticmethod(
        lambda ctx, dy: (dy.new_zeros(sum(ctx.sizes[0]), dy.shape[1]), None, None, None)
    )


def gradients_of_experts_divided_by_the_data_ranks():
    def divided(parameters, mesh):
        parameters = list(parameters)
        sum_over_copies(parameters, mesh)
        for parameter in parameters:
            if "ep" in axes_of(parameter):
                local(parameter.grad).div_(mesh.size("dp_replicate"))

    ddp.sum_over_copies = divided


def copies_of_experts_not_added_up():
    copy_axes = Mesh.copy_axes
    Mesh.copy_axes = lambda self, axes: () if "ep" in axes else copy_axes(self, axes)
    Mesh.data_axis = lambda self, axes: self.replica_axis


def experts_of_other_ranks_added_up():
    Mesh.copy_axes = lambda self, axes: self.gradient_axes


def norm_of_the_experts_of_one_rank():
    sharded_axes = clip.sharded_axes

    def without_experts(parameter, facts):
        return tuple(axis for axis in sharded_axes(parameter, facts) if axis != "ep")

    clip.sharded_axes = without_experts


def norm_that_counts_copies_of_experts():
    sharded_axes = clip.sharded_axes

    def with_copies(parameter, facts):
        axes = sharded_axes(parameter, facts)
        return (*axes, "dp_expert") if "ep" in axes else axes

    clip.sharded_axes = with_copies


def factors_cut_as_if_experts_came_first():
    cuts_of = expert_plan.cuts_of

    def in_order(hf, spec, num_ranks):
        cuts = cuts_of(hf, spec, num_ranks)
        return {
            name: DimCut(cut.dim, even(num_ranks, cut.rows.size, "")) for name, cut in cuts.items()
        }

    expert_parallel.cuts_of = in_order


def factors_saved_as_ranks_hold_them():
    expert_parallel.in_order = lambda pm, reordered, axis: pm


def adapters_of_experts_not_saved():
    weights = export.portable_weights

    def empty(pm, trained_only):  # a file without their names is refused on its way out
        for name, one in weights(pm, trained_only):
            yield name, torch.zeros_like(one) if ".experts." in name else one

    export.portable_weights = empty


def loads_of_one_rank_taken_for_all():
    routing.sum_over = lambda counts, mesh, axes: None


def shards_of_experts_not_reduced():
    fsdp2.left_replicated = lambda part, mesh: [p for p in part.parameters() if "ep" in axes_of(p)]
    fsdp2.trained_replicated = lambda pm, mesh: []


def shared_factors_of_the_first_expert_alone():
    adapter_of = routed_experts.RoutedExperts._adapter

    def first_alone(self, name):
        a, b, scale = adapter_of(self, name)
        is_first = torch.arange(len(b)).view(-1, 1, 1) == 0
        return StackedAdapter(a, b.where(is_first, b.detach()), scale)

    routed_experts.RoutedExperts._adapter = first_alone


def shared_factors_not_added_up():
    left = fsdp2.left_replicated

    def with_trained(part, mesh):
        return [*left(part, mesh), *(p for p in part.parameters() if p.requires_grad)]

    fsdp2.left_replicated = with_trained
    fsdp2.trained_replicated = lambda pm, mesh: []


def share_of_a_bias_taken_for_all_of_it():
    in_place = tensor_modules.PlainShares.in_place

    @contextmanager
    def over_what_is_there(self):
        for owner, name, _ in self._places:
            owner.__dict__.pop(name, None)
        with in_place(self):
            yield

    tensor_modules.PlainShares.in_place = over_what_is_there


def limit_of_the_micro_batch():
    rows = Capacity._documents_of_tokens

    def together(ids):
        numbers, lengths = rows(ids)
        return torch.zeros_like(numbers), torch.full_like(lengths, len(lengths))

    Capacity._documents_of_tokens = staticmethod(together)


def biases_in_a_row_taken_for_one():
    biases_of = routing.biases_of
    routing.biases_of = lambda *model: ((path, bias[None]) for path, bias in biases_of(*model))


def last_tokens_kept():
    drop = Capacity.drop

    def backwards(self, chosen, order, *others):
        return drop(self, chosen.flip(0), order.flip(0), *others)

    Capacity.drop = backwards


def dropped_rows_given_to_the_last_expert():
    compute = routed_experts.RoutedExperts._of_kept

    def all_of_them(self, rows, ends):
        return compute(self, rows, torch.cat([ends[:-1], ends.new_tensor([len(rows)])]))

    routed_experts.RoutedExperts._of_kept = all_of_them


BUGS = (
    (weights_of_the_router_not_multiplied, FULL),
    (rows_returned_as_the_experts_had_them, FULL),
    (rows_taken_for_sorted_by_expert, FULL),
    (gradient_of_rows_not_sent_back, FULL),
    (gradients_of_experts_divided_by_the_data_ranks, FULL),
    (copies_of_experts_not_added_up, FULL),
    (experts_of_other_ranks_added_up, FULL),
    (norm_of_the_experts_of_one_rank, FULL),
    (norm_that_counts_copies_of_experts, FULL),
    (factors_cut_as_if_experts_came_first, ADAPTERS),
    (factors_saved_as_ranks_hold_them, ADAPTERS),
    (adapters_of_experts_not_saved, ADAPTERS),
    (shards_of_experts_not_reduced, ADAPTERS),
    (shared_factors_of_the_first_expert_alone, SHARED),
    (shared_factors_not_added_up, SHARED),
    (loads_of_one_rank_taken_for_all, BALANCED),
    (biases_in_a_row_taken_for_one, IN_A_ROW),
    (share_of_a_bias_taken_for_all_of_it, WITH_BIASES),
    (limit_of_the_micro_batch, LIMITED),
    (last_tokens_kept, LIMITED),
    (dropped_rows_given_to_the_last_expert, LIMITED),
)


@pytest.mark.parametrize(("bug", "cell"), planted(BUGS))
def test_a_planted_bug_is_caught(bug, cell):
    check_caught(bug, cell)
