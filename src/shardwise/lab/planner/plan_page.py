"""The view of a plan: lines and tables for the terminal and the page, data for `--json` and it."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

from shardwise.base.words import counted, number, percent, size
from shardwise.base.words import seconds as seconds_text
from shardwise.lab.drawing.text_table import TextTable
from shardwise.lab.planner.candidates import Question, Subject
from shardwise.lab.planner.choices import written
from shardwise.lab.planner.cluster import efficiency
from shardwise.lab.planner.divisions import group_lines, groups_by_axis, layout_name
from shardwise.lab.planner.exact import Choice, usable_bytes
from shardwise.lab.planner.memory import PeakBytes
from shardwise.lab.planner.search import Answer
from shardwise.lab.planner.step_time import StepTime
from shardwise.lab.planner.ties import why_first
from shardwise.metrics.flops import model_flops_per_token
from shardwise.models.dtypes import product_dtype

MEMORY_PARTS = {
    "weights": "what the rank keeps of them between steps",
    "gradients": "of trained weights, at the peak",
    "optimizer": "its states, of what the rank updates",
    "activations": "what forwards keep for backwards",
    "buffers": "gathered weights, buckets and messages",
    "temporary": "what runs at the peak needs for itself",
    "overhead": "of the device's runtime and libraries",
}
TIME_PARTS = {
    "layers": "forwards and backwards of the layers",
    "head": "the head and the loss",
    "recomputation": "forwards that backwards run again",
    "reference": "forwards alone, as of the model that answers are compared with",
    "communication": "what no computation hides",
    "bubble": "waiting for other stages of the pipeline",
    "host": "a GPU waits until its host has queued its work",
    "optimizer": "the update of the weights",
    "data": "reading rows: taken to be 0, as data.workers read ahead",
}
OVERHEADS = tuple(part for part in TIME_PARTS if part not in ("layers", "head"))
"""Parts of a step in which no device computes what the model needs."""


def memory_parts(memory: PeakBytes) -> dict[str, int]:
    """Return the bytes of each part of a rank's memory."""
    return {part: getattr(memory, part) for part in MEMORY_PARTS}


def time_parts(time: StepTime) -> dict[str, float]:
    """Return the seconds of each part of a step."""
    return {part: getattr(time, part) for part in TIME_PARTS}


def heading(question: Question, subject: Subject) -> Iterator[str]:
    """Yield lines on what is planned: the model, the step and the devices, with notes on them."""
    cfg, cluster = question.cfg, question.cluster
    counts, products = subject.counts, str(product_dtype(cfg)).removeprefix("torch.")
    trained = "in full"
    if cfg.lora:
        trained = f"LoRA of {cfg.lora.path}" if cfg.lora.path else f"LoRA r={cfg.lora.r}"
    active = ""
    if counts.active_parameters < counts.parameters:
        active = f" ({in_words(counts.active_parameters)} active)"
    yield (
        f"{subject.facts.family}, {in_words(counts.parameters)} parameters{active}, {trained}: "
        f"{in_words(counts.trainable_parameters)} trained; weights in {cfg.model.dtype}, "
        f"products in {products}"
    )
    rows, length = cfg.training.global_batch_size, cfg.data.sequence_length
    yield f"a step: {counted(rows, 'row')} of {length:,} tokens, {rows * length:,} in all"
    device = cluster.device
    joined = ""
    if cluster.nodes > 1:
        bits = 8 * cluster.between.bandwidth / efficiency("link") / 1e9
        joined = f" with {bits:.0f} Gbit/s per device between them"
    yield (
        f"{cluster.num_devices:,} x {device.name} in {counted(cluster.nodes, 'node')}{joined}; "
        f"{size(usable_bytes(question))} of {size(device.memory_bytes)} may be used"
    )
    yield from subject.run.notes
    if cluster.calibration is not None:
        mode = "lora" if cfg.lora else "full"
        keys = {f"{x.kind}, {x.feed_forward}, {mode}" for x in subject.run.spec.layers}
        known = cluster.calibration.for_busy(cluster.num_devices).units.keys()
        if names := "; ".join(sorted(keys - known)):
            yield f"not calibrated, priced as the mean of layers that were: {names}"
        if products not in cluster.device.flops:
            as_measured = f"those in {cluster.calibration.dtype}"
            yield f"not calibrated: products in {products} are priced as {as_measured}"
        if cfg.training.is_fp8:
            yield f"not calibrated: training.matmul {cfg.training.matmul} is priced as {products}"
        if cfg.training.is_compiled and question.device_type == "cuda":
            yield "not calibrated: the host is priced as without training.compile"


