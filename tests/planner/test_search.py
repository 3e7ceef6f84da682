"""The search: what it offers is allowed and fits, and more devices never need more memory."""

from __future__ import annotations

import itertools
import json
import math
import re
from dataclasses import replace
from functools import cache
from random import Random
from time import perf_counter

import pytest

from shardwise.assembly.describe import describe
from shardwise.base.layouts import Facts, layout_of
from shardwise.config import Data, Lora, Model, Parallel, RunConfig, Training, UserError, rules
from shardwise.config.presets import MODELS
from shardwise.lab.planner.calibration import Speeds
from shardwise.lab.planner.candidates import Question, Space, subject_of
from shardwise.lab.planner.changes import bases
from shardwise.lab.planner.cluster import cluster_of
from shardwise.lab.planner.divisions import Division, division_of, layout_name, title
from shardwise.lab.planner.estimate import Estimates
from shardwise.lab.planner.exact import USABLE, Choice, Exact, explain
from shardwise.lab.planner.peak import memory_of_rank
from shardwise.lab.planner.plan_page import heading, reasons, verdict
from shardwise.lab.planner.search import OFFLOADS, Answer, search
from shardwise.lab.planner.ties import TIE, has_room, intricacy
from shardwise.models import quantise
from tests.models.quantised_folders import NF4
from tests.planner.test_calibration import made

MOST_OF_A_STAGE = 1.01
"""The most that a bound of a pipeline is over its peak here. It takes layers of the average size,
and the stages of a hybrid may have smaller ones."""


def question(
    preset: str,
    devices: str,
    nodes: int = 1,
    rows: int = 16,
    lora: bool = True,
    length: int = 2048,
    link: str | None = None,
) -> Question:
    cfg = RunConfig(
        Model(str(MODELS / preset), dtype="bfloat16" if lora else "float32"),
        Data("any", sequence_length=length),
        Training("any", global_batch_size=rows, precision="bfloat16"),
        lora=Lora() if lora else None,
    )
    return Question(cfg, cluster_of(devices, nodes, link))


@cache
def small() -> Answer:
    return search(question("tiny-qwen3_5", "4xRTX4090"))


def test_every_choice_is_allowed_fits_and_is_in_order():
    answer = small()
    assert len(answer.choices) == 5
    seconds = [choice.time.total for choice in answer.choices[1:]]
    assert [float(f"{s:.2e}") for s in seconds] == sorted(float(f"{s:.2e}") for s in seconds)
    for choice in answer.choices:
        assert choice.fits
        assert choice.memory.total <= answer.limit_bytes
        rules.check(choice.cfg, Facts(4, answer.subject.facts))
        division = choice.candidate.division
        assert layout_name(division) == layout_of(choice.cfg.parallel)
        assert division_of(choice.cfg, 4) == division
    assert len({choice.title for choice in answer.choices}) == 5


def test_of_equal_choices_the_simplest_is_first():
    """On devices that do not wait for their hosts: layers so small would best be queued by two."""
    asked = question("tiny-qwen3_5", "4xRTX4090")
    device = asked.cluster.device
    device = replace(device, assumed={**device.assumed, "launch_seconds": 0.0})
    asked = replace(asked, cluster=replace(asked.cluster, device=device))
    assert search(asked).best.title == "ddp:4"


def test_what_the_rules_refuse_is_refused_in_their_words():
    answer = small()
    cfg = replace(answer.question.cfg, parallel=Parallel(data="zero2", tp=2))
    with pytest.raises(UserError) as refused:
        rules.check(cfg, Facts(4, answer.subject.facts))
    assert answer.refused["zero2-tp"] == str(refused.value)
    assert not any(layout.startswith("ep") for layout in answer.refused)


def test_a_simpler_layout_is_asked_with_offload_before_it_is_said_not_to_fit():
    """The best one may have offload as well."""
    answer = search(question("qwen3_5-9b", "8xRTX4090", rows=512, lora=False, length=8192))
    assert answer.simpler["fsdp2"].fits
    assert answer.simpler["fsdp2"].cfg.parallel.offload != "none"


