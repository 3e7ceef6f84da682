"""Every causal model type of the installed transformers ends in a table or in one line."""

from collections.abc import Callable

import pytest
from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from shardwise.assembly.describe import describe
from shardwise.config import Data, Lora, Model, RunConfig, Training, UserError
from shardwise.models.catalogue import model_table

OF_PYTHON = (
    *("object has no", "NoneType", "unsupported operand", "positional argument", "<class '"),
    *("not subscriptable", "has no attribute", "is not an nn.Module", "must be real number"),
)
"""What an error of Python says of its own types, which says nothing to a user."""


def default_config(model_type: str, **sizes: int) -> PretrainedConfig | None:
    """Transformers' default config with few layers, where it takes the key; None if none is
    valid."""
    for changes in (sizes, {}):
        try:
            return AutoConfig.for_model(model_type, **changes)
        except Exception:  # whatever transformers says of its own default
            continue
    return None


@pytest.mark.parametrize("model_type", sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
def test_a_type_is_described_or_refused_in_one_line(model_type, tmp_path):
    config = default_config(model_type, num_hidden_layers=4)
    if config is None:
        return
    config.save_pretrained(tmp_path / model_type)
    model = Model(str(tmp_path / model_type), init="random")
    run = RunConfig(model, Data("x", sequence_length=8), Training("o", steps=1), lora=Lora())
    for message in (refusal(lambda: model_table(model)), refusal(lambda: describe(run, 1))):
        if message is not None:
            assert model_type.partition("_text")[0] in message or "config.json" in message
            assert len(message) < 700
            assert not any(sign in message for sign in OF_PYTHON), message


def refusal(call: Callable[[], object]) -> str | None:
    """The line that a call is refused with, None if it is not."""
    try:
        call()
    except UserError as error:
        return str(error)
    return None