def best_table(answer: Answer) -> TextTable:
    """Return a table of the best layouts: the simplest of the fastest, then the fastest."""
    columns = ("layout", "how a rank works", ">memory", ">step", ">tokens/s", ">MFU")
    rows = [
        (
            choice.title,
            choice.details,
            size(choice.memory.total),
            seconds_text(choice.time.total),
            number(choice.tokens_per_second),
            percent(choice.mfu, 1),
        )
        for choice in answer.choices
    ]
    return TextTable(columns, rows)


def reasons(answer: Answer) -> Iterator[str]:
    """Yield sentences on the best choice: why it is first, and what limits it."""
    yield from why_first(best := answer.best, answer.fastest, answer.question)
    for base, choice in answer.faster_bases.items():
        yield (
            f"with --model.base={base} (other losses) a step takes "
            f"{seconds_text(choice.time.total)} and {size(choice.memory.total)}: {choice.details}"
        )
    memory = memory_parts(best.memory)
    largest = max(memory, key=memory.__getitem__)
    binds = answer.question.is_short_of_memory(best.candidate) or answer.too_large
    yield (
        f"memory {'binds' if binds else 'does not bind'}: {size(best.memory.total)} of "
        f"{size(answer.limit_bytes)} at the {best.memory.moment}, most of it {largest} "
        f"({size(memory[largest])})"
    )
    for change, choice in answer.too_large[:1]:
        yield f"{change} would be faster, but needs {size(choice.memory.total)}"
    seconds = time_parts(best.time)
    lost = max(OVERHEADS, key=lambda part: seconds[part])
    if (share_lost := seconds[lost] / best.time.total) < 0.05:
        yield "computation takes nearly all of a step: no other part takes 5 % of it"
    else:
        yield f"{lost} is the largest loss: {share_lost:.0%} of a step"
    if (moved := best.time.elementwise / best.time.total) >= 0.1:
        yield f"elementwise operators take {moved:.0%} of a step"
    yield from on_the_host(best, answer.question)


def on_the_host(choice: Choice, question: Question) -> Iterator[str]:
    """Yield a sentence on what is offloaded, if something is."""
    if choice.memory.host:
        node_bytes = choice.memory.host * question.cluster.per_node
        yield f"each node needs {size(node_bytes)} of its own memory for what is offloaded"


def changes_table(answer: Answer) -> TextTable:
    """Return a table of the best layout with one thing changed."""
    return _compared("the best with", "", answer.changes.items(), answer)


def simpler_table(answer: Answer) -> TextTable:
    """Return a table of other layouts of few parts, each with the reason why it is not the best."""
    titles, others = {choice.title for choice in answer.choices[:1]}, []
    for choice in answer.simpler.values():
        if choice.title not in titles:
            offload = choice.cfg.parallel.offload
            others.append((choice.title + f", offload {offload}" * (offload != "none"), choice))
    return _compared("layout", "why not", others, answer)


def _compared(
    what: str, why: str, choices: Iterable[tuple[str, Choice]], answer: Answer
) -> TextTable:
    """Return a table of choices by name beside the best one."""
    rows = [
        (name, size(choice.memory.total), seconds_text(choice.time.total), verdict(choice, answer))
        for name, choice in choices
    ]
    return TextTable((what, ">memory", ">step", why), rows)


def verdict(choice: Choice, answer: Answer) -> str:
    """Return why a choice is not the best: it does not fit, or what makes it slower."""
    if not choice.fits:
        return why_not_fitting(choice, answer.question)
    if not answer.choices:
        return "fits"
    best = answer.best
    if (ratio := choice.time.total / best.time.total) < 0.995:
        others = ", with other losses" * (choice.loss_settings != best.loss_settings)
        return f"{ratio:.2f} times as long{others}"
    if ratio < 1.005:
        share = choice.memory.total / answer.limit_bytes
        return f"as fast, but takes {share:.0%} of the memory" if choice.is_tight else "as fast"
    mine, others = time_parts(choice.time), time_parts(best.time)
    worst = max(mine, key=lambda part: mine[part] - others[part])
    text = f"{ratio:.2f} times as long: {worst} +{seconds_text(mine[worst] - others[worst])}"
    division, cluster = choice.candidate.division, answer.question.cluster
    if worst == "communication" and division.tp > cluster.per_node:
        text += f" (links between nodes are too slow for tp:{division.tp})"
    elif worst == "communication" and cluster.nodes > 1 and division.pp == 1:
        text += " (between nodes)"
    return text