def test_a_simpler_layout_that_is_short_of_memory_is_shown_at_its_best():
    """A schedule that keeps less needs no recomputation, which interleaved stages need."""
    answer = search(question("olmo2-7b", "4xA100-80GB", rows=128, length=14_336))
    simpler = answer.simpler["pp"]
    assert (simpler.candidate.schedule, simpler.candidate.recomputation) == ("1f1b", "none")
    for schedule in ("1f1b", "interleaved-1f1b", "zbv"):
        asked = replace(answer.question.cfg, parallel=Parallel(pp=4, schedule=schedule))
        fixed = frozenset({"parallel.pp", "parallel.schedule"})
        fitting = search(Question(asked, answer.question.cluster, fixed)).choices
        assert fitting or schedule != "1f1b"
        assert all(simpler.time.total < 1.01 * choice.time.total for choice in fitting)


def test_estimates_know_that_experts_of_ep_have_the_tokens_of_several_devices():
    asked = question("qwen3-next-80b-a3b", "8xH100-80GB", rows=64)
    estimates = Estimates(asked, subject_of(asked))
    alone, spread = (
        sum(estimates.work(division, "none"))
        for ep in (1, 8)
        for division in [Division(1, "ddp", 8, 1, 1, ep, 1, False)]
    )
    # Of 512 experts each has 40 tokens of one device, fewer than it takes to hide its weights.
    assert spread < 0.9 * alone


def test_a_fixed_key_is_kept():
    asked = question("tiny-qwen3_5", "4xRTX4090")
    parallel = replace(asked.cfg.parallel, tp=2)
    answer = search(
        replace(
            asked,
            cfg=replace(asked.cfg, parallel=parallel),
            fixed=frozenset(["parallel.tp", "training.checkpointing"]),
        )
    )
    assert {choice.candidate.division.tp for choice in answer.computed} == {2}
    assert {choice.cfg.training.checkpointing for choice in answer.computed} == {"none"}


def test_a_fixed_size_that_no_rule_allows_is_refused():
    asked = question("tiny-qwen3_5", "3xRTX4090", rows=15)
    parallel = replace(asked.cfg.parallel, tp=3)
    cfg = replace(asked.cfg, parallel=parallel)
    with pytest.raises(UserError, match="cannot be sharded evenly"):
        search(replace(asked, cfg=cfg, fixed=frozenset(["parallel.tp"])))


def test_a_wanted_layout_is_the_only_one():
    asked = question("tiny-qwen3_5", "8xRTX4090")
    answer = search(replace(asked, wanted={"hsdp": (2, 2), "tp": (), "sp": ()}))
    assert {title(choice.candidate.division) for choice in answer.computed} == {"hsdp:2x2-tp:2-sp"}


@pytest.mark.parametrize(
    ("fixed", "wanted", "message"),
    [
        ({"tp": 2}, {"ddp": ()}, "--explain ddp and parallel.tp 2 contradict each other"),
        ({"tp": 2}, {"tp": (4,)}, "--explain tp and parallel.tp 2 contradict each other"),
        (
            {"data": "fsdp2", "dp_replicate": 3},
            None,
            "dp_replicate 3 does not divide the 4 data-par",
        ),
    ],
)
def test_fixed_keys_that_leave_no_layout_are_named(fixed, wanted, message):
    asked = question("tiny-llama", "4xRTX4090")
    cfg = replace(asked.cfg, parallel=replace(asked.cfg.parallel, **fixed))
    keys = frozenset(f"parallel.{key}" for key in fixed)
    with pytest.raises(UserError, match=message):
        search(replace(asked, cfg=cfg, fixed=keys, wanted=wanted))


def test_rows_that_no_layout_divides():
    asked = question("tiny-qwen3_5", "5xRTX4090", rows=7, length=2047)
    with pytest.raises(UserError, match="no layout divides 7 rows"):
        search(asked)


def test_a_run_as_it_stands_is_explained_and_checked():
    asked = question("tiny-qwen3_5", "4xRTX4090")
    cfg = replace(asked.cfg, parallel=replace(asked.cfg.parallel, data="fsdp2", tp=2))
    choice, _ = explain(replace(asked, cfg=cfg))
    assert (choice.title, choice.cfg) == ("fsdp2:2-tp:2", cfg)
    with pytest.raises(UserError, match="data is single"):
        explain(asked)


