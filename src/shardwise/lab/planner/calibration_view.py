"""Text that `shardwise calibrate` prints of a calibration."""

from collections.abc import Iterator

from rich.box import SIMPLE
from rich.table import Table

from shardwise.base.words import size as size_text
from shardwise.lab.planner.calibration import Calibration


def collectives_table(calibration: Calibration) -> Table:
    """Return a table with a row per collective and size, as nccl-tests print them."""
    table = Table("collective", "ranks", "bytes", "us", "algbw GB/s", "busbw GB/s", box=SIMPLE)
    for row in sorted(calibration.collectives, key=lambda row: (row.kind, row.num_bytes)):
        bandwidths = (row.algorithm_bandwidth, row.bus_bandwidth)
        table.add_row(
            row.kind,
            str(row.num_ranks),
            size_text(row.num_bytes),
            f"{row.seconds * 1e6:.0f}",
            *(f"{bandwidth / 1e9:.3f}" for bandwidth in bandwidths),
        )
    return table


def summary(calibration: Calibration) -> Iterator[str]:
    """Yield lines with the machine and its rates."""
    yield f"{calibration.environment['device']}, {calibration.num_processes} processes"
    yield f"products: up to {calibration.best_rate / 1e9:.1f} GFLOP/s per process"
    yield f"memory: {calibration.memory_bandwidth / 1e9:.1f} GB/s per process, copying"
    kinds = calibration.speeds[calibration.num_processes].units
    yield f"layers: {'; '.join(kinds)}"
