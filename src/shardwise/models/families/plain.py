"""Families of the common shape: softmax attention, then an MLP."""

from shardwise.models.families.base import Family

LLAMA = Family("llama")
QWEN3 = Family("qwen3")
OLMO2 = Family("olmo2")