def test_what_no_formula_knows_is_left_out_of_a_search_and_refused_where_it_is_asked_for():
    asked = question("tiny-llama", "4xRTX4090")
    training = replace(asked.cfg.training, loss="plain")
    plain = replace(asked, cfg=replace(asked.cfg, training=training))
    found = search(plain)
    assert {choice.candidate.division.tp for choice in found.computed} == {1}
    cfg = replace(plain.cfg, parallel=Parallel(data="fsdp2", tp=2))
    with pytest.raises(UserError, match="no formula knows what gathers all logits over tp"):
        explain(replace(plain, cfg=cfg))


def test_the_fullest_rank_of_a_pipeline_may_be_any():
    asked = question("tiny-llama", "4xCPU-core")
    parallel = Parallel(pp=4, schedule="gpipe", split=[0, 1, 2, 1])
    training = replace(asked.cfg.training, device="cpu")
    cfg = replace(asked.cfg, parallel=parallel, training=training)
    choice, _ = explain(replace(asked, cfg=cfg))
    run, boundaries = describe(cfg, 4), (0, 1, 2, 4, 6)
    places = [{**dict.fromkeys(run.sizes, 0), "pp": stage} for stage in range(4)]
    totals = [memory_of_rank(cfg, run, place, boundaries).total for place in places]
    assert totals.index(max(totals)) == 2
    assert choice.memory.total == totals[2]


def test_what_does_not_fit_on_one_device_is_sharded():
    answer = search(question("llama-3.1-8b", "8xRTX4090", lora=False))
    assert answer.best.memory.total <= answer.limit_bytes
    assert not answer.simpler["ddp"].fits
    assert answer.best.candidate.division.data == "fsdp2" or answer.best.cfg.parallel.tp > 1


def test_a_division_is_not_given_up_for_a_candidate_that_needs_more():
    """Bounds of memory of its candidates were equal with layers that stay gathered, or that are
    freed, and with any schedule."""
    asked = question("qwen3_5-9b", "8xRTX4090", rows=512, lora=False, length=8192)
    assert search(asked).best.fits


def test_a_stage_s_gathered_weights_count_before_it_is_computed():
    """Pipelines under fsdp2 seemed to fit and to be fast, and none of 200 of them did."""
    asked = question("llama-3.1-405b", "8xRTX4090", 2048, rows=16384, lora=False, length=8192)
    assert re.fullmatch(r"hsdp:\d+x\d+-tp:8-sp", search(asked).best.title)


def test_what_stays_on_the_host_takes_time():
    asked = question("llama-3.1-8b", "8xL40S", lora=False)
    cfg = replace(asked.cfg, parallel=Parallel(data="fsdp2"))
    runs = {
        offload: explain(replace(asked, cfg=replace(cfg, parallel=parallel)))[0]
        for offload in ("none", "optimizer", "all")
        for parallel in [replace(cfg.parallel, offload=offload)]
    }
    sizes = [choice.memory.total for choice in runs.values()]
    assert sizes == sorted(sizes, reverse=True)
    states = 16 * 8.03e9 / 8  # of a rank: weights, gradients and two moments in float32
    assert [choice.memory.host for choice in runs.values()] == pytest.approx(
        [0, states, states], rel=1e-3
    )
    assert sizes[0] - sizes[2] == pytest.approx(states, rel=0.05)
    trained = asked.cluster.host.bandwidth * runs["optimizer"].time.optimizer
    assert trained > 2 * 4 * 8.03e9 / 8  # gradients down and weights up, and then the update
    assert runs["none"].time.optimizer < runs["all"].time.optimizer
    messages = [c.time.communication + c.time.hidden_communication for c in runs.values()]
    assert messages[0] == messages[1] < messages[2]
    on_cpu = replace(asked, cluster=cluster_of("8xCPU-core"))
    times = [explain(replace(on_cpu, cfg=c.cfg))[0].time.total for c in runs.values()]
    assert len({*times}) == 1


def test_activations_that_go_to_the_host_are_planned():
    asked = question("qwen3_5-0.8b", "1xRTX4090")
    training = replace(asked.cfg.training, offload_activations=True)
    moved = replace(asked, cfg=replace(asked.cfg, training=training))
    least, most = (
        min(choice.memory.activations for choice in search(one).computed) for one in (moved, asked)
    )
    assert least < most


