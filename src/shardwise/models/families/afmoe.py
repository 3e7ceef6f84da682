"""Trinity: gated attention over a window or all tokens, then an MLP or a mixture of experts."""

from shardwise.models.families.base import Family, StageFacts, feed_forwards
from shardwise.models.families.plain import EXAONE4
from shardwise.models.kinds import mixture
from shardwise.models.spec import Norms

AFMOE = Family(
    "afmoe",
    mixers=EXAONE4.mixers,
    # No router: a bias balances its load (`mixture.MIXTURE`).
    feed_forward=feed_forwards(mixture.OF_AFMOE),
    norms=Norms(
        behind="post_attention_layernorm", between="pre_mlp_layernorm", after="post_mlp_layernorm"
    ),
    cut=StageFacts(factor_key="mup_enabled"),
)
