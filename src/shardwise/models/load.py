"""From a model folder or hub id to a transformers model: config, modules on meta, weights."""

from __future__ import annotations

import contextlib
import copy
import logging
import re
from collections.abc import Container, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.initialization import no_init_weights

from shardwise.base.safety import warn_of_code
from shardwise.config import Model, UserError
from shardwise.models.foreign import foreign, reason
from shardwise.models.hub import ask_hub, check_source
from shardwise.models.initialise import initialise_buffers, random_weights
from shardwise.models.names import hf_name, is_adapter
from shardwise.models.notices import held_notices, quiet_notices
from shardwise.models.published import check_config, method_of
from shardwise.models.sizes import check_bytes, check_parameters, check_read, check_written
from shardwise.models.weight_files import (
    PLAIN,
    OwnCodes,
    check_quantised,
    first_dtype,
    in_words,
    other_entries,
    other_keys,
    weights_from_files,
)

_OF_FAKES = (
    *(DataDependentOutputException, DynamicOutputShapeException),
    *(UnsupportedFakeTensorException, UnsupportedOperatorException),
)
"""Errors of what fake tensors cannot compute, whatever the config."""


def read_config(model: Model) -> PretrainedConfig:
    """Read `config.json` of a local folder or hub id: of a multimodal one, the language model's.

    UserError if there is no config, or if transformers cannot use it.
    """
    return read_whole_config(model).get_text_config()


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


def build_meta(model: Model, hf_config: PretrainedConfig) -> PreTrainedModel:
    """Return the transformers model: parameters on meta, buffers on the CPU with their true values.

    Parameters have `model.dtype`, except those that the family keeps in float32. Tied parameters
    are one object; after something has replaced parameters module by module (`to_empty`),
    `tie_weights()` ties them again. Attention is torch's scaled dot product, or eager in a class
    that has no other; `use_cache` is off. `hf_config` is not changed.
    """
    quiet_notices()
    config = copy.deepcopy(hf_config)
    config.use_cache = config.output_attentions = config.output_hidden_states = False
    config.return_dict = True
    dtype = getattr(torch, model.dtype)
    building = foreign(model.path, config, "build a causal model")
    with building, torch.device("meta"), no_init_weights():
        built = _from_config(model, config, dtype)
    hold_frozen(built)
    check_parameters(model.path, built)
    for pattern, kept_dtype in built._get_dtype_plan(dtype).items():
        _cast(built, re.compile(pattern.replace("*", ".*")), kept_dtype)
    initialise_buffers(built)
    built.tie_weights()
    return built


