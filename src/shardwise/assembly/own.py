"""A run of a module of the caller: described, cut into parts, and its initial state."""

from collections.abc import Iterator, Sequence

import torch

from shardwise.assembly.costs import Costs
from shardwise.assembly.describe import Description
from shardwise.assembly.state import MemoryState
from shardwise.base.layouts import Facts, ModelFacts, axis_sizes
from shardwise.base.schedule.costs import Cost, CostSource
from shardwise.config import RunConfig, require, rules
from shardwise.models import eight_bit
from shardwise.models.counts import ModelCounts
from shardwise.models.families import Family
from shardwise.models.initialise import nudged
from shardwise.models.own import OWN, GivesCuts, GivesStages, OwnModel, OwnPart, own_stages
from shardwise.models.part import ModelPart
from shardwise.models.tensor_cuts import Indivisible
from shardwise.models.tensor_plan import split_blocks
from shardwise.parallel.optimizers import update_rule_of
from shardwise.parallel.pipeline_parallel import pipeline_of
from shardwise.parallel.reduce import from_every_rank

BY_PARAMETERS = CostSource(rate="one operation per parameter")
"""The source of the costs of a module's layers."""
OWN_FAMILY = Family(OWN, mixers={}, feed_forward={})
"""Family of every module of a caller."""


class OwnDescription(Description):
    """A run of a module of the caller."""

    def costs(self, cfg: RunConfig, counts: ModelCounts | None, num_ranks: int) -> Costs:
        """Return costs of the units before, in and after the layers, by parameters.

        What lies outside of the layers is not counted: which end holds it is known to `cut` alone.
        """
        layers = [layer.name for layer in self.spec.layers]
        rule = update_rule_of(cfg)
        chosen = rule.selected(self.hf, self.spec)
        selected = {self.hf.get_parameter(name) for name in chosen}
        costs = []
        for name in ("before the layers", *layers, "after the layers"):
            is_layer = name in layers
            parameters = list(self.hf.get_submodule(name).parameters()) if is_layer else []
            trained = [p for p in parameters if p.requires_grad]
            num_weights, num_trained = (sum(p.numel() for p in ps) for ps in (parameters, trained))
            trained_bytes = sum(p.nbytes for p in trained)
            cost = Cost(
                name=name,
                forward_seconds=num_weights,
                input_seconds=num_weights,
                weight_seconds=num_trained,
                activation_bytes=0,
                output_bytes=0,
                weight_bytes=sum(p.nbytes for p in parameters),
                gradient_bytes=trained_bytes,
                optimizer_bytes=sum(
                    rule.state_bytes(p.numel(), p.itemsize, p in selected) for p in trained
                ),
                parameters=num_weights,
                trainable=bool(trained) or not is_layer,
            )
            costs.append(cost)
        return tuple(costs), BY_PARAMETERS

    def uncounted(self, cfg: RunConfig) -> Iterator[str]:
        """Yield nothing."""
        yield from ()

    def parts(
        self, cfg: RunConfig, boundaries: Sequence[int] = (), chunks: Sequence[int] = ()
    ) -> tuple[ModelPart, ...]:
        """Return the module as one part or, with boundaries, the stages of these chunks."""
        if not boundaries:
            return (OwnPart(self.hf, self.spec, cfg),)
        return own_stages(self.hf, self.spec, boundaries, chunks, cfg)


def describe_own(
    own: OwnModel, cfg: RunConfig, num_ranks: int, device: torch.device | None = None
) -> OwnDescription:
    """Describe a run of a module, as `describe` does; UserError with the first rule against it."""
    facts = own_facts(own)
    rules.check(cfg, Facts(num_ranks, facts))
    return OwnDescription(
        hf=own.module,
        multimodal=None,
        spec=own.spec,
        family=OWN_FAMILY,
        sizes=axis_sizes(cfg, num_ranks),
        positions=None,
        coverage=None,
        lora=None,
        kernels={},
        pipeline=pipeline_of(cfg, num_ranks),
        facts=facts,
        notes=(),
    )


def own_facts(own: OwnModel) -> ModelFacts:
    """Return what the rules may ask of a module."""

    def indivisible(num_ranks: int) -> str | None:
        try:
            for layer in own.spec.layers:
                split_blocks(own.module, layer, num_ranks)
        except Indivisible as error:
            return str(error)
        return None

    return ModelFacts(
        family=own.spec.family,
        is_listed=False,
        num_layers=len(own.spec.layers),
        kinds=(OWN,),
        is_tied=own.is_tied,
        num_positions=None,
        unseeded_noise=None,
        sees_ahead=None,
        has_router_loss=False,
        has_router_bias=False,
        adds_positions=False,
        kinds_without_isolation=(),
        trains_in_16_bits=any(p.requires_grad and p.itemsize < 4 for p in own.module.parameters()),
        has_plain_adapters=False,
        saved_layers=None,
        blocks=(),
        num_experts=(),
        indivisible=indivisible,
        is_own=True,
        gives_stages=isinstance(own.module, GivesStages),
        gives_cuts=isinstance(own.module, GivesCuts),
        **eight_bit.facts_of(own.module, own.spec),
    )


def own_state(cfg: RunConfig, own: OwnModel) -> MemoryState:
    """Return the state of a new run: the module's own values, which must be equal on every rank."""
    # A number for each tensor, from every rank to all.
    sums = {key: value.double().sum().item() for key, value in own.values.items()}
    ranks = from_every_rank(sums)
    for key, value in sums.items():
        require(
            all(other.get(key) == value for other in ranks),
            f"{key.partition('/')[2]} of {own.spec.family} has other initial values on another "
            "rank; call torch.manual_seed before the module is built",
        )
    values = dict(own.values)
    if cfg.measure.nudge_weights:
        values = {key: nudged(value, cfg.training.seed, key) for key, value in values.items()}
    return MemoryState(values)
