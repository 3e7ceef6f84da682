"""Jet-Nemotron: JetBlock, full attention or sliding attention, then an MLP."""

from shardwise.models.families.base import SOFTMAX, Family, mixer
from shardwise.models.kinds import jet_block

JET_NEMOTRON = Family(
    "jet_nemotron", mixers={"linear_attention": mixer("self_attn", jet_block.JET_BLOCK), **SOFTMAX}
)
