"""Clusters by name."""

from __future__ import annotations

import pytest

from shardwise.config import UserError
from shardwise.lab.planner.cluster import BASE_LATENCY, cluster_of


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


@pytest.mark.parametrize(
    "name", ["A100-40GB", "A100-80GB", "H100-80GB", "H200", "B200", "L40S", "RTX4090", "CPU-core"]
)
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


def test_here_asks_for_a_calibration(tmp_path, monkeypatch):
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path))
    with pytest.raises(UserError, match="run shardwise calibrate"):
        cluster_of("here")
