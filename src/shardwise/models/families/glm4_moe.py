"""GLM-4.5: full attention, then an MLP or a mixture of experts with a shared one."""

from shardwise.models.families.base import Family, feed_forwards
from shardwise.models.kinds import mixture

# No router: a bias balances its load (`mixture.MIXTURE`).
GLM4_MOE = Family("glm4_moe", feed_forward=feed_forwards(mixture.MIXTURE))