def _from_config(model: Model, config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Return the class's model, with torch's scaled dot product if the class has that form."""

    def built(attention: str) -> PreTrainedModel:
        return AutoModelForCausalLM.from_config(
            config,
            dtype=dtype,
            attn_implementation=attention,
            trust_remote_code=model.trust_remote_code,
        )

    try:
        return built("sdpa")
    except ValueError as error:
        # Transformers' refusal: sinks, softcaps and older classes have no such form.
        if "scaled_dot_product_attention" not in str(error):
            raise
    return built("eager")


def hold_frozen(built: PreTrainedModel) -> None:
    """Make buffers of the parameters that a class never trains, as most classes have them: biases
    on the scores of routers.
    """
    for module in built.modules():
        for leaf, parameter in list(module.named_parameters(recurse=False)):
            if not parameter.requires_grad:
                del module._parameters[leaf]
                module.register_buffer(leaf, parameter.detach())


def check_computes(model: Model) -> None:
    """Raise UserError if transformers itself cannot compute by `config.json`.

    Who asks has seen a first step fail. Tensors are fake: they take no memory. In bfloat16, the
    only dtype in which fake ones have a grouped product.
    """
    config = read_config(model)
    logger = logging.getLogger(FakeTensorMode.__module__)  # it logs each error with a traceback
    was_disabled, logger.disabled = logger.disabled, True
    computing = foreign(model.path, config, "compute with the sizes")
    try:
        with computing, contextlib.suppress(*_OF_FAKES), FakeTensorMode(), no_init_weights():
            built = _from_config(model, config, torch.bfloat16)
            rows = torch.ones(2, 16, dtype=torch.long)
            built(input_ids=rows, use_cache=False, return_dict=True)
    finally:
        logger.disabled = was_disabled


def _cast(built: PreTrainedModel, pattern: re.Pattern[str], dtype: torch.dtype) -> None:
    for path, module in built.named_modules():
        for name, parameter in module.named_parameters(path, recurse=False):
            if parameter.is_floating_point() and pattern.search(name):
                leaf = name.rpartition(".")[2]
                module._parameters[leaf] = nn.Parameter(parameter.to(dtype))
        for name, buffer in module.named_buffers(path, recurse=False):
            if buffer.is_floating_point() and pattern.search(name):
                module._buffers[name.rpartition(".")[2]] = buffer.to(dtype)


def weights(
    hf_model: PreTrainedModel,
    model: Model,
    seed: int,
    wanted: Container[str] | None = None,
    own: OwnCodes | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (transformers name, full CPU tensor) of each parameter, tied ones once, and buffer.

    They come from safetensors, or are a function of (seed, module path) where `model.init` is
    `random`; buffers are the persistent ones. A tensor has the parameter's dtype, except one that
    is stored in a file as it is: that has the file's dtype, so that whoever fills a shard casts the
    shard only; one that a file has in few bits is float32. One parameter at a time is in memory
    (while experts are stacked, up to twice their stack). Of `hf_model` only the config is used, so
    it may be sharded, a stage or have adapters. `wanted`: the names to yield. No others are read or
    drawn, except those that come out of one conversion or one module with them. `own` gets codes
    and scales that a quantised folder has of each matrix. UserError, on the first call of `next` or
    at a parameter, if the files do not fit the model.
    """
    skeleton = build_meta(model, hf_model.config)
    if model.init == "weights":
        yield from weights_from_files(skeleton, model.path, wanted, own)
        return
    yield from random_weights(skeleton, seed, wanted)
    for name, tensor in skeleton.state_dict().items():
        if not tensor.is_meta and (wanted is None or name in wanted):  # a persistent buffer
            yield name, tensor


def other_weights(hf_model: PreTrainedModel, model: Model) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (key, tensor) of what is in the model's files beside this model, as it is stored.

    One tensor at a time is in memory. Of `hf_model` only the config is used. Random weights have no
    files, and so nothing beside the model.
    """
    if model.init == "weights":
        yield from other_entries(build_meta(model, hf_model.config), model.path)


def untuned(hf_model: PreTrainedModel, model: Model) -> str | None:
    """Return the words for what is in the model's files beside this model; None for nothing, or
    where the files cannot be read, which whoever reads them says.
    """
    if model.init == "random":
        return None
    with contextlib.suppress(UserError, OSError):
        keys = other_keys(build_meta(model, hf_model.config), model.path)
        return in_words(keys, hf_model) if keys else None


def in_own_dtype(model: Model, hf_config: PretrainedConfig) -> Model:
    """Return the model in the dtype of its folder, as transformers takes it: the config's, or that
    of the first number in the files.
    """
    dtype = hf_config.dtype
    if dtype is None and model.init == "weights":
        dtype = first_dtype(model.path)
    if dtype not in PLAIN:
        return model
    own: Any = str(dtype).removeprefix("torch.")  # float16, too, in which nothing trains
    return replace(model, dtype=own)


def fill(
    hf_model: PreTrainedModel, values: Iterable[tuple[str, torch.Tensor]], cast: bool = True
) -> None:
    """Replace every parameter and persistent buffer of an unsharded model by `values`.

    Parameters keep their dtype or, without `cast`, get that of the values.

    Names are transformers names (both copies of a module in `modules_to_save` get a copy of the
    same value) or, for LoRA factors, the model's. Tied parameters are tied again. An assert fails
    if a name is unknown or a parameter is left on meta.
    """
    places: dict[str, list[tuple[nn.Module, str]]] = {}
    for path, module in hf_model.named_modules(remove_duplicate=False):
        for leaf in (*module._parameters, *module._buffers):
            name = f"{path}.{leaf}" if path else leaf
            key = name if is_adapter(name) else hf_name(name)
            places.setdefault(key, []).append((module, leaf))
    for name, value in values:
        for module, leaf in places[name]:
            if leaf in module._parameters:
                like = module.get_parameter(leaf)
                copied = value.to(like.dtype if cast else value.dtype, copy=True)
                module._parameters[leaf] = nn.Parameter(copied, like.requires_grad)
            else:
                module._buffers[leaf] = value.clone()
    hf_model.tie_weights()
    left = [name for name, parameter in hf_model.named_parameters() if parameter.is_meta]
    assert not left, f"no value for {left[:5]}"


def load_whole(
    model: Model, hf_config: PretrainedConfig, seed: int = 0, cast: bool = True
) -> PreTrainedModel:
    """Return the model with all its weights on the CPU, in eval mode: for export and tests only.

    Without `cast` parameters have the dtype of the files, unless those are quantised.
    """
    built = build_meta(model, hf_config)
    fill(built, weights(built, model, seed), cast or method_of(hf_config) is not None)
    return built.eval()
