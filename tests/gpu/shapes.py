"""What the kernels are timed on: linears of published models, and heads. It imports no torch.

Sizes: Llama's and Jet-Nemotron's are published (github.com/NVlabs/Jet-Nemotron has the latter in
jetai/modeling/configs/jetlm_2B.json). Qwen3.5-9B's are transformers' defaults, and Qwen3.5-2B's are
the shapes of its tensors as github.com/invergent-ai/surogate converts them
(serve/tools/convert/qwen3_5_2b/inventory.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Setting:
    """Linears that share an input of T tokens, with their adapters; mostly one."""

    model: str
    name: str
    k: int  # features in
    n: tuple[int, ...]  # features out, of each
    r: int = 16
    p: float = 0.0  # of dropout


@dataclass(frozen=True)
class Head:
    """A language model's head, and whether it is trained."""

    model: str
    width: int
    vocabulary: int
    trained: bool = False


@dataclass(frozen=True)
class Sizes:
    """All that one run times, what matters most first."""

    tokens: int
    settings: tuple[Setting, ...]
    heads: tuple[Head, ...]
    repeats: int  # of each timing; the median counts


ONE = (
    Setting("Llama-3.1-8B", "q", 4096, (4096,)),
    Setting("Llama-3.1-8B", "k", 4096, (1024,)),
    Setting("Llama-3.1-8B", "up", 4096, (14336,)),
    Setting("Llama-3.1-8B", "down", 14336, (4096,)),
    Setting("Qwen3.5-2B", "out", 2048, (2048,)),
    Setting("Qwen3.5-2B", "up", 2048, (6144,)),
    Setting("Qwen3.5-2B", "down", 6144, (2048,)),
    Setting("Qwen3.5-9B", "q and its gate", 4096, (8192,)),
    Setting("Qwen3.5-9B", "up", 4096, (12288,)),
    Setting("Qwen3.5-9B", "down", 12288, (4096,)),
    Setting("Jet-Nemotron-2B", "q", 1536, (1152,)),
    Setting("Jet-Nemotron-2B", "up", 1536, (8960,)),
    Setting("Jet-Nemotron-2B", "down", 8960, (1536,)),
)
TOGETHER = (
    Setting("Llama-3.1-8B", "q, k, v", 4096, (4096, 1024, 1024)),
    Setting("Llama-3.1-8B", "gate, up", 4096, (14336, 14336)),
    Setting("Qwen3.5-2B", "in_proj_qkv, in_proj_z", 2048, (6144, 2048)),
    Setting("Qwen3.5-2B", "gate, up", 2048, (6144, 6144)),
    Setting("Qwen3.5-9B", "in_proj_qkv, in_proj_z", 4096, (8192, 4096)),
    Setting("Jet-Nemotron-2B", "q, k, v", 1536, (1152, 1152, 3072)),
)


def _with(settings: tuple[Setting, ...], r: int, p: float) -> tuple[Setting, ...]:
    return tuple(replace(setting, r=r, p=p) for setting in settings)


HEADS = (Head("Llama-3.1-8B", 4096, 128_256), Head("Qwen3.5-2B", 2048, 248_320))
FULL = Sizes(
    tokens=8192,
    settings=(
        *(*ONE, *TOGETHER, *_with(ONE, 16, 0.1), *_with(ONE, 64, 0.0)),
        *(*_with(ONE, 64, 0.1), *_with(TOGETHER, 16, 0.1)),
    ),
    heads=(*HEADS, *(replace(head, trained=True) for head in HEADS)),
    repeats=15,
)
ODD = (Setting("odd", "", 77, (61,), 5, 0.1), Setting("odd", "", 136, (40, 24), 200, 0.0))
"""Sizes that no tile divides. A side is compared at these before all."""
REHEARSAL = Sizes(
    tokens=70,
    settings=(
        Setting("toy", "q", 48, (40,), 4, 0.0),
        Setting("toy", "q", 48, (40,), 4, 0.1),
        Setting("toy", "gate, up", 48, (33, 24), 4, 0.1),
    ),
    heads=(Head("toy", 48, 200), Head("toy", 48, 200, trained=True)),
    repeats=2,
)
"""The same code on toys, on the CPU: everything except the device."""


def sizes_of(device_type: str) -> Sizes:
    """Return what is timed on cuda or cpu."""
    return FULL if device_type == "cuda" else REHEARSAL
