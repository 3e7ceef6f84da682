"""Known bugs of losses of pairs, planted one at a time as in test_sensitivity.py.

Those of a layout must turn a cell red; those of one process the comparison with TRL's values.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from dataclasses import replace

import pytest
import torch

from shardwise.config import Data
from shardwise.kernels.linear_cross_entropy import chunked
from shardwise.models import preferences
from shardwise.models.preferences import Preferences
from shardwise.parallel import preferences as passes
from shardwise.parallel.neighbours import ContextNeighbours
from shardwise.training import step
from tests.distributed import run_ranks
from tests.models import test_preferences as by_trl
from tests.parity.features.preferences import FIXED
from tests.parity.test_sensitivity import check_caught, planted

CONTEXT, IN_FULL, WITH_TOKENS, TENSOR, EXPERTS, PIPELINE, *_, LABELLED, STAGED, _ = FIXED


def sigmoid_of_a_ranks_part_of_a_sum():
    total = ContextNeighbours.total
    ContextNeighbours.total = lambda self, x: x if x.dim() == 2 and len(x) == 2 else total(self, x)


def value_whole_on_every_rank_of_a_row():
    loss = Preferences.loss

    def whole(self, losses, places, batch):
        found = loss(self, losses, places, batch)
        return found + found.detach()

    Preferences.loss = whole


def loss_divided_by_local_pairs():
    def of_this_rank(pm, microbatches, mesh):
        counts = torch.stack([pm.objective.count(batch) for batch in microbatches]).sum(0).tolist()
        return counts[0], counts[-1]

    step.count_targets = of_this_rank


def chosen_tokens_counted_on_each_rank():
    passes.sum_over = lambda tensor, mesh, axes: tensor


def router_loss_counted_twice():
    weigh = passes._weigh_tokens

    def twice(pm, microbatches, parts, mesh):
        weigh(pm, microbatches, parts, mesh)
        for part in parts:
            part.router_loss.weigh(2 * part.router_loss.factor)

    passes._weigh_tokens = twice


def sides_swapped_on_one_micro_batch():
    dpo = preferences.dpo

    def swapped(sides, reference, keys, beta):
        flips = (0,) if swapped.number % 2 else ()
        swapped.number += 1
        flipped = preferences.Sides(*(x.flip(-1) if flips else x for x in sides))
        return dpo(flipped, reference.flip(-1) if flips else reference, keys, beta)

    swapped.number = 0
    preferences.dpo = swapped


def start_not_given_back():
    exchanged, kept = passes._exchanged, []

    @contextmanager
    def only_once(*given):
        kept.append(exchanged(*given))
        kept[-1].__enter__()
        yield

    passes._exchanged = only_once


def reference_of_another_micro_batch():
    loss = Preferences.loss

    def of_another(self, losses, places, batch):
        if self.kept is None and len(self.reference) > 1:
            first, second, *_ = self.reference
            kept = self.reference
            if kept[first].logps.shape == kept[second].logps.shape:
                kept[first], kept[second] = kept[second], kept[first]
        return loss(self, losses, places, batch)

    Preferences.loss = of_another


def estimate_of_a_rank():
    estimate = passes._estimate

    def of_this_rank(policy, reference, mesh):
        sum_over, passes.sum_over = passes.sum_over, lambda tensor, mesh, axes: tensor
        found = estimate(policy, reference, mesh)
        passes.sum_over = sum_over
        return found

    passes._estimate = of_this_rank


def estimate_of_one_micro_batch():
    estimate = passes._estimate

    passes._estimate = lambda policy, *rest: estimate(dict([*policy.items()][:1]), *rest)


def factors_left_out_of_the_heads_gradient():
    gradients = chunked._Head.losses_and_gradients

    def without(self, hidden, weight, bias, needs_grad, factors=None):
        ones = None if factors is None else torch.full_like(factors, factors.mean())
        return gradients(self, hidden, weight, bias, needs_grad, ones)

    chunked._Head.losses_and_gradients = without


BUGS = (
    (sigmoid_of_a_ranks_part_of_a_sum, CONTEXT),
    (value_whole_on_every_rank_of_a_row, CONTEXT),
    (loss_divided_by_local_pairs, IN_FULL),
    (chosen_tokens_counted_on_each_rank, WITH_TOKENS),
    (router_loss_counted_twice, EXPERTS),
    (sides_swapped_on_one_micro_batch, PIPELINE),
    (start_not_given_back, IN_FULL),
    (reference_of_another_micro_batch, PIPELINE),
    (factors_left_out_of_the_heads_gradient, TENSOR),
    (estimate_of_a_rank, LABELLED),
    (estimate_of_one_micro_batch, STAGED),
)


@pytest.mark.parametrize(("bug", "cell"), planted(BUGS))
def test_a_planted_bug_is_caught(bug, cell):
    check_caught(bug, cell)


# ------------------------------------------------------------------------- of one process


def reference_with_adapters_on():
    passes._adapters_off = lambda layers: nullcontext()


def mean_for_sum():
    dpo = preferences.dpo
    preferences.dpo = lambda sides, *rest: dpo(sides._replace(logps=sides.means), *rest)


def sum_for_mean():
    preferences.Sides.means = property(lambda self: self.logps)


def sides_swapped():
    sides_of = preferences._sides

    def swapped(losses, places, batch):
        return preferences.Sides(*(x.flip(-1) for x in sides_of(losses, places, batch)))

    preferences._sides = swapped


def missing_pairs_counted():
    preferences.Sides.exist = property(lambda self: torch.ones_like(self.num_tokens).bool())


def prompts_counted():
    document = by_trl.document

    def with_targets_in_prompts(prompt, chosen, rejected):
        made = document(prompt, chosen, rejected)
        made.targets[1 : len(prompt)] = True
        return made

    by_trl.document = with_targets_in_prompts


def labels_not_shifted():
    to_batch = by_trl.to_batch

    def unshifted(rows, slots, step):
        batch = to_batch(rows, slots, step)
        batch.labels[:, :-1] = batch.labels[:, 1:].clone()
        return batch

    by_trl.to_batch = unshifted


def sides_not_kept_apart():
    Data.keeps_documents_apart = property(lambda self: False)


def margin_left_out():
    simpo = preferences.simpo
    preferences.simpo = lambda sides, keys, beta: simpo(sides, replace(keys, margin=0.0), beta)


def estimate_of_own_answers():
    by_trl.labelled = lambda labelled=by_trl.labelled: [
        replace(one, other=one) for one in labelled()
    ]


def estimate_with_a_sign():
    clamp = torch.Tensor.clamp
    torch.Tensor.clamp = lambda self, *args, **given: (
        self if given == {"min": 0} else clamp(self, *args, **given)
    )


def weight_of_undesirable_answers_left_out():
    kto = preferences.kto
    preferences.kto = lambda sides, reference, keys, *rest: kto(
        sides, reference, replace(keys, undesirable_weight=1.0), *rest
    )


OF_ONE_PROCESS = (
    (reference_with_adapters_on, "llama/lora/dpo"),
    (mean_for_sum, "llama/lora/dpo"),
    (sum_for_mean, "llama/lora/simpo"),
    (sides_swapped, "llama/lora/dpo"),
    (missing_pairs_counted, "llama/lora/dpo"),
    (prompts_counted, "llama/lora/dpo"),
    (labels_not_shifted, "llama/lora/orpo"),
    (sides_not_kept_apart, "qwen3_5_text/lora/dpo"),
    (margin_left_out, "llama/lora/simpo"),
    (sides_swapped, "llama/lora/kto"),
    (reference_with_adapters_on, "llama/lora/kto"),
    (estimate_of_own_answers, "llama/lora/kto"),
    (estimate_with_a_sign, "llama/full/kto"),
    (weight_of_undesirable_answers_left_out, "llama/full/kto"),
)


def _computed_with(bug, name: str, folder: str) -> tuple:
    bug()
    return by_trl.compute(name, folder, by_trl.ROWS[1])


@pytest.mark.parametrize(("bug", "name"), OF_ONE_PROCESS)
def test_a_planted_bug_of_one_process_is_caught(bug, name, tmp_path):
    folder = by_trl.reference_folder(name.partition("/")[0], tmp_path)
    (found,) = run_ranks(1, _computed_with, bug, name, folder)
    with pytest.raises(AssertionError):
        by_trl.check_equal(name, *found)
