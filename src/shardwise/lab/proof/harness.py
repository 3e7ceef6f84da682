"""A few steps under any layout, and what must be equal to one process.

The rules are those of docs/concepts/parity.md: SGD, LoRA's B drawn at random, row lengths that give
each rank another number of target tokens, several micro-batches per step, and clipping that acts.
"""

import hashlib
import math
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from shardwise.assembly.build import build
from shardwise.assembly.state import MemoryState
from shardwise.base.batches import IGNORED, Batch
from shardwise.base.interfaces import Mesh
from shardwise.checkpoint.export import save_result
from shardwise.config import RunConfig
from shardwise.models import load, quantise
from shardwise.models.adapters import lora
from shardwise.models.families import spec_of
from shardwise.models.kinds import RATES
from shardwise.models.names import hf_name
from shardwise.models.quantise import Format, stored_paths
from shardwise.parallel.clip import PLAIN, sharded_axes
from shardwise.parallel.place import full_tensor
from shardwise.training.evaluate import evaluate
from shardwise.training.step import Phase, forward_backward, nothing, training_step

TOLERANCE = {"loss": 1e-6, "grad": 1e-5, "norm": 1e-5, "param": 1e-5, "saved": 1e-5}
"""The largest relative difference of each kind of number that rounding may make in float32."""
EVALUATED = 7
"""The step whose rows are evaluated after the last step."""

