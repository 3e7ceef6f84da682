"""GPT-2: learned positions; its linears are Conv1D, which keep their weight as [in, out]."""

from shardwise.models.families.base import Family, StageFacts, mixer
from shardwise.models.kinds import attention
from shardwise.models.spec import Norms

GPT2 = Family(
    "gpt2",
    embed="transformer.wte",
    positions="transformer.wpe",
    layers="transformer.h",
    norm="transformer.ln_f",
    mixers={"full_attention": mixer("attn", attention.JOINED)},
    norms=Norms(before="ln_1", between="ln_2"),
    cut=StageFacts(dropout="transformer.drop"),
    seeded=("resid_pdrop", "embd_pdrop", "summary_first_dropout"),
)
