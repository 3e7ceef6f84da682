"""Documents that share a row are kept apart in every layer kind: logits, gradients, masks, and what
would leak."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, pairwise, product
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shardwise.base.batches import Batch
from shardwise.config import Lora
from shardwise.kernels.recurrence import Tokens
from shardwise.models import load
from shardwise.models.causal_lm import CausalLM
from shardwise.models.documents import documents_of
from shardwise.models.facts import facts_of
from shardwise.models.families import FAMILIES, family_of, spec_of
from shardwise.models.families.base import mixer
from shardwise.models.kinds import gated_delta_net
from shardwise.models.patches import patch
from shardwise.models.patches.cores import use_cores
from shardwise.models.patches.isolation import isolate
from shardwise.models.slot_dropout import DropoutState, SlotDropout
from shardwise.parallel.activation_checkpoint import recompute
from tests.left_out import some_now
from tests.models.tiny import relative_error, with_adapters, with_every_kind
from tests.parity.harness import Cell, run_config

ISOLATED = sorted(name for name, family in FAMILIES.items() if family.keeps_documents_apart)
BY_KIND = some_now(ISOLATED, with_every_kind(ISOLATED))
"""`make test` takes families with every kind of block, and `make parity` all."""
# The tiny models' chunks have 64 (Gated DeltaNet) and 32 tokens (Mamba2), their convolutions reach
# 3 tokens back: a document longer than a chunk, one of a single token, two, and rows that part in
# different places; the last is whole.
LENGTHS = ((1, 66, 2, 15), (20, 3, 61), (84,))
EXACT = 1e-10  # in float64
rows_of_lengths = st.integers(2, 90).flatmap(
    lambda length: st.lists(
        st.sets(st.integers(1, length - 1), max_size=5).map(
            lambda cuts: tuple(end - begin for begin, end in pairwise([0, *sorted(cuts), length]))
        ),
        min_size=1,
        max_size=3,
    )
)


def model(
    family: str, packing: str = "isolated", dropout: float | None = None, format: str = "text"
) -> CausalLM:
    """A tiny model on the CPU; with adapters where a dropout is given."""
    cfg = run_config(Cell(family, "single", "full"))
    # Without the router loss, which is one of rows and not of documents.
    cfg = replace(
        cfg,
        data=replace(cfg.data, packing=packing, format=format),
        model=replace(cfg.model, router_aux_loss_coef=0.0),
    )
    hf_config = load.read_config(cfg.model)
    if dropout is None:
        hf = load.load_whole(cfg.model, hf_config)
    else:
        hf, _ = with_adapters(cfg.model, Lora(r=4, dropout=dropout))
    hf.set_experts_implementation("eager")  # grouped products know no float64
    return patch(CausalLM(hf, spec_of(hf_config, hf), family_of(hf), cfg), cfg, torch.device("cpu"))


def packed(
    lengths: tuple[tuple[int, ...], ...] | list[tuple[int, ...]] = LENGTHS, seed: int = 0
) -> Batch:
    """Rows of documents of these lengths, every token of which has a target."""
    tokens = torch.randint(
        0, 256, (2, len(lengths), sum(lengths[0])), generator=torch.Generator().manual_seed(seed)
    )
    owners = [
        list(chain.from_iterable([number] * n for number, n in enumerate(row))) for row in lengths
    ]
    return Batch(tokens[0], tokens[1], torch.tensor(owners), tuple(range(len(lengths))), step=1)


def alone(batch: Batch) -> list[Batch]:
    """Each document of the rows by itself, in order."""
    found = []
    for row in range(len(batch.slots)):
        for owner in batch.document_ids[row].unique_consecutive():
            at = batch.document_ids[row] == owner
            ids, labels = batch.input_ids[row, at][None], batch.labels[row, at][None]
            found.append(Batch(ids, labels, torch.zeros_like(ids), (row,), step=1))
    return found


@contextmanager
def double() -> Iterator[None]:
    """Compute in float64, also where a model asks for float32.

    Gradients of A_log are small differences of large terms: in float32 the shape of a batch alone
    moves them by 1e-4.
    """
    to = torch.Tensor.to
    wider = {torch.float32: torch.float64}

    def patched(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        args = tuple(wider.get(arg, arg) if isinstance(arg, torch.dtype) else arg for arg in args)
        return to(
            self, *args, **{k: wider.get(v, v) if k == "dtype" else v for k, v in kwargs.items()}
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "to", patched)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        patch.setattr(torch.Tensor, "type", patched)
        yield


def gradients(lm: CausalLM, batches: list[Batch]) -> dict[str, torch.Tensor]:
    """Of the loss summed over these batches, in float64."""
    lm.double().zero_grad()
    with double():
        for batch in batches:
            lm(batch).backward()
    return {name: p.grad.clone() for name, p in lm.named_parameters() if p.grad is not None}


def worst(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    assert all(grad.abs().max() > 0 for grad in other.values())
    return max(relative_error(one[name], other[name]) for name in other)


def logits_error(lm: CausalLM, batch: Batch) -> float:
    """Between the logits of documents that share rows and of each by itself."""
    with torch.no_grad():
        expected = torch.cat([lm(document, return_logits=True)[0] for document in alone(batch)])
        return relative_error(lm(batch, return_logits=True).flatten(0, 1), expected)


@given(rows_of_lengths)
def test_every_document_has_a_row_of_its_own(lengths):
    batch = packed(lengths)
    documents = documents_of(batch.documents_on_host, batch.device)
    if documents is None:
        assert all(len(row) == 1 for row in lengths)
        return
    groups = documents.unpack(batch.input_ids + 1)  # 0 is left for padding
    found = sorted(tuple(row[row > 0].tolist()) for group in groups for row in group)
    assert found == sorted(tuple((document.input_ids[0] + 1).tolist()) for document in alone(batch))
    for group in groups:
        assert ((group > 0).long().diff(dim=1) <= 0).all()  # padding comes last
    assert sum(group.numel() for group in groups) < 2 * batch.input_ids.numel()
    assert torch.equal(documents.repack(groups).view(batch.input_ids.shape), batch.input_ids + 1)


@pytest.mark.parametrize("family", BY_KIND)
def test_logits_are_those_of_the_document_alone(family):
    assert logits_error(model(family), packed()) < 1e-5
    # What the test would see without isolation: attention and state run on, far beyond rounding.
    assert logits_error(model(family, "concat"), packed()) > 1e-2


@pytest.mark.parametrize("packing", ["none", "documents"])
@pytest.mark.parametrize("family", BY_KIND)
def test_both_sides_of_a_pair_are_those_of_each_alone(family, packing):
    assert logits_error(model(family, packing, format="preference"), packed()) < 1e-5


@pytest.mark.parametrize("family", BY_KIND)
def test_every_kind_of_layer_would_leak(family):
    layers = model(family, "concat").spec.layers
    kinds = {
        layer.kind for layer in layers if any(block.kind.mixes_tokens for block in layer.mixers)
    }
    for kind in kinds:
        lm = model(family, "concat")
        others = tuple(layer for layer in lm.spec.layers if layer.kind != kind)
        leaking = tuple(layer for layer in lm.spec.layers if layer.kind == kind)
        lm.isolated = True
        isolate(lm.hf, replace(lm.spec, layers=others), lm.dropout)
        use_cores(lm.hf, replace(lm.spec, layers=leaking), Tokens)
        assert logits_error(lm, packed()) > 1e-4, kind  # ten times what isolation may be off by


@pytest.mark.parametrize("family", BY_KIND)
def test_gradients_are_the_sum_over_documents_alone(family):
    batch = packed()
    expected = gradients(model(family), alone(batch))
    assert worst(gradients(model(family), [batch]), expected) < EXACT
    assert worst(gradients(model(family, "concat"), [batch]), expected) > 1e-2


@pytest.mark.parametrize("family", BY_KIND)
def test_nothing_of_the_first_document_reaches_the_second(family):
    lm, batch = model(family), packed(((40, 70, 5),))
    first, second = slice(0, 40), slice(40, 110)
    embedded = []
    handle = lm.hf.get_input_embeddings().register_forward_hook(
        lambda module, args, out: embedded.append(out)
    )
    logits = lm(batch, return_logits=True)
    (gradient,) = torch.autograd.grad(logits[0, second].square().sum(), embedded)
    handle.remove()
    assert gradient[0, first].abs().max() == 0
    assert gradient[0, 110:].abs().max() == 0
    assert gradient[0, second].abs().amax(dim=1).min() > 0
    ids = batch.input_ids.clone()
    ids[0, first] = (ids[0, first] + 1) % 256
    with torch.no_grad():
        changed = lm(replace(batch, input_ids=ids), return_logits=True)
    assert relative_error(changed[0, first], logits[0, first]) > 1e-2
    # Not bit by bit: how many tokens go to an expert decides in which order its products are
    # summed.
    assert relative_error(changed[0, second], logits[0, second]) < 1e-6


@pytest.mark.parametrize("family", ["olmo_hybrid", "nemotron_h", "lfm2"])
@settings(max_examples=3, deadline=None)
@given(rows_of_lengths)
def test_any_boundaries(family, lengths):
    assume(
        any(length > 1 for row in lengths for length in row)
    )  # a single token has no state that could decay
    lm, batch = model(family), packed(lengths)
    assert logits_error(lm, batch) < 1e-5
    assert worst(gradients(lm, [batch]), gradients(lm, alone(batch))) < EXACT


def test_a_filled_up_row_is_finite_and_changes_nothing():
    batch = packed(((30, 54), (84,)))
    labels, owners = batch.labels.clone(), batch.document_ids.clone()
    labels[0, 30:], owners[0, 30:] = -100, -1
    labels[1], owners[1] = -100, -1
    filled = replace(batch, labels=labels, document_ids=owners)
    lm = model("qwen3_5_text")
    assert worst(gradients(lm, [filled]), gradients(lm, alone(batch)[:1])) < EXACT


@pytest.mark.parametrize(
    ("family", "checkpointing"),
    some_now(
        product(("qwen3_5_text", "nemotron_h"), ("full", "operators")),
        [("qwen3_5_text", "full"), ("nemotron_h", "operators")],
    ),
)
def test_checkpointing_computes_again_with_the_documents_of_its_own_micro_batch(
    family, checkpointing
):
    plain, lower = model(family), model(family)
    recompute(lower.hf, lower.spec, checkpointing, lower.dropout)
    one, other = packed(), packed(((50, 34),) * 3, seed=1)
    expected = gradients(plain, [one, other])
    lower.double()
    with double():
        first, second = lower(one), lower(other)  # both in flight, as in a pipeline
        first.backward()
        second.backward()
    found = {name: p.grad for name, p in lower.named_parameters()}
    assert worst(found, expected) < EXACT
    assert lower.dropout.unpack is None


@pytest.mark.parametrize(
    "family", some_now(("llama", "qwen3_next", "olmo_hybrid"), ("qwen3_next",))
)
def test_adapters(family):
    batch = packed()
    expected = gradients(model(family, dropout=0.0), alone(batch))
    assert all(".lora_" in name for name in expected)
    assert worst(gradients(model(family, dropout=0.0), [batch]), expected) < EXACT


def test_dropout_masks_belong_to_the_row_and_its_places_in_it():
    batch = packed()
    state = DropoutState(0)
    module, x = SlotDropout(0.5, "x", state), torch.randn(*batch.input_ids.shape, 8)
    state.start(batch)
    documents = documents_of(batch.documents_on_host, batch.device)
    expected = module(x)
    found = []
    for group, rows in enumerate(documents.unpack(x)):
        state.unpack = lambda mask, group=group: documents.unpack(mask)[group]
        found.append(module(rows))
    assert torch.equal(documents.repack(found).view(x.shape), expected)


def test_dropout_does_not_depend_on_which_rows_share_a_micro_batch():
    lm, batch = model("olmo_hybrid", dropout=0.2), packed()
    parts = [
        Batch(
            batch.input_ids[i : i + 1],
            batch.labels[i : i + 1],
            batch.document_ids[i : i + 1],
            (i,),
            1,
        )
        for i in range(3)
    ]
    assert worst(gradients(lm, [batch]), gradients(lm, parts)) < EXACT
    assert worst(gradients(lm, [replace(batch, step=2)]), gradients(lm, parts)) > 1e-2


def test_not_asked_for_nothing_is_wrapped():
    assert model("llama").hf.model.layers[0].self_attn.forward.__name__ == "isolated"
    for packing in ("none", "concat"):
        forward = model("llama", packing).hf.model.layers[0].self_attn.forward
        assert forward.__name__ != "isolated"


def test_kinds_without_proof_are_told():
    lm = model("qwen3_5_text", "concat")
    unproven = mixer("linear_attn", replace(gated_delta_net.JOINED, keeps_documents_apart=False))
    layers = tuple(
        replace(layer, mixers=unproven.blocks) if layer.kind == unproven.name else layer
        for layer in lm.spec.layers
    )
    found = facts_of(lm.hf, replace(lm.spec, layers=layers), lm.family)
    assert found.kinds_without_isolation == ("gated_delta_net",)