def why_not_fitting(choice: Choice, question: Question) -> str:
    """Return why a choice does not fit, with the part that takes most."""
    limit, memory = usable_bytes(question), choice.memory
    text = f"{choice.fit}: {needs(memory.total, limit)}"
    if choice.fit == "uncertain":
        whole = size(question.cluster.device.memory_bytes)
        return f"{text}; the device has {whole}, fragments take some"
    states = memory.weights + memory.gradients + memory.optimizer
    is_sharded = "weights" in choice.candidate.division.strategy.sharded
    if is_sharded and memory.total - states > limit:
        # A stage of a pipeline keeps what it has gathered too.
        is_alone = choice.candidate.division.pp == 1
        is_freed = choice.candidate.is_resharded and is_alone
        names = {
            "activations": "one micro-batch's activations"
            if is_alone
            else "the activations of the micro-batches in flight",
            "buffers": "the layers that are gathered at once"
            if is_freed
            else "gathered weights that stay",
            "temporary": "temporary tensors",
        }
        by_size = sorted(names, key=lambda part: getattr(memory, part), reverse=True)
        if memory.moment.startswith("update"):
            return f"{text}; the update alone {size(getattr(memory, by_size[0]))}"
        left, together = limit - memory.overhead, list[str]()
        for part in by_size:
            if left >= 0:
                left -= getattr(memory, part)
                together.append(names[part])
        what = " and ".join(together) + " together" * (len(together) > 1)
        return f"{text}; {what} do not fit, however small the shards"
    parts = memory_parts(memory)
    largest = max(parts, key=lambda part: parts[part])
    return f"{text}; {largest} alone {size(parts[largest])}"


def needs(num_bytes: int, limit: int) -> str:
    """Return in words that a choice needs more than the limit."""
    if size(num_bytes) == size(limit):
        return f"needs {size(num_bytes - limit)} more than {size(limit)}"
    return f"needs {size(num_bytes)} of {size(limit)}"


def in_words(count: int) -> str:
    """Return a number of parameters in millions or billions: `9.44 M`, `70.6 B`."""
    return f"{number(count / 1e9)} B" if count >= 1e9 else f"{number(count / 1e6)} M"


def refusal_lines(answer: Answer, most: int = 3) -> Iterator[str]:
    """Yield the words of the rules that refuse layouts, each message once."""
    messages = list(dict.fromkeys(answer.refused.values()))
    for message in messages[:most]:
        yield f"refused: {message}"
    if len(messages) > most:
        yield f"and {len(messages) - most} more refusals, which --json lists"


def overview(answer: Answer) -> Iterator[str | TextTable]:
    """Yield what is said of a search: the best layouts and the reasons."""
    yield from heading(answer.question, answer.subject)
    if answer.choices:
        yield best_table(answer)
        yield from reasons(answer)
        yield changes_table(answer)
    yield simpler_table(answer)
    yield from refusal_lines(answer)
    divisions, layouts = answer.num_divisions, len(answer.computed)
    yield (
        f"{divisions:,} division{'s' * (divisions != 1)} of the devices, "
        f"{counted(layouts, 'layout')} computed exactly, in {answer.seconds:.1f} s"
    )


def details(choice: Choice, question: Question, subject: Subject) -> Iterator[str | TextTable]:
    """Yield what is said of one layout: its arithmetic."""
    yield from heading(question, subject)
    yield f"{choice.title}: {choice.details_in_full}"
    yield from group_lines(choice.cfg, question.num_ranks)
    yield memory_table(choice)
    yield time_table(choice)
    yield from arithmetic(choice, question, subject)


def memory_table(choice: Choice) -> TextTable:
    """Return the arithmetic of the fullest rank's memory."""
    total = choice.memory.total
    rows = [
        (part, size(num_bytes), percent(num_bytes / total), MEMORY_PARTS[part])
        for part, num_bytes in memory_parts(choice.memory).items()
    ]
    whole = ("all", size(total), "", f"at the {choice.memory.moment}")
    return TextTable(("memory of the fullest rank", ">", ">share", ""), [*rows, whole])


