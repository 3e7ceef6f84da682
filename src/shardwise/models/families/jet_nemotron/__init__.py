"""Jet-Nemotron, which transformers does not have: `shardwise.models` registers it there."""

from transformers import AutoConfig, AutoModelForCausalLM

from shardwise.models.families.jet_nemotron.configuration import JetNemotronConfig
from shardwise.models.families.jet_nemotron.family import JET_NEMOTRON
from shardwise.models.families.jet_nemotron.model import JetNemotronForCausalLM, JetNemotronModel

__all__ = [
    "JET_NEMOTRON",
    "JetNemotronConfig",
    "JetNemotronForCausalLM",
    "JetNemotronModel",
    "register",
]


def register() -> None:
    """Let AutoConfig and AutoModelForCausalLM find `model_type: jet_nemotron`.

    A second call changes nothing.
    """
    AutoConfig.register(JetNemotronConfig.model_type, JetNemotronConfig, exist_ok=True)
    AutoModelForCausalLM.register(JetNemotronConfig, JetNemotronForCausalLM, exist_ok=True)
