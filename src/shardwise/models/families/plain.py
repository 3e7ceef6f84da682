"""Families of the common shape: softmax attention, then an MLP."""

from shardwise.models.families.base import Family
from shardwise.models.spec import Norms

LLAMA = Family("llama")
QWEN3 = Family("qwen3")
OLMO2 = Family("olmo2", norms=Norms(rounds_last=True))
