"""Measured costs: what is measured, what of it is kept, and what a run makes of it."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwise.assembly import profiles as profile_store
from shardwise.assembly.build import build as build_run
from shardwise.assembly.costs import costs_of
from shardwise.assembly.describe import describe
from shardwise.assembly.profiles import Measured, Profile, needs_gradient, path_of, unit_keys
from shardwise.base.interfaces import Mesh
from shardwise.base.schedule.costs import COUNTED, CostSource
from shardwise.base.schedule.orders import Pipeline
from shardwise.base.schedule.split import predict
from shardwise.config import Lora, RunConfig, UserError
from shardwise.config.keys import all_keys, facts_of
from shardwise.lab.planner import profile
from shardwise.lab.planner.bench import Bench
from shardwise.models.counts import count_model
from shardwise.parallel.mesh import build_mesh
from tests.assembly.test_costs import LENGTH, build, config, tiny
from tests.distributed import PATIENCE, run_ranks

HIDDEN = 4 * 2 * LENGTH * 64  # bytes of two rows of hidden states in float32


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch):
    monkeypatch.setattr(profile, "FEWEST", 3)
    monkeypatch.setattr(profile, "MOST", 3)


def measured(cfg: RunConfig) -> tuple[Profile, tuple[str, ...]]:
    """On this rank, with others if there are."""
    alike = replace(cfg, parallel=replace(cfg.parallel, pp=1, schedule="1f1b", data="ddp"))
    mesh: Mesh = build_mesh(alike, torch.device("cpu"))
    facts = describe(cfg, cfg.parallel.pp)
    keys = unit_keys(facts.hf, facts.spec, cfg.parallel.schedule)
    return profile.profile_units(cfg, mesh, facts, keys), keys


def measured_undisturbed(num_ranks: int, cfg: RunConfig) -> list[tuple[Profile, tuple[str, ...]]]:
    """Measure until another process has not made what is around a layer longer than the layer.

    So few rounds of so small layers can be disturbed; each time they are not.
    """
    for _ in range(10):
        results = run_ranks(num_ranks, measured, cfg)
        measured_once, keys = results[0]
        if all(measured_once.units[key].forward_seconds > 0 for key in keys[1:-1]):
            return results
    pytest.fail(f"{measured_once.units}")


def test_two_ranks_measure_each_kind_of_unit_once():
    cfg = config(tiny("qwen3_5"))
    (result, keys), (other, _) = measured_undisturbed(2, cfg)
    assert result == other
    assert list(result.units) == list(dict.fromkeys(keys))  # bottom up
    assert [key.rpartition(",")[0] for key in result.units] == [
        "embedding",
        "gated_delta_net, dense",
        "full_attention, dense",
        "head",
    ]
    embedding, recurrent, attention, head = result.units.values()
    assert (embedding.forward_seconds, embedding.activation_bytes) == (0.0, 0)
    assert embedding.backward_seconds > 0  # its weight is trained
    for layer in (recurrent, attention):
        for seconds in (
            layer.forward_seconds,
            layer.backward_seconds,
            layer.input_seconds,
            layer.weight_seconds,
        ):
            assert 0 < seconds < PATIENCE
        assert layer.activation_bytes > HIDDEN
    # Its input, the norm's and the hidden states' gradient; and the head's gradient, which the loss
    # keeps.
    assert 2 * HIDDEN + 4 * 64 * 256 <= head.activation_bytes < 5 * HIDDEN + 4 * 64 * 256
    assert 0 < result.stage_seconds < PATIENCE
    assert 0 < result.output_seconds < PATIENCE
    assert (result.num_processes, result.rounds) == (2, 3)


def test_what_needs_no_backward_has_none_and_a_layer_computed_again_keeps_its_input():
    adapters = Lora(targets=["model.layers.2.self_attn.q_proj"])
    cfg = config(tiny("llama"), adapters, {"checkpointing": "full"})
    ((result, keys),) = measured_undisturbed(1, cfg)
    frozen, lowest, above = (result.units[keys[place]] for place in (1, 3, 4))
    assert keys[1] == keys[2]
    assert (frozen.backward_seconds, frozen.activation_bytes) == (0.0, 0)
    assert lowest.backward_seconds > 0
    # Its input needs no gradient.
    assert (lowest.input_seconds, lowest.weight_seconds) == (0.0, 0.0)
    assert above.input_seconds > 0
    # Beside the input: where each token stands, and so on; nothing of the size of a hidden state.
    assert HIDDEN <= above.activation_bytes < 1.7 * HIDDEN
    assert result.output_seconds == 0.0


def test_backwards_of_compiled_layers_are_measured_whole():
    """Their code cannot run in halves, and no schedule asks for it."""
    cfg = config(tiny("llama"), training={"compile": "aot_eager"})
    ((result, keys),) = run_ranks(1, measured, cfg)
    layer = result.units[keys[1]]
    assert layer.backward_seconds > 0
    assert (layer.input_seconds, layer.weight_seconds) == (0.0, 0.0)


def test_a_head_without_the_chunked_loss_has_its_products_in_the_backward():
    cfg = config(tiny("llama"), training={"loss": "plain"})
    # One of three rounds may be disturbed by another process, but not always the same.
    for _ in range(10):
        ((result, keys),) = run_ranks(1, measured, cfg)
        head = result.units[keys[-1]]
        if head.backward_seconds > 0.3 * (head.input_seconds + head.weight_seconds):
            break
    else:
        pytest.fail(f"{head.backward_seconds} s, of {head.input_seconds} and {head.weight_seconds}")
    assert head.activation_bytes > 4 * 2 * LENGTH * 256  # probabilities


class Clocked:
    """A stage whose forward takes seconds of its own, and some that depend on what ran before; the
    second one of all is disturbed.
    """

    after = "a backward"
    clock = 0.0
    is_last = False

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.is_first = seconds == 0
        self.disturbed = iter([0.0, 100.0])

    def forward_maybe_with_nosync(
        self, carried: torch.Tensor, number: torch.Tensor
    ) -> torch.Tensor:
        Clocked.clock += {"a backward": 4.0, "a layer": 2.0, "nothing but what is around": 1.0}[
            self.after
        ] + self.seconds
        Clocked.clock += next(self.disturbed, 0.0)
        Clocked.after = "a layer" if self.seconds else "nothing but what is around"
        return carried


class ClockedWatch:
    @contextmanager
    def taking(self, into: list[float]) -> Generator[None]:
        start = Clocked.clock
        yield
        into.append(Clocked.clock - start)

    def wait(self) -> None:
        pass


class ClockedBench(Bench):
    def backward(
        self, place: int, carried: torch.Tensor, output: torch.Tensor, halves: bool
    ) -> None:
        Clocked.after = "a backward"


def clocked_forwards() -> tuple[float, list[float]]:
    stages = [Clocked(0.0), Clocked(5.0), Clocked(8.0)]
    bench = ClockedBench(stages, [False] * 3, True, [], torch.zeros(1), 1.0, ClockedWatch())
    units = bench.units(4, together=True)
    return bench.around_seconds, [unit.forward_seconds for unit in units]


def test_what_is_around_a_unit_is_taken_off_as_warm_as_it_was_there():
    # Each unit's forward has 1 s in it that is not its own; a stage in a run, which comes after a
    # backward, 4 s.
    assert run_ranks(2, clocked_forwards) == [(4.0, [1.0, 5.0, 8.0])] * 2


def test_which_inputs_need_a_gradient():
    adapters = Lora(targets=["model.layers.2.self_attn.q_proj"])
    hf, spec = build(config(tiny("llama"), adapters))
    assert needs_gradient(hf, spec, "1f1b") == [False, False, False, False, True, True]
    assert needs_gradient(hf, spec, "zbv") == [False, True, True, True, True, True]
    plain, zero_bubble = unit_keys(hf, spec, "1f1b"), unit_keys(hf, spec, "zbv")
    assert plain[1] == plain[2] != plain[3] != plain[4]
    assert plain[1] != zero_bubble[1] == zero_bubble[2] == zero_bubble[4] != zero_bubble[3]


def made_up(keys: tuple[str, ...]) -> Profile:
    unit = Measured(2.0, 5.0, 4.0, 3.0, 1000)
    return Profile(dict.fromkeys(keys, unit), 0.5, 0.25, num_processes=2, spread=0.01, rounds=9)


def test_a_run_finds_its_profile_and_another_does_not(tmp_path, monkeypatch):
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path))
    cfg = config(tiny("llama"), Lora())
    hf, spec = build(cfg)
    counts = count_model(hf, spec)
    keys = unit_keys(hf, spec, "1f1b")
    counted, source = costs_of(cfg, hf, spec, counts, 2)
    assert source == COUNTED
    path = path_of(cfg, hf, keys, 2)
    profile_store.write(made_up(keys), path)
    units, source = costs_of(cfg, hf, spec, counts, 2)
    assert source == CostSource(path.stem, num_processes=2)
    layer = units[2]
    assert (layer.forward_seconds, layer.input_seconds, layer.weight_seconds) == (2.0, 4.0, 1.0)
    assert layer.split_seconds == 2.0  # 4 + 3 apart, 5 together
    assert (layer.activation_bytes, layer.state_bytes) == (1000, counted[2].state_bytes)
    # Two stages with 0.5 s each around their three units, 0.25 s from one to the other, forwards of
    # 2 s.
    timeline = predict(units, (0, 3, 6), Pipeline("1f1b", 2, 2)).timeline
    (first,) = (
        event
        for event in timeline.events
        if (event.rank, event.microbatch, event.kind) == (1, 0, "F")
    )
    assert (first.start, first.end) == (6.75, 13.25)
    longer = replace(cfg, data=replace(cfg.data, sequence_length=25))
    assert costs_of(longer, hf, spec, counts, 2)[1] == COUNTED
    adapters = config(tiny("llama"), Lora(r=4))
    hf, spec = build(adapters)
    assert costs_of(adapters, hf, spec, None, 2)[1] == COUNTED


TIMED: dict[str, Any] = {
    "model.base": "int8",
    "model.router_aux_loss_coef": 0.01,
    "model.expert_capacity": 1.5,
    "model.trust_remote_code": True,  # another class may have the same config
    "model.attention": "math",
    "lora.dropout": 0.1,
    "lora.experts": "shared",
    "lora.kernel": "peft",
    "lora.dora": True,
    "data.sequence_length": 25,
    "data.packing": "isolated",
    "training.micro_batch_size": 1,
    "training.precision": "bfloat16",
    "training.cast": "weights",
    "training.accumulation": "float32",
    "training.checkpointing": "full",
    "training.compile": "aot_eager",
    "training.offload_activations": True,
    "training.loss": "plain",
    "training.matmul": "fp8_tensorwise",
}
"""Keys of the run file that a profile depends on by themselves, each with another value."""


def test_every_key_is_in_a_profiles_name_unless_its_facts_say_that_it_changes_no_time():
    """A new key is in the name until somebody finds here that it changes no time."""
    assert {key for key in all_keys() if facts_of(key).timed} == TIMED.keys()


def changed(cfg: RunConfig, key: str, value: Any) -> RunConfig:
    section, _, name = key.partition(".")
    changes: dict[str, Any] = {section: replace(getattr(cfg, section), **{name: value})}
    return replace(cfg, **changes)


def test_each_of_these_keys_gives_another_profile(tmp_path, monkeypatch):
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path))
    cfg = config(tiny("llama"), Lora())
    hf, spec = build(cfg)
    keys = unit_keys(hf, spec, "1f1b")
    unchanged = path_of(cfg, hf, keys, 2)
    paths = {path_of(changed(cfg, key, value), hf, keys, 2) for key, value in TIMED.items()}
    assert len(paths | {unchanged}) == 1 + len(TIMED)
    chats, packed = changed(cfg, "data.format", "chat"), changed(cfg, "data.packing", "documents")
    assert path_of(chats, hf, keys, 2) == path_of(packed, hf, keys, 2) != unchanged
    for key, value in (("training.seed", 1), ("lora.alpha", 1.0), ("parallel.split", "uniform")):
        assert path_of(changed(cfg, key, value), hf, keys, 2) == unchanged
    monkeypatch.setattr(profile_store, "version", lambda name: "another")
    assert path_of(cfg, hf, keys, 2) not in paths | {unchanged}


def test_a_profile_is_for_as_many_busy_processes_as_measured_it(tmp_path, monkeypatch):
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path))
    monkeypatch.setattr(profile_store, "num_cores", lambda: 4)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # so the number of threads does not tell them apart
    cfg = config(tiny("llama"))
    hf, spec = build(cfg)
    keys = unit_keys(hf, spec, "1f1b")
    files = [path_of(cfg, hf, keys, processes) for processes in (2, 3, 4, 8)]
    assert len(set(files)) == 3
    assert files[2] == files[3]  # of 8, only 4 are busy at a time
    profile_store.write(made_up(keys), files[0])
    sources = [costs_of(cfg, hf, spec, None, processes)[1] for processes in (2, 3)]
    assert sources == [CostSource(files[0].stem, num_processes=2), COUNTED]


def cut_by(cfg: RunConfig) -> int:
    """Return the processes of the profile that cuts a run, of two profiles in the cache."""
    hf, spec = build(cfg)
    keys = unit_keys(hf, spec, "1f1b")
    if dist.get_rank() == 0:
        for processes in (2, 3):
            profile_store.write(
                replace(made_up(keys), num_processes=processes), path_of(cfg, hf, keys, processes)
            )
    cut = build_run(cfg, build_mesh(cfg, torch.device("cpu"))).cut
    assert cut is not None
    return cut.source.num_processes


def test_a_run_takes_the_profile_of_its_own_number_of_processes(tmp_path, monkeypatch):
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path))
    monkeypatch.setattr(profile_store, "num_cores", lambda: 4)
    for pp in (2, 3):
        assert run_ranks(pp, cut_by, config(tiny("llama"), pp=pp)) == [pp] * pp


@pytest.mark.parametrize(
    "content", ["", "[]", '{"schema_version": 0}', '{"schema_version": 3, "units": {"a": {}}}']
)
def test_a_damaged_profile_is_refused(content, tmp_path):
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(UserError, match=r"a\.json: .* shardwise split --profile"):
        profile_store.read(tmp_path / "a.json")


def test_a_profile_of_before_the_slowdown_went_is_read(tmp_path):
    path = tmp_path / "a.json"
    profile_store.write(made_up(("a",)), path)
    path.write_text(path.read_text().replace('"spread"', '"slowdown": 1.1, "spread"'))
    assert profile_store.read(path) == made_up(("a",))
