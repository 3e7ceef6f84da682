"""The class that a model folder names, where the language model is one part of it.

Of such a folder, Qwen3.5's with a vision tower for example, the language model is trained alone, as
the class that transformers' `AutoModelForCausalLM` makes of it. Whoever serves the result loads the
class in `architectures`, in which the same modules have other names.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights

from shardwise.config import Model, UserError
from shardwise.models.foreign import foreign
from shardwise.models.load import read_whole_config


@dataclass(frozen=True)
class Multimodal:
    """The class in `architectures`, and the places of the language model's modules in it."""

    model: PreTrainedModel
    """All of it, on meta."""
    places: Mapping[str, str]
    """The paths of the base model and of the head in this class, by those in the text class."""

    def name_of(self, name: str) -> str:
        """Return the name that a module or parameter of the text class has in this class."""
        renamed = _moved(name, self.places)
        assert renamed is not None, f"{name} is neither in the base model nor in the head"
        return renamed

    def text_name(self, name: str) -> str | None:
        """Return the name in the text class; None for what is not of the language model."""
        return _moved(name, {here: text for text, here in self.places.items()})

    def names_any(self, modules: Iterable[str]) -> bool:
        """Return whether some of these modules are of this class and not of the text class."""
        paths = {path for path, _ in self.model.named_modules()}
        inside = {path: self.text_name(path) for path in modules}
        return any(path in paths if text is None else text != path for path, text in inside.items())

    def around(
        self, text: PreTrainedModel, beside: Iterable[tuple[str, torch.Tensor]]
    ) -> PreTrainedModel:
        """Return this class with the modules of `text` and the parameters `beside` in it.

        `beside` yields (name, value); the other parameters beside the language model are on meta.
        """
        whole = copy.deepcopy(self.model)
        for path, here in self.places.items():
            whole.set_submodule(here, text.get_submodule(path))
        for name, value in beside:
            path, _, leaf = name.rpartition(".")
            setattr(whole.get_submodule(path), leaf, nn.Parameter(value, requires_grad=False))
        return whole


def multimodal_of(model: Model, text: PreTrainedModel) -> Multimodal | None:
    """Return the class that the folder of `model` names, or None where it names that of `text`.

    `text` is the language model, on any device, with adapters or without. UserError where
    transformers lacks the class, or where the language model is not found in it.
    """
    config = read_whole_config(model)
    name = (config.architectures or [type(text).__name__])[0]
    if config.get_text_config() is config or name == type(text).__name__:
        return None
    way_out = "take `architectures` out of config.json to keep the language model alone"
    if not hasattr(transformers, name):
        raise UserError(
            f"{model.path}: config.json names {name}, which transformers does not have; {way_out}"
        )
    building = foreign(model.path, config, f"build {name}", way_out)
    with building, torch.device("meta"), no_init_weights():
        whole = getattr(transformers, name)(copy.deepcopy(config))
    bases = [path for path, part in whole.named_modules() if type(part) is type(text.base_model)]
    heads = [_path_of(one, one.get_output_embeddings()) for one in (text, whole)]
    if len(bases) != 1 or None in heads:
        raise UserError(
            f"{model.path}: the language model, {type(text.base_model).__name__} with a head, is "
            f"not found once in {name}; {way_out}"
        )
    return Multimodal(whole, {text.base_model_prefix: bases[0], str(heads[0]): str(heads[1])})


def _path_of(model: PreTrainedModel, module: nn.Module | None) -> str | None:
    return next((path for path, part in model.named_modules() if part is module), None)


def _moved(name: str, places: Mapping[str, str]) -> str | None:
    for old, new in places.items():
        if f"{name}.".startswith(f"{old}."):
            return new + name.removeprefix(old)
    return None
