"""Dropout without a generator: whether a feature of a token is kept is a hash of the token's seed and the feature.

So a mask is the same on every device and in every kernel, whatever part of it is computed, and need not be kept for the
backward. A feature is kept if the hash, taken for a signed number, is at least `threshold(p)`:

    hash32(seed, feature) = mix(seed ^ mix(feature))        all in 32 bits, products modulo 2^32, logical shifts
    mix(x): x ^= x >> 16; x *= 0x7FEB352D; x ^= x >> 15; x *= 0x846CA68B; x ^= x >> 16

Source of `mix`: Chris Wellons' hash prospector, `lowbias32` (public domain).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

MULTIPLIERS = (0x7FEB352D, 0x846CA68B)
CPU_BLOCK = 2**17
"""Hashes that are taken at once on a CPU: a dozen operators over numbers that stay in its cache."""


@dataclass(frozen=True)
class Dropout:
    """The masks of S modules that see the same M tokens."""

    p: float
    """Of a feature to be dropped; what is kept is divided by 1 - p."""
    seeds: torch.Tensor
    """[S, M] int32."""
    features: torch.Tensor | None = None
    """[K] int32: which features of the whole each of x's is; None: 0 to K - 1."""
    drawn: dict[int, torch.Tensor] = field(default_factory=dict, compare=False)
    """Masks by module: a byte an element, as long as this object lives: not from a forward to its backward."""

    def keep(self, module: int, num_features: int) -> torch.Tensor:
        """Which of K features of each token module `module` keeps: bool [M, K]."""
        if module not in self.drawn:
            seeds, features = self.seeds[module], self.features
            if features is None:
                features = torch.arange(num_features, dtype=torch.int32, device=seeds.device)
            eager_cpu = seeds.is_cpu and not torch.compiler.is_compiling()
            parts = seeds.split(max(1, CPU_BLOCK // num_features)) if eager_cpu else (seeds,)
            masks = [hash32(part[:, None], features) >= threshold(self.p) for part in parts]
            self.drawn[module] = masks[0] if len(masks) == 1 else torch.cat(masks)
        return self.drawn[module]

    def drop(self, x: torch.Tensor, module: int = 0) -> torch.Tensor:
        """Zero what module `module` drops of x [M, K], and divide the rest by 1 - p."""
        return self.zero(x, module) / (1.0 - self.p)

    def zero(self, x: torch.Tensor, module: int = 0) -> torch.Tensor:
        """Zero what module `module` drops of x [M, K]."""
        return torch.where(self.keep(module, x.shape[1]), x, 0.0)


def flat(drop: Dropout | None) -> tuple[torch.Tensor | None, torch.Tensor | None, float]:
    """Its fields, as operators of torch's take them: `seeds` (None: no dropout), `features`, `p`."""
    return (None, None, 0.0) if drop is None else (drop.seeds, drop.features, drop.p)


def hash32(seeds: torch.Tensor, counters: torch.Tensor) -> torch.Tensor:
    """A number for each (seed, counter); int32, broadcast against each other."""
    return mix(seeds ^ mix(counters))


def mix(x: torch.Tensor) -> torch.Tensor:
    """A bijection of 32-bit numbers, of whose output each bit depends on each of the input; int32."""
    # Shifts of int32 are arithmetic, so the copies of the sign are cut off.
    first, second = (m - (m >> 31 << 32) for m in MULTIPLIERS)
    x = ((x >> 16).bitwise_and_(0xFFFF).bitwise_xor_(x)).mul_(first)
    x = ((x >> 15).bitwise_and_(0x1FFFF).bitwise_xor_(x)).mul_(second)
    return (x >> 16).bitwise_and_(0xFFFF).bitwise_xor_(x)


def threshold(p: float) -> int:
    """The least int32 hash that is kept: a share `p` of them is less."""
    return min(round(p * 2**32), 2**32 - 1) - 2**31
