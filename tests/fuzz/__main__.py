"""Compare random runs under random layouts with one process, for some minutes: `python -m
tests.fuzz --minutes 10`.

Each run is a function of its seed: `--only SEED` runs one alone and prints its run file and its
config.json.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from random import SystemRandom

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["SHARDWISE_CACHE"] = os.path.join(tempfile.gettempdir(), "shardwise-no-such-cache")

from shardwise.models.families import FAMILIES
from tests.fuzz.draws import Draw, draw
from tests.fuzz.judge import Result, judge
from tests.fuzz.report import report


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0, help="until when a new run is begun")
    parser.add_argument("--seed", type=int, help="of the first run; the next one has the next seed")
    parser.add_argument(
        "--only", type=int, metavar="SEED", help="run this one alone and print all of it"
    )
    parser.add_argument("--family", choices=FAMILIES, help="of all runs; without it, each in turn")
    options = parser.parse_args()
    warnings.simplefilter("error")  # as in the tests; the ranks inherit it
    first = options.only if options.only is not None else options.seed
    if first is None:
        first = SystemRandom().randrange(10**6)
    end = time.monotonic() + 60 * options.minutes
    results: list[tuple[Draw, Result]] = []
    with tempfile.TemporaryDirectory() as folder:
        while not results or (options.only is None and time.monotonic() < end):
            seed = first + len(results)
            drawn = draw(seed, Path(folder) / str(seed), options.family)
            if options.only is not None:
                print(drawn, flush=True)
            results.append((drawn, judge(drawn)))
            result = results[-1][1]
            print(f"{result.status:8}{drawn.id}  {result.reason}", flush=True)
            if result.status == "failed":
                print(result.detail, file=sys.stderr, flush=True)
    print(report(results))
    return 1 if Counter(result.status for _, result in results)["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
