"""Counts read off tiny models, against sums done by hand; FLOPs against torch's counter are in
tests/metrics."""

from __future__ import annotations

import pytest
from torch import nn

from shardwise.models.chunks import CoreFlops
from shardwise.models.counts import ProductWeight, Unit, count_model
from shardwise.models.families import spec_of
from shardwise.models.kinds.attention import Attention
from shardwise.models.kinds.gated_delta_net import GatedDeltaNet
from shardwise.models.kinds.jet_block import DynamicConvolution
from shardwise.models.kinds.kda import KimiDeltaAttention
from shardwise.models.kinds.mamba import Mamba
from shardwise.models.kinds.mamba2 import Mamba2
from tests.left_out import some_now
from tests.metrics.tiny_models import CONFIGS, add_lora, build, linears
from tests.models.tiny import on_meta, tiny, with_every_kind


def weights_of(unit: Unit) -> dict[str, ProductWeight]:
    return {weight.name.removeprefix(unit.name + "."): weight for weight in unit.weights}


@pytest.mark.parametrize(
    ("preset", "parameters"),
    [
        ("llama-3.1-8b", 8_030_261_248),
        ("gpt2-large", 774_030_080),
        ("jet-nemotron-2b", 1_964_806_208),
        ("phi-4", 14_659_507_200),
        ("smollm3-3b", 3_075_098_624),
        ("gemma-3-1b", 999_885_952),
        ("gemma-2-9b", 9_241_705_984),
        ("mistral-small-24b", 23_572_403_200),
    ],
)
def test_presets_of_published_models_have_their_published_size(preset, parameters):
    model = on_meta(tiny(preset))
    assert sum(p.numel() for p in model.parameters()) == parameters


@pytest.mark.parametrize(
    ("preset", "parameters", "active"),
    [("deepseek-v3", 671e9, 37e9), ("nemotron-3-nano-30b-a3b", 31.6e9, 3.6e9)],
)
def test_presets_of_published_mixtures_have_their_published_sizes(preset, parameters, active):
    model = on_meta(tiny(preset))
    counts = count_model(model, spec_of(model.config, model))
    assert counts.parameters == pytest.approx(parameters, rel=0.01)
    assert counts.active_parameters == pytest.approx(active, rel=0.02)


@pytest.mark.parametrize("lora", [False, True])
def test_a_token_meets_its_own_experts_and_all_else(lora):
    model, spec = build("qwen3_moe", device="meta")  # 2 of 4 experts
    if lora:
        add_lora(model, ["q_proj"], ["experts.gate_up_proj", "experts.down_proj"])
    counts = count_model(model, spec)
    of_experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    assert of_experts > 0
    assert counts.active_parameters == counts.parameters - of_experts // 2


def test_a_token_meets_all_of_a_dense_model():
    model, spec = build("llama", device="meta")
    counts = count_model(model, spec)
    assert counts.active_parameters == counts.parameters


