import pytest

from shardwise.models.names import hf_name, is_adapter, is_saved_copy


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.norm.weight", "model.norm.weight"),
        (
            "model.layers.0.self_attn.q_proj.base_layer.weight",
            "model.layers.0.self_attn.q_proj.weight",
        ),
        (
            "model.layers.1.mlp.experts.base_layer.base_layer.gate_up_proj",
            "model.layers.1.mlp.experts.gate_up_proj",
        ),
        ("lm_head.original_module.weight", "lm_head.weight"),
        ("lm_head.modules_to_save.default.weight", "lm_head.weight"),
    ],
)
def test_a_base_parameter_keeps_its_transformers_name(name, expected):
    assert hf_name(name) == expected


def test_only_lora_factors_are_adapters():
    assert is_adapter("model.layers.0.mlp.experts.base_layer.lora_A.default.weight")
    assert is_adapter("model.layers.0.self_attn.q_proj.lora_B.default.weight")
    assert not is_adapter("model.layers.0.self_attn.q_proj.base_layer.weight")
    assert not is_adapter("lm_head.modules_to_save.default.weight")
    assert is_saved_copy("lm_head.modules_to_save.default.weight")
    assert not is_saved_copy("lm_head.original_module.weight")


def test_a_factor_has_no_transformers_name():
    with pytest.raises(AssertionError, match="no counterpart"):
        hf_name("model.layers.0.self_attn.q_proj.lora_B.default.weight")
