"""Rules of how long a run trains, when it evaluates, and how its learning rate changes."""

from shardwise.config import CALLERS, Data, Optimizer, Training
from shardwise.config.rules.rule import Case, Rule
from shardwise.config.section import facts_in


def _of_evaluations(case: Case) -> str | None:
    """Return a key that is set and acts on evaluations, of a run that has none."""
    if case.cfg.data.validation != 0 or case.cfg.data.train == CALLERS:
        return None
    keys = ("keep_best", "patience", "eval_every", "eval_batches")
    return next((key for key in keys if getattr(case.training, key)), None)


def _by_epoch(case: Case) -> str | None:
    """Return a key that counts in epochs."""
    keys = ("eval_every", "save_every")
    return next((key for key in keys if getattr(case.training, key) == "epoch"), None)


def _not_of_a_callers_loop(case: Case) -> str | None:
    """Return the first key that is set although the rows and the evaluations are the caller's."""
    cfg = case.cfg
    if cfg.data.train != CALLERS:
        return None
    for section, default in (
        (cfg.data, Data(CALLERS)),
        (cfg.training, Training(cfg.training.output_dir)),
    ):
        for key, facts in facts_in(type(section)).items():
            if not facts.for_own_loop and getattr(section, key) != getattr(default, key):
                return f"{type(section).__name__.lower()}.{key}"
    return None


RULES = (
    Rule(
        "a key that a loop of the caller does not read",
        applies=lambda case: _not_of_a_callers_loop(case) is not None,
        problem=lambda case: (
            f"{_not_of_a_callers_loop(case)} is set, but which rows are read and evaluated is for "
            "the loop of the caller to say"
        ),
        way_out="leave it out",
        why="the key would have no effect",
    ),
    Rule(
        "steps with epochs",
        applies=lambda case: case.training.steps is not None and case.training.epochs is not None,
        problem="training.steps and training.epochs are both set, and each says when a run ends",
        way_out="leave one of them out, or set it to null",
        why="they would contradict each other",
    ),
    Rule(
        "a key by epoch without epochs",
        applies=lambda case: _by_epoch(case) is not None and case.training.epochs is None,
        problem=lambda case: f"training.{_by_epoch(case)} is epoch, and training.epochs is not set",
        way_out="give a number of steps, or set training.epochs in place of training.steps",
        why="without epochs nobody says how many steps one has",
    ),
    Rule(
        "epochs of a stream",
        applies=lambda case: case.cfg.data.streaming and case.training.epochs is not None,
        problem="training.epochs is set, but with data.streaming nobody knows how many steps it is",
        way_out="set training.steps instead, or data.streaming to false",
        why="the learning rate needs the number of steps before the first one",
    ),
    Rule(
        "a share of a stream",
        applies=lambda case: (
            case.cfg.data.streaming
            and isinstance(case.cfg.data.validation, int | float)
            and case.cfg.data.validation > 0
        ),
        problem="data.validation is a share, which data.streaming cannot hold out",
        way_out="name a split, as in owner/name::validation, or set data.streaming to false",
        why="a stream has no number of documents to take a share of",
    ),
    Rule(
        "answers with a label from a stream",
        applies=lambda case: case.training.reads_labels and case.cfg.data.streaming,
        problem="training.objective kto compares each answer with another document's, and "
        "data.streaming reads every document once",
        way_out="set data.streaming to false",
        why="a stream has no document by number",
    ),
    Rule(
        "evaluations without validation",
        applies=lambda case: _of_evaluations(case) is not None,
        problem=lambda case: (
            f"training.{_of_evaluations(case)} is set, but data.validation is 0: nothing is "
            "evaluated"
        ),
        way_out="set data.validation, or leave the key out",
        why="the key would have no effect",
    ),
    Rule(
        "patience without evaluations",
        applies=lambda case: (
            case.training.patience > 0
            and case.training.eval_every == 0
            and case.cfg.data.train != CALLERS
        ),
        problem="training.patience counts evaluations, and training.eval_every is 0",
        way_out="set training.eval_every to a number of steps, or to epoch",
        why="the only evaluation after a step is that of the last one",
    ),
    Rule(
        "two lengths of the warm-up",
        applies=lambda case: (
            case.cfg.optimizer.warmup_steps > 0 and case.cfg.optimizer.warmup_ratio > 0
        ),
        problem=(
            "optimizer.warmup_steps is {cfg.optimizer.warmup_steps} and optimizer.warmup_ratio is "
            "{cfg.optimizer.warmup_ratio}"
        ),
        way_out="give one of them",
        why="each gives the warm-up its length",
    ),
    Rule(
        "decay_ratio without wsd",
        applies=lambda case: (
            case.cfg.optimizer.decay_ratio != Optimizer().decay_ratio
            and case.cfg.optimizer.lr_schedule != "wsd"
        ),
        problem=(
            "optimizer.decay_ratio is {cfg.optimizer.decay_ratio}, which optimizer.lr_schedule "
            "{cfg.optimizer.lr_schedule} does not use"
        ),
        way_out="leave it out, or set lr_schedule to wsd",
        why="the key would have no effect",
    ),
    Rule(
        "min_lr_ratio with a constant learning rate",
        applies=lambda case: (
            case.cfg.optimizer.min_lr_ratio > 0 and case.cfg.optimizer.lr_schedule == "constant"
        ),
        problem=(
            "optimizer.min_lr_ratio is {cfg.optimizer.min_lr_ratio}, but with lr_schedule constant "
            "the learning rate does not fall"
        ),
        way_out="leave it out, or set lr_schedule to cosine, linear or wsd",
        why="the key would have no effect",
    ),
)
