"""Facts of a model that the rules may ask for, read off the model on `meta`."""

import re
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from shardwise.base.layouts import ModelFacts
from shardwise.base.schedule.context import AttentionShape, ContextFacts
from shardwise.kernels.grouped_linear import ROW_BYTES, takes
from shardwise.kernels.quantised import Format
from shardwise.models import eight_bit, expert_plan, quantise, tensor_plan
from shardwise.models.families import FAMILIES, Family
from shardwise.models.kinds.attention import Attention
from shardwise.models.names import in_use, is_copied, is_wrapper
from shardwise.models.patches import float8, lora_kernel
from shardwise.models.patches.cores import REGISTRY
from shardwise.models.routed_experts import is_routed
from shardwise.models.router_loss import routers_of
from shardwise.models.spec import ModelSpec
from shardwise.models.weights import weights_of


def facts_of(hf: PreTrainedModel, spec: ModelSpec, family: Family) -> ModelFacts:
    """Return the facts of a whole model with its adapters, on any device."""
    is_listed = family.model_type in FAMILIES
    noise = noise_of(hf.config, family)

    def indivisible(num_ranks: int) -> str | None:
        return tensor_plan.problem(hf, spec, num_ranks) if is_listed else None

    def odd_blocks(base: Format, num_ranks: int) -> str | None:
        return quantise.problem(hf, spec, base, num_ranks)

    kinds = tuple(dict.fromkeys(layer.kind for layer in spec.layers))
    return ModelFacts(
        family=family.model_type,
        is_listed=is_listed,
        num_layers=len(spec.layers),
        kinds=kinds,
        is_tied=spec.tied,
        num_positions=None if spec.positions is None else hf.config.max_position_embeddings,
        unseeded_noise=next(iter(noise.items()), None),
        sees_ahead=_sees_ahead(hf.config),
        has_router_loss=bool(routers_of(hf, family)),
        has_router_bias=any(True for _ in expert_plan.biases_of(hf, spec)),
        adds_positions=family.positions is not None,
        kinds_without_isolation=tuple(
            dict.fromkeys(layer.kind for layer in spec.layers if not layer.keeps_documents_apart)
        ),
        trains_in_16_bits=any(
            p.requires_grad and p.dtype != torch.float32 for p in hf.parameters()
        ),
        has_plain_adapters=lora_kernel.has_plain_layers(hf),
        saved_layers=_saved_layers(hf, spec),
        blocks=family.paths,
        num_experts=tuple(
            dict.fromkeys(expert_plan.num_experts(m) for _, m in expert_plan.experts_of(hf, spec))
        ),
        indivisible=indivisible,
        odd_blocks=odd_blocks,
        has_own_attention=any(
            REGISTRY in block.kind.functions for layer in spec.layers for block in layer.mixers
        ),
        has_fused_attention=hf.config._attn_implementation != "eager",
        folds_adapters=any(
            is_wrapper(module) and not is_routed(module.get_base_layer()) for module in hf.modules()
        ),
        context=context_facts(hf, spec),
        most_earlier_tokens=_most_earlier_tokens(hf, spec),
        num_float8_linears=float8.num_linears(hf, spec),
        **eight_bit.facts_of(hf, spec),
    )


def noise_of(config: PretrainedConfig, family: Family) -> dict[str, float]:
    """Return the keys of a config, with their values, whose random numbers no seed reaches.

    Whatever the key, a function inside a block may draw the numbers.
    """
    keys = [key for key in config.to_dict() if "drop" in key or "jitter" in key]
    values = {key: getattr(config, key, 0) for key in keys if key not in family.seeded}
    return {key: value for key, value in values.items() if value}


def _sees_ahead(config: PretrainedConfig) -> tuple[str, Any] | None:
    """Return the key, and its value, with which transformers makes masks that hide no later token.

    Folders of models for embeddings have it. (Those of Gemma 4 may say `vision`: of images alone.)
    """
    if not getattr(config, "is_causal", True):
        return "is_causal", config.is_causal
    both = getattr(config, "use_bidirectional_attention", None)
    return ("use_bidirectional_attention", both) if both in (True, "all") else None


def _saved_layers(hf: PreTrainedModel, spec: ModelSpec) -> str | None:
    """Return a module of `lora.modules_to_save` that holds whole decoder layers, or None."""
    saved = [name for name, m in hf.named_modules() if is_copied(m)]
    for name in saved:
        if any(f"{layer.name}.".startswith(f"{name}.") for layer in spec.layers):
            return name
    return None


def context_facts(hf: PreTrainedModel, spec: ModelSpec) -> ContextFacts:
    """Return how the tokens of a model's rows may be cut over ranks."""
    kinds = {block.kind for layer in spec.layers for block in layer.mixers}
    contiguous = any(kind.mixes_tokens and not kind.is_attention for kind in kinds)
    cores = [core for kind in kinds if kind.is_attention for core in kind.cores(hf.config)]
    if not cores:
        return ContextFacts(contiguous, None)
    # Kinds of attention of one model have the same heads.
    core = cores[0]
    assert isinstance(core, Attention)
    kv_heads = getattr(hf.config, "num_key_value_heads", None) or core.num_heads
    shape = AttentionShape(1, core.num_heads, kv_heads, core.key_dim, core.value_dim, 1)
    return ContextFacts(contiguous, shape)


def _most_earlier_tokens(hf: PreTrainedModel, spec: ModelSpec) -> int:
    blocks = [(f"{layer.name}.{b.path}", b.kind) for layer in spec.layers for b in layer.mixers]
    return max((kind.width(in_use(hf.get_submodule(path))) - 1 for path, kind in blocks), default=0)


def why_in_a_loop(hf: PreTrainedModel, spec: ModelSpec, num_ranks: int) -> str | None:
    """Return why a GPU multiplies a rank's experts one by one, with `num_ranks` ranks of `tp`.

    Returns None where it takes all experts of a layer in one product.
    """
    cuts = tensor_plan.cuts_of(hf, spec, num_ranks) if num_ranks > 1 else {}
    ranks = [rank for module in hf.modules() if is_wrapper(module) for rank in module.r.values()]
    for row in weights_of(hf, spec):
        if not row.is_stack or row.is_adapter:
            continue
        shape = list(row.shape)
        if row.name in cuts:
            shape[cuts[row.name].dim] = cuts[row.name].rows.local_size
        if not takes(torch.device("cuda"), row.dtype, [*shape[1:], *ranks]):
            short = re.sub(r"\.\d+\.", ".*.", row.path, count=1)
            return (
                f"{short} is {shape} on a rank, in {str(row.dtype).removeprefix('torch.')}, "
                "and torch's grouped product takes bfloat16 alone, and widths and ranks of "
                f"adapters that are multiples of {ROW_BYTES // 2}"
            )
    return None
