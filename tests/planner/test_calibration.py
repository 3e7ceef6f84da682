"""The file of a calibration, and what is looked up in it."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from shardwise.config import UserError
from shardwise.lab.planner.calibration import (
    LEAST_SECONDS,
    Calibration,
    Collective,
    prices_of,
    read,
    write,
)
from shardwise.lab.planner.candidates import Question, subject_of
from shardwise.lab.planner.cluster import cluster_of
from shardwise.lab.planner.unit_work import Product
from shardwise.metrics.hardware import environment
from tests.planner.test_step_time import single, speeds


def made() -> Calibration:
    facts = environment(torch.device("cpu"))
    messages = (
        Collective("all-reduce", 4, 10**4, 1e-5),
        Collective("all-reduce", 4, 3 * 10**4, 2e-5),
    )
    # A latency of 5 us, and 2 GB/s.
    return Calibration(facts, 4, 2**30, 1e10, {1: speeds(), 4: speeds()}, messages, 0.0)


def test_what_is_written_is_read_and_used_as_here(tmp_path, monkeypatch):
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path))
    write(made(), tmp_path / "calibration.json")
    cluster = cluster_of("here")
    assert cluster.calibration == read(tmp_path / "calibration.json")
    assert cluster.num_devices == 4
    assert cluster.device.flops["float32"] == pytest.approx(1e9)


def on_a_gpu() -> Calibration:
    return replace(made(), device="cuda", dtype="bfloat16", environment={"device": "NVIDIA H200"})


def test_a_gpu_here_has_its_links_and_no_rate_in_float32(monkeypatch):
    monkeypatch.setattr("shardwise.lab.planner.cluster.calibration_here", on_a_gpu)
    here, preset = cluster_of("here"), cluster_of("4xH200")
    assert (here.inside, here.host) == (preset.inside, preset.host)
    question = Question(single(), here)
    assert question.device_type == "cuda"
    with pytest.raises(UserError, match="was calibrated in bfloat16"):
        subject_of(question)
    assert subject_of(Question(single(precision="bfloat16"), here)).counts.parameters


def test_the_file_of_a_gpu_is_refused_where_there_is_none(tmp_path):
    write(on_a_gpu(), tmp_path / "calibration.json")
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="measured on NVIDIA H200, this machine is without a"):
            read(tmp_path / "calibration.json")


def test_bus_bandwidth_is_that_of_nccl_tests():
    row = made().collectives[0]
    assert row.algorithm_bandwidth == pytest.approx(1e9)
    assert row.bus_bandwidth == pytest.approx(1.5e9)  # 2 (4 - 1) / 4
    assert replace(row, kind="all-gather").bus_bandwidth == pytest.approx(0.75e9)
    assert replace(row, kind="send").bus_bandwidth == pytest.approx(1e9)


@pytest.mark.parametrize("num_bytes", [10, 2000, 6000])
def test_a_message_is_a_latency_and_bytes_over_a_bandwidth(num_bytes):
    seconds = made().message_seconds("all-reduce", 4, num_bytes)
    assert seconds == pytest.approx(5e-6 + num_bytes / 2e9)


def test_a_message_that_was_lost_in_noise_says_nothing_of_the_others():
    messages = (*made().collectives, Collective("all-reduce", 4, 1000, LEAST_SECONDS))
    lost = replace(made(), collectives=messages)
    assert lost.message_seconds("all-reduce", 4, 2000) == pytest.approx(5e-6 + 2000 / 2e9)


def test_a_product_thinner_than_any_measured_one_takes_as_long():
    measured = replace(speeds(), sizes=(16, 4096))
    thin, least = (Product("forward", 1024, inner, 1024) for inner in (4, 16))
    assert measured.product_seconds(thin) == measured.product_seconds(least)


def test_more_ranks_than_were_measured_are_refused():
    with pytest.raises(UserError, match="calibrate --nproc 8"):
        made().message_seconds("all-reduce", 8, 1000)


def test_a_rate_between_measured_shapes_is_interpolated_in_logarithms():
    table = np.array(speeds().products["forward"])
    table[:, :, 0] *= 4  # a fourth of the rate with one column
    slower = replace(speeds(), products={"forward": table.tolist()})
    between = Product("forward", 64, 64, 64)  # half way from 1 to 4096
    rate = 2 * 64**3 / slower.product_seconds(between)
    assert rate == pytest.approx(1e9 / 2)


def test_prices_are_those_that_amounts_were_made_with_and_never_negative():
    amounts = np.array([[1, 10, 5, 0], [1, 20, 7, 0], [1, 40, 30, 0], [1, 10, 50, 0]], dtype=float)
    prices = prices_of(amounts, amounts @ np.array([3, 0.5, 0.1, 0]))
    assert prices == pytest.approx([3, 0.5, 0.1, 0])
    assert min(prices_of(amounts, -amounts[:, 1])) == 0


@pytest.mark.parametrize("damage", ["cut", "version", "machine", "part"])
def test_a_damaged_or_foreign_file_is_refused_in_one_line(tmp_path, damage):
    path = tmp_path / "calibration.json"
    write(made(), path)
    content = json.loads(path.read_text(encoding="utf-8"))
    if damage == "version":
        content["schema_version"] = 99
    elif damage == "machine":
        content["environment"]["device"] = "another processor"
    elif damage == "part":
        del content["speeds"]
    text = json.dumps(content)
    path.write_text(text[:50] if damage == "cut" else text, encoding="utf-8")
    with pytest.raises(UserError, match="run shardwise calibrate") as error:
        read(path)
    assert "\n" not in str(error.value)
