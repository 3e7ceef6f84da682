"""Mamba2 and the families that have it: what each rank holds, on meta and without any ranks."""

from collections.abc import Callable

import pytest
import torch
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1RMSNormGated
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHRMSNormGated

from shardwise.models.families import spec_of
from shardwise.models.kinds import mamba2
from shardwise.models.load import build_meta, read_config
from shardwise.models.tensor_cuts import BlockSplit, Indivisible
from shardwise.models.tensor_plan import problem, split_blocks
from tests.models.tiny import on_meta, relative_error, tiny

# Matrices that every rank holds whole: routers, of which each needs all scores.
WHOLE = {
    "tiny-nemotron_h": {"mixer.gate.weight"},
    "tiny-granitemoehybrid": {"block_sparse_moe.router.weight"},
    "tiny-falcon_h1": set(),
    "tiny-bamba": set(),
}
FAMILIES = [
    *[("tiny-nemotron_h", 4), ("tiny-granitemoehybrid", 4), ("tiny-falcon_h1", 2)],
    ("tiny-bamba", 4),
]


def mixer(num_groups: int, num_heads: int = 8) -> torch.nn.Module:
    """A Mamba2 mixer with heads of 16 and states of 16."""
    model = tiny("tiny-nemotron_h")
    config = read_config(model)
    config.n_groups, config.mamba_num_heads = num_groups, num_heads
    return build_meta(model, config).get_submodule("model.layers.0.mixer")


@pytest.mark.parametrize(("name", "num_ranks"), FAMILIES)
def test_every_matrix_is_sharded_and_comes_together_again(name, num_ranks):
    model = on_meta(tiny(name))
    spec = spec_of(model.config, model)
    whole = set()
    for layer in spec.layers:
        module = model.get_submodule(layer.name)
        cuts = {
            f"{path}.{weight}": cut
            for path, split in split_blocks(model, layer, num_ranks).items()
            for weight, cut in (split or BlockSplit({})).weights.items()
        }
        parameters = dict(module.named_parameters())
        for weight, cut in cuts.items():
            size = parameters[weight].shape[cut.dim]
            rows = torch.arange(size)
            assert cut.rows.size == size, weight
            assert cut.rows.restore(cut.rows.arrange(rows, 0), 0).equal(rows), weight
        whole |= {n for n, parameter in parameters.items() if parameter.dim() > 1} - cuts.keys()
    assert whole == WHOLE[name]


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("num_groups", [1, 2, 4, 8])
def test_a_ranks_heads_find_their_own_group(num_groups, num_ranks):
    heads, size = 8, 16
    split = mamba2.split(mixer(num_groups), num_ranks)
    # Rows of in_proj by what they are: z, x and dt by head, B and C by group.
    of_head, of_group = torch.arange(heads), torch.arange(num_groups)
    rows = (
        [of_head.repeat_interleave(size)] * 2 + [of_group.repeat_interleave(size)] * 2 + [of_head]
    )
    local_heads, local_groups = split.attributes["num_heads"], split.attributes["n_groups"]
    for rank in range(num_ranks):
        own = split.weights["in_proj.weight"].rows.take(torch.cat(rows), 0, rank)
        widths = [size * local_heads] * 2 + [size * local_groups] * 2 + [local_heads]
        z, x, b, c, dt = own.split(widths)
        assert dt.tolist() == list(range(rank * local_heads, (rank + 1) * local_heads))
        assert z.equal(dt.repeat_interleave(size))
        assert x.equal(z)
        assert b.equal(c)
        # Head h of the model reads group h // (heads / groups); the mixer's code says so of what it
        # holds.
        read = b[::size].repeat_interleave(local_heads // local_groups)
        assert read.equal(dt // (heads // num_groups))
        assert (
            split.weights["conv1d.weight"]
            .rows.take(torch.cat(rows[1:4]), 0, rank)
            .equal(torch.cat([x, b, c]))
        )


@pytest.mark.parametrize(
    ("groups", "heads", "num_ranks", "what"),
    [
        (3, 6, 2, "3 groups of heads of Mamba2"),
        (2, 6, 3, "2 groups of"),
        (1, 6, 4, "6 heads of Mamba2"),
    ],
)
def test_groups_and_heads_that_cannot_be_sharded(groups, heads, num_ranks, what):
    with pytest.raises(Indivisible, match=what):
        mamba2.split(mixer(groups, heads), num_ranks)


def test_a_norm_that_sees_no_groups_is_over_all_ranks():
    block = mixer(2)
    assert not mamba2.split(block, 2).norms  # a group each
    del block.norm.group_size  # as Granite's norm was in transformers 5.17
    assert mamba2.split(block, 2).norms.keys() == {"norm"}


def test_which_sizes_a_model_has():
    model = on_meta(tiny("tiny-falcon_h1"))
    spec = spec_of(model.config, model)
    # 6 heads of Mamba2 in 2 groups, and 4 of attention.
    assert [n for n in range(1, 9) if problem(model, spec, n) is None] == [1, 2]


NORMS: dict[str, Callable[[int, int], torch.nn.Module]] = {
    "nemotron_h": lambda width, groups: NemotronHRMSNormGated(
        width, group_size=width // groups, eps=1e-3
    ),
    "falcon_h1": lambda width, groups: FalconH1RMSNormGated(
        width, 1e-3, groups, norm_before_gate=True
    ),
    "falcon_h1, gate first": lambda width, groups: FalconH1RMSNormGated(
        width, 1e-3, groups, norm_before_gate=False
    ),
}


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("name", NORMS)
def test_a_norm_of_which_ranks_share_a_group(name, groups):
    width, num_ranks = 24, 4
    torch.manual_seed(0)
    norm = NORMS[name](width, groups)
    torch.nn.init.normal_(norm.weight)
    x, gate = torch.randn(2, 2, 5, width)
    expected = norm(x, gate)
    shares = [tensor.detach().chunk(num_ranks, -1) for tensor in (norm.weight, x, gate)]

    def computed(add_up: Callable[[torch.Tensor, int], torch.Tensor], rank: int) -> torch.Tensor:
        own, features, factor = (share[rank] for share in shares)
        norm.weight = torch.nn.Parameter(own)
        return mamba2.gated_rms_norm(groups, norm, width, add_up)(features, factor)

    partial_sums: list[torch.Tensor] = []  # of each rank
    for rank in range(num_ranks):
        computed(
            lambda partial_sum, num_shares: partial_sums.append(partial_sum) or partial_sum, rank
        )

    def sum_for(rank: int) -> Callable[[torch.Tensor, int], torch.Tensor]:
        def add_up(partial_sum: torch.Tensor, num_shares: int) -> torch.Tensor:
            neighbours = num_ranks // num_shares
            first = rank // neighbours * neighbours
            return sum(partial_sums[first : first + neighbours], torch.zeros_like(partial_sum))

        return add_up

    found = torch.cat([computed(sum_for(rank), rank) for rank in range(num_ranks)], -1)
    assert relative_error(found, expected) < 1e-6
