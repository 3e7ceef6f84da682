"""Jet-Nemotron's configuration: the published config.json, read into transformers' own words.

Facts (keys, defaults) from github.com/NVlabs/Jet-Nemotron (Apache-2.0) and arXiv 2508.15884.
"""

import math
from dataclasses import field
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

_KINDS = {"jet": "linear_attention", "attn": "full_attention", "swa": "sliding_attention"}
_JET = {"num_heads": 6, "head_dim": 256, "expand_v": 2.0}
_JET |= {"conv_size": 4, "dconv_generator_reduction": 8, "norm_eps": 1e-5}
_IGNORED = ("mode", "dconv_implementation")
"""Keys that choose among the published kernels, which this model does not use."""
_PUBLISHED = {kind: name for name, kind in _KINDS.items()}


@strict
class JetNemotronConfig(PreTrainedConfig):
    """The published config, except that `layer_types` has transformers' names in memory.

    transformers' masks and caches go by these names. Files keep the published ones (`jet`, `attn`,
    `swa`), and may have either. What JetBlock and the window take from `efficient_attention_config`
    has also the names that other hybrids use. Raises ValueError if sizes do not fit.
    """

    model_type = "jet_nemotron"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012
    default_theta = 1_000_000.0

    vocab_size: int = 151936
    hidden_size: int = 1536
    intermediate_size: int = 8960
    num_hidden_layers: int = 28
    num_attention_heads: int = 12
    num_key_value_heads: int | None = 2
    hidden_act: str = "silu"
    max_position_embeddings: int = 32768
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    use_cache: bool = True
    tie_word_embeddings: bool = True
    rope_parameters: dict | None = None
    attention_dropout: float | int = 0.0
    layer_types: list[str] = field(default_factory=list)  # none: full attention in all
    efficient_attention_config: dict | None = None
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        """Translate `layer_types`, and check the sizes that its layers need."""
        self.num_key_value_heads = self.num_key_value_heads or self.num_attention_heads
        types = self.layer_types or ["attn"] * self.num_hidden_layers
        self.layer_types = [_KINDS.get(name, name) for name in types]
        self._check()
        # The published model goes by the window in efficient_attention_config alone. `auto_map`
        # names files of code, which are not saved with a model.
        for key in ("sliding_window", "auto_map"):
            kwargs.pop(key, None)
        super().__post_init__(**kwargs)

    def _check(self) -> None:
        if self.num_attention_heads % (self.num_key_value_heads or 1):
            raise ValueError("num_attention_heads is no multiple of num_key_value_heads")
        if "sliding_attention" in self.layer_types and not _is_size(self.sliding_window):
            raise ValueError(
                "layer_types has swa, but efficient_attention_config no swa with a window_size"
            )
        if "linear_attention" not in self.layer_types:
            return
        given = self._of("jet")
        if not given:
            raise ValueError(
                "layer_types has jet, but efficient_attention_config no jet with its sizes"
            )
        if unknown := [key for key in given if key not in (*_JET, *_IGNORED)]:
            raise ValueError(
                f"efficient_attention_config.jet has {unknown[0]!r}; it may have {', '.join(_JET)}"
            )
        for key in ("num_heads", "head_dim", "conv_size", "dconv_generator_reduction"):
            if not _is_size(self.jet[key]):
                raise ValueError(
                    f"efficient_attention_config.jet has {key} {self.jet[key]!r}, which is no size"
                )
        if not math.isclose(
            self.jet["head_dim"] * self.jet["expand_v"], self.linear_value_head_dim, rel_tol=1e-5
        ):
            raise ValueError(
                "head_dim times expand_v in efficient_attention_config is not a whole number"
            )
        values = self.linear_num_value_heads * self.linear_value_head_dim
        reduction = self.jet["dconv_generator_reduction"]
        if values < reduction:
            raise ValueError(
                f"efficient_attention_config.jet has dconv_generator_reduction {reduction}, which "
                f"leaves nothing of the {values} features of its values"
            )

    def _of(self, mixer: str) -> dict[str, Any]:
        return (self.efficient_attention_config or {}).get(mixer) or {}

    def to_dict(self) -> dict[str, Any]:
        """Return what is written to config.json."""
        types = [_PUBLISHED.get(kind, kind) for kind in self.layer_types]
        # The published class has no rope_parameters, and takes another theta without rope_theta.
        theta = (self.rope_parameters or {}).get("rope_theta", self.default_theta)
        return super().to_dict() | {"layer_types": types, "rope_theta": theta}

    @property
    def sliding_window(self) -> int | None:
        """The tokens that a token of a `swa` layer sees, itself among them."""
        return self._of("swa").get("window_size")

    @property
    def jet(self) -> dict[str, Any]:
        """JetBlock's sizes."""
        return _JET | self._of("jet")

    @property
    def linear_num_value_heads(self) -> int:
        """JetBlock's heads."""
        return self.jet["num_heads"]

    @property
    def linear_key_head_dim(self) -> int:
        """The size of a head's queries and keys."""
        return self.jet["head_dim"]

    @property
    def linear_value_head_dim(self) -> int:
        """The size of a head's values."""
        return round(self.jet["head_dim"] * self.jet["expand_v"])


def _is_size(value: object) -> bool:
    return isinstance(value, int) and value > 0
