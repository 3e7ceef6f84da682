from __future__ import annotations

import subprocess

import pytest
import torch

import shardwise
from shardwise.metrics import hardware
from shardwise.metrics.hardware import commit, environment, measured_flops, peak_flops

CPU = torch.device("cpu")
CUDA = torch.device("cuda")


@pytest.fixture
def gpu_name(monkeypatch):
    """Play a GPU of this name, whose products are measured at 1 FLOP/s."""

    def name(value: str) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: value)
        monkeypatch.setattr(
            hardware, "measured_flops", lambda device, dtype: hardware.PeakFlops(1.0, "measured")
        )

    return name


def test_environment_names_versions_and_machine():
    facts = environment()
    assert facts["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert facts["shardwise"] == shardwise.__version__
    assert facts["cpu_count"] >= 1
    assert facts["device"]


def test_commit_of_a_checkout_that_tracks_this_package(tmp_path, monkeypatch):
    def git(*args: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        command = ["git", *identity, *args]
        return subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout.strip()

    package = tmp_path / "shardwise" / "metrics"
    package.mkdir(parents=True)
    source = package / "hardware.py"
    source.write_text("")
    (tmp_path / "README").write_text("")
    monkeypatch.setattr(hardware, "__file__", str(source))
    assert commit() is None  # no checkout
    git("init", "-q")
    git("add", "README")
    git("commit", "-qm", "another project")
    assert commit() is None  # a checkout, but of something else
    git("add", "shardwise")
    git("commit", "-qm", "shardwise")
    assert commit() == git("rev-parse", "HEAD")
    (tmp_path / "README").write_text("changed, outside of the library")
    assert commit() == git("rev-parse", "HEAD")
    source.write_text("changed")
    assert commit() == git("rev-parse", "HEAD") + "+changes"


def test_published_peaks(gpu_name):
    gpu_name("NVIDIA H100 PCIe")
    assert peak_flops(CUDA, torch.bfloat16).flops_per_second == 756e12
    assert peak_flops(CUDA, torch.float16).flops_per_second == 756e12
    peak = peak_flops(CUDA, torch.float32)
    assert peak.flops_per_second == 51.2e12
    assert peak.source == "published dense float32 peak of NVIDIA H100 PCIe"


@pytest.mark.parametrize(
    "name", ["NVIDIA L40", "NVIDIA GB300", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "Some GPU"]
)
def test_other_gpus_are_measured_and_not_taken_for_known_ones(gpu_name, name):
    gpu_name(name)
    assert peak_flops(CUDA, torch.bfloat16).source == "measured"


def test_float32_with_tf32_is_measured(gpu_name):
    gpu_name("NVIDIA H200")
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        assert peak_flops(CUDA, torch.float32).source == "measured"
    finally:
        torch.set_float32_matmul_precision(before)


def test_a_cpu_is_measured(monkeypatch):
    clock = iter(range(10**6))
    # A clock that gains a second with every look: each product takes one second, so 256 x 256 is 2
    # * 256^3 FLOP/s, and there is no time for a larger one.
    monkeypatch.setattr(hardware.time, "perf_counter", lambda: float(next(clock)))
    peak = measured_flops(CPU, torch.float32, seconds=10)
    assert peak.flops_per_second == 2 * 256**3
    assert peak.source.startswith("measured here: 256 x 256 matrix product in float32 on ")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_measured_peak_is_above_what_a_product_reaches(dtype):
    peak = peak_flops(CPU, dtype)
    assert peak.flops_per_second > 1e8  # a scalar loop in C does about 1e9
    assert "CPU threads" in peak.source
