"""The seconds of a step: what each part is made of, and how layouts compare."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from shardwise.assembly.costs import with_gradients
from shardwise.assembly.describe import describe
from shardwise.config import Lora, Parallel, Preference, RunConfig
from shardwise.lab.planner.calibration import FACTORS, Calibration, Collective, Speeds
from shardwise.lab.planner.cluster import Cluster, Link, cluster_of, efficiency
from shardwise.lab.planner.communication import data_messages, step_of
from shardwise.lab.planner.memory import state_bytes
from shardwise.lab.planner.share import Shares
from shardwise.lab.planner.step_time import StepTime, _waits_for_host, time_of_step
from shardwise.lab.planner.unit_time import UnitSeconds, seconds_of_units
from shardwise.lab.planner.unit_work import work_of_units
from shardwise.lab.planner.weights import shapes_of
from shardwise.metrics.flops import is_again, unit_flops_per_token
from shardwise.models.activations import unit_moves
from shardwise.models.counts import count_model
from tests.assembly.test_costs import build, config, tiny

RATE = 1e9


def speeds(seconds_of_rest: float = 0.0) -> Speeds:
    """Products at one rate whatever their shape, and so many seconds per unit and pass beside."""
    sizes = (1, 4096)
    table = [[[2 * m * k * n / RATE for n in sizes] for k in sizes] for m in sizes]
    kinds = ("embed", "gated_delta_net, dense", "full_attention, dense", "head")
    prices = {"forward": [seconds_of_rest, 0, 0, 0], "backward": [seconds_of_rest, 0, 0, 0]}
    units = {f"{kind}, {mode}": prices for kind, mode in product(kinds, ("full", "lora"))}
    return Speeds(sizes, dict.fromkeys(("forward", "input", "weight"), table), units, [0.0, 1e-9])


def calibrated(rest: float = 0.0, jitter: float = 0.0, rest_alone: float | None = None):
    messages = tuple(
        Collective(kind, 2, num_bytes, 1e-3 + num_bytes / 1e9)
        for kind in FACTORS
        for num_bytes in (1000, 100_000_000)
    )
    busy = {1: speeds(rest if rest_alone is None else rest_alone), 2: speeds(rest)}
    made = Calibration({"device": "x"}, 2, 2**30, 1e9, busy, messages, jitter)
    return replace(cluster_of("2xCPU-core"), calibration=made)


def step_time(cfg: RunConfig, num_ranks: int, cluster) -> StepTime:
    return time_of_step(cfg, describe(cfg, num_ranks), cluster)


def single(**training) -> RunConfig:
    training = {"global_batch_size": 4, **training}
    return replace(config(tiny("qwen3_5"), None, training), parallel=Parallel())


def test_a_gpu_waits_for_a_host_that_queues_its_work_more_slowly():
    cfg = single(precision="bfloat16", checkpointing="full")

    def step(host_seconds: float) -> StepTime:
        passes = {"forward": host_seconds, "backward": 2 * host_seconds}
        of = replace(speeds(), host=dict.fromkeys(speeds().units, passes))
        made = replace(calibrated().calibration, device="cuda", speeds={1: of, 2: of})
        rates = {"bfloat16": RATE, "float16": RATE}
        device = replace(cluster_of("1xH200").device, flops=rates)
        return step_time(cfg, 1, replace(cluster_of("1xH200"), device=device, calibration=made))

    fast, slow = step(1e-9), step(1e3)
    assert fast.host < 1e-6
    # Two micro-batches: embedding, layers and head; a layer's forward runs twice.
    num_layers = len(describe(cfg, 1).spec.layers)
    queued = 1e3 * 2 * (3 + 4 * num_layers + 3)
    computed = slow.layers + slow.head + slow.recomputation
    assert slow.host == pytest.approx(queued - computed)
    assert slow.total == pytest.approx(queued + slow.optimizer)


def test_a_gpu_that_ran_ahead_waits_though_it_is_slower_in_all():
    def unit(forward: float, backward: float) -> UnitSeconds:
        return UnitSeconds(forward, backward, 0.0, 0.0, 0.0, host_forward=2.0, host_backward=1.0)

    # It waits for the forward, which it does in half the host's time, and then works a queue off.
    assert _waits_for_host([unit(1.0, 5.0)], 1) == pytest.approx(1.0)
    # The host queues the second forward meanwhile.
    assert _waits_for_host([unit(1.0, 5.0)], 2) == pytest.approx(1.0)
    assert _waits_for_host([unit(1.0, 5.0)], 1000) == pytest.approx(1.0)
    assert _waits_for_host([unit(1.0, 1.5)], 1000) == pytest.approx(1000 * 0.5, rel=0.01)


def test_autocast_costs_a_calibrated_gpu_the_bytes_that_it_moves():
    def step(dtype: str) -> StepTime:
        cfg = single(precision="bfloat16")
        cfg = replace(cfg, model=replace(cfg.model, dtype=dtype))
        of = speeds()
        prices = {"forward": [0, 1e-6, 0, 0], "backward": [0, 1e-6, 0, 0]}
        of = replace(of, units=dict.fromkeys(of.units, prices))
        made = replace(calibrated().calibration, device="cuda", speeds={1: of, 2: of})
        return step_time(cfg, 1, replace(cluster_of("1xH200"), calibration=made))

    cfg = single(precision="bfloat16")
    moved = []
    for dtype in ("bfloat16", "float32"):
        cfg = replace(cfg, model=replace(cfg.model, dtype=dtype))
        run = describe(cfg, 1)
        on_gpu = replace(cfg, training=replace(cfg.training, device="cuda"))
        units = [unit_moves(on_gpu, run.hf, run.spec, i) for i in range(len(run.spec.layers) + 1)]
        moved.append(sum(sum(unit.forward) + sum(unit.backward) for unit in units))
    layers = step("float32").layers - step("bfloat16").layers
    assert layers == pytest.approx(2 * (moved[1] - moved[0]) * 1e-6)
    # 4 bytes of a weight are read and 2 written, and the other way round of its gradient.
    modules = [run.hf.get_submodule(layer.name) for layer in run.spec.layers]
    weights = [p for module in modules for p in module.parameters() if p.ndim == 2]
    assert moved[1] - moved[0] > 2 * 6 * sum(p.numel() for p in weights)


def test_a_step_is_its_products_by_shape_and_the_rest_of_its_units():
    cfg = single()
    works = work_of_units(cfg, *build(cfg))
    flops = [
        sum(2 * p.rows * p.inner * p.columns * p.times for p in w.forward + w.backward)
        for w in works
    ]
    result, with_rest = (step_time(cfg, 1, calibrated(rest)) for rest in (0.0, 0.5))
    assert result.layers == pytest.approx(2 * sum(flops[:-1]) / RATE)
    assert result.head == pytest.approx(2 * flops[-1] / RATE)
    assert with_rest.head - result.head == pytest.approx(2 * 2 * 0.5)
    assert result.optimizer > 0
    assert (result.communication, result.bubble, result.recomputation) == (0.0, 0.0, 0.0)
    parts = (result.layers, result.head, result.optimizer)
    assert result.total == pytest.approx(sum(parts))


def test_recomputing_costs_the_forwards_of_the_layers():
    plain, again = (
        step_time(single(checkpointing=mode), 1, calibrated(0.5)) for mode in ("none", "full")
    )
    assert again.layers == plain.layers
    num_layers = 4
    assert again.recomputation > 2 * num_layers * 0.5


@pytest.mark.parametrize("mode", ["lora", "full"])
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_a_step_recomputes_the_flops_that_are_counted(family, mode):
    """Products of `operators` are kept; attention's output is, and a recurrence is run again."""
    lora = Lora(targets="all-linear") if mode == "lora" else None
    for way, kept in (("none", ()), ("operators", ("full_attention",)), ("full", ())):
        training = {"global_batch_size": 4, "checkpointing": way}
        cfg = replace(config(tiny(family), None, training), lora=lora, parallel=Parallel())
        hf, spec = build(cfg)
        length = cfg.data.sequence_length
        tokens = cfg.training.micro_batch_size * length
        units = with_gradients(count_model(hf, spec), "1f1b").units
        for unit, work in zip(units, work_of_units(cfg, hf, spec), strict=True):
            flops = sum(2 * p.rows * p.inner * p.columns * p.times for p in work.again)
            a_again = sum(2 * w.active * w.numel for w in unit.weights if is_again(w))
            convolutions = sum(2 * w.numel for w in unit.weights if w.by_elements) * (way != "none")
            cores = sum(core.per_token(length)[0] for core in unit.core_flops)
            is_layer = unit.layer is not None
            runs_again = is_layer and way != "none" and unit.kind not in kept
            assert work.rest_again.core_flops == pytest.approx(tokens * cores * runs_again)
            counted = unit_flops_per_token(unit, length, way).recomputed
            counted -= cores * (is_layer and way == "full") + convolutions * is_layer + a_again
            assert flops == pytest.approx(tokens * counted)