@pytest.mark.parametrize("lora", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("family", CONFIGS)
def test_every_parameter_is_counted_once(family, lora):
    model, spec = build(family, device="meta")
    if lora:
        add_lora(model, linears(model), modules_to_save=None if spec.tied else ["lm_head"])
    found = count_model(model, spec)
    parameters = list(model.parameters())
    assert found.parameters == sum(p.numel() for p in parameters)
    assert found.trainable_parameters == sum(p.numel() for p in parameters if p.requires_grad)
    assert [unit.kind for unit in found.units] == [
        "embed",
        *(layer.kind for layer in spec.layers),
        "head",
    ]


@pytest.mark.parametrize("family", some_now(CONFIGS, with_every_kind(CONFIGS)))
def test_meta_counts_equal_those_of_real_weights(family):
    assert count_model(*build(family, device="meta")) == count_model(*build(family))


def test_cores_of_each_kind():
    kinds = {}
    for family in CONFIGS:
        for unit in count_model(*build(family, device="meta")).units:
            kinds.setdefault(unit.kind, unit.cores)
            assert len(unit.core_flops) == len(unit.cores)
    attention = Attention(num_heads=4, key_dim=8, value_dim=8)
    rule = GatedDeltaNet(num_heads=4, key_dim=8, value_dim=16)
    scan = Mamba2(num_heads=4, head_dim=16, state_size=8, num_groups=2)
    assert kinds == {
        "embed": (),
        "full_attention": (attention,),
        "gated_delta_net": (rule,),
        # The first family by name that has it is gemma2.
        "sliding_attention": (Attention(num_heads=4, key_dim=8, value_dim=8, window=24, cap=50.0),),
        "short_convolution": (),
        "mamba2": (scan,),
        "attention_and_mamba2": (scan, attention),
        "jet_block": (
            DynamicConvolution(num_channels=4 * 16, width=4),
            GatedDeltaNet(num_heads=4, key_dim=8, value_dim=16),
        ),
        "kda": (KimiDeltaAttention(num_heads=2, key_dim=16, value_dim=16),),
        "mamba": (Mamba(num_channels=64, state_size=8),),
        "mlp": (),
        "moe": (),
        "head": (),
    }


def test_latent_attention_has_keys_and_values_of_two_sizes():
    attention = count_model(*build("kimi_linear", device="meta")).units[3]
    assert attention.kind == "full_attention"
    assert attention.cores == (Attention(num_heads=4, key_dim=8 + 4, value_dim=6),)


@pytest.mark.parametrize("family", ["kimi_linear", "jamba"])
def test_rates_of_decay_are_no_factors_of_a_product(family):
    # Though they have two dims (jamba: [channels, states]) or four (kimi_linear: [1, 1, heads, 1]).
    model, spec = build(family, device="meta")
    assert any("A_log" in name and p.ndim > 1 for name, p in model.named_parameters())
    assert not any(
        "A_log" in weight.name for unit in count_model(model, spec).units for weight in unit.weights
    )


def test_a_tied_head_multiplies_but_owns_nothing():
    model, spec = build("llama", device="meta", tie_word_embeddings=True)
    embed, *_, head = count_model(model, spec).units
    assert embed.parameters == 64 * 32
    assert embed.weights == ()  # a lookup
    assert head.parameters == 32  # the norm
    assert [weight.numel for weight in head.weights] == [64 * 32]


def test_what_is_a_product_in_a_gated_delta_net_layer():
    model, spec = build("qwen3_5_text", device="meta")
    # 32 wide; q and k 2 heads of 8, v and z 4 heads of 16; no norm, bias, A_log or dt_bias.
    assert {name: w.numel for name, w in weights_of(count_model(model, spec).units[1]).items()} == {
        "linear_attn.conv1d.weight": 96 * 4,
        "linear_attn.in_proj_qkv.weight": 96 * 32,
        "linear_attn.in_proj_z.weight": 64 * 32,
        "linear_attn.in_proj_b.weight": 4 * 32,
        "linear_attn.in_proj_a.weight": 4 * 32,
        "linear_attn.out_proj.weight": 32 * 64,
        "mlp.gate_proj.weight": 48 * 32,
        "mlp.up_proj.weight": 48 * 32,
        "mlp.down_proj.weight": 48 * 32,
    }


def test_lora_factors_on_experts_are_found_and_marked():
    model, spec = build("nemotron_h", device="meta")
    add_lora(model, ["q_proj"], ["experts.up_proj", "experts.down_proj"])
    weights = weights_of(count_model(model, spec).units[2])
    stack = "mixer.experts.base_layer.base_layer"
    up, down = weights[f"{stack}.up_proj"], weights[f"{stack}.down_proj"]
    assert not up.trainable
    assert not up.on_stack
    # A for up: rank 4 for each of 4 experts, 32 wide; a token meets 2 of 4.
    factor = weights["mixer.experts.base_layer.lora_A.default.weight"]
    assert (factor.numel, factor.active, factor.trainable, factor.on_stack) == (
        4 * 4 * 32,
        0.5,
        True,
        True,
    )
    # Both experts' products lie in the lowest layer with adapters: only down's input depends on
    # one, on up's.
    assert (up.input_gradient, down.input_gradient) == (False, True)


def test_gradients_flow_from_the_lowest_adapter_upwards():
    model, spec = build("olmo_hybrid", device="meta")
    add_lora(model, linears(model, "layers.0.linear_attn.q_proj"))
    embed, first, second, head = count_model(model, spec).units
    weights = weights_of(first)
    needed = {name for name, weight in weights.items() if weight.input_gradient}
    frozen_input = {f"linear_attn.{x}_proj.weight" for x in "kvabg"}
    assert needed == weights.keys() - frozen_input - {
        "linear_attn.q_proj.base_layer.weight",
        "linear_attn.q_proj.lora_A.default.weight",
    }
    assert first.core_gradient
    assert not embed.backward
    assert all(weight.input_gradient for unit in (second, head) for weight in unit.weights)


def test_below_and_beside_the_lowest_adapter_nothing_flows():
    model, spec = build("llama", device="meta")
    add_lora(model, linears(model, "layers.1.mlp.down_proj"))
    _, first, second, head = count_model(model, spec).units
    assert (first.backward, second.backward) == (False, True)
    assert not second.core_gradient  # the attention lies below its layer's MLP
    flowing = {name for name, weight in weights_of(second).items() if weight.input_gradient}
    assert flowing == {"mlp.down_proj.lora_B.default.weight"}
    assert all(weight.input_gradient for weight in head.weights)


def test_a_trained_embedding_sends_a_gradient_through_everything():
    model, spec = build("llama", device="meta")
    found = count_model(model, spec)
    assert all(w.input_gradient and w.trainable for unit in found.units for w in unit.weights)


@pytest.mark.parametrize(
    ("family", "layer", "expected"),
    [
        ("llama", 0, {"mlp.down_proj.weight"}),
        ("olmo2", 0, set()),  # a norm follows
        ("lfm2", 0, {"feed_forward.w2.weight"}),
        ("gpt2", 0, {"mlp.c_proj.weight"}),
        ("qwen3_moe", 0, set()),
        ("qwen3_moe", 1, {"mlp.down_proj.weight"}),
        ("olmo_hybrid", 0, {"mlp.down_proj.weight"}),
        ("olmo_hybrid", 1, set()),  # a norm follows
        ("qwen3_next", 0, set()),  # the experts' weighted sum follows
        ("nemotron_h", 0, {"mixer.out_proj.weight"}),
        ("nemotron_h", 1, {"mixer.shared_experts.down_proj.weight"}),
        ("nemotron_h", 2, {"mixer.o_proj.weight"}),
        ("nemotron_h", 3, {"mixer.down_proj.weight"}),
        ("granitemoehybrid", 0, {"shared_mlp.output_linear.weight"}),
        ("falcon_h1", 0, {"feed_forward.down_proj.weight"}),
        ("kimi_linear", 0, {"mlp.down_proj.weight"}),
        ("kimi_linear", 1, {"mlp.shared_experts.down_proj.weight"}),
        ("jet_nemotron", 0, {"mlp.down_proj.weight"}),
        ("jamba", 0, {"feed_forward.down_proj.weight"}),
        ("jamba", 1, set()),
    ],
)
def test_the_product_that_a_checkpoint_does_not_run_again(family, layer, expected):
    unit = count_model(*build(family, device="meta")).units[1 + layer]
    assert {name for name, weight in weights_of(unit).items() if not weight.rerun} == expected


def test_an_unknown_module_is_named_rather_than_guessed():
    model, spec = build("llama", device="meta")
    model.model.layers[0].novel = nn.Linear(4, 4, device="meta")
    with pytest.raises(AssertionError, match=r"layers\.0\.novel"):
        count_model(model, spec)


def test_sums_that_the_cores_are_made_of():
    # One token attends to itself: 2 heads of 8, a score (2 * 8) and a value (2 * 8) each.
    assert Attention(2, 8, 8).model_forward(1) == 64
    # Three tokens have 1 + 2 + 3 pairs.
    assert Attention(2, 8, 8).model_forward(3) * 3 == 6 * 64
    # A window of two: pairs 1 + 2 + 2; one as long as the sequence is no window.
    assert Attention(2, 8, 8, window=2).model_forward(3) * 3 == 5 * 64
    assert Attention(2, 8, 8, window=9).model_forward(3) == Attention(2, 8, 8).model_forward(3)
    # 3 channels of 2 states: 6 to decay, 12 to add, 12 to read.
    assert Mamba(3, 2).model_forward(7) == 30
    assert DynamicConvolution(3, 4).model_forward(7) == 24  # 3 channels of 4 taps


def test_sums_that_cores_run():
    # The second chunk has one token: 2 * (3 * 8 + 2 * 16) for itself, 6 * 8 * 16 with the state.
    rule = GatedDeltaNet(2, 8, 16).flops(2)
    expected = [
        of_64 + 2 * one
        # Backward: 2 * (6 * 8 + 5 * 16) for itself, 14 * 8 * 16 with the state. The map: 2 * (2 * 8
        # + 16) and 4 * 8 * (8 + 16).
        for of_64, one in zip(
            in_row(rule, 64), (112 + 768, 256 + 1792, 64 + 768, 112 + 768), strict=True
        )
    ]
    assert in_row(rule, 65) == pytest.approx(expected, rel=1e-12)
    # A chunk of four and one of two: 16 + 4 pairs, of one group of size 4 and two heads of size 8.
    scan = Mamba2(2, 8, 4, num_groups=1, chunk_size=4).flops(2, 1)
    state = 6 * 16 * 4
    expected = [
        2 * (20 * (4 + 16) + 2 * state),
        2 * (20 * (3 * 4 + 2 * 16) + 5 * state),
        2 * state,
        2 * state,
    ]
    assert in_row(scan, 6) == pytest.approx(expected, rel=1e-12)
    # A chunk of four: 16 pairs of size 8, a 4 x 4 product of size 8, three with the 8 x 8 state,
    # and a solve with 16 columns. The map: 16 pairs, two products with 8 x 16, and the solve.
    rule = KimiDeltaAttention(1, 8, 8, chunk_size=4).flops(1)
    assert in_row(rule, 4)[::2] == [2 * 256 + 3 * 512 + 12 * 16, 256 + 2 * 1024 + 12 * 16]


@pytest.mark.parametrize(
    ("family", "layer", "expected"),
    [
        # 4 heads of 8 on 10 pairs of 4 tokens: 5 products for the forward's two.
        ("llama", 0, [[1280, 3200, 0, 0]]),
        # Latents: keys of 12 and values of 6; backward 3 * 12 + 2 * 6.
        ("kimi_linear", 2, [[1440, 3840, 0, 0]]),
        # A window is a mask on all 16 pairs.
        ("jet_nemotron", 1, [[2048, 5120, 0, 0]]),
        # 64 channels of 8 states: 5, 20, and 3 in either map.
        ("jamba", 0, [[10240, 40960, 6144, 6144]]),
        # 64 channels of 4 taps. 4 heads of 8 and 16, each with one chunk: 16 pairs times 2 * (3 * 8
        # + 2 * 16), 6 * 4 * 8 * 16, an inverse of 16 * 3: 1792 + 3072 + 48; backward 4096 + 7168 +
        # 48; map 1024 + 3072 + 48.
        ("jet_nemotron", 0, [[2048, 4096, 0, 0], [4 * 4912, 4 * 11312, 4 * 4144, 4 * 4912]]),
    ],
)
def test_cores_run_what_their_nodes_say(family, layer, expected):
    unit = count_model(*build(family, device="meta")).units[1 + layer]
    assert [in_row(flops, 4) for flops in unit.core_flops] == expected


def in_row(flops: CoreFlops, num_tokens: int) -> list[float]:
    """FLOPs of a row in a forward, a backward, and the two maps of `cp`."""
    plain, with_maps = (flops.per_token(num_tokens, maps) for maps in (False, True))
    maps = [both - one for both, one in zip(with_maps, plain, strict=True)]
    return [per_token * num_tokens for per_token in (*plain, *maps)]
