"""Models that are trained: those of transformers, and those that this project adds to them."""

from shardwise.models.families.jet_nemotron import register

register()
