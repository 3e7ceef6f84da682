"""Known bugs of Muon, planted one at a time as in test_sensitivity.py: each turns a cell red."""

from __future__ import annotations

import pytest
from torch.distributed.tensor import DTensor

from shardwise.parallel import muon
from shardwise.parallel.optimizers.muon import MuonUpdate
from tests.parity.features.muon import FIXED
from tests.parity.test_sensitivity import check_caught, planted

REPLICATED, SHARDED, EXPERTS = FIXED


def shard_orthogonalised_alone():
    def alone(update):
        local = muon._newton_schulz(update.to_local())
        return DTensor.from_local(
            local, update.device_mesh, update.placements, shape=update.shape, stride=update.stride()
        )

    muon._orthogonal = alone


def everything_by_adamw_on_several_ranks():
    MuonUpdate.selected = lambda *_: frozenset()


def scaled_by_the_shard():
    update = muon.Muon._update

    def of_local_shape(self, parameter, lr, weight_decay):
        rows = max(parameter.shape[-2:])
        shard = max(parameter.to_local().shape[-2:])
        update(self, parameter, lr * (shard / rows) ** 0.5, weight_decay)

    muon.Muon._update = of_local_shape


def momentum_of_the_last_gradient_only():
    muon.MOMENTUM = 0.0


def experts_as_one_matrix():
    orthogonal = muon._newton_schulz
    muon._newton_schulz = lambda x: orthogonal(x.flatten(0, -2)).view(x.shape)


BUGS = (
    (shard_orthogonalised_alone, SHARDED),
    (everything_by_adamw_on_several_ranks, REPLICATED),
    (scaled_by_the_shard, SHARDED),
    (momentum_of_the_last_gradient_only, REPLICATED),
    (experts_as_one_matrix, EXPERTS),
)


@pytest.mark.parametrize(("bug", "cell"), planted(BUGS))
def test_a_planted_bug_is_caught(bug, cell):
    check_caught(bug, cell)
