"""How often elementwise operators move what enters and leaves the products of a layer.

A layer's norms, gates, convolutions, rotations and copies between dtypes each read and write whole
tensors. traffic.yaml has, by family and by the key of a `UnitWork`, the bytes that they move in a
forward and in a backward over those of its products' inputs and outputs, as
tools/elementwise_traffic.py has counted them in eager code.
"""

from __future__ import annotations

import statistics
from functools import cache
from pathlib import Path
from typing import Literal

import torch
import yaml

PATH = Path(__file__).with_name("traffic.yaml")
Direction = Literal["forward", "backward"]
Table = dict[str, dict[str, dict[str, list[float]]]]


@cache
def passes(
    family: str, key: str, direction: Direction, products: torch.dtype, hidden: torch.dtype
) -> float:
    """Return the passes over the inputs and outputs of a unit's products.

    An element has as many bytes as in products; `hidden` is the dtype of hidden states.

    A family that was not counted takes the mean of those that have such layers, and a kind of layer
    that none has the mean of all. Embedding, head and loss are not counted, and move each once.
    """
    if key.startswith(("embed,", "head,")):
        return 1.0
    name = "bfloat16" if hidden.itemsize == 2 else "mixed"
    name, table = "float32" if products.itemsize == 4 else name, _table()
    place = ("forward", "backward").index(direction)
    if key in table.get(family, {}):
        return table[family][key][name][place]
    mode = key.rpartition(", ")[2]
    rows = [row for of_family in table.values() for k, row in of_family.items() if k == key]
    rows = rows or [
        row for of_family in table.values() for k, row in of_family.items() if k.endswith(mode)
    ]
    return statistics.mean(row[name][place] for row in rows)


@cache
def _table() -> Table:
    return yaml.safe_load(PATH.read_text(encoding="utf-8"))