def test_a_quantised_folder_is_planned_as_it_is_trained_which_is_said(tmp_path):
    content = json.loads((MODELS / "qwen3_5-0.8b" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(content | {"quantization_config": NF4}))
    asked = question("qwen3_5-0.8b", "1xRTX4090")
    cfg = replace(asked.cfg, model=replace(asked.cfg.model, path=str(tmp_path)))
    said = [" ".join(heading(asked, subject_of(asked)))]
    for base in ("none", "nf4"):
        one = replace(asked, cfg=replace(cfg, model=replace(cfg.model, base=base)))
        said.append(" ".join(heading(one, subject_of(one))))
    stored = "stored as nf4, and here they take the memory of bfloat16; model.base: nf4 keeps them"
    assert [stored in text for text in said] == [False, True, False]


def test_the_best_is_shown_with_one_thing_changed():
    asked = question("tiny-llama", "2xRTX4090", lora=False)
    training = replace(asked.cfg.training, precision="float32")
    parallel = Parallel(pp=2, data="single")
    cfg = replace(asked.cfg, parallel=parallel, training=training)
    answer = search(replace(asked, cfg=cfg, fixed=frozenset(["parallel.pp", "parallel.data"])))
    by_cost = answer.changes["layers split by cost"]
    assert sum(by_cost.cfg.parallel.split) == 4
    assert answer.changes["products in bfloat16"].time.total < answer.best.time.total
    assert "products in bfloat16" not in search(asked).changes
    sharded = search(replace(asked, wanted={"fsdp2": ()}))
    assert {"offload optimizer", "offload all"} <= sharded.changes.keys()


@cache
def tight() -> Answer:
    """What fits where all layers are computed again, and not where only their operators are."""
    return search(question("olmo-hybrid-7b", "1xRTX4090", length=4096))


def test_no_more_is_computed_again_than_memory_asks_for():
    answer, full = tight(), tight().changes["checkpointing full"]
    best, memory = answer.fastest, answer.question.cluster.device.memory_bytes
    assert 0.99 * memory < best.cfg.training.budget_bytes
    assert best.memory.total <= answer.limit_bytes
    chosen = best.applied.training.checkpointing
    assert chosen.full
    assert chosen.operators
    assert best.time.total < 0.95 * full.time.total
    # No change that is shown makes the best faster than it ties with, but for other losses.
    others = [choice for name, choice in answer.changes.items() if name[:4] != "base"]
    assert all(best.order() <= choice.order() for choice in others if choice.fits)


def test_of_times_that_a_plan_cannot_tell_apart_the_one_with_room_is_first():
    answer = tight()
    best, fastest = answer.best, answer.fastest
    assert has_room(best, answer.question)
    assert not has_room(fastest, answer.question)
    assert 1 < best.time.total / fastest.time.total <= TIE
    (reason, *_) = reasons(answer)
    assert "faster, which is less than a plan may be wrong by" in reason
    tied = [c for c in answer.computed if c.fits and c.time.total <= TIE * fastest.time.total]
    assert intricacy(best, answer.question) == min(intricacy(c, answer.question) for c in tied)


def test_a_base_in_fewer_bits_shows_what_then_fits():
    changes = {name: choice for name, choice in tight().changes.items() if name[:4] == "base"}
    int8, nf4 = changes.values()
    assert [choice.cfg.model.base for choice in (tight().best, int8, nf4)] == [
        "none",
        "int8",
        "nf4",
    ]
    assert int8.fits
    assert nf4.fits
    # The smaller the base, the less is computed again.
    assert nf4.time.total < int8.time.total < 0.95 * tight().best.time.total
    assert verdict(nf4, tight()).endswith("with other losses")
    asked = tight().question
    assert not bases(replace(asked, fixed=frozenset(["model.base"])))
    assert not bases(replace(asked, cfg=replace(asked.cfg, lora=None)))


def test_the_best_layout_does_not_depend_on_how_many_are_shown():
    asked = question("llama-3.1-405b", "8xH100-80GB", 64, rows=512, lora=False, length=8192)
    one, ten = (search(asked, top).best for top in (1, 10))
    assert one.title == ten.title == "fsdp2:128-tp:4-sp"


def test_a_bound_of_ddp_knows_no_gathered_weights():
    """A run file may say `reshard_after_forward: false`, which means nothing to ddp."""
    asked = question("tiny-qwen3_5", "4xRTX4090")
    estimates = Estimates(asked, subject_of(asked))
    (candidate, *_) = (c for c in computed(asked) if c.candidate.division.data == "ddp")
    kept = candidate.candidate._replace(is_resharded=False)
    assert estimates.least_bytes(kept) == estimates.least_bytes(candidate.candidate)


def test_a_price_of_experts_knows_their_axis():
    asked = question("tiny-qwen3_5_moe", "4xH100-80GB", lora=False)
    cfg = replace(asked.cfg, parallel=Parallel(data="fsdp2", ep=2))
    sliced = replace(cfg, parallel=replace(cfg.parallel, ep=1))
    spread, complete = (explain(replace(asked, cfg=c))[0].time for c in (cfg, sliced))
    assert spread.communication > complete.communication
    # As many products; beside them a rank puts rows into the order of ranks, and of its experts.
    assert complete.layers < spread.layers < 1.08 * complete.layers


def test_a_large_cluster_is_ordered_quickly_and_bounds_are_bounds():
    asked = question("llama-3.1-8b", "8xH100-80GB", nodes=2048, rows=2048, length=8192)
    subject = subject_of(asked)
    start = perf_counter()
    space, estimates = Space(asked, subject), Estimates(asked, subject)
    divisions = sorted(space.divisions(), key=estimates.least_seconds)
    assert perf_counter() - start < 30  # 1 s on an idle core
    assert len(divisions) > 500
    for division in divisions[:: len(divisions) // 40]:
        for candidate in list(space.candidates(division))[::7]:
            bound = estimates.least_seconds(division)
            assert bound <= estimates.seconds(candidate) * (1 + 1e-9)
            states = estimates.state_bytes(division, candidate.offload)
            assert states <= estimates.least_bytes(candidate)


def test_a_strategy_that_only_a_run_file_asks_for_has_a_bound_below_its_memory():
    """fsdp1 shards as fsdp2 does: its bound once had the whole model on every rank."""
    asked = question("llama-3.1-8b", "8xH100-80GB", lora=False)
    cfg = replace(asked.cfg, parallel=Parallel(data="fsdp1"))
    asked = replace(asked, cfg=cfg, fixed=frozenset({"parallel.data"}))
    subject = subject_of(asked)
    space, estimates = Space(asked, subject), Estimates(asked, subject)
    (division,) = (d for d in space.divisions() if title(d) == "fsdp1:8")
    least, *_ = space.candidates(division)
    choice = Exact(asked, subject).of(least)
    assert choice is not None
    # Float32 weights, gradients and two states over 8 ranks, and the embedding, which is gathered.
    num_bytes = 16 * subject.counts.parameters / 8 + 4 * 128_256 * 4096
    assert estimates.state_bytes(division) == pytest.approx(num_bytes, rel=1e-3)
    assert estimates.state_bytes(division) < choice.memory.total


def test_a_search_with_a_stored_base_asks_once_for_each_size_how_its_blocks_lie(monkeypatch):
    asked_for, problem = [], quantise.problem

    def counted(hf, spec, base, num_ranks):
        asked_for.append((base, num_ranks))
        return problem(hf, spec, base, num_ranks)

    monkeypatch.setattr(quantise, "problem", counted)
    asked = question("lfm2-1.2b", "4xRTX4090")
    model = replace(asked.cfg.model, base="nf4")
    plain, stored = search(asked), search(replace(asked, cfg=replace(asked.cfg, model=model)))
    assert len(stored.computed) <= 1.5 * len(plain.computed)
    assert 0 < asked_for.count(("nf4", 2)) <= 2
    assert len(asked_for) <= 6  # tp: 1, 2, 4, and of the run itself before its search


@pytest.mark.parametrize(
    ("preset", "devices", "is_lora", "rows", "length"),
    [
        ("tiny-qwen3_5-tied", "4xRTX4090", False, 8, 2048),
        ("tiny-qwen3_moe", "4xRTX4090", False, 8, 2048),
        # Ranks of cp keep no scores on a CPU, which one process does.
        ("tiny-kimi_linear", "8xCPU-core", True, 64, 2048),
        # Weights that autocast has cast are kept once, however many rows a micro-batch has.
        ("llama-3.1-8b", "8xH100-80GB", False, 16, 128),
        # A backward frees gathered weights as it makes their gradients.
        ("nemotron-3-nano-30b-a3b", "4xRTX4090", False, 8, 2048),
    ],
)
def test_a_bound_of_memory_is_below_what_is_computed(preset, devices, is_lora, rows, length):
    """Also of a tied head, of experts that `ep` spreads, and of offload. What CUDA and NCCL take is
    in no bound, and would hide what a tiny model takes.
    """
    asked = question(preset, devices, rows=rows, lora=is_lora, length=length)
    subject = subject_of(asked)
    space, estimates = Space(asked, subject, offloads=OFFLOADS), Estimates(asked, subject)
    exact = Exact(asked, subject)
    every = [c for division in space.divisions() for c in space.candidates(division)]
    compared = 0
    for candidate in filter(space.is_allowed, Random(0).sample(every, 160)):
        choice = exact.of(candidate)
        if choice is not None:
            compared += 1
            taken = choice.memory.total - choice.memory.overhead
            most = MOST_OF_A_STAGE if candidate.division.pp > 1 else 1.0
            bound = estimates.least_bytes(candidate)
            assert bound <= most * taken, (choice.title, choice.details)
    assert compared > 60


@pytest.fixture(scope="module")
def every() -> list[Choice]:
    return computed(of_few_rows())


def of_few_rows() -> Question:
    return question("tiny-qwen3_5", "4xRTX4090", rows=4, lora=False)


@pytest.mark.parametrize("share", [1.0, 0.3, 0.02])
def test_it_finds_what_computing_every_candidate_finds(share, every):
    """On devices whose memory suffices for this share of the candidates."""
    asked = of_few_rows()
    assert len(every) > 200
    sizes = sorted(choice.memory.total for choice in every)
    limit = sizes[round(share * len(sizes)) - 1]
    device = replace(asked.cluster.device, memory_bytes=math.ceil(limit / USABLE))
    asked = replace(asked, cluster=replace(asked.cluster, device=device))
    answer = search(asked)
    fastest = min(c.time.total for c in every if c.memory.total <= answer.limit_bytes)
    assert answer.fastest.time.total == pytest.approx(fastest, rel=0.01)
    assert answer.best.time.total <= TIE * answer.fastest.time.total


def computed(asked: Question) -> list[Choice]:
    """Return every candidate that no rule refuses, each computed exactly."""
    subject = subject_of(asked)
    exact, space = Exact(asked, subject), Space(asked, subject)
    candidates = itertools.chain(*map(space.candidates, space.divisions()))
    choices = [exact.of(candidate) for candidate in filter(space.is_allowed, candidates)]
    return [choice for choice in choices if choice is not None]


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_more_devices_never_need_more_memory(name):
    """At one micro-batch size, and so at equal work of a rank."""
    totals = []
    for number in (2, 4, 8):
        asked = question("tiny-qwen3_5", f"{number}xRTX4090")
        cfg = replace(asked.cfg, parallel=replace(asked.cfg.parallel, data=name))
        totals.append(explain(replace(asked, cfg=cfg))[0].memory.total)
    assert totals == sorted(totals, reverse=True)


def test_a_layer_that_was_not_calibrated_is_named():
    prices = {"forward": [1e-6] * 4, "backward": [1e-6] * 4}
    asked = question("tiny-llama", "1xH100-80GB")
    subject = subject_of(asked)
    layer = subject.run.spec.layers[0]
    kind = f"{layer.kind}, {layer.feed_forward}, lora"
    for units, is_named in (({}, True), ({kind: prices}, False)):
        speeds = Speeds((1,), {}, units, ())
        calibration = replace(made(), speeds={1: speeds})
        here = replace(asked, cluster=replace(asked.cluster, calibration=calibration))
        assert any(kind in line for line in heading(here, subject)) == is_named
