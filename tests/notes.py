"""Notes of runs whose random base is no mistake, as in most tests."""

from collections.abc import Iterable


def beside_random_base(notes: Iterable[str]) -> tuple[str, ...]:
    return tuple(note for note in notes if not note.startswith("model.init is random"))