@pytest.mark.parametrize(
    ("parallel", "share"),
    [
        (Parallel(data="ddp"), 1),
        (Parallel(data="zero2"), 1 / 2),
        (Parallel(data="fsdp2"), 1 / 2),
        (Parallel(data="fsdp2", pp=2, schedule="1f1b"), 1),  # reduced after all of them
    ],
)
def test_a_rank_adds_up_the_gradients_that_it_keeps(parallel, share):
    """Each micro-batch but the first adds its own, in the dtype of weights, to the sum: of two a
    half, and of four three quarters."""
    cluster = cluster_of("4xH100-80GB")
    num_ranks = 2 * parallel.pp
    of = []
    for number in (2, 4):  # micro-batches of a rank
        cfg = single(global_batch_size=4 * number)
        cfg = replace(cfg, parallel=parallel)
        units = seconds_of_units(cfg, describe(cfg, num_ranks), cluster, num_ranks)
        of.append(sum(unit.elementwise for unit in units[1:-1]))
    trained = sum(unit.trainable_parameters for unit in count_model(*build(cfg)).units[1:-1])
    bandwidth = cluster.device.memory_bandwidth * efficiency("memory")
    assert of[1] - of[0] == pytest.approx(3 * 4 * trained * share / 4 / bandwidth)


