"""Rules on context parallelism: how rows may be cut, and what it runs with."""

from shardwise.config.rules.rule import Case, Rule, multiples


def _tokens_of_a_rank(case: Case) -> int:
    return case.cfg.data.sequence_length // case.parallel.cp


def _cuts_a_head(case: Case) -> bool:
    facts = case.model.context
    if case.parallel.cp == 1 or case.parallel.cp_attention != "ulysses" or facts is None:
        return False
    shape = facts.on_rank(case.parallel)
    return shape is not None and shape.num_heads % case.parallel.cp != 0


def _cuts_odd_pairs(case: Case) -> bool:
    facts = case.model.context
    if case.parallel.cp == 1 or facts is None:
        return False
    _, cut = facts.way_and_cut(case.parallel)
    return cut.zigzag and case.cfg.data.sequence_length % (2 * case.parallel.cp) != 0


RULES = ()
"""On the run file alone."""

MODEL_RULES = (
    Rule(
        "ulysses over heads",
        applies=_cuts_a_head,
        problem=lambda case: (
            f"parallel.cp_attention is ulysses, but {case.parallel.cp} ranks cannot share this "
            f"{case.model.family}'s attention heads evenly"
        ),
        way_out="use ring or gather, or another parallel.cp",
        why="a rank computes whole heads",
    ),
    Rule(
        "sequence length over pairs of chunks",
        applies=_cuts_odd_pairs,
        problem=lambda case: (
            f"data.sequence_length is {case.cfg.data.sequence_length}, which cannot be cut into "
            f"{2 * case.parallel.cp} equal chunks, two for each rank of parallel.cp"
        ),
        way_out=lambda case: (
            f"use {multiples(case.cfg.data.sequence_length, 2 * case.parallel.cp)}"
        ),
        why="so all ranks have the same causal attention to compute",
    ),
    Rule(
        "fewer tokens on a rank of cp than a convolution reads",
        applies=lambda case: (
            case.parallel.cp > 1 and _tokens_of_a_rank(case) < case.model.most_earlier_tokens
        ),
        problem=lambda case: (
            f"with parallel.cp a rank has {_tokens_of_a_rank(case)} of the tokens of a row, and "
            f"convolutions read {case.model.most_earlier_tokens} before their own"
        ),
        way_out=lambda case: (
            "lower parallel.cp, or set data.sequence_length to "
            f"{case.parallel.cp * case.model.most_earlier_tokens} or more"
        ),
        why="a rank gets these tokens from the one before it alone",
    ),
)
"""On the model."""
