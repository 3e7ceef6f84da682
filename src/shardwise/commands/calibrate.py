"""The command `shardwise calibrate`."""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from shardwise.base.safety import check_output
from shardwise.commands.command import Command, show
from shardwise.config import require


def run(args: Namespace) -> int:
    """Measure this machine, write the file, and print its figures."""
    import torch
    from rich.console import Console
    from transformers.utils import logging

    from shardwise.base.process.world import num_cores
    from shardwise.lab.planner.calibration import default_path, read
    from shardwise.lab.planner.calibration_view import collectives_table, summary
    from shardwise.lab.planner.measure_machine import calibrate
    from shardwise.launch.local import start_processes

    num_devices, what = torch.cuda.device_count() * torch.cuda.is_available(), "GPUs"
    require(
        args.device != "cuda" or num_devices > 0,
        "--device is cuda but torch finds no GPU; give --device cpu",
    )
    device = args.device or ("cuda" if num_devices else "cpu")
    if device == "cpu":
        num_devices, what = num_cores(), "cores"
    nproc = args.nproc
    if nproc is None:
        nproc = min(2, num_devices) if device == "cpu" else num_devices
    require(
        1 <= nproc <= num_devices,
        f"--nproc is {nproc}; give 1 to {num_devices}, as many as this machine has {what}",
    )
    path = default_path() if args.out is None else Path(args.out)
    if args.out is not None:
        check_output(path, "--out")
        is_file = path.is_file() or not path.exists()
        require(is_file, f"--out {path} is no file, and is read again; give the path of a file")
    logging.set_verbosity_error()
    if code := calibrate(nproc, path, start_processes, device):
        return code
    calibration = read(path)
    console = Console()
    if calibration.collectives:
        console.print(collectives_table(calibration))
    show(console, summary(calibration))
    print(f"wrote {path}")
    return 0


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--nproc",
        type=int,
        metavar="N",
        help="measure up to N busy processes (default: one for each GPU, or 2 without a GPU)",
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        help="what to measure (default: cuda where there is a GPU)",
    )
    parser.add_argument(
        "-o", "--out", metavar="FILE", help="write the file there, not into the cache"
    )


COMMAND = Command(
    "calibrate",
    "Measure this machine once for the planner. Time matrix products, layers, AdamW, memory and "
    "every collective on its GPUs or CPU cores, in a few minutes, and keep a file in the cache.",
    _add_arguments,
    run,
)
