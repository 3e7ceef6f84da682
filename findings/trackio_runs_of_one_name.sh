#!/usr/bin/env bash
# trackio 0.43.0: of two runs with one name, `trackio get` shows the newer alone, and nothing says so.
#
# `trackio.init` with a name that a finished run has makes a second run, and `trackio list runs` prints the name twice.
# `trackio get metric` takes a run by its name, has no option for its id, and answers with the values of the newer run.
# The older values are in the database; after `Run.rename`, which goes by id, the command finds both.
#
# Seen: runs of the losses 3, 2 and then 9, 8 are listed as `a` and `a`; the values of `a` are 9, 8.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check trackio==0.43.0
export TRACKIO_DIR="$folder/data"
mkdir "$TRACKIO_DIR"
"$folder/venv/bin/python" - "$folder/venv/bin/trackio" <<'PYTHON'
import json
import subprocess
import sys

import trackio


def log(losses):
    trackio.init(project="project", name="a", embed=False)
    for step, loss in enumerate(losses):
        trackio.log({"loss": loss}, step=step)
    trackio.finish()


def values(run):
    command = [sys.argv[1], "get", "metric", "--project", "project", "--run", run, "--metric", "loss", "--json"]
    answer = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return [row["value"] for row in answer["values"]]


log([3.0, 2.0])
log([9.0, 8.0])
runs = list(trackio.Api().runs("project"))
print("trackio", trackio.__version__, "runs", [run.name for run in runs])
newer = values("a")
runs[0].rename("renamed")
both = sorted([values("a"), values("renamed")])
print("values of a:", newer, "values of both, one of them renamed:", both)
assert [run.name for run in runs] == ["a", "a"], "the behaviour has changed"
assert (newer, both) == ([9.0, 8.0], [[3.0, 2.0], [9.0, 8.0]]), "the behaviour has changed"
PYTHON
