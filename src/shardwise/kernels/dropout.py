"""Dropout without a random generator: a hash of a token's seed and a feature decides what is kept.

So a mask is the same on every device, in every kernel and for any share of the features, and the
backward computes it again instead of storing it. An element is kept if its hash, read as a signed
32-bit number, is at least `threshold(p)`:

    hash32(seed, feature) = mix(seed ^ mix(feature))
    mix(x): x ^= x >> 16; x *= 0x7FEB352D; x ^= x >> 15; x *= 0x846CA68B; x ^= x >> 16

in 32 bits: products modulo 2^32, logical shifts.
Source of `mix`: Chris Wellons' hash prospector, `lowbias32` (public domain).
"""

from dataclasses import dataclass, field

import torch

MULTIPLIERS = (0x7FEB352D, 0x846CA68B)
CPU_BLOCK = 2**17
"""Hashes that are computed at a time on a CPU: their dozen operators then work in its cache."""


@dataclass(frozen=True)
class Dropout:
    """The dropout masks of one or several modules that see the same rows."""

    p: float
    """Probability that an element is dropped; what is kept is divided by 1 - p."""
    seeds: torch.Tensor
    """[modules, rows] int32."""
    features: torch.Tensor | None = None
    """[features] int32: the global number of each feature of x; None: 0, 1, 2, ..."""
    drawn: dict[int, torch.Tensor] = field(default_factory=dict, compare=False)
    """The masks computed so far, by module: a byte per element, for as long as this object lives.
    A backward makes an object of its own, so that no mask is kept from the forward."""

    def keep(self, module: int, num_features: int) -> torch.Tensor:
        """Return the mask of a module, bool [rows, features]: True where an element is kept."""
        if module not in self.drawn:
            seeds, features = self.seeds[module], self.features
            if features is None:
                features = torch.arange(num_features, dtype=torch.int32, device=seeds.device)
            in_blocks = seeds.is_cpu and not torch.compiler.is_compiling()
            blocks = seeds.split(max(1, CPU_BLOCK // num_features)) if in_blocks else (seeds,)
            least = threshold(self.p)
            masks = [hash32(block[:, None], features) >= least for block in blocks]
            self.drawn[module] = masks[0] if len(masks) == 1 else torch.cat(masks)
        return self.drawn[module]

    def drop(self, x: torch.Tensor, module: int = 0) -> torch.Tensor:
        """Return x [rows, features] with dropped elements 0 and kept ones divided by 1 - p."""
        return self.zero(x, module) / (1.0 - self.p)

    def zero(self, x: torch.Tensor, module: int = 0) -> torch.Tensor:
        """Return x [rows, features] with dropped elements 0 and kept ones as they are."""
        return torch.where(self.keep(module, x.shape[1]), x, 0.0)


def as_arguments(drop: Dropout | None) -> tuple[torch.Tensor | None, torch.Tensor | None, float]:
    """Return `seeds` (None: no dropout), `features` and `p`, which torch's operators can take."""
    return (None, None, 0.0) if drop is None else (drop.seeds, drop.features, drop.p)


def from_arguments(
    seeds: torch.Tensor | None, features: torch.Tensor | None, p: float
) -> Dropout | None:
    """Return what `as_arguments` took apart."""
    return None if seeds is None else Dropout(p, seeds, features)


def hash32(seeds: torch.Tensor, counters: torch.Tensor) -> torch.Tensor:
    """Return a hash of each (seed, counter): int32, as are both, which broadcast."""
    return mix(seeds ^ mix(counters))


def mix(x: torch.Tensor) -> torch.Tensor:
    """Return a bijection of the int32 numbers x; each of its bits depends on all bits of x."""
    # Shifts of int32 are arithmetic, so the copies of the sign are masked out.
    first, second = (m - (m >> 31 << 32) for m in MULTIPLIERS)
    x = ((x >> 16).bitwise_and_(0xFFFF).bitwise_xor_(x)).mul_(first)
    x = ((x >> 15).bitwise_and_(0x1FFFF).bitwise_xor_(x)).mul_(second)
    return (x >> 16).bitwise_and_(0xFFFF).bitwise_xor_(x)


def threshold(p: float) -> int:
    """Return the smallest int32 hash that is kept: a share `p` of all hashes lies below it."""
    return min(round(p * 2**32), 2**32 - 1) - 2**31
