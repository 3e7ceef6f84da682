"""ERNIE 4.5: full attention, then an MLP or a mixture of experts with a shared one."""

from shardwise.models.families.base import Family, feed_forwards
from shardwise.models.families.plain import ERNIE4_5
from shardwise.models.kinds import mixture

ERNIE4_5_MOE = Family(
    "ernie4_5_moe",
    mixers=ERNIE4_5.mixers,
    # A bias balances its load, too.
    feed_forward=feed_forwards(mixture.SHARED_FIRST),
    router="Ernie4_5_MoeTopKRouter",
)