@pytest.mark.parametrize("lora", [None, Lora(targets="all-linear")], ids=["full", "lora"])
def test_experts_of_other_ranks_add_up_no_gradients_here(lora):
    cfg = replace(config(tiny("qwen3_5_moe"), None, {"global_batch_size": 8}), lora=lora)
    whole, spread = (
        work_of_units(cfg, run.hf, run.spec, shapes_of(cfg, run))
        for cfg in (replace(cfg, parallel=Parallel(data="ddp", ep=ep)) for ep in (1, 2))
        for run in [describe(cfg, 2)]
    )
    of_experts = [
        weight.numel
        for unit in count_model(*build(cfg)).units
        for weight in unit.weights
        if weight.trainable and ".experts." in weight.name
    ]
    all_of_it = sum(work.rest_backward.trained for work in whole[1:-1])
    of_a_rank = sum(work.rest_backward.trained for work in spread[1:-1])
    assert all_of_it - of_a_rank == sum(of_experts) / 2 > 0


def test_a_rank_adds_up_as_much_of_its_own_experts_as_of_shards_of_all():
    cluster = cluster_of("4xH100-80GB")
    added = []
    for ep in (1, 2, 4):
        of = []
        for number in (2, 4):  # micro-batches of a rank
            cfg = config(tiny("qwen3_5_moe"), None, {"global_batch_size": 8 * number})
            cfg = replace(cfg, parallel=Parallel(data="fsdp2", ep=ep))
            units = seconds_of_units(cfg, describe(cfg, 4), cluster, 4)
            of.append(sum(unit.elementwise for unit in units))
        added.append(of[1] - of[0])
    assert added == pytest.approx([added[0]] * 3)


def test_adapters_train_less_than_all_weights():
    full = single()
    adapters = replace(full, lora=Lora(targets="auto"))
    of_full, of_adapters = (step_time(cfg, 1, calibrated()) for cfg in (full, adapters))
    assert of_adapters.layers < of_full.layers
    assert of_adapters.optimizer < of_full.optimizer / 5


@pytest.mark.parametrize("data", ["ddp", "zero1", "fsdp2"])
def test_on_a_cpu_every_message_is_waited_for_and_on_a_gpu_some_hide(data):
    cfg = replace(single(), parallel=Parallel(data=data))
    on_cpu = step_time(cfg, 2, calibrated())
    assert on_cpu.hidden_communication == 0.0
    assert on_cpu.communication > 1e-3
    on_gpu = step_time(cfg, 2, cluster_of("2xH100-80GB"))
    assert (on_gpu.hidden_communication > 0) == (data != "zero1")


