"""The class that a model folder names, where the language model is one part of it.

Of such a folder, Gemma 3's or Qwen3.5's with a vision tower for example, the language model is
trained alone, as the class that transformers' `AutoModelForCausalLM` makes of it. Whoever serves
the result loads the class in `architectures`, in which the same modules have other names.
"""

import copy
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import transformers
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

from shardwise.config import Model, UserError
from shardwise.models.families import Family
from shardwise.models.folder_config import read_whole_config
from shardwise.models.foreign import foreign
from shardwise.models.weight_files import TextName
from shardwise.models.weight_folder import files_by_key, weight_folder


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

    def unscaled(self, family: Family) -> tuple[str, ...]:
        """Return a note where this class leaves out a factor or cap that logits of the text class
        have.
        """
        config, forward = self.model.config.get_text_config(), type(self.model).forward
        changes = (family.logits_multiplied_by, family.logits_divided_by, family.logits_capped_by)
        left = [key for key in filter(None, changes) if key not in inspect.getsource(forward)]
        return tuple(
            f"{type(self.model).__name__} of transformers gives logits without {key} "
            f"({getattr(config, key)}), with which {config.model_type} was trained and this run "
            "computes: its most likely token is the same, its loss is not"
            for key in left
            if getattr(config, key, None) not in (None, 1)
        )


def multimodal_of(model: Model, text: PreTrainedModel) -> Multimodal | None:
    """Return the class that the folder of `model` names, or None where it names that of `text`.

    `text` is the language model, on any device, with adapters or without. UserError where
    transformers lacks the class, or where the language model is not found in it.
    """
    config = read_whole_config(model)
    name = (config.architectures or [type(text).__name__])[0]
    if config.get_text_config() is config or name == type(text).__name__:
        return None
    return _within(model, text, config, name)


def class_in_files(model: Model, text: PreTrainedModel) -> tuple[PreTrainedModel, TextName]:
    """Return the class, on meta, whose names the files of `model` have, and the way to `text`'s.

    Without `architectures` that is the class of the config, unless a file has a name of `text`.
    """
    config, whole = read_whole_config(model), multimodal_of(model, text)
    name = MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.get(config.model_type)
    is_part = config.get_text_config() is not config
    if not config.architectures and is_part and name is not None:
        files = files_by_key(weight_folder(model.path))
        whole = (
            _within(model, text, config, name)
            if files.keys().isdisjoint(text.state_dict())
            else None
        )
    return (text, str) if whole is None else (whole.model, whole.text_name)


def _within(model: Model, text: PreTrainedModel, config: PretrainedConfig, name: str) -> Multimodal:
    """Return the class of this name, with the language model in it."""
    way_out = "take `architectures` out of config.json to keep the language model alone"
    if not hasattr(transformers, str(name)):
        raise UserError(
            f"{model.path}: config.json names {name}, which transformers does not have; {way_out}"
        )
    config = copy.deepcopy(config)
    # Classes differ in their default: what the files have is what the language model says.
    config.tie_word_embeddings = text.config.tie_word_embeddings
    building = foreign(model.path, config, f"build {name}", way_out)
    with building, torch.device("meta"), no_init_weights():
        whole = getattr(transformers, name)(config).to(text.dtype)
    places = _places(whole, text)
    if places is None:
        raise UserError(
            f"{model.path}: the language model, {type(text.base_model).__name__} with a head, is "
            f"not found once in {name}; {way_out}"
        )
    return Multimodal(whole, places)


def _places(whole: PreTrainedModel, text: PreTrainedModel) -> dict[str, str] | None:
    """Return `Multimodal.places`; None unless the language model and its head are there once."""
    kind = whole.config.get_text_config().model_type
    parts = {
        path: part
        for path, part in whole.named_modules()
        if isinstance(part, PreTrainedModel) and part.config.model_type == kind
    }
    bases = [path for path, part in parts.items() if part.base_model is part]
    holders = [whole, *(part for part in parts.values() if part.base_model is not part)]
    heads = [head for part in holders if (head := part.get_output_embeddings()) is not None]
    own = _path_of(text, text.get_output_embeddings())
    if len(bases) != 1 or not heads or own is None:
        return None
    return {text.base_model_prefix: bases[0], own: str(_path_of(whole, heads[0]))}


def _path_of(model: PreTrainedModel, module: nn.Module | None) -> str | None:
    return next((path for path, part in model.named_modules() if part is module), None)


def _moved(name: str, places: Mapping[str, str]) -> str | None:
    for old, new in places.items():
        if f"{name}.".startswith(f"{old}."):
            return new + name.removeprefix(old)
    return None
