"""The config of a model folder or hub id, read and checked: of a multimodal one, of its text."""

from dataclasses import fields
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig, PreTrainedTokenizerBase

from shardwise.base.safety import warn_of_code
from shardwise.config import Model, UserError
from shardwise.models.families import FAMILIES
from shardwise.models.foreign import foreign, reason
from shardwise.models.hub import ask_hub, check_source
from shardwise.models.notices import held_notices, quiet_notices
from shardwise.models.published import check_config, method_of
from shardwise.models.sizes import check_bytes, check_read, check_written
from shardwise.models.weight_files import check_quantised

_OF_CLASS = ("architectures", "model_type", "transformers_version")
"""Keys that a config has of its class."""


def read_config(model: Model) -> PretrainedConfig:
    """Read `config.json` of a local folder or hub id: of a multimodal one, the language model's.

    UserError if there is no config, or if transformers cannot use it.
    """
    return _as_causal(read_whole_config(model))


def _as_causal(config: PretrainedConfig) -> PretrainedConfig:
    """Return the config of the language model, as the class has it that a listed family says where
    transformers has none: without images all positions of a token are one, as in that class.
    """
    text = config.get_text_config()
    alike = [family for family in FAMILIES.values() if text.model_type in family.text_parts]
    if not alike:
        return text
    keys = {field.name: getattr(text, field.name) for field in fields(text)}
    if method_of(text) is not None:
        keys["quantization_config"] = text.quantization_config
    rope = {k: v for k, v in text.rope_parameters.items() if not k.startswith("mrope")}
    keys |= {"rope_parameters": rope, "tie_word_embeddings": config.tie_word_embeddings}
    keys |= alike[0].text_parts[text.model_type]
    kept = {key: value for key, value in keys.items() if key not in _OF_CLASS}
    return AutoConfig.for_model(alike[0].model_type, **kept)


@held_notices()
def read_whole_config(model: Model) -> PretrainedConfig:
    """Read `config.json` as `read_config` does, but return all of it."""
    check_source(model.path)
    warn_of_code(model)
    if model.tokenizer is not None:  # reported now, not when it is read
        ask_hub(model.tokenizer, "tokenizer_config.json", "model.tokenizer")
    quiet_notices()
    config = _config_by_transformers(model)
    with foreign(model.path, config, "find the language model"):
        text = config.get_text_config()
    _check_text(model.path, text)
    _check_quantised(model, config)
    if not model.trust_remote_code:
        check_read(model.path, text)
    return config


def _check_text(path: str, text: Any) -> None:
    """Raise UserError unless this is the config of a language model whose layers are alike."""
    if not isinstance(text, PretrainedConfig):
        raise UserError(
            f"{path}: text_config is {str(text)[:40]} in config.json, of a class that has none; "
            "take it out"
        )
    if text.is_heterogeneous:
        varied = ", ".join(sorted(text.per_layer_attributes or ()))
        raise UserError(
            f"{path}: in {text.model_type} layers differ in {varied[:100]} (per_layer_config in "
            "config.json), which is not read; give a model of a family that `shardwise models` "
            "lists"
        )


def _check_quantised(model: Model, config: PretrainedConfig) -> None:
    """Check a quantised folder, and leave how it is quantised on the language model's config too.

    Raises UserError if its weights cannot be read; where it is on this machine, headers are read.
    """
    text, folder = config.get_text_config(), Path(model.path)
    for holder in (config, text):
        if section := getattr(holder, "quantization_config", None):
            check_config(model.path, section)
            config.quantization_config = text.quantization_config = section
    if model.init == "random":
        for holder in (config, text):
            holder.__dict__.pop("quantization_config", None)
    method = method_of(text)
    if method is not None and any(folder.glob("*.safetensors")):
        check_quantised(folder, text.quantization_config)


def _config_by_transformers(model: Model) -> PretrainedConfig:
    try:
        check_bytes(model.path)
        check_written(model.path, PretrainedConfig.get_config_dict(model.path)[0])
        return AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    except (UserError, MemoryError):
        raise
    except Exception as error:  # whatever transformers makes of what stands there
        if "trust_remote_code" in str(error):
            raise UserError(
                f"{model.path}: it comes with Python code of its own; set model.trust_remote_code "
                "to true if you trust that"
            ) from None
        problem, way = "cannot read config.json", "correct it"
        if not Path(model.path).is_dir():
            problem = "the path of the model is no folder with a config.json, nor one of the hub"
        raise UserError(
            f"{model.path}: {problem} ({reason(error)}); {way}, or give a model of a family "
            "that `shardwise models` lists"
        ) from None


def check_vocabulary(config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the number of the model's embeddings where a token has none, None where all have one.

    Published tokenizers have tokens that no text uses, such as Gemma 3's of an image, so that a
    document with such a token is refused, and not the tokenizer: under tensor parallelism it would
    give 0 and no error. UserError where a text begins or ends with one.
    """
    if max(tokenizer.get_vocab().values()) < config.vocab_size:
        return None
    for token, number in (
        (tokenizer.bos_token, tokenizer.bos_token_id),
        (tokenizer.eos_token, tokenizer.eos_token_id),
    ):
        if number is not None and number >= config.vocab_size:
            raise UserError(
                f"the tokenizer's {token} has the id {number} but the model only "
                f"{config.vocab_size} embeddings (config.vocab_size); give the tokenizer that "
                "belongs to the model (model.tokenizer)"
            )
    return config.vocab_size
