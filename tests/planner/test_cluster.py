"""Clusters by name."""

from __future__ import annotations

import pytest
import torch

from shardwise.config import UserError
from shardwise.lab.planner.cluster import BASE_LATENCY, _table, cluster_of

DEVICES = [*_table()["devices"]]


def test_a_name_gives_the_datasheet_s_figures():
    cluster = cluster_of("8xH100-80GB", 2, "200Gbps")
    assert cluster.num_devices == 16
    assert cluster.device.flops["bfloat16"] == pytest.approx(989.4e12)
    assert cluster.device.memory_bandwidth == 3.35e12
    assert "datasheet" in cluster.device.source
    assert cluster.link_of(8) == cluster.inside
    assert cluster.link_of(16) == cluster.between
    assert cluster_of("6xH100-80GB", 2).link_of(4).latency == cluster.between.latency
    assert cluster_of("6xH100-80GB").link_of(4) == cluster.inside
    assert cluster.between.bandwidth == pytest.approx(0.8 * 200e9 / 8)


def test_ranks_of_a_node_send_to_others_through_a_port_each_but_no_faster_than_within():
    cluster = cluster_of("8xH100-80GB", 2, "200Gbps")
    assert cluster.link_of(16, ports=4).bandwidth == 4 * cluster.between.bandwidth
    fast = cluster_of("8xRTX4090", 2, "400Gbps")
    assert fast.link_of(16, ports=8).bandwidth == fast.inside.bandwidth
    assert fast.link_of(16, ports=8).latency == fast.between.latency


def test_a_ring_takes_as_many_steps_as_it_has_links():
    """A gather among 16 ranks of two nodes: 14 steps within nodes and one between them."""
    cluster = cluster_of("8xH100-80GB", 2, "400Gbps")
    within, between = cluster.inside.latency, cluster.between.latency
    assert cluster.latency("all-gather", 2, 2) == pytest.approx(BASE_LATENCY + within)
    assert cluster.latency("all-gather of weights", 16, 16) == pytest.approx(
        BASE_LATENCY + 14 * within + between
    )
    # One rank of each node; a sum goes up and down a tree where that is shorter than the ring.
    assert cluster.latency("reduce-scatter", 2, 16) == pytest.approx(BASE_LATENCY + between)
    assert cluster.latency("all-reduce", 16, 16) == pytest.approx(
        BASE_LATENCY + 2 * (7 * within + between)
    )
    many = cluster_of("8xH100-80GB", 1024, "400Gbps")
    assert many.latency("all-gather", 8192, 8192) > 1000 * many.latency("all-gather", 8, 8) / 10
    assert many.latency("all-reduce", 8192, 8192) < many.latency("all-gather", 8192, 8192) / 20
    assert many.latency("send", 2, 8192) == pytest.approx(BASE_LATENCY + between)


@pytest.mark.parametrize("name", DEVICES)
def test_every_device_has_all_figures(name):
    cluster = cluster_of(name)
    assert cluster.num_devices == 1
    assert cluster.device.memory_bytes > 2**30
    assert cluster.device.flops["float32"] > 0
    assert cluster.device.source


def test_a_link_of_another_kind_joins_the_devices_of_a_node():
    assert cluster_of("4xL40S", 1, "PCIe5").inside.bandwidth == pytest.approx(0.8 * 64e9)


def test_names_of_devices_may_be_in_small_letters():
    assert cluster_of("8xh200") == cluster_of("8xH200")


@pytest.mark.parametrize(
    ("name", "nodes", "link", "way_out"),
    [
        ("8xH1000", 1, None, "8xH100-80GB"),
        ("0xH200", 1, None, "at least one device"),
        ("8xh2", 1, None, r"did you mean H200 or H20\?"),
        ("8xA100", 1, None, r"did you mean A100-40GB or A100-80GB\?"),
        ("8xRTX6090", 1, None, r"did you mean RTX.090\?"),
        ("H200", 0, None, "at least 1"),
        ("H200", 1, "pigeon", "400Gbps"),
        ("here", 2, None, "leave --nodes out"),
        ("8xH100-80GB", 10_000_000, None, "at most 1,000,000"),
    ],
)
def test_an_unknown_name_is_refused_with_a_way_out(name, nodes, link, way_out):
    with pytest.raises(UserError, match=way_out) as error:
        cluster_of(name, nodes, link)
    assert "\n" not in str(error.value)


CARD = """
gib: 15.5
memory_bandwidth: 3.2e+11
flops: {float32: 8.1e+12, float16: 6.5e+13}
inside: PCIe3
host: PCIe3
"""


def test_a_device_without_a_name_has_a_file_of_its_figures(tmp_path):
    (tmp_path / "card.yaml").write_text(CARD)
    cluster = cluster_of(f"2x{tmp_path}/card.yaml")
    assert (cluster.device.name, cluster.num_devices) == ("card", 2)
    assert cluster.device.memory_bytes == 15.5 * 2**30
    assert cluster.device.rate(torch.bfloat16) == 8.1e12  # it has none of its own
    assert cluster.inside.bandwidth == cluster.host.bandwidth == pytest.approx(0.8 * 16e9)


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("gib: 15.5", "gib: true", "gib: Input should be a valid number"),
        ("gib: 15.5", "gib: 0", "gib: Input should be greater than"),
        ("8.1e+12", "8.1", "flops.float32: Input should be greater than .* in FLOP/s"),
        ("float32", "float64", "Input should be 'bfloat16', 'float16' or 'float32'"),
        ("float32: 8.1e+12, ", "", "flops has no float32"),
        ("PCIe3", "PCI", "inside: Input should be "),
        ("gib", "memory", "gib: Field required"),
        (CARD, "[]", "give gib, memory_bandwidth and flops"),
    ],
)
def test_figures_that_no_device_has_are_refused(old, new, problem, tmp_path):
    (tmp_path / "card.yaml").write_text(CARD.replace(old, new))
    with pytest.raises(UserError, match=problem) as error:
        cluster_of(f"{tmp_path}/card.yaml")
    assert "\n" not in str(error.value)


def test_geforce_cards_exchange_messages_by_way_of_the_host():
    """At half the rate of a card of the same link whose driver lets others read its memory."""
    geforce, other = cluster_of("2xRTX4090").inside, cluster_of("2xA6000").inside
    assert geforce.bandwidth == other.bandwidth / 2
    assert geforce.latency == 2 * other.latency


def test_here_asks_for_a_calibration(tmp_path, monkeypatch):
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path))
    with pytest.raises(UserError, match="run shardwise calibrate"):
        cluster_of("here")
