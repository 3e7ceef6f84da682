import dataclasses
import math

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from shardwise.config import UserError
from shardwise.models.initialise import nudged
from shardwise.models.load import build_meta, read_config, weights
from tests.left_out import some_now
from tests.models.tiny import EACH_KIND, PLAIN, TINY, entries, on_meta, same, tiny


@pytest.mark.parametrize("name", some_now(TINY, (*EACH_KIND, "tiny-qwen3_5-tied")))
def test_random_weights_are_a_function_of_the_seed(name):
    model = tiny(name)
    state = torch.get_rng_state()
    first = entries(model, seed=3)
    torch.rand(1)  # moves the global state, which must not matter
    assert same(first, entries(model, seed=3))
    torch.set_rng_state(state)
    entries(model, seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    other = entries(model, seed=4)
    drawn = [n for n in first if not torch.equal(first[n], other[n])]
    assert {n for n in first if n.endswith("proj.weight")} <= set(drawn)
    built = on_meta(model)
    assert first.keys() == built.state_dict().keys() - built.all_tied_weights_keys.keys()


@pytest.mark.parametrize("name", some_now(PLAIN, EACH_KIND))
def test_random_weights_follow_the_familys_rules(name: str) -> None:
    # transformers' own initialisation, twice: what is equal in both is a constant; of the rest ours
    # is another draw.
    ours = entries(tiny(name))
    config = read_config(tiny(name))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        theirs, again = (
            AutoModelForCausalLM.from_config(config, dtype=torch.float32).state_dict()
            for _ in range(2)
        )
    assert ours.keys() == theirs.keys() - on_meta(tiny(name)).all_tied_weights_keys.keys()
    for key in ours:
        value = theirs[key]
        if torch.equal(value, again[key]):
            assert torch.equal(ours[key], value), key
        elif value.numel() >= 500:
            # The deviation s of n draws has itself a deviation of s / sqrt(2 n), 3.2 % at most
            # here, and the difference of two such estimates sqrt(2) times that; their means differ
            # by s sqrt(2 / n). Five times each.
            assert math.isclose(ours[key].std(), value.std(), rel_tol=0.22), key
            assert abs(ours[key].mean() - value.mean()) < 5 * value.std() * math.sqrt(
                2 / value.numel()
            ), key


def test_random_weights_do_not_depend_on_the_dtype_but_for_rounding():
    exact, rounded = (
        entries(tiny("tiny-olmo_hybrid")),
        entries(tiny("tiny-olmo_hybrid", "bfloat16")),
    )
    assert same({n: v.to(rounded[n].dtype) for n, v in exact.items()}, rounded)
    assert rounded["model.layers.0.linear_attn.A_log"].dtype == torch.float32


def test_random_weights_of_a_layer_do_not_depend_on_the_layers_before():
    config = read_config(tiny("tiny-llama"))
    model = tiny("tiny-llama")
    longer = dataclasses.replace(config, num_hidden_layers=6)
    four, six = (
        dict(weights(on_meta(model), model, 0)),
        dict(weights(build_meta(model, longer), model, 0)),
    )
    assert same(four, {n: six[n] for n in four})


def test_a_parameter_without_a_rule_is_refused(monkeypatch):
    built = on_meta(tiny("tiny-qwen3_next"))
    monkeypatch.setattr(
        type(built), "_init_weights", PreTrainedModel._init_weights
    )  # knows no stacks of experts
    with pytest.raises(
        UserError, match=r"no rule for the initial values of model\.layers\.0\.linear_attn\.dt_bias"
    ):
        entries(tiny("tiny-qwen3_next"))


def test_nudged_weights_are_off_by_one_unit_in_the_last_place():
    value = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    value[0] = 0.0
    moved = nudged(value, seed=0, name="a.weight")
    units = (moved.view(torch.int32) - value.view(torch.int32)).abs()
    assert units.max() == 1
    assert 0.3 < units.float().mean() < 0.9
    assert moved[0] == 0.0
    assert torch.equal(moved, nudged(value, seed=0, name="a.weight"))
    assert not torch.equal(moved, nudged(value, seed=0, name="b.weight"))
    assert torch.equal(nudged(value.bfloat16(), seed=0, name="a.weight"), value.bfloat16())