def test_what_follows_the_last_backward_does_not_hide():
    """Gradients of ddp beside ep, and those of fsdp2 in a pipeline, are summed there; sums over
    replicas hide behind the backward of the last micro-batch at most.
    """
    cluster = cluster_of("4xH100-80GB")
    training = {"global_batch_size": 8}
    experts, hybrid = (config(tiny(name), None, training) for name in ("qwen3_5_moe", "qwen3_5"))
    runs = (
        replace(experts, parallel=Parallel(data="ddp", ep=2)),
        replace(hybrid, parallel=Parallel(data="fsdp2", pp=2, schedule="1f1b")),
        replace(hybrid, parallel=Parallel(data="fsdp2", dp_replicate=2)),
    )
    sent = []
    for cfg in runs:
        run = describe(cfg, 4)
        step = step_of(cfg, run, Shares(cfg, run).of(0))
        sent.append({(message.kind, message.when) for message in data_messages(step)})
    assert sent == [
        {("all-reduce", "waited")},
        {("all-gather", "layers"), ("reduce-scatter", "waited")},
        {("all-gather", "layers"), ("reduce-scatter", "layers"), ("all-reduce", "last backward")},
    ]
    slow = replace(cluster, between=Link(1e3, 0.0), per_node=2, nodes=2)
    long = replace(runs[2], data=replace(runs[2].data, sequence_length=8_192))
    step = step_time(long, 4, slow)
    assert 0 < step.hidden_communication < step.layers + step.head


def test_stages_wait_for_what_others_send_within_their_layers():
    def step(cluster: Cluster) -> StepTime:
        cfg = config(tiny("qwen3_5"), None, {"global_batch_size": 8}, tp=2)
        return step_time(cfg, 4, cluster)

    cluster = cluster_of("4xH100-80GB")
    slow = replace(cluster, inside=Link(1e6, 0.0))
    m, p = 4, 2
    of_links = step(slow).communication - step(cluster).communication
    assert step(slow).bubble > 0.9 * of_links * (p - 1) / m


def test_what_fsdp_gathers_hides_on_ranks_that_share_rows_too():
    """Its ranks are then those of `cp`, whose own messages do not hide."""
    cluster = cluster_of("2xH100-80GB")
    cfg = replace(single(), parallel=Parallel(cp=2))
    alone = step_time(cfg, 2, cluster)
    sharded = step_time(replace(cfg, parallel=Parallel(data="fsdp2", cp=2)), 2, cluster)
    assert alone.hidden_communication == 0.0
    assert sharded.hidden_communication > 0.0


@pytest.mark.parametrize("cluster", [calibrated(), cluster_of("1xH100-80GB")], ids=["here", "GPU"])
def test_an_update_takes_what_its_optimizer_moves_and_multiplies(cluster):
    def seconds(name: str) -> float:
        cfg = single()
        return step_time(
            replace(cfg, optimizer=replace(cfg.optimizer, name=name)), 1, cluster
        ).optimizer

    assert seconds("sgd") < seconds("adamw") < seconds("muon")


def test_a_norm_reads_gradients_and_clipping_reads_and_writes_them():
    def seconds(limit: float | None) -> float:
        cfg = single()
        cfg = replace(cfg, optimizer=replace(cfg.optimizer, max_grad_norm=limit))
        return step_time(cfg, 1, cluster_of("1xH100-80GB")).optimizer

    assert seconds(None) == pytest.approx(8 / 10 * seconds(1.0))  # beside AdamW's 7


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_ranks_wait_for_one_another_the_longer_they_compute(num_ranks):
    cfg = replace(single(), parallel=Parallel(data="ddp" if num_ranks == 2 else "single"))
    calm, jittery = (step_time(cfg, num_ranks, calibrated(jitter=x)) for x in (0.0, 0.1))
    waits = 0.1 * (calm.layers + calm.head) if num_ranks == 2 else 0.0
    assert jittery.communication - calm.communication == pytest.approx(waits)


def test_tensor_parallel_ranks_share_products_and_wait_for_messages():
    alone = step_time(single(), 1, calibrated())
    shared = step_time(replace(single(), parallel=Parallel(tp=2)), 2, calibrated())
    assert shared.communication > 0
    assert 0.4 * alone.layers < shared.layers < 0.8 * alone.layers


def test_a_pipeline_s_step_is_the_simulator_s():
    cfg = config(tiny("qwen3_5"), None, {"global_batch_size": 8})
    alone = step_time(replace(cfg, parallel=Parallel()), 1, calibrated(0.1))
    halves = step_time(cfg, 2, calibrated(0.1))
    assert halves.bubble > 0
    work = halves.layers + halves.head
    assert work < alone.layers + alone.head < 2 * (work + halves.bubble)


