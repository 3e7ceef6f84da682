"""Attention of rows whose tokens lie on several ranks equals that of one process."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import PreTrainedModel

from shardwise.base.interfaces import Mesh
from shardwise.base.schedule.context import AttentionShape, TokenSplit, Way, sent_by_attention
from shardwise.config import UserError
from shardwise.kernels.attention import Merged, Sight
from shardwise.kernels.attention.places import Places, Scores
from shardwise.kernels.recurrence import Tokens
from shardwise.lab.planner.collectives import Collectives
from shardwise.lab.planner.communication import Total, add_up
from shardwise.models.families import spec_of
from shardwise.models.load import fill, weights
from shardwise.models.patches.cores import use_attention
from shardwise.parallel.context_attention import ContextAttention, _AllToAll
from shardwise.parallel.context_exchange import Ring
from tests.distributed import run_ranks
from tests.left_out import some_now
from tests.models.tiny import EACH_KIND, PLAIN, on_meta, tiny

WAYS: tuple[tuple[Way, bool], ...] = (
    ("ring", False),
    ("ring", True),
    ("gather", False),
    ("gather", True),
    ("ulysses", False),
)
"""Each way, with a zigzag cut or not."""
HEADS = ((4, 4), (4, 2), (4, 1), (8, 1), (12, 3))
NUM_TOKENS = 48


@dataclass(frozen=True)
class Case:
    way: Way
    zigzag: bool
    heads: tuple[int, int] = (4, 2)
    window: int | None = None
    documents: bool = False
    cap: float | None = None
    sinks: bool = False
    sizes: tuple[int, int] = (8, 8)
    dtype: torch.dtype = torch.float64
    num_tokens: int = NUM_TOKENS
    seed: int = 0
    share: float = 0.15
    """Of tokens that begin a document."""


CASES = [
    *(
        Case(*way, window=window, documents=documents)
        for way in WAYS
        for window in (None, 1, 5, 13, 30, 60)
        for documents in (False, True)
    ),
    *(
        Case(*way, window=window, documents=documents, cap=cap, sinks=sinks)
        for way in WAYS
        for window in (None, 13)
        for documents in (False, True)
        for cap, sinks in ((0.8, False), (None, True), (0.8, True))
    ),
    *(Case(*way, heads=heads) for way in WAYS for heads in HEADS),
    *(Case(*way, heads=(4, 4), sizes=sizes) for way in WAYS for sizes in ((6, 4), (4, 6))),
]
ODD = [
    Case(*way, heads=(6, 2), window=window, documents=documents, num_tokens=num_tokens)
    for way in WAYS
    for num_tokens in (6, 42)
    for window in (None, 4)
    for documents in (False, True)
]
"""For 3 ranks: chunks of a token each, keys of 2 heads for queries of 6."""


def drawn_cases(num_ranks: int, num_cases: int) -> list[Case]:
    """Return cases of drawn lengths, heads, windows and documents, one after the other by way."""
    random, cases = Random(num_ranks), []
    for seed in range(num_cases):
        num_tokens = 2 * num_ranks * random.randint(1, 9)
        num_kv_heads, group = random.choice((1, 2, 3)), random.choice((1, 2, 4))
        cases.append(
            Case(
                *WAYS[seed % len(WAYS)],
                heads=(num_ranks * num_kv_heads * group, num_kv_heads),
                window=random.choice((None, random.randint(1, num_tokens + 3))),
                documents=random.random() < 0.8,
                cap=random.choice((None, 0.3, 2.0)),
                sinks=random.random() < 0.5,
                sizes=(random.randint(2, 6), random.randint(2, 6)),
                num_tokens=num_tokens,
                seed=seed,
                share=random.choice((0.05, 0.3, 1.0)),
            )
        )
    return cases


SHORT = [
    Case(*way, dtype=dtype, documents=documents, cap=cap, sinks=sinks)
    for way in WAYS
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
    for documents in (False, True)
    for cap, sinks in ((None, False), (0.8, True))
]


def inputs(case: Case) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None]:
    """Return q, k, v and a gradient of complete rows, and their documents."""
    generator = torch.Generator().manual_seed(case.seed)
    num_heads, num_kv_heads = case.heads
    key_size, value_size = case.sizes
    shapes = [(num_heads, key_size), (num_kv_heads, key_size)]
    shapes += [(num_kv_heads, value_size), (num_heads, value_size)]
    tensors = tuple(
        torch.randn(2, heads, case.num_tokens, size, generator=generator, dtype=torch.float64)
        for heads, size in shapes
    )
    # Documents of 1 token up to several chunks; the second row has one that fills it.
    begins = torch.rand(2, case.num_tokens, generator=generator) < case.share
    begins[1] = False
    documents = begins.cumsum(1) if case.documents else None
    return tuple(x.to(case.dtype) for x in tensors), documents


def sinks_of(case: Case) -> torch.Tensor | None:
    """Return a score of each head beside those of keys, some larger than all of them."""
    return torch.linspace(-2, 4, case.heads[0], dtype=case.dtype) if case.sinks else None


def of_one_process(case: Case) -> tuple[torch.Tensor, ...]:
    """Return output and gradients of complete rows, all scores at once, as transformers has them
    for Gemma 2 and gpt-oss: a cap, then a column for the sink, whose share is dropped."""
    (q, k, v, grad_out), documents = inputs(case)
    sinks = sinks_of(case)
    trained = [x.requires_grad_() for x in (q, k, v, *([] if sinks is None else [sinks]))]
    wide = torch.promote_types(case.dtype, torch.float32)
    keys, values = (x.to(wide).repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q.to(wide) @ keys.mT * 0.4
    if case.cap is not None:
        scores = torch.tanh(scores / case.cap) * case.cap
    sight = Sight(0.4, 0, case.window, documents, documents)
    mask = sight.mask(case.num_tokens, case.num_tokens, q.device)
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        column = sinks.to(wide).view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column], -1)
    out = (scores.softmax(-1)[..., : case.num_tokens] @ values).to(q.dtype)
    return out.detach(), *torch.autograd.grad(out, trained, grad_out)


def differences(cases: list[Case]) -> list[list[float]]:
    """Return how far this rank's output and gradients are from one process's."""
    rank, n = dist.get_rank(), dist.get_world_size()
    found = []
    for case in cases:
        cut = TokenSplit(n, case.zigzag)
        chunks = cut.chunks(rank)

        def here(
            x: torch.Tensor, cut: TokenSplit = cut, chunks: tuple[int, ...] = chunks
        ) -> torch.Tensor:
            parts = x.chunk(n * cut.chunks_per_rank, 2)
            return torch.cat([parts[chunk] for chunk in chunks], 2)

        tensors, documents = inputs(case)
        q, k, v, grad_out = map(here, tensors)
        sinks = sinks_of(case)
        trained = [x.requires_grad_() for x in (q, k, v, *([] if sinks is None else [sinks]))]
        attend = ContextAttention(dist.group.WORLD, cut, case.way)
        out = attend(q, k, v, Scores(0.4, case.window, case.cap, sinks), documents)
        results = [out.detach(), *torch.autograd.grad(out, trained, grad_out)]
        whole = of_one_process(case)
        assert [x.dtype for x in results] == [case.dtype] * len(whole)
        wanted = [*map(here, whole[:4]), *whole[4:]]
        for total in results[4:]:  # every rank has all sinks, so their gradients are added up
            dist.all_reduce(total)
        sizes = [x.abs().max().clamp(min=1) for x in whole]
        found.append(
            [
                float((mine - other).abs().max() / size)
                for mine, other, size in zip(results, wanted, sizes, strict=True)
            ]
        )
    return found


def largest(cases: list[Case], num_ranks: int) -> dict[Case, float]:
    """Return the largest difference of each case over ranks."""
    by_rank = run_ranks(num_ranks, differences, cases)
    return {case: max(map(max, of_case)) for case, of_case in zip(cases, zip(*by_rank))}


@pytest.mark.parametrize(
    ("num_ranks", "cases"),
    [
        (2, CASES),
        (3, [*ODD, *drawn_cases(3, 60)]),
        pytest.param(4, [*CASES, *drawn_cases(4, 60)], marks=pytest.mark.slow),
    ],
)
def test_equals_one_process(num_ranks, cases):
    found = largest(cases, num_ranks)
    assert {case: error for case, error in found.items() if not error < 1e-12} == {}


def test_equals_one_process_in_fewer_bits():
    allowed = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}
    found = largest(SHORT, 2)
    assert {case: error for case, error in found.items() if not error < allowed[case.dtype]} == {}


BLOCKS, GIVE_BACK, ADD, CHUNK = Places.blocks, Ring.give_back, Merged.add, torch.Tensor.chunk


def merge_without_rescaling(self, out, lse):
    self.out.add_(out)
    self.lse.copy_(torch.logaddexp(self.lse, lse))


def leave_out_the_sink(self, out, lse):
    if out is not None:
        ADD(self, out, lse)


def count_the_sink_on_every_rank(self, out, lse):
    ADD(self, out, lse)
    if out is None:
        ADD(self, out, lse)


def without_cap(self, keys):
    return BLOCKS(self._replace(scores=self.scores._replace(cap=None)), keys)


def sinks_of_the_first_heads(x, *args):
    return [CHUNK(x, *args)[0]] * args[0]


def places_of_the_front(self, keys):
    """Take the back chunk's places for the chunk after the front one's."""
    first = self.queries[0]
    follow = range(first.stop, first.stop + len(first))
    return BLOCKS(self._replace(queries=(first, follow)[: len(self.queries)]), keys)


def without_documents(self, keys):
    return BLOCKS(self._replace(documents=None), keys)


def lose_gradients(self, number, grad_k, grad_v):
    lost = number == 1
    return GIVE_BACK(self, number, grad_k * (not lost), grad_v * (not lost))


def keep_gradients(_, gradient):
    return gradient, None


@pytest.mark.parametrize(
    ("place", "name", "planted", "case"),
    [
        (Merged, "add", merge_without_rescaling, Case("ring", False)),
        (Places, "blocks", places_of_the_front, Case("ring", True)),
        (Places, "blocks", places_of_the_front, Case("gather", True)),
        (Places, "blocks", without_documents, Case("ulysses", False, documents=True)),
        (Merged, "add", leave_out_the_sink, Case("ring", False, sinks=True)),
        (Merged, "add", count_the_sink_on_every_rank, Case("ring", True, sinks=True)),
        (Places, "blocks", without_cap, Case("ring", False, cap=0.8)),
        (torch.Tensor, "chunk", sinks_of_the_first_heads, Case("ulysses", False, sinks=True)),
        (Ring, "give_back", lose_gradients, Case("ring", False)),
        (_AllToAll, "backward", staticmethod(keep_gradients), Case("ulysses", False)),
    ],
)
def test_a_mistake_is_seen(monkeypatch, place, name, planted, case):
    monkeypatch.setattr(place, name, planted)
    assert not largest([case], 2)[case] < 1e-3


def cp_mesh() -> Mesh:
    sizes = (1, 1, 1, dist.get_world_size(), 1)
    dense = init_device_mesh("cpu", sizes, mesh_dim_names=Mesh.AXES)
    return Mesh(dense, torch.device("cpu"))


def sent_and_predicted(cases: list[Case]) -> list[tuple[list[Total], list[Total]]]:
    """Return what this rank sent in forward and backward of each case, and what formulas say."""
    mesh, rank, n = cp_mesh(), dist.get_rank(), dist.get_world_size()
    results = []
    for case in cases:
        cut = TokenSplit(n, case.zigzag)
        (q, k, v, grad_out), _ = inputs(case)
        q, k, v, grad_out = (x[:, :, : NUM_TOKENS // n].clone() for x in (q, k, v, grad_out))
        q.requires_grad_()
        k.requires_grad_()
        with Collectives(mesh) as forward:
            scores = Scores(0.4, case.window)
            out = ContextAttention(mesh.group("cp"), cut, case.way)(q, k, v, scores)
        with Collectives(mesh) as backward:
            out.backward(grad_out)
        shape = AttentionShape(2 * q.shape[2], *case.heads, *case.sizes, q.element_size())
        predicted = sent_by_attention(shape, cut, rank, case.way, case.window, q.shape[2])
        as_totals = [
            {(kind, "cp"): sent for kind, sent in of_pass.items() if sent[0]}
            for of_pass in predicted
        ]
        counted = [add_up(x.messages) for x in (forward, backward)]
        results.append((counted, as_totals))
    return results


COUNTED = [
    *(Case(*way, window=window) for way in WAYS for window in (None, 1, 8, 30)),
    Case("ulysses", False, heads=(12, 3)),
    Case("gather", False, heads=(4, 4), sizes=(6, 4)),
    Case("ring", True, heads=(4, 4), sizes=(6, 4), dtype=torch.bfloat16),
]


def test_sends_what_the_formulas_say():
    for rank, of_rank in enumerate(run_ranks(4, sent_and_predicted, COUNTED)):
        for case, (counted, predicted) in zip(COUNTED, of_rank, strict=True):
            assert counted == predicted, (rank, case)


class CompleteRows:
    """The neighbours of a test: they know the documents of complete rows."""

    def __init__(self, documents: torch.Tensor) -> None:
        self.documents = documents


WINDOWS = {
    f"tiny-{name}": {None, 16}
    for name in (
        *("qwen2", "qwen2_moe", "qwen3", "olmo3", "exaone4", "gemma2", "gemma3", "dots1"),
        *("afmoe", "cohere2", "jet_nemotron"),
    )
}
"""Windows of the attention layers of tiny models."""


def output_and_gradients(hf: PreTrainedModel, ids: torch.Tensor) -> list[torch.Tensor]:
    hf.zero_grad()
    # transformers takes places that begin again for the start of a document.
    places = torch.arange(ids.shape[1])[None].expand(len(ids), -1)
    logits = hf(input_ids=ids, position_ids=places, use_cache=False).logits
    logits.float().square().mean().backward()
    gradients = (parameter.grad for parameter in hf.parameters())
    return [logits.detach(), *(gradient.clone() for gradient in gradients if gradient is not None)]


@pytest.mark.parametrize("name", some_now(PLAIN, (*EACH_KIND, *WINDOWS)))
def test_takes_what_the_attention_of_every_family_gives(name):
    calls = []

    def attention(tokens, module, *args, **kwargs):
        calls.append(kwargs.get("sliding_window"))
        context = ContextAttention(None, TokenSplit(1), "ring")
        return context.for_mixer(tokens, module, *args, **kwargs)

    model = tiny(name)
    hf = on_meta(model)
    fill(hf, weights(hf, model, 0))
    ids = torch.randint(3, 60, (2, 20), generator=torch.Generator().manual_seed(0))
    expected = output_and_gradients(hf, ids)
    assert not calls
    use_attention(hf, spec_of(hf.config, hf), Tokens, attention)
    results = output_and_gradients(hf, ids)
    assert set(calls) == WINDOWS.get(name, {None})
    assert len(results) > len(list(hf.parameters())) // 2
    for result, other in zip(results, expected, strict=True):
        torch.testing.assert_close(result, other, rtol=1e-4, atol=1e-5)


def test_compiled_layers_of_one_class_have_the_windows_of_their_kinds():
    model = tiny("tiny-olmo3")
    hf = on_meta(model)
    fill(hf, weights(hf, model, 0))
    ids = torch.randint(3, 60, (1, 40), generator=torch.Generator().manual_seed(0))
    spec = spec_of(hf.config, hf)
    use_attention(hf, spec, Tokens, ContextAttention(None, TokenSplit(1), "ring").for_mixer)
    expected = output_and_gradients(hf, ids)
    torch._dynamo.reset()
    for layer in spec.layers:
        hf.get_submodule(layer.name).compile(backend="eager")
    for result, other in zip(output_and_gradients(hf, ids), expected, strict=True):
        torch.testing.assert_close(result, other, rtol=1e-4, atol=1e-5)


def of_mixer_on_a_rank() -> torch.Tensor:
    """Return this rank's output of a mixer under autocast, with the documents of complete rows."""
    case = Case("ring", False, documents=True, dtype=torch.float32)
    (q, k, v, _), documents = inputs(case)
    rank, n = dist.get_rank(), dist.get_world_size()
    assert documents is not None
    mine = [x.chunk(n, 2)[rank] for x in (q, k, v)]
    tokens = Tokens(documents.chunk(n, 1)[rank], CompleteRows(documents))
    context = ContextAttention(dist.group.WORLD, TokenSplit(n), "ring")
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = context.for_mixer(tokens, torch.nn.Identity(), *mine, None, scaling=0.4)
    assert out.dtype == torch.bfloat16
    return out


