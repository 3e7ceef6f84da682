"""How often elementwise operators move what enters and leaves the products of a unit.

A layer's norms, gates, convolutions, rotations and copies between dtypes each read and write whole
tensors, and so does the loss. traffic.yaml has, by family and by the key of a `UnitWork` (of a head
with its loss), the bytes that they move in a forward and in a backward over those of its products'
inputs and outputs, as tools/elementwise_traffic.py has counted them in eager code.
"""

from __future__ import annotations

import statistics
from functools import cache
from pathlib import Path
from typing import Literal

import yaml

from shardwise.config import RunConfig
from shardwise.models.dtypes import hidden_dtype, product_dtype

PATH = Path(__file__).with_name("traffic.yaml")
Direction = Literal["forward", "backward"]
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")
Table = dict[str, dict[str, dict[str, list[float]]]]


def passes(cfg: RunConfig, family: str, key: str, direction: Direction) -> float:
    """Return the passes over the inputs and outputs of a unit's products.

    An element has as many bytes as in products. A family that was not counted takes the mean of
    those that have such layers, and a kind of layer that none has the mean of all.
    """
    if key.startswith("head, "):
        loss = cfg.training.loss
        key = f"{key}, {'triton' if loss == 'auto' else loss}"  # as a GPU's `auto`
    products, hidden = product_dtype(cfg), hidden_dtype(cfg)
    name = "bfloat16" if hidden.itemsize == 2 else "mixed"
    times = _counted(family, key, "float32" if products.itemsize == 4 else name, direction)
    if cfg.training.compile == "inductor" and _is_compiled(cfg, key):
        # Compiled code reads and writes once what eager operators read and write one by one.
        return min(times, 1.0)
    return times


def _is_compiled(cfg: RunConfig, key: str) -> bool:
    """Return whether a unit is a layer without eager code.

    Experts run as they are where tokens are sent or dropped; all of their layer is priced so.
    """
    is_layer = not key.startswith(("embed, ", "head, "))
    are_eager = cfg.parallel.ep > 1 or cfg.model.expert_capacity is not None
    return is_layer and not (are_eager and ", moe, " in key)


@cache
def _counted(family: str, key: str, dtypes: str, direction: Direction) -> float:
    place, table = DIRECTIONS.index(direction), _table()
    if key in table.get(family, {}):
        return table[family][key][dtypes][place]
    rows = [row for family_rows in table.values() for k, row in family_rows.items() if k == key]
    if not rows:  # a key of a layer has its kind, its feed-forward and what is trained
        mode = key.rpartition(", ")[2]
        units = (item for family_rows in table.values() for item in family_rows.items())
        rows = [row for k, row in units if k.endswith(mode) and not k.startswith("embed, ")]
    return statistics.mean(row[dtypes][place] for row in rows)


@cache
def _table() -> Table:
    return yaml.safe_load(PATH.read_text(encoding="utf-8"))
