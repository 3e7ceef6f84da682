"""Known bugs of tensor and context parallelism, planted one at a time as in test_sensitivity.py:
each must turn a cell red."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

from shardwise.kernels.attention.blocks import Merged
from shardwise.models import causal_lm, routed_experts, tensor_cuts
from shardwise.models.kinds import attention, jet_block, mixture
from shardwise.models.patches import cores, router_loss
from shardwise.parallel import clip, ddp, fsdp2, tensor_axis, tensor_modules, tensor_parallel
from shardwise.parallel.reduce import sum_over, sum_over_copies
from tests.parity.features.tensors import HALF, cell
from tests.parity.harness import Cell
from tests.parity.test_sensitivity import check_caught, overflow_seen_by_one_rank_only, planted


def without_sums(fragment: str):
    """The gradients of replicated parameters with this in their name stay partial sums."""
    block = tensor_parallel._Splitter.split

    def split(self):
        block(self)
        partial_sums = self.result.partial_sums
        partial_sums -= {name for name in partial_sums if fragment in name}

    tensor_parallel._Splitter.split = split


def gated_norm_not_summed():
    without_sums("linear_attn.norm.weight")


def whole_factor_not_summed():
    without_sums("q_proj.lora_A")


def layer_norms_not_summed():
    without_sums("layernorm")


def router_not_summed():
    without_sums("mlp.gate.weight")


def blocks_of_rows_taken_for_one():
    ranges = tensor_cuts.Rows.ranges

    def one(self, rank):
        if self.shared:
            return ranges(self, rank)
        return [(rank * self.local_size, self.local_size)]

    tensor_cuts.Rows.ranges = one
    tensor_cuts.Rows.in_order = property(lambda self: not self.shared)


def gradient_of_a_parallel_block_summed_twice():
    enter = tensor_axis.TensorAxis.enter
    tensor_axis.TensorAxis.enter = lambda self, x: enter(self, enter(self, x))


def rates_of_the_activation_not_summed():
    without_sums("act_fn.alpha_n")


def embeddings_not_scaled():
    Gemma3TextScaledWordEmbedding.forward = nn.Embedding.forward


def places_of_the_row_in_isolated_documents():
    causal_lm.document_begins = torch.zeros_like


def window_of_the_class():
    cores._with_window = lambda core, *kind: core


def kernel_factor_not_summed():
    without_sums("kernel_generator.w1")


def kernels_cut_as_if_taps_came_first():
    split = jet_block.split

    def taps_first(block, num_ranks):
        found = split(block, num_ranks)
        taps = block.dynamic_conv1d.width
        generated = {name: cut for name, cut in found.weights.items() if "w2" in name}
        rows = {
            name: replace(
                cut, rows=tensor_cuts.blocked(num_ranks, (cut.rows.size // taps,) * taps, "")
            )
            for name, cut in generated.items()
        }
        return replace(found, weights={**found.weights, **rows})

    object.__setattr__(jet_block.JET_BLOCK, "split", taps_first)


def key_heads_of_another_group():
    ranges = tensor_cuts.Rows.ranges

    def turned(self, rank):
        if not self.shared:
            return ranges(self, rank)
        return ranges(self, self.num_ranks - 1 - rank)

    tensor_cuts.Rows.ranges = turned


def gradients_of_shared_heads_not_summed():
    tensor_parallel._add_up_shared = lambda *_: None


def shared_heads_counted_by_each_rank():
    clip.counted = lambda parameter, facts: [clip.local(parameter.grad)]


def mask_of_the_first_features_on_every_rank():
    share = tensor_modules._share_dropout
    tensor_modules._share_dropout = lambda block, linear, rows, axis: share(
        block, linear, rows, replace(axis, rank=0)
    )


def mask_drawn_for_the_share_alone():
    tensor_modules._share_dropout = lambda block, linear, rows, axis: None


def bias_added_by_each_rank():
    shares = tensor_modules.PlainShares
    within = shares.within

    def unchanged(self, forward):
        self.changed = {key: change for key, change in self.changed.items() if key[1] != "bias"}
        return within(self, forward)

    shares.within = unchanged


def bias_of_experts_added_by_each_rank():
    biases = tensor_modules.whole_biases
    tensor_modules.whole_biases = lambda block, split: (
        place for place in biases(block, split) if place[1] == "bias"
    )


def gates_cut_as_if_they_came_first():
    split = mixture.split

    def blocked(block, num_ranks):
        found = split(block, num_ranks)
        widths = (block.experts.intermediate_size,) * 2
        name = "experts.gate_up_proj"
        wrong = replace(found.weights[name], rows=tensor_cuts.blocked(num_ranks, widths, ""))
        return replace(found, weights={**found.weights, name: wrong})

    object.__setattr__(mixture.ROUTER, "split", blocked)


def sinks_left_out_of_the_sum():
    add = Merged.add
    Merged.add = lambda self, out, lse: None if out is None else add(self, out, lse)


def router_loss_of_each_rank():
    make = router_loss.RouterLoss
    router_loss.RouterLoss = lambda *args, gradient_share: make(*args)


def squares_of_own_heads_only():
    norm = tensor_cuts.rms_norm
    attention.rms_norm = lambda module, features, add_up: norm(
        module, features // 2, lambda squares: squares
    )


def norm_of_own_shares_only():
    clip.sum_over = lambda tensor, mesh, axes: sum_over(tensor, mesh, set(axes) - {"tp"})


def tokens_of_the_first_rank_on_every_rank():
    vocabulary = tensor_modules.Vocabulary
    tensor_modules.Vocabulary = lambda first, *others: vocabulary(0, *others)


def gradient_of_a_block_not_summed():
    tensor_axis.TensorAxis.enter = lambda self, x: x


def output_summed_twice():
    leave = tensor_axis.TensorAxis.leave
    tensor_axis.TensorAxis.leave = lambda self, x: self.sum_up(leave(self, x))


def adapters_of_experts_not_scaled():
    adapter = routed_experts.RoutedExperts._adapter

    def unscaled(self, name):
        views = adapter(self, name)
        # The reference runs the same code, on whole stacks.
        is_cut = isinstance(self.module._parameters[name], DTensor)
        return views._replace(scale=1.0) if is_cut else views

    routed_experts.RoutedExperts._adapter = unscaled


def cut_gradients_of_replicas_not_summed():
    def whole_ones(parameters, mesh):
        sum_over_copies([p for p in parameters if not isinstance(p, DTensor)], mesh)

    ddp.sum_over_copies = whole_ones


def what_fsdp2_leaves_whole_not_reduced():
    fsdp2.trained_replicated = lambda pm, mesh: []


BUGS: tuple[tuple[Callable[[], None], Cell], ...] = (
    (gated_norm_not_summed, cell("qwen3_next", "tp", "full")),
    (whole_factor_not_summed, cell("llama", "tp", "lora")),
    (whole_factor_not_summed, cell("llama", "tp-sp", "lora")),
    (layer_norms_not_summed, cell("qwen3_5_text", "tp-sp", "full", "tied")),
    (layer_norms_not_summed, cell("llama", "tp-sp", "full", "bfloat16")),
    (overflow_seen_by_one_rank_only, cell("llama", "tp", "full", HALF)),
    (overflow_seen_by_one_rank_only, cell("llama", "pp-tp", "full", HALF)),
    (router_not_summed, cell("qwen3_moe", "tp", "full")),
    (blocks_of_rows_taken_for_one, cell("qwen3_5_text", "tp", "full")),
    (kernel_factor_not_summed, cell("jet_nemotron", "tp", "full")),
    (kernels_cut_as_if_taps_came_first, cell("jet_nemotron", "tp", "full")),
    (key_heads_of_another_group, cell("granitemoehybrid", "tp", "full", nproc=4)),
    (gradients_of_shared_heads_not_summed, cell("granitemoehybrid", "tp", "full", nproc=4)),
    (shared_heads_counted_by_each_rank, cell("granitemoehybrid", "tp", "full", nproc=4)),
    (mask_of_the_first_features_on_every_rank, cell("llama", "tp", "lora", "dropout")),
    (mask_drawn_for_the_share_alone, cell("llama", "tp", "lora", "dropout")),
    (bias_added_by_each_rank, cell("gpt2", "tp", "full")),
    (gradient_of_a_parallel_block_summed_twice, cell("cohere2", "tp", "full")),
    (rates_of_the_activation_not_summed, cell("apertus", "tp", "full")),
    (bias_of_experts_added_by_each_rank, cell("gpt_oss", "tp", "full")),
    (gates_cut_as_if_they_came_first, cell("gpt_oss", "tp", "full")),
    (sinks_left_out_of_the_sum, Cell("gpt_oss", "cp", "full", 2)),
    (embeddings_not_scaled, cell("gemma3_text", "tp", "full")),
    (blocks_of_rows_taken_for_one, cell("phi3", "tp", "full")),
    *(
        (places_of_the_row_in_isolated_documents, Cell(name, "cp", "full", 4, "isolated"))
        for name in ("hunyuan_v1_dense", "ministral3")
    ),
    (window_of_the_class, Cell("qwen2_moe", "cp", "full", 2)),
    (router_loss_of_each_rank, cell("qwen3_moe", "tp", "full")),
    (squares_of_own_heads_only, cell("olmo_hybrid", "tp", "full")),
    (norm_of_own_shares_only, cell("llama", "tp", "lora")),
    (tokens_of_the_first_rank_on_every_rank, cell("llama", "tp", "lora")),
    (gradient_of_a_block_not_summed, cell("llama", "tp", "lora")),
    (output_summed_twice, cell("llama", "tp", "lora")),
    (adapters_of_experts_not_scaled, cell("qwen3_next", "tp-sp", "lora", "experts")),
    (cut_gradients_of_replicas_not_summed, cell("llama", "ddp-tp", "lora")),
    (what_fsdp2_leaves_whole_not_reduced, cell("qwen3_next", "fsdp2-tp", "full")),
)


@pytest.mark.parametrize(("bug", "where"), planted(BUGS))
def test_planted_bug_is_caught(bug, where):
    check_caught(bug, where)
