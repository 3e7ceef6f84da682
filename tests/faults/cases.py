"""The faults that are injected, one case each: what happens to which rank, when, in what layout."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

LLAMA, HYBRID, EXPERTS = "tiny-llama", "tiny-qwen3_5", "tiny-qwen3_moe"


@dataclass(frozen=True)
class Layout:
    """How a run is split, and the model that it trains."""

    num_ranks: int
    parallel: dict[str, Any] = field(default_factory=dict)
    model: str = LLAMA


LAYOUTS = {
    "single": Layout(1, model=HYBRID),
    "ddp": Layout(2, {"data": "ddp"}),
    "zero1": Layout(2, {"data": "zero1"}),
    "zero2": Layout(2, {"data": "zero2"}),
    "fsdp1": Layout(2, {"data": "fsdp1"}),
    "fsdp2": Layout(2, {"data": "fsdp2"}, HYBRID),
    "pp": Layout(2, {"pp": 2}),
    "pp-interleaved": Layout(2, {"pp": 2, "schedule": "interleaved-1f1b"}),
    "pp-zbv": Layout(2, {"pp": 2, "schedule": "zbv"}),
    "tp": Layout(2, {"tp": 2}),
    "tp-sp": Layout(2, {"tp": 2, "sequence_parallel": True}),
    "cp": Layout(2, {"cp": 2}, HYBRID),
    "ddp-ep": Layout(2, {"data": "ddp", "ep": 2}, EXPERTS),
    "hsdp": Layout(4, {"data": "fsdp2", "dp_replicate": 2}),
    "pp-tp": Layout(4, {"pp": 2, "tp": 2}),
    "pp-fsdp2": Layout(4, {"data": "fsdp2", "pp": 2}),
    "tp-fsdp2": Layout(4, {"data": "fsdp2", "tp": 2}),
    "cp-fsdp2": Layout(4, {"data": "fsdp2", "cp": 2}),
    "ddp-4": Layout(4, {"data": "ddp"}),
    "pp-ep": Layout(4, {"data": "ddp", "pp": 2, "ep": 2}, EXPERTS),
    "tp-ep": Layout(4, {"data": "ddp", "tp": 2, "ep": 2}, EXPERTS),
    "fsdp2-ep": Layout(4, {"data": "fsdp2", "ep": 2}, EXPERTS),
    "3d": Layout(8, {"data": "fsdp2", "pp": 2, "tp": 2}),
}
MODES = ("lora", "full", "dpo-lora", "dpo-full")
"""What is trained: pairs beside a reference, which is the base or, in full, what the run found."""
PHASES = (
    "start",  # before the process group is up
    "load",  # before the model is built and its weights are loaded
    "forward",
    "backward",
    "collective",  # before the second message of a step
    "clip",  # gradients are added up over ranks
    "optimizer",
    "evaluation",
    "save",  # before this rank writes its tensors
    "written",  # after
    "rename",  # before the checkpoint gets its name
    "named",  # after
    "export",  # before adapter/ or model/ is written
    "gathering",  # in the midst of that
    "exported",  # rank 0 has written it, and not renamed
    "record",  # adapter/ or model/ has its name
    "resume",  # before a checkpoint is looked for
    "restore",  # before its first tensor is read
)
FAULTS = (
    "kill",
    "error",
    "launcher-kill",
    "freeze",
    "stop",
    "launcher-terminate",
    "exit",
    "slow",
    "terminate",
    "launcher-freeze",
    "launcher-interrupt",
)
"""Of processes. Their number is prime: in turn, they meet all layouts and all phases."""


@dataclass(frozen=True)
class Case:
    """One fault, or some in a row."""

    kind: str
    layout: str
    fault: str
    phase: str = ""
    rank: int = 0
    mode: str = "lora"
    resumed_in: str = ""
    """The layout of the run that goes on; "": the same."""
    overrides: tuple[str, ...] = ()
    second: tuple[str, str, int] | None = None
    """Fault, phase and rank of one more fault, in the run that goes on."""
    file: str = ""
    """Of a checkpoint."""
    seed: int = 0

    @property
    def key(self) -> str:
        """Unique among cases, and the same in every session."""
        settings = [item.partition(".")[2] for item in self.overrides]
        parts = [self.kind, self.fault, self.phase, f"rank {self.rank}", self.file, self.layout]
        parts += [self.mode, *settings, f"then {self.resumed_in}" * bool(self.resumed_in)]
        parts += [" ".join(map(str, self.second))] if self.second else []
        parts += [f"seed {self.seed}"] if self.seed else []
        return "/".join(filter(None, parts))


def cases() -> list[Case]:
    """All of them, in an order in which a part is a sample of the whole."""
    found = [
        *_processes(),
        *_kills(),
        *_pairs(),
        *_memory_checkpoints(),
        *_disks(),
        *_memory(),
        *_clocks(),
        *_checkpoints(),
        *_numbers(),
        *_of_many_ranks(),
        *_in_a_row(),
        *_at_random(),
    ]
    assert len({case.key for case in found}) == len(found)
    random.Random(0).shuffle(found)
    return found


def _processes() -> Iterator[Case]:
    small, large = PHASES, ("load", "backward", "collective", "optimizer", "rename", "gathering")
    for i, (name, layout) in enumerate(LAYOUTS.items()):
        for j, phase in enumerate(small if layout.num_ranks <= 2 else large):
            if name == "single" and phase == "collective":
                continue
            if layout.num_ranks == 2 and (i + j) % 3 == 2:  # two thirds of the product
                continue
            fault = FAULTS[(i + 2 * j) % len(FAULTS)]
            if name == "single" and fault == "stop":  # nobody is there who could end it
                fault = "segmentation fault"
            overrides = ["launch.timeout_seconds=10"] if fault == "stop" else []
            if phase in ("save", "written", "rename", "named") and i % 2:
                overrides.append("training.async_save=true")
            ends = fault in ("kill", "error", "exit", "stop")
            if ends and phase not in ("resume", "restore") and (i + j) % 3 == 0:
                overrides.append("launch.restarts=1")
            others = [n for n in _alike(name) if n != name]
            changes = ends and not overrides and j % 2 and others
            yield Case(
                "process",
                name,
                fault,
                phase,
                rank=(i + j) % layout.num_ranks,
                mode="full" if (i + j // 2) % 2 else "lora",
                resumed_in=others[j % len(others)] if changes else "",
                overrides=tuple(overrides),
            )

    for name in ("ddp", "pp", "tp", "fsdp2"):
        for fault, phase in (("exit as if done", "backward"), ("segmentation fault", "clip")):
            yield Case("process", name, fault, phase, rank=1)
    yield Case("process", "pp", "exit as if done", "gathering", mode="full")
    yield Case("process", "ddp", "exit as if done", "record")


def _alike(name: str) -> list[str]:
    """Layouts of the same model, on at most two ranks."""
    model = LAYOUTS[name].model
    return [n for n, one in LAYOUTS.items() if one.model == model and one.num_ranks <= 2]


def _kills() -> Iterator[Case]:
    """A rank that dies at once in every phase, in layouts in turn."""
    names = ("ddp", "fsdp2", "pp", "tp", "cp", "ddp-ep", "pp-ep", "tp-ep", "fsdp2-ep")
    for i, phase in enumerate(PHASES):
        for name in (names[i % 9], names[(i + 4) % 9]):
            rank = (i + 1) % LAYOUTS[name].num_ranks
            # Of these phases each has something to restart from.
            restarts = i % 2 and phase not in ("resume", "restore")
            overrides = ("launch.restarts=1",) * bool(restarts)
            mode = "full" if i % 2 else "lora"
            yield Case("kill", name, "kill", phase, rank, mode, overrides=overrides)


def _pairs() -> Iterator[Case]:
    """A rank that dies in a step of pairs: in the reference's pass, in which full training has
    other weights for a while, or later."""
    restarts, memory = "launch.restarts=1", "training.memory_checkpoint_every=1"
    more = ((), (restarts,), ("training.async_save=true",), (restarts, memory))
    for i, name in enumerate(("ddp", "fsdp2", "zero1", "tp", "pp", "cp")):
        for j, phase in enumerate(("reference", "backward", "optimizer")):
            mode = MODES[2 + (i + j) % 2]
            overrides = more[(i + 2 * j) % 4]
            yield Case("pairs", name, "kill", phase, i % 2, mode, overrides=overrides)


def _memory_checkpoints() -> Iterator[Case]:
    """Nothing is on the disk when a rank dies: the new group starts from copies in memory."""
    overrides = (
        *("launch.restarts=1", "training.memory_checkpoint_every=1", "training.save_every=0"),
    )
    for i, name in enumerate(("ddp", "zero1", "fsdp2", "pp", "tp-sp", "cp", "ddp-ep", "hsdp")):
        for phase in ("backward", "optimizer"):
            mode = "full" if i % 2 else "lora"
            rank = i % LAYOUTS[name].num_ranks
            yield Case("memory checkpoint", name, "kill", phase, rank, mode, overrides=overrides)


def _disks() -> Iterator[Case]:
    faults = {
        "full": ("optimizer", "save", "written", "rename", "gathering"),
        "no inodes": ("optimizer", "gathering"),
        "read-only": ("optimizer", "save", "gathering"),
        "file too large": ("save", "gathering"),
        "quota": ("save", "named"),
        "I/O error": ("save", "rename"),
        "slow disk": ("save", "gathering"),
        "folder moved": ("optimizer", "save", "gathering"),
        "checkpoints removed": ("optimizer", "named"),
    }
    layouts = ("single", "ddp", "fsdp2", "pp", "tp", "zero1", "cp")
    for i, (fault, phases) in enumerate(faults.items()):
        for j, phase in enumerate(phases):
            for k in range(2):
                name = layouts[(i + 2 * j + 3 * k) % len(layouts)]
                # Only rank 0 writes the results.
                ranks = 1 if phase in ("rename", "named", "gathering") else LAYOUTS[name].num_ranks
                overrides = ("training.async_save=true",) * (phase == "save" and k == 1)
                mode = "full" if (i + j + k) % 2 else "lora"
                yield Case("disk", name, fault, phase, (j + k) % ranks, mode, "", overrides)


def _memory() -> Iterator[Case]:
    for i, fault in enumerate(("no memory", "MemoryError", "CUDA out of memory")):
        for j, phase in enumerate(
            ("load", "forward", "backward", "optimizer", "save", "gathering")
        ):
            name = ("ddp", "fsdp2", "tp", "pp", "single")[(i + j) % 5]
            yield Case("memory", name, fault, phase, (i + j) % LAYOUTS[name].num_ranks)


def _clocks() -> Iterator[Case]:
    for i, fault in enumerate(("an hour forth", "an hour back", "ten years back", "back to 1970")):
        for j, phase in enumerate(("start", "forward", "save", "exported")):
            name = ("fsdp2", "pp", "single", "ddp")[(i + j) % 4]
            yield Case("clock", name, fault, phase, j % LAYOUTS[name].num_ranks)


def _checkpoints() -> Iterator[Case]:
    for name in ("single", "fsdp2", "pp"):
        tensors = [f"tensors-{rank}.safetensors" for rank in range(LAYOUTS[name].num_ranks)]
        for file in ("checkpoint.json", "index.json", "metrics.jsonl", *tensors):
            for fault in ("cut", "flipped", "of another run", "missing", "empty"):
                if name == "fsdp2" and file == "metrics.jsonl":
                    continue  # the same for every layout
                if fault == "of another run" and file == "index.json":
                    continue  # it is the same
                mode = "full" if name in ("pp", "single") else "lora"
                yield Case("checkpoint", name, fault, mode=mode, file=file)


def _numbers() -> Iterator[Case]:
    every = ("training.check_copies_every=1",)
    for name, ranks in {
        "ddp": (0, 1),
        "ddp-4": (0, 2),
        "cp": (0, 1),
        "hsdp": (1, 2),
        "ddp-ep": (1,),
    }.items():
        for rank in ranks:
            yield Case("numbers", name, "bit of a weight", "stepped", rank, "full", "", every)
            yield Case("numbers", name, "bit of a gradient", "clip", rank, "lora", "", every)
    for name, rank in (("zero1", 0), ("zero2", 1), ("tp", 1), ("tp-sp", 0)):
        for mode in ("lora", "full"):
            fault = "bit of a weight" if name.startswith("zero") else "bit of a norm's weight"
            yield Case("numbers", name, fault, "stepped", rank, mode, "", every)


def _of_many_ranks() -> Iterator[Case]:
    """What does not end a process, in layouts of more than two ranks, in turn."""
    many = [(name, layout.num_ranks) for name, layout in LAYOUTS.items() if layout.num_ranks > 2]
    disks = "full", "read-only", "quota", "I/O error"
    memories = "no memory", "MemoryError", "CUDA out of memory"
    clocks = "an hour forth", "an hour back", "ten years back", "back to 1970"
    damages = "cut", "flipped", "of another run", "missing", "empty"
    for i, (name, num_ranks) in enumerate(many):
        last, mode = num_ranks - 1, ("lora", "full")[i % 2]
        yield Case("disk", name, disks[i % 4], "save", 0, mode)
        yield Case("memory", name, memories[i % 3], ("backward", "optimizer")[i % 2], last, mode)
        yield Case("clock", name, clocks[i % 4], "forward", last, mode)
        for damage in (damages[i % 5], damages[(i + 2) % 5]):
            yield Case("checkpoint", name, damage, mode=mode, file="tensors-0.safetensors")


def _in_a_row() -> Iterator[Case]:
    for i, (first, second) in enumerate(
        [
            (("kill", "forward"), ("kill", "restore")),
            (("kill", "named"), ("error", "gathering")),
            (("launcher-kill", "written"), ("kill", "gathering")),
            (("error", "collective"), ("launcher-terminate", "load")),
            (("exit", "save"), ("kill", "record")),
            (("terminate", "forward"), ("exit", "start")),
        ]
    ):
        for name in (("ddp", "pp-interleaved"), ("fsdp2", "zero2"), ("tp-sp", "fsdp1"))[i % 3]:
            yield Case(
                "in a row", name, *first, i % 2, "lora" if i % 2 else "full", second=(*second, 1)
            )


def _at_random() -> Iterator[Case]:
    for seed in range(1, 16):
        name = list(LAYOUTS)[seed]
        mode, restarts = ("lora", "full")[seed % 2], ("launch.restarts=1",) * (seed % 3 == 0)
        yield Case(
            "random",
            name,
            "kill",
            "later",
            seed % LAYOUTS[name].num_ranks,
            mode,
            "",
            restarts,
            seed=seed,
        )
