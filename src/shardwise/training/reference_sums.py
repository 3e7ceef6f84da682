"""The reference's log-probabilities of a run's answers, in a file (`reference_logprobs`).

An answer is known by a hash of its tokens and targets, those of its pair included. So the file does
not depend on rows, ranks, epochs or the order of documents: a resume under another layout reads it.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save

from shardwise.base.batches import IGNORED, Batch
from shardwise.base.interfaces import ParallelModel
from shardwise.base.safety import write_atomically
from shardwise.config import UserError, require
from shardwise.parallel.preferences import PairsObjective
from shardwise.parallel.reduce import from_every_rank


class ReferenceSums:
    """Sums over the tokens of answers by the reference, two numbers for each pair."""

    def __init__(self, path: Path) -> None:
        """Take the file, of which nothing is read yet."""
        self.path = path
        self._sums: dict[int, tuple[float, float]] = {}

    def __call__(self, batch: Batch) -> torch.Tensor:
        """Return the sums of complete rows, [B, pairs, 2]; UserError where the file lacks them."""
        found = torch.zeros(len(batch.slots), batch.most_pairs, 2)
        for row, pair, key in _keys(batch):
            if key not in self._sums:
                raise UserError(
                    f"{self.path} lacks answers of step {batch.step}: it has those of the run as "
                    "it began; set training.steps and data back, or "
                    "preference.reference_logprobs to step"
                )
            found[row, pair] = torch.tensor(self._sums[key])
        return found

    def compute(self, pm: ParallelModel, steps: Iterable[Sequence[Batch]]) -> Iterator[int]:
        """Let the reference compute what these global batches have and is not there; then save it.

        Yields the number of batches that are done. A collective of all ranks, which read different
        rows. UserError for a number that is not finite.
        """
        assert isinstance(pm.objective, PairsObjective)
        for number, microbatches in enumerate(steps, 1):
            own = [batch.to(pm.objective.mesh.device) for batch in microbatches]
            others = [batch.mismatched for batch in own if batch.mismatched is not None]
            for batches in (own, others) if others else (own,):
                keys = {key for batch in batches for _, _, key in _keys(batch)}
                if any(from_every_rank(not keys <= self._sums.keys())):
                    sums = pm.objective.reference_pass(pm, batches)
                    found = {
                        key: tuple(sums[batch.slots].logps[row, pair].tolist())
                        for batch in batches
                        if batch.slots in sums
                        for row, pair, key in _keys(batch)
                    }
                    for those in from_every_rank(found):
                        self._sums |= those
            yield number
        logps = torch.tensor([*self._sums.values()]).view(-1, 2)
        is_finite = bool(logps.isfinite().all())
        require(is_finite, "a log-probability of the reference is not finite; look at its weights")
        if dist.get_rank() == 0:
            keys = torch.tensor([*self._sums], dtype=torch.int64)
            write_atomically(self.path, save({"keys": keys, "logps": logps}))
        dist.barrier()

    def read(self, path: Path) -> None:
        """Read what a run wrote before its first step, which the resume has compared with it."""
        content = load_file(path)
        self._sums = dict(zip(content["keys"].tolist(), map(tuple, content["logps"].tolist())))
        if path != self.path and dist.get_rank() == 0:
            write_atomically(self.path, path.read_bytes())

    def use_in(self, pm: ParallelModel) -> None:
        """Let the steps of a model look up what the reference gave."""
        assert isinstance(pm.objective, PairsObjective)
        pm.objective.computed = self


def _keys(batch: Batch) -> Iterator[tuple[int, int, int]]:
    """Yield row and number of each pair of complete rows, and its hash.

    What stands behind the last target of a side is left out: a row may end before it.
    """
    assert batch.ids_on_host is not None
    assert batch.on_host is not None
    labels, documents = batch.on_host.labels_array, batch.documents_on_host
    for row, (ids, row_labels, numbers) in enumerate(zip(batch.ids_on_host, labels, documents)):
        for pair in range(batch.most_pairs):
            content = hashlib.blake2b(digest_size=8)
            for number in (2 * pair, 2 * pair + 1):
                places = np.flatnonzero(numbers == number)
                targets = np.flatnonzero(row_labels[places] != IGNORED)
                places = places[: targets[-1] + 1] if len(targets) else places[:0]
                content.update(np.stack([ids[places], row_labels[places]]).tobytes() + b"|")
            if (numbers // 2 == pair).any():
                yield row, pair, int.from_bytes(content.digest(), "little", signed=True)
