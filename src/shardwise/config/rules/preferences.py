"""Rules of objectives of pairs: their data, their keys, and the model that they compare with."""

from shardwise.config import Preference
from shardwise.config.preference import USED_BY
from shardwise.config.rules.rule import Rule, either


def _of_preference(key: str) -> Rule:
    """Return the rule that a key has its default unless the objective reads it."""
    default, users = getattr(Preference(), key), USED_BY[key]
    return Rule(
        f"preference.{key} without its objective",
        applies=lambda case: (
            getattr(case.cfg.preference, key) != default and case.cfg.objective not in users
        ),
        problem=f"preference.{key} is set, which training.objective {{cfg.objective}} does not use",
        way_out=f"leave it out, or set training.objective to {either([*users])}",
        why="the key would have no effect",
    )


RULES = (
    Rule(
        "pairs without an objective for them",
        applies=lambda case: (
            not case.training.has_preferences and "preference" in case.cfg.data.formats
        ),
        problem="data.format is preference, whose pairs training.objective sft does not read",
        way_out="set training.objective to dpo, kto, orpo or simpo, or data.format to chat with "
        "data.fields: {{messages: chosen}}",
        why="both answers would be learnt alike",
    ),
    Rule(
        "an objective of pairs without pairs",
        applies=lambda case: (
            case.training.has_preferences and case.cfg.data.formats != {"preference"}
        ),
        problem="training.objective is {cfg.objective}, which reads pairs of answers",
        way_out="set data.format to preference, or training.objective to sft",
        why="a document has no side to compare with",
    ),
    *(_of_preference(key) for key in USED_BY),
    Rule(
        "label smoothing of a loss that has none",
        applies=lambda case: (
            case.cfg.preference.label_smoothing > 0 and case.cfg.preference.loss != "sigmoid"
        ),
        problem="preference.label_smoothing is set, which loss {cfg.preference.loss} does not use",
        way_out="leave it out, or set preference.loss to sigmoid",
        why="the key would have no effect",
    ),
    Rule(
        "a base as reference without adapters",
        applies=lambda case: case.cfg.preference.reference == "base" and case.cfg.lora is None,
        problem="preference.reference is base, the model with its adapters off, and there are none",
        way_out="set it to start, which keeps a copy of the weights, or add the section lora",
        why="the reference would be the trained model itself",
    ),
    Rule(
        "a base as reference beside modules that are trained in full",
        applies=lambda case: (
            case.cfg.preference.reference == "base"
            and case.cfg.lora is not None
            and not case.cfg.trains_adapters_alone
        ),
        problem="preference.reference is base, and lora.modules_to_save trains modules of it",
        way_out="set preference.reference to start, which keeps a copy of what is trained",
        why="the originals of these modules are not laid out as their trained copies are",
    ),
)
