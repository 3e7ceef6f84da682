"""dots.llm1: attention over all tokens or a window, then an MLP or a mixture of experts."""

from shardwise.models.families.base import Family, feed_forwards
from shardwise.models.kinds import mixture

# No router: a bias balances its load (`mixture.MIXTURE`).
DOTS1 = Family(
    "dots1",
    feed_forward=feed_forwards(mixture.MIXTURE),
    # transformers' config has no numbers of experts by default.
    options={
        **{"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6},
        **{"first_k_dense_replace": 1, "moe_intermediate_size": 1408},
    },
)