Differences = dict[str, dict[str, float]]
"""Relative differences by kind of number, as in TOLERANCE, and by name."""
Row = Callable[[int, int], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
"""(slot, step) -> tokens, labels and documents of a row, each [T]."""


Side = tuple[int, list[int], list[int]]
"""The number of a document, its prompt and its answer."""


@dataclass(frozen=True)
class RandomRows:
    """Rows of random tokens, each a function of (slot, step). With 24 tokens they have 24, 5, 14,
    23, ... targets, so that no two ranks have as many.
    """

    length: int = 24
    vocabulary: int = 256

    def __call__(self, slot: int, step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See Row."""
        length = self.length
        generator = torch.Generator().manual_seed(1000 * step + slot)
        tokens = torch.randint(0, self.vocabulary, (length + 1,), generator=generator)
        labels = tokens[1:].clone()
        labels[length - (slot * 7 + step * 3) % max(1, length - 4) :] = IGNORED
        # Three documents; of 24 tokens they have 1 to 12 in the front and 1 to 7 at the end. Only
        # packing `isolated` looks at them.
        places = torch.arange(length)
        in_second = places >= 1 + (slot * 5 + step) % max(1, length // 2)
        in_third = places >= length - 1 - (slot * 3 + step) % max(1, length * 7 // 24)
        return tokens[:-1], labels, in_second.long() + in_third.long()


@dataclass(frozen=True)
class PairRows(RandomRows):
    """Rows of pairs of answers: the documents 2k and 2k + 1 of a row are the sides of its pair k.

    Prompts have 2 or 3 tokens and answers 2 to 5, so that rows of 24 tokens have one pair or two,
    and padding behind them.
    """

    def __call__(self, slot: int, step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See Row."""
        sides = list[Side]()
        some = self._drawn(slot, step)
        for pair in range(2):
            prompt = some(2 + (slot + pair) % 2)
            answers = some(3 + (slot * 3 + step + pair) % 3), some(2 + (slot + step) % 3)
            both = [(2 * pair + side, prompt, answer) for side, answer in enumerate(answers)]
            if self._has_room(sides + both):
                sides += both
        return self._row(sides)

    def _has_room(self, sides: Sequence[Side]) -> bool:
        return sum(len(prompt) + len(answer) for _, prompt, answer in sides) <= self.length

    def _drawn(self, slot: int, step: int) -> Callable[[int], list[int]]:
        """Return a function that draws so many tokens."""
        generator = torch.Generator().manual_seed(1000 * step + slot)
        most = self.vocabulary
        return lambda number: torch.randint(0, most, (number,), generator=generator).tolist()

    def _row(self, sides: Sequence[Side]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return a row of these sides, one behind the other."""
        tokens, labels, documents = list[int](), list[int](), list[int]()
        for number, prompt, answer in sides:
            tokens += [*prompt, *answer]
            labels += [*[IGNORED] * (len(prompt) - 1), *answer, IGNORED]
            documents += [number] * (len(prompt) + len(answer))
        rest = self.length - len(tokens)
        padded = tokens + [0] * rest, labels + [IGNORED] * rest, documents + [-1] * rest
        ids, targets, numbers = map(torch.tensor, padded)
        return ids, targets, numbers


@dataclass(frozen=True)
class LabelledRows(PairRows):
    """Rows of up to three answers with a label: document 2k or 2k + 1 is desirable or is not.

    So that no two ranks have as many, a row has one to three answers.
    """

    is_mismatched: bool = False
    """Whether each prompt has the answer of the row of the slot before."""

    def __call__(self, slot: int, step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See Row."""
        sides, others = self._answers(slot, step), self._answers(slot + 100, step)
        if self.is_mismatched:
            sides = [(*own[:2], other[2]) for own, other in zip(sides, others)]
        del sides[1 + (slot + step) % 3 :]
        while not self._has_room(sides):
            sides.pop()
        return self._row(sides)

    def _answers(self, slot: int, step: int) -> list[Side]:
        some = self._drawn(slot, step)
        return [
            (2 * k + (slot + step + k) % 2, some(2 + (slot + k) % 2), some(2 + (slot + k) % 4))
            for k in range(3)
        ]


ROWS: dict[str, type[RandomRows]] = {"sft": RandomRows, "kto": LabelledRows}
"""The rows of an objective; of others PairRows."""


@dataclass(frozen=True)
class Outcome:
    """Results of a run on a rank; tensors are complete, whatever the layout."""

    losses: list[float]
    norms: list[float]
    eval_loss: float
    grads: dict[str, torch.Tensor]
    """Gradients of the first step, before clipping."""
    params: dict[str, torch.Tensor]
    """Trainable parameters after the last step."""
    saved: dict[str, torch.Tensor]
    """Tensors that the run leaves on disk."""
    axes: dict[str, list[str]] = field(default_factory=dict)
    """The mesh axes that a trained parameter is sharded over, where there are any."""


def microbatches(cfg: RunConfig, mesh: Mesh, step: int, row: Row | None = None) -> list[Batch]:
    """Return this rank's rows of step `step`; without `row` those of `Rows()`."""
    row = row or ROWS.get(cfg.objective, PairRows)()
    size = cfg.training.micro_batch_size
    slots = list(mesh.slots(cfg.training.global_batch_size))
    batches = []
    for start in range(0, len(slots), size):
        batch = _batch_of(row, tuple(slots[start : start + size]), step)
        if isinstance(row, LabelledRows):
            other = _batch_of(replace(row, is_mismatched=True), batch.slots, step)
            batch = replace(batch, mismatched=other)
        batches.append(batch)
    return batches


def _batch_of(row: Row, slots: tuple[int, ...], step: int) -> Batch:
    rows = [row(slot, step) for slot in slots]
    ids, labels, documents = (torch.stack(part) for part in zip(*rows))
    most = int(documents.max()) // 2 + 1
    return Batch(ids, labels, documents, slots, step, most_pairs=most)


@dataclass(frozen=True)
class DrawnStart(MemoryState):
    """Weights at which gradients show what they are to show, drawn for the model that is built.

    LoRA's B is drawn at random: at its usual zero every gradient of A is zero and proves nothing.
    Rates of decay are drawn small, so that a recurrent state lives for some tokens: at their usual
    values it is forgotten at once, and gradients of rates (1e-5) are rounding errors in good part.
    """

    read_back: Format | None = None
    """The frozen matrices of layers are what this format of `model.base` makes of them."""

    def check(self, model: Any, cfg: RunConfig, selected: Collection[str]) -> None:
        """Draw the weights of this model, which has its adapters."""
        stored = _stored(model, cfg, self.read_back) if self.read_back else ()
        self.tensors.update((f"weights/{name}", value) for name, value in (*drawn(model), *stored))


def _stored(hf: Any, cfg: RunConfig, read_back: Format) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, values) of what is read back, and of DoRA's magnitudes, which start from it."""
    plain = load.build_meta(cfg.model, load.read_config(cfg.model))
    magnitudes = lora.magnitude_starts(hf, dict(hf.named_parameters()))
    names = {hf_name(n): n for n in stored_paths(hf, spec_of(hf.config, hf), read_back)}
    for name, value in quantise.read_back(plain, cfg.model, cfg.training.seed, read_back, names):
        yield names[name], value
        if start := magnitudes.get(names[name]):
            yield start[0], lora.first_magnitude(start[1], value)


def drawn(hf: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, values) of the parameters that `DrawnStart` draws, by their names."""
    for name, parameter in hf.named_parameters():
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "little")
        generator = torch.Generator().manual_seed(seed)
        if ".lora_B." in name:
            yield name, torch.randn(parameter.shape, generator=generator) * 0.05
        elif name.rpartition(".")[2] in RATES:
            yield name, (0.02 + 0.3 * torch.rand(parameter.shape, generator=generator)).log()


def run(
    cfg: RunConfig,
    mesh: Mesh,
    batches_of: Callable[[Mesh, int], list[Batch]],
    loss_scale: float = 0.0,
    read_back: Format | None = None,
) -> Outcome:
    """Run the steps of `cfg` on these micro-batches of each step, and return what this rank saw.

    `loss_scale`: the first one; 0: that of the run. `read_back`: see `DrawnStart`.
    """
    job = build(cfg, mesh, DrawnStart(read_back=read_back))
    if loss_scale:
        job.loss_scale.scale = loss_scale
    losses: list[float] = []
    norms: list[float] = []
    grads: dict[str, torch.Tensor] = {}
    # Complete parameters that the optimizer has shards of, and frozen ones, which may have got a
    # gradient by mistake.
    named = [
        *job.pm.named_parameters(),
        *(pair for g in job.optimizer.param_groups for pair in _pairs(g)),
    ]

    def look(phase: Phase) -> None:
        for name, parameter in named if phase == "reduction" else ():
            if parameter.grad is not None:
                grads[name] = full_tensor(job.pm.to_portable(name, parameter.grad)).clone()

    after = look  # in the first step
    if cfg.training.precision == "float16":
        # Times the loss scale they overflow, so they are looked at without it.
        forward_backward(job.pm, batches_of(mesh, 1), mesh, after=look)
        for _, parameter in named:
            parameter.grad = None
        after = nothing
    for step in range(1, job.num_steps + 1):
        batches, max_norm = batches_of(mesh, step), cfg.optimizer.max_grad_norm
        result = training_step(job, batches, mesh, max_norm, after)
        after = nothing
        losses.append(result.loss)
        # What is infinite on one rank may be NaN on another.
        norms.append(math.inf if result.skipped else result.grad_norm)
    eval_loss = evaluate(job.pm, [batches_of(mesh, EVALUATED)], mesh, job.num_steps).loss
    with tempfile.TemporaryDirectory() as folder:
        written = save_result(job, cfg, mesh, Path(folder))
        saved = {}
        if written is not None:
            (file,) = written.glob("*.safetensors")
            saved = load_file(file)
    params = {
        name: full_tensor(job.pm.to_portable(name, p)).clone()
        for name, p in job.pm.trained().items()
    }
    facts = job.pm.parameter_facts
    axes = {n: [*sharded_axes(p, facts.get(p, PLAIN))] for n, p in named if p.requires_grad}
    return Outcome(losses, norms, eval_loss, grads, params, saved, axes)


def _pairs(group: dict[str, Any]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    return zip(group["param_names"], group["params"])


def weaknesses(reference: Outcome, max_norm: float) -> list[str]:
    """Return why a comparison with this one process would prove less than it is to prove."""
    problems = [
        f"the gradient of {name} is zero and proves nothing"
        for name, grad in reference.grads.items()
        if not grad.abs().max() > 0
    ]
    if not min(reference.norms) > max_norm:
        problems.append("clipping did not act")
    if not reference.norms[-1] < math.inf:
        problems.append("no step was done")
    return problems


def differences(outcomes: Sequence[Outcome], reference: Outcome) -> Differences:
    """Return by kind of number and by name the largest relative difference of all ranks.

    A tensor's is its largest absolute difference over its largest value. It is infinite for a
    tensor that no rank has, or that only the ranks have: they need not hold the same tensors, but
    must hold all of the reference's between them, and no others.
    """
    return {
        "loss": _by_step([rank.losses for rank in outcomes], reference.losses)
        | {
            "evaluation": maximum(
                _relative(rank.eval_loss, reference.eval_loss) for rank in outcomes
            )
        },
        "norm": _by_step([rank.norms for rank in outcomes], reference.norms),
        "grad": _worst([rank.grads for rank in outcomes], reference.grads),
        "param": _worst([rank.params for rank in outcomes], reference.params),
        "saved": _worst([rank.saved for rank in outcomes], reference.saved),
    }


def largest(errors: Differences) -> dict[str, float]:
    """Return the largest difference of each kind; NaN if one of them is NaN."""
    return {kind: maximum(by_name.values()) for kind, by_name in errors.items()}


def tolerance(in_16_bits: Outcome, in_float32: Outcome) -> dict[str, float]:
    """Return the tolerance of a layout that need not round in 16 bits as one process does.

    Both are of one process. A layout may differ by three times what 16 bits change there: as much
    as that again on its own way from float32, and as much to spare. Where float16 overflows on one
    process, a layout must overflow too.
    """
    norms = [n if n == math.inf else m for n, m in zip(in_16_bits.norms, in_float32.norms)]
    changed = largest(differences([in_16_bits], replace(in_float32, norms=norms)))
    return {key: max(TOLERANCE[key], 3 * changed[key]) for key in TOLERANCE}


def verdict(errors: Mapping[str, float], most: Mapping[str, float] = TOLERANCE) -> list[str]:
    """Return what is out of tolerance; nothing where the layout is right (NaN is not)."""
    return [
        f"{key} {errors[key]:.1e} > {most[key]:.0e}" for key in most if not errors[key] <= most[key]
    ]


def _relative(value: float, reference: float) -> float:
    # The difference of equal infinities is NaN.
    return 0.0 if value == reference else abs(value - reference) / abs(reference)


def _by_step(by_rank: Sequence[list[float]], reference: list[float]) -> dict[str, float]:
    return {
        f"step {i + 1}": maximum(_relative(rank[i], value) for rank in by_rank)
        for i, value in enumerate(reference)
    }


def _worst(
    by_rank: Sequence[dict[str, torch.Tensor]], reference: dict[str, torch.Tensor]
) -> dict[str, float]:
    errors = dict.fromkeys(reference.keys() ^ set().union(*by_rank), math.inf)
    for name, expected in reference.items():
        pieces = [tensors[name] for tensors in by_rank if name in tensors]
        if pieces:
            scale = expected.abs().max().clamp(min=1e-30)
            errors[name] = maximum(
                ((piece - expected).abs().max() / scale).item() for piece in pieces
            )
    return errors


def maximum(values: Iterable[float]) -> float:
    """Return the largest value; NaN if one of them is, which Python's max need not return."""
    return torch.tensor(list(values)).max().item()
