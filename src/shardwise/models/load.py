"""Transformers models by the config of a model folder or hub id: on meta, and with weights."""

import contextlib
import copy
import logging
import re
from collections.abc import Container, Iterable, Iterator
from dataclasses import replace
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
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from shardwise.config import Model, UserError
from shardwise.models.folder_config import read_config
from shardwise.models.foreign import foreign
from shardwise.models.initialise import initialise_buffers, random_weights
from shardwise.models.multimodal import class_in_files
from shardwise.models.names import hf_name, is_adapter
from shardwise.models.notices import quiet_notices
from shardwise.models.published import method_of
from shardwise.models.sizes import check_parameters
from shardwise.models.weight_files import (
    PLAIN,
    OwnCodes,
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
        whole, text_name = class_in_files(model, skeleton)
        yield from weights_from_files(whole, model.path, wanted, own, text_name)
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
        skeleton = build_meta(model, hf_model.config)
        yield from other_entries(*class_in_files(model, skeleton), model.path)


def untuned(hf_model: PreTrainedModel, model: Model) -> str | None:
    """Return the words for what is in the model's files beside this model; None for nothing, or
    where the files cannot be read, which whoever reads them says.
    """
    if model.init == "random":
        return None
    with contextlib.suppress(UserError, OSError):
        skeleton = build_meta(model, hf_model.config)
        keys = other_keys(*class_in_files(model, skeleton), model.path)
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
