#!/usr/bin/env bash
# datasets 5.2.0 with pandas 3.1.1: a CSV cell changes its value where a chunk of 10,000 rows begins.
#
# `load_dataset("csv")` reads a file in chunks, and pandas guesses the types of each chunk from its own rows. A chunk
# in which a column holds digits alone loses leading zeros; the column is text, so the number becomes text again. The
# same cell one row earlier keeps them. The words None and NA become missing values in every row.
#
# Seen: after 10,000 rows of words `007` is read as '7', after 9,999 as '007'.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check datasets==5.2.0 pandas==3.1.1
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - "$folder" <<'PYTHON'
import sys

import datasets
import pandas

datasets.disable_progress_bars()


def column(name, cells):
    path = f"{sys.argv[1]}/{name}.csv"
    with open(path, "w", encoding="utf-8") as file:
        file.write("\n".join(["code", *cells]) + "\n")
    cache = f"{sys.argv[1]}/cache-{name}"
    return datasets.load_dataset("csv", data_files=path, split="train", cache_dir=cache)["code"][:]


print("datasets", datasets.__version__, "pandas", pandas.__version__)
within = column("within", ["words"] * 9_999 + ["007"])[-1]
behind = column("behind", ["words"] * 10_000 + ["007"])[-1]
words = column("words", ["words", "None", "NA"])
print(f"row 10,000: {within!r}; row 10,001: {behind!r}; the words None and NA: {words[1:]}")
assert (within, behind, words[1:]) == ("007", "7", [None, None]), "the behaviour has changed"
PYTHON
