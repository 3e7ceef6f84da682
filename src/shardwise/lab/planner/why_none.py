"""Why no division of the devices is allowed, in one line with a way out.

A cause is named only where it is one: rows, where with as many as devices a division is allowed; a
rule, where it refuses every division that the other keys leave, or a size that is given.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod

from shardwise.base.layouts import ALONE, data_parts, layout_of, replicated
from shardwise.base.words import counted
from shardwise.config import Parallel, UserError, require
from shardwise.lab.planner.candidates import Space
from shardwise.parallel.strategies import STRATEGIES

Sizes = Mapping[str, tuple[int, ...]]


def refuse(space: Space) -> None:
    """Raise UserError with the reason why a space has no division."""
    question = space.question
    wanted = question.wanted or {}
    fixed = {
        axis: (getattr(question.cfg.parallel, axis),)
        for axis in ("pp", "cp", "tp", "ep")
        if f"parallel.{axis}" in question.fixed
    }
    for axis, size in fixed.items() if wanted else ():
        require(
            (wanted.get(axis) or size if axis in wanted else (1,)) == size,
            f"--explain {'-'.join(wanted)} and parallel.{axis} {size[0]} contradict each other; "
            "leave one out",
        )
    given = fixed | {part: size for part, size in wanted.items() if size}
    # With a row for each device no division is left out for its rows.
    training = replace(question.cfg.training, global_batch_size=question.num_ranks)
    cfg = replace(question.cfg, training=training)
    roomy = Space(replace(question, cfg=cfg), space.subject)
    divisions = [*roomy.divisions()]
    for reason in _of_sizes(roomy, given):
        raise UserError(reason)
    if divisions:
        rows, least = question.cfg.training.global_batch_size, min(d.num_data for d in divisions)
        raise UserError(
            f"no layout divides {rows} rows in a step over {question.num_ranks} devices; give "
            f"--tokens-per-step so that the rows are a multiple of {least}, or other --devices"
        )
    for reason in _of_layouts(roomy, given):
        raise UserError(reason)
    keys = [*([f"--explain {'-'.join(wanted)}"] if wanted else []), *sorted(question.fixed)]
    raise UserError(
        f"no layout of {counted(question.num_ranks, 'device')} has all of {', '.join(keys)}; leave "
        "one out, or give other --devices"
    )


def _of_sizes(space: Space, given: Sizes) -> Iterator[str]:
    """Yield why the sizes that are given are none of the devices."""
    question, refused = space.question, space.refused
    num_ranks, wanted = question.num_ranks, question.wanted or {}
    name = "-".join(wanted)
    for key in (name, *(f"{part}:{size[0]}" for part, size in given.items())):
        if key in refused:
            yield refused[key]
    some = () if space.subject.facts.num_experts else (2,)  # any number where there are no experts
    for size in given.get("ep", some) if "ep" in wanted else ():
        if message := space.why_no_size("ep", size):
            yield message
    for part, (data, _) in data_parts().items():
        replicas, shards = size if len(size := wanted.get(part, ())) == 2 else (2, 2)
        if replicas == 1:
            yield f"{part}:1x{shards} has one replica; --explain it as {data}:{shards}"
        if shards == 1 and "cp" not in wanted:
            whole = f"{replicated().data}:{replicas}"
            yield f"{part}:{replicas}x1 shards nothing; --explain it as {whole}"
    # Ranks along `ep` are among those of the data-parallel axes and of cp.
    sizes = ", ".join(f"{part}:{'x'.join(map(str, size))}" for part, size in given.items())
    ranks = prod(prod(size) for part, size in given.items() if part != "ep")
    is_whole = bool(wanted) and all(part in given or part in (ALONE, "sp") for part in wanted)
    if num_ranks % ranks or (is_whole and ranks != num_ranks):
        yield (
            f"{sizes or name} {'needs' if is_whole else 'needs a multiple of'} "
            f"{counted(ranks, 'device')}, and --devices and --nodes give {num_ranks}; give other "
            "sizes or other devices"
        )
    open_axes = {"pp", "cp", "tp"}.intersection(wanted).difference(given)
    if num_ranks // ranks < 2 ** len(open_axes):
        yield f"{name} needs several devices for each axis; give more --devices or smaller sizes"
    shares = num_ranks // (given.get("pp", (1,))[0] * given.get("tp", (1,))[0])
    (ep,) = given.get("ep", (1,))
    if shares % ep:
        yield (
            f"ep:{ep} does not divide the {counted(shares, 'rank')} of {name or 'the layout'} that "
            "share experts; give a size that does"
        )


def _of_layouts(space: Space, given: Sizes) -> Iterator[str]:
    """Yield why no layout of the sizes that are given is allowed, whatever the rows."""
    question, wanted = space.question, space.question.wanted or {}
    num_ranks = question.num_ranks
    given_or = (("data", None), ("dp_replicate", 1))
    (data,), (replicas,) = (question.values(f"parallel.{key}", (x,)) for key, x in given_or)
    part = next((part for part in (data, *wanted) if part in data_parts()), None)
    axes = {axis: size for axis, size in given.items() if axis in ("pp", "cp", "tp")}
    names = ["-".join(wanted)] if wanted else []
    if data is not None:
        names.append(layout_of(replace(Parallel(data), **{a: size for a, (size,) in axes.items()})))
    yield from filter(None, map(space.why_no_layout, names))
    yield from (message for key, message in space.refused.items() if ":" not in key)
    if len(alone := wanted.keys() - {"sp"}) == 1 and part is None:  # it has all devices
        yield from filter(None, [space.refused.get(f"{alone.pop()}:{num_ranks}")])
    num_data = num_ranks // prod(size for (size,) in axes.values())
    if replicas > 1:
        if data is not None:
            yield from filter(None, [space.message(Parallel(data, replicas), 2 * replicas)])
        if num_data % replicas or replicas >= num_data * axes.get("cp", (1,))[0]:
            yield (
                f"parallel.dp_replicate {replicas} does not divide the {num_data} data-parallel "
                "devices into replicas with shards; set one that does"
            )
    if part is not None and num_data == 1:
        sizes = "".join(f" beside {axis}:{size}" for axis, (size,) in axes.items())
        yield (
            f"{part} needs several data-parallel devices, and {counted(num_ranks, 'device')} have "
            f"one{sizes}; leave {part} out, or give more --devices"
        )
    if part is not None and not STRATEGIES[data_parts()[part][0]].is_searched:
        yield f"{part} is planned where a run asks for it alone: add --parallel.data={part}"