def test_a_mixer_has_the_documents_of_complete_rows():
    out = torch.cat(run_ranks(2, of_mixer_on_a_rank), 1)
    expected, *_ = of_one_process(Case("ring", False, documents=True))
    torch.testing.assert_close(out.double(), expected.transpose(1, 2), rtol=0, atol=3e-2)


def test_a_bias_by_place_is_refused():
    (q, k, v, _), _ = inputs(Case("ring", False))
    context = ContextAttention(None, TokenSplit(1), "ring")
    with pytest.raises(UserError, match=r"parallel\.cp"):
        context.for_mixer(
            Tokens(), torch.nn.Identity(), q, k, v, None, position_bias=torch.zeros(4)
        )


def kept_bytes() -> dict[str, int]:
    """Return the bytes that a rank keeps for the backward beside q, k and v, in each way."""
    n, kept = dist.get_world_size(), {}
    for way, zigzag in WAYS:
        (q, k, v, _), _ = inputs(Case(way, zigzag))
        q, k, v = (x[:, :, : NUM_TOKENS // n].clone().requires_grad_() for x in (q, k, v))
        sizes: dict[int, int] = {}

        def pack(x: torch.Tensor, sizes: dict[int, int] = sizes) -> torch.Tensor:
            sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            ContextAttention(dist.group.WORLD, TokenSplit(n, zigzag), way)(q, k, v, Scores(0.4))
        kept[f"{way} {zigzag}"] = sum(sizes.values()) - sum(x.nbytes for x in (q, k, v))
    return kept


def test_a_rank_keeps_its_inputs_its_output_and_a_number_per_query():
    kept = run_ranks(2, kept_bytes)[0]
    queries, size = 2 * 4 * NUM_TOKENS // 2, 8
    assert kept == dict.fromkeys(kept, queries * (size + 1) * 8)
