"""Traits of the schedules of pipelines, by their names."""

HALVING = ("interleaved-zero-bubble", "zbv", "dualpipe-v")
"""Schedules that run backwards in two halves: first the gradient of a stage's input, later those of
its weights. The first half needs an input that requires a gradient, all the way down to the
embedding, even where nothing there is trained. Under the others a stage with nothing trainable at
or below it runs no backward."""
BATCHING = ("1f1b",)
"""Schedules that send in one batch with what they receive. torch waits for both, and keeps what was
sent until the next batch."""
ONE_STAGE = ("gpipe", "1f1b")
"""Schedules of one stage a rank, which receives what it runs next. Under the others torch receives
as early as it is sent."""
V_SHAPED = ("zbv", "dualpipe-v")
"""Schedules under which rank r of p holds the stages r and 2p-1-r, and so the first rank both ends
of the model."""


def virtual_stages_of(schedule: str, num_virtual: int) -> int:
    """Return the stages per rank that a schedule has: fixed for some, else `num_virtual`."""
    if schedule in ONE_STAGE:
        return 1
    return 2 if schedule in V_SHAPED else num_virtual


def least_microbatches(schedule: str, num_ranks: int) -> int:
    """Return the fewest micro-batches of a step that a schedule accepts on so many ranks."""
    return {"1f1b": num_ranks, "dualpipe-v": 2 * num_ranks}.get(schedule, 1)


def microbatches_left_over(schedule: str, num_ranks: int, num_microbatches: int) -> int:
    """Return how many micro-batches are too many for an interleaved schedule's equal rounds."""
    if not schedule.startswith("interleaved"):
        return 0
    return num_microbatches % max(1, num_microbatches // num_ranks)