def time_table(choice: Choice) -> TextTable:
    """Return the arithmetic of a step's time."""
    total, parts = choice.time.total, time_parts(choice.time)
    rows = [
        (part, seconds_text(seconds), percent(seconds / total), TIME_PARTS[part])
        for part, seconds in parts.items()
        if part != "host" or seconds  # no datasheet tells it
    ]
    if moved := choice.time.elementwise:
        what = "of the first three: what reads and writes whole tensors"
        rows.append(("elementwise", seconds_text(moved), percent(moved / total), what))
    hidden = seconds_text(choice.time.hidden_communication)
    rows.append(("all", seconds_text(total), "", f"{hidden} of communication hidden"))
    return TextTable(("time of a step", ">", ">share", ""), rows)


def arithmetic(choice: Choice, question: Question, subject: Subject) -> Iterator[str]:
    """Yield sentences that derive the largest numbers of one layout."""
    division, counts, cluster = choice.candidate.division, subject.counts, question.cluster
    shards = division.num_sharing if "weights" in division.strategy.sharded else 1
    yield (
        f"weights: {in_words(counts.parameters)} parameters are {size(subject.weight_bytes)}; over "
        f"tp {division.tp} x pp {division.pp} x {shards} shards about "
        f"{size(subject.weight_bytes / (division.tp * division.pp * shards))} a rank"
    )
    tokens = choice.cfg.training.global_batch_size * (length := choice.cfg.data.sequence_length)
    flops = tokens * model_flops_per_token(counts, length)
    yield (
        f"computation: {flops / tokens / 1e9:.3g} GFLOPs a token x {tokens:,} tokens = "
        f"{flops:.3g} FLOPs; over {counted(cluster.num_devices, 'device')} in "
        f"{seconds_text(choice.time.total)} that is {percent(choice.mfu, 1)} of their peak (MFU)"
    )
    rate = choice.tokens_per_second
    yield f"{number(rate)} tokens/s; {number(rate / cluster.num_devices)} a device"
    yield from on_the_host(choice, question)
    left = (limit := usable_bytes(question)) - choice.memory.total
    fits = f"fits: {size(left)} left of {size(limit)}"
    yield fits if choice.fits else why_not_fitting(choice, question)


def as_data(answer: Answer) -> dict[str, Any]:
    """Return an answer as plain data, for `--json`."""
    question, cluster = answer.question, answer.question.cluster
    return {
        "schema_version": 1,
        "heading": [*heading(question, answer.subject)],
        "cluster": {
            "device": cluster.device.name,
            "memory_bytes": cluster.device.memory_bytes,
            "usable_bytes": answer.limit_bytes,
            "per_node": cluster.per_node,
            "nodes": cluster.nodes,
            "links": {
                name: asdict(getattr(cluster, name)) for name in ("inside", "between", "host")
            },
        },
        "reasons": [*reasons(answer)] if answer.choices else [],
        "choices": [choice_data(choice, answer) for choice in answer.choices],
        "groups": groups_by_axis(answer.best.cfg, question.num_ranks) if answer.choices else {},
        "changes": {name: choice_data(c, answer) for name, c in answer.changes.items()},
        "simpler": [choice_data(choice, answer) for choice in answer.simpler.values()],
        "computed": [choice_data(choice, answer) for choice in answer.computed],
        "refused": answer.refused,
        "num_divisions": answer.num_divisions,
        "seconds": answer.seconds,
    }


def page_data(answer: Answer) -> dict[str, Any]:
    """Return what the page shows: the data, the tables, and the parts that its bars are made of."""
    tables = (("best", best_table), ("changes", changes_table), ("simpler", simpler_table))
    shown = {name: table(answer) for name, table in tables}
    parts = {"memory": [*MEMORY_PARTS], "time": [*TIME_PARTS]}
    return as_data(answer) | {"tables": shown, "parts": parts}


def choice_data(choice: Choice, answer: Answer) -> dict[str, Any]:
    """Return a choice as plain data."""
    return {
        "layout": layout_name(choice.candidate.division),
        "title": choice.title,
        "details": choice.details_in_full,
        "verdict": verdict(choice, answer),
        "fits": choice.fits,
        "fit": choice.fit,
        "memory": _memory_data(choice.memory),
        "stages": {str(place): _memory_data(memory) for place, memory in choice.stages.items()},
        "time": asdict(choice.time) | {"total": choice.time.total},
        "tokens_per_second": choice.tokens_per_second,
        "mfu": choice.mfu,
        "division": choice.candidate.division._asdict(),
        "parallel": asdict(choice.cfg.parallel),
        "training": {
            "micro_batch_size": choice.cfg.training.micro_batch_size,
            "checkpointing": written(choice.cfg.training.checkpointing),
        },
    }


def _memory_data(memory: PeakBytes) -> dict[str, Any]:
    return memory._asdict() | {"total": memory.total}