def test_only_gradients_of_weights_fill_a_bubble():
    """Of whole linears they take as long as those of inputs; of adapters of rank 1 next to none."""
    bubbles = {}
    for mode, adapters in (("full", None), ("lora", Lora(r=1))):
        for schedule, virtual in (("interleaved-1f1b", 2), ("zbv", None)):
            pipeline = Parallel(pp=2, schedule=schedule, virtual_stages=virtual, split="uniform")
            cfg = replace(config(tiny("llama"), adapters, {"global_batch_size": 16}))
            cfg = replace(cfg, parallel=pipeline)
            bubbles[mode, schedule] = step_time(cfg, 2, calibrated()).bubble
    left = {
        mode: bubbles[mode, "zbv"] / bubbles[mode, "interleaved-1f1b"] for mode in ("full", "lora")
    }
    assert left["full"] < 0.7 * left["lora"], bubbles


def test_a_rank_computes_the_faster_the_longer_others_wait():
    def slowdown(layers: list[int]) -> float:
        """Return how much longer the busiest rank computes than alone."""
        training = {"global_batch_size": 8}
        cfg = config(tiny("qwen3_5"), None, training, split=layers)
        works = [
            step_time(cfg, 2, cluster)
            for cluster in (calibrated(2.0, rest_alone=1.0), calibrated(1.0))
        ]
        together, alone = (work.layers + work.head for work in works)
        return together / alone

    assert 1.15 < slowdown([4, 0]) < 1.2  # embedding and layers are 5 units, the head is 1
    assert 1.6 < slowdown([2, 2]) < 1.9


@pytest.mark.parametrize("data", ["ddp", "fsdp2"])
def test_tokens_that_go_to_experts_on_other_ranks_take_time(data):
    cfg = config(tiny("qwen3_5_moe"), None, {"global_batch_size": 8})
    alone, spread = (
        step_time(replace(cfg, parallel=Parallel(data=data, ep=ep)), 4, cluster_of("4xH100-80GB"))
        for ep in (1, 2)
    )
    assert spread.communication + spread.hidden_communication > alone.communication


def test_sums_over_nodes_use_the_ports_of_all_ranks_of_a_node_that_take_part():
    cfg = replace(single(global_batch_size=8), parallel=Parallel(data="ddp"))
    pairs, alone = (
        step_time(cfg, 4, cluster_of(f"{per_node}xH100-80GB", 4 // per_node, "100Gbps"))
        for per_node in (2, 1)
    )
    assert pairs.communication < alone.communication


def test_a_preset_is_a_roofline_of_its_datasheet():
    cfg = single()
    slow, fast = (step_time(cfg, 1, cluster_of(name)) for name in ("CPU-core", "H100-80GB"))
    assert slow.layers > 20 * fast.layers > 0


def test_between_measured_sizes_a_rate_is_interpolated_and_beyond_them_it_is_the_nearest():
    table = np.array(speeds().products["forward"]) / np.array([1, 4])
    slower_if_narrow = replace(speeds(), products={"forward": table.tolist()})
    times = [
        slower_if_narrow.product_seconds(work)
        for work in work_of_units(single(), *build(single()))[1].forward
    ]
    assert all(seconds > 0 for seconds in times)


def test_preferences_take_forwards_and_a_copy_to_start_from():
    """SFT, and in order: dpo and kto whose reference computes in each step, and before the first.

    Kto evaluates two kinds of rows by the reference, and one by the model itself.
    """
    cluster = cluster_of("1xH100-80GB")
    plain = single()
    forwards, copies = [], []
    for objective, when in product(("dpo", "kto"), ("step", "precompute")):
        training = replace(plain.training, objective=objective)
        keys = Preference(reference_logprobs=when)
        data = replace(plain.data, format="preference")
        cfg = replace(plain, data=data, training=training, preference=keys)
        step, of_plain = step_time(cfg, 1, cluster), step_time(plain, 1, cluster)
        assert step.layers == of_plain.layers
        forwards.append(step.reference)
        run = describe(plain, 1)
        share, none = Shares(plain, run).of(0), dict.fromkeys(run.sizes, 0)
        held, before = (state_bytes(c, share, run.sizes, none) for c in (cfg, plain))
        copies.append(held["weights"] / before["weights"])
        assert held["optimizer"] == before["optimizer"]
    assert copies == [2.0, 1.0, 2.0, 1.0]
    one = forwards[0]
    assert forwards == pytest.approx([one, 0.0, 3 * one, one])
    assert 0 < one < step_time(plain, 1, cluster).total / 2
