#!/usr/bin/env bash
# datasets 5.2.0: every shuffled pass over a streamed Parquet set ends in five seconds of sleep.
#
# A pass that was read to its end waits for threads that have ended already, also with a single file. Without the
# shuffle, and with JSON lines, nothing waits. Ten epochs cost 50 seconds, and so do ten that a resume skips.
#
# Seen: one sleep of 5 seconds in each shuffled pass, none in a plain one.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check datasets==5.2.0 pyarrow==26.0.1
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - "$folder" <<'PYTHON'
import sys
import time

import datasets
import pyarrow
import pyarrow.parquet

slept = []
sleep = time.sleep
time.sleep = lambda seconds: slept.append(seconds) if seconds >= 1 else sleep(seconds)
file = f"{sys.argv[1]}/rows.parquet"
pyarrow.parquet.write_table(pyarrow.table({"text": [str(number) for number in range(10)]}), file)
stream = datasets.load_dataset("parquet", data_files=file, split="train", streaming=True)
print("datasets", datasets.__version__)
for name, passes in (("plain", stream), ("shuffled", stream.shuffle(seed=0, buffer_size=4))):
    slept.clear()
    rows = [len(list(passes)) for _ in range(2)]
    print(f"{name}: two passes of {rows} rows, sleeps of one second or more: {slept}")
    assert slept == ([5, 5] if name == "shuffled" else []), "the behaviour has changed"
PYTHON
