"""Jet-Nemotron, for training and generation: Qwen2 with JetBlock in place of most attention.

Some of its attention layers see a window. Facts (names, shapes, formulas) are from
github.com/NVlabs/Jet-Nemotron (Apache-2.0) and arXiv 2508.15884. What it shares with Qwen2
(attention, MLP, rotary positions) is transformers' code.
"""

from copy import copy
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationMixin
from transformers.masking_utils import LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING as MASKS
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.qwen2 import modeling_qwen2 as qwen2
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from shardwise.models.families.jet_nemotron.configuration import JetNemotronConfig
from shardwise.models.families.jet_nemotron.jet_block import JetBlock, JetNemotronRMSNorm


class JetNemotronDecoderLayer(qwen2.Qwen2DecoderLayer):
    """Qwen2's layer around one of the three mixers, each of which goes by the name `self_attn`."""

    def __init__(self, config: JetNemotronConfig, layer_idx: int) -> None:
        # The config has all that Qwen2's has.
        super().__init__(config, layer_idx)  # ty: ignore[invalid-argument-type]
        if config.layer_types[layer_idx] == "linear_attention":
            self.self_attn = JetBlock(config, layer_idx)
        self.input_layernorm = JetNemotronRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = JetNemotronRMSNorm(config.hidden_size, config.rms_norm_eps)


class JetNemotronPreTrainedModel(PreTrainedModel):
    """Base class that transformers asks of a family."""

    config_class = JetNemotronConfig
    config: JetNemotronConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["JetNemotronDecoderLayer"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_attention_backend = True
    _is_stateful = True
    _can_record_outputs = {  # noqa: RUF012
        "hidden_states": JetNemotronDecoderLayer,
        "attentions": qwen2.Qwen2Attention,
    }

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, JetBlock):
            module.initialise(self.config.initializer_range)


class JetNemotronModel(JetNemotronPreTrainedModel):
    """Token ids to hidden states."""

    def __init__(self, config: JetNemotronConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(
            JetNemotronDecoderLayer(config, i) for i in range(config.num_hidden_layers)
        )
        self.norm = JetNemotronRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = qwen2.Qwen2RotaryEmbedding(config)  # ty: ignore[invalid-argument-type]
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Return hidden states [B, T, D] after the final norm, as transformers' models do."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        if position_ids is None:
            first = 0 if past_key_values is None else past_key_values.get_seq_length()
            position_ids = torch.arange(first, first + hidden.shape[1], device=hidden.device)[None]
        masks = attention_mask  # by layer type where `generate` has made them already
        if not isinstance(masks, dict):
            make: Any = MASKS
            given = {"attention_mask": attention_mask, "position_ids": position_ids}
            masks = {
                kind: make[kind](
                    self.config,
                    hidden,
                    past_key_values=self._of_kind(kind, past_key_values),
                    **given,
                )
                for kind in set(self.config.layer_types)
            }
        around = {
            "position_embeddings": self.rotary_emb(hidden, position_ids),
            "position_ids": position_ids,
            **kwargs,
        }
        for kind, layer in zip(self.config.layer_types, self.layers):
            hidden = layer(
                hidden, masks[kind], past_key_values=past_key_values, use_cache=use_cache, **around
            )
        return BaseModelOutputWithPast(
            last_hidden_state=self.norm(hidden), past_key_values=past_key_values
        )

    def _of_kind(self, kind: str, cache: Cache | None) -> Cache | None:
        if cache is None:
            return None
        # A mask is as wide as its layers' cache. transformers 5.17 asks the first layer of a cache,
        # whatever its kind.
        types = self.config.layer_types
        kind_cache = copy(cache)
        kind_cache.layers = [layer for type_, layer in zip(types, cache.layers) if type_ == kind]
        return kind_cache


class JetNemotronForCausalLM(JetNemotronPreTrainedModel, GenerationMixin):
    """With its head, which is the embedding if `tie_word_embeddings` says so."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: JetNemotronConfig) -> None:
        super().__init__(config)
        self.model = JetNemotronModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    forward = qwen2.Qwen2ForCausalLM.forward  # hidden states, head, loss: as in every family
