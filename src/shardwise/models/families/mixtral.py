"""Mixtral: attention over all tokens or a window of them, then a mixture of experts."""

from shardwise.models.families.base import Family, feed_forwards
from shardwise.models.kinds import mixture

MIXTRAL = Family(
    "mixtral", feed_forward=feed_forwards(mixture.WIDE_WEIGHTS), router="MixtralTopKRouter"
)
