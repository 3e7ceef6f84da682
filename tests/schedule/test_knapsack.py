"""The choice of layers to compute again is the cheapest one: compared with every choice."""

from __future__ import annotations

from itertools import accumulate, product

from hypothesis import given
from hypothesis import strategies as st

from shardwise.base.schedule import knapsack
from shardwise.base.schedule.knapsack import Bounds, ChunkOptions, Option, cheapest, choose

SIZE = st.integers(0, 12)
OPTION = st.builds(Option, SIZE, SIZE, SIZE, st.integers(0, 5))
UNITS = st.lists(st.lists(OPTION, min_size=1, max_size=3), min_size=1, max_size=4)


@st.composite
def bounds_of(draw, num_units: int) -> Bounds:
    rooms = st.lists(st.integers(0, 60), min_size=num_units, max_size=num_units)
    kept = st.lists(st.integers(-1, 60), min_size=num_units + 1, max_size=num_units + 1)
    return Bounds(draw(rooms), draw(rooms), draw(kept))


@st.composite
def chunks_of_a_rank(draw, most_chunks: int) -> list[ChunkOptions]:
    number = draw(st.integers(1, most_chunks))
    in_flight = st.tuples(*[st.integers(0, 2)] * number)
    chunks = []
    for _ in range(number):
        units = draw(st.lists(st.lists(OPTION, min_size=1, max_size=3), min_size=1, max_size=2))
        passes = st.lists(st.tuples(in_flight, bounds_of(len(units))), min_size=1, max_size=2)
        chunks.append(ChunkOptions(units, draw(passes)))
    return chunks


def is_within(options: list[Option], bounds: Bounds, beside: int = 0) -> bool:
    kept = [beside, *accumulate((option.kept for option in options), initial=beside)][1:]
    return (
        all(k + o.forward <= most for k, o, most in zip(kept, options, bounds.forward))
        and all(k + o.backward <= most for k, o, most in zip(kept[1:], options, bounds.backward))
        and all(k <= most for k, most in zip(kept, bounds.kept, strict=True))
    )


def price(options: list[Option]) -> int:
    return sum(option.price for option in options)


@given(st.data())
def test_one_chunk_is_as_cheap_as_the_best_of_all_choices(data):
    units = data.draw(UNITS)
    bounds = data.draw(bounds_of(len(units)))
    every = [list(options) for options in product(*units) if is_within(list(options), bounds)]
    chosen = cheapest(units, bounds)
    if chosen is None:
        assert not every
        return
    options = [unit[number] for unit, number in zip(units, chosen, strict=True)]
    assert is_within(options, bounds)
    assert price(options) == min(map(price, every))


@given(chunks_of_a_rank(most_chunks=2))
def test_chunks_with_others_in_flight_are_as_cheap_as_the_best_of_all_choices(chunks):
    within = []
    for numbers in product(*[product(*[range(len(u)) for u in c.units]) for c in chunks]):
        own = [
            [unit[n] for unit, n in zip(chunk.units, of_chunk, strict=True)]
            for chunk, of_chunk in zip(chunks, numbers, strict=True)
        ]
        totals = [sum(option.kept for option in options) for options in own]
        if all(
            is_within(options, bounds, sum(n * k for n, k in zip(in_flight, totals, strict=True)))
            for chunk, options in zip(chunks, own, strict=True)
            for in_flight, bounds in chunk.bounds
        ):
            within.append((sum(map(price, own)), numbers))
    chosen = choose(chunks)
    assert (chosen is None) == (not within)
    if chosen is not None:
        prices = {numbers: one for one, numbers in within}
        assert prices[chosen] == min(prices.values())


def test_a_choice_among_thinned_states_is_within_bounds(monkeypatch):
    units = [[Option(8 + i, 8, 0), Option(3, 8, 8, 7 + i % 3)] for i in range(12)]
    bounds = Bounds([96] * 12, [96] * 12, [96] * 13)
    prices = []
    for most in (4096, 4):
        monkeypatch.setattr(knapsack, "MOST_STATES", most)
        chosen = cheapest(units, bounds)
        assert chosen is not None
        options = [unit[n] for unit, n in zip(units, chosen, strict=True)]
        assert is_within(options, bounds)
        prices.append(price(options))
    assert 0 < prices[0] <= prices[1]
