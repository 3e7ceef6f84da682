"""Bytes per rank of GPT-2 Large under single, DDP, ZeRO-3 and ZeRO-3 x TP, beside published peaks.

    python tools/gpt2_large.py [--out results/gpt2-large]

States are those of shardwise.planner.memory for rank 0 of each of configs/gpt2-large/*.yaml.
tests/integration/test_gpt2_large.py compares them, on a small model, with what real ranks hold.

The peak is predicted, and was not measured at this size: the most of five moments of a step on a
GPU, each the states that are there and what lies beside them. B rows of T tokens, D wide, L layers,
F = 4 D, V tokens, t = tp.

- Weights are float32, products bfloat16: `hidden`, the stream between layers and what a checkpoint
  holds, is 4 B T D bytes.
- forward: a checkpoint per layer, and autocast's bfloat16 copies of all layers' weights, which it
  keeps until the model ends (not of tensor parallelism's shares: these are no leaves of the graph).
- loss: the checkpoints, the last layer's and the final norm's output. Chunked: the rows with a
  target (4 B T D), their gradient (4 B T D), in bfloat16 (2 B T D); of the head the gradient
  (4 V D / t), a bfloat16 copy and a chunk's product (2 V D / t each); a chunk of logits in float32
  and in bfloat16. Plain: the head in bfloat16 (2 V D / t) and three times all logits in float32
  (12 B T V): log-probabilities, their gradient, and the logits' gradient.
- last layer, first layer: what a layer keeps while it is computed again, per token and D: 8 bytes
  whole (products' inputs of bfloat16 after the norms, the sum in the middle), 8 / t of attention
  (queries, keys, values, output) and 64 / t of the feed-forward (GPT-2's activation has a power,
  which autocast computes in float32 on a GPU; 40 / t on a CPU); its bfloat16 weights (24 D^2 / t);
  gradients: two of the stream, two as wide as F. In the last layer all checkpoints are there and
  only the head's gradient; in the first one checkpoint and all gradients. In between both change
  evenly.
- step: all gradients, and the square roots of one moment, which AdamW makes for all weights at once
  (on a CPU twice those of the largest).

DDP keeps its buckets, which are the gradients, throughout. ZeRO-3 keeps the embeddings and the
final norm gathered for the whole step, since the head is tied, and their gradient whole to its end;
of the layers it has two gathered (the next is fetched beforehand), and one's gradient whole, twice.
ZeRO-3 x TP does so with a tensor-parallel rank's share: the token embedding's rows and a layer's
matrices are 1 / t of the whole ones, the other weights are whole. What an allocator rounds up or
holds in reserve, NCCL's buffers and CUDA's context are not in it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from shardwise.assembly.describe import describe
from shardwise.benchmark.paired import command_line, table, write_json
from shardwise.config import RunConfig
from shardwise.kernels.linear_cross_entropy.chunked import CHUNK_BYTES
from shardwise.layouts import AXES
from shardwise.metrics.hardware import environment
from shardwise.models.load import read_config
from shardwise.planner.memory import state_bytes
from shardwise.planner.share import share_of
from shardwise.run_file import load_config

ROOT = Path(__file__).parents[1]
PUBLISHED_GB = {"single": 21, "ddp": 21, "zero3": 20, "fsdp2-tp": 6}
NUM_GPUS = {"single": 1, "ddp": 4, "zero3": 4, "fsdp2-tp": 4}
ROWS = (8, 32)
COLUMNS = (
    *("layout", "rows", "weights", "gradients", "AdamW", "states", "peak", "moment"),
    *("plain loss", "moment", "published"),
)
HEAD = """\
# GPT-2 Large, 1,024 tokens, bfloat16 products, AdamW, checkpoints: GB (10^9 bytes) on rank 0

States are exact, peaks predicted, neither measured on GPUs. Published are peaks of an unknown batch
size.

"""


def main() -> None:
    options = command_line(__doc__, ROOT / "results" / "gpt2-large").parse_args()
    rows = [row_of(layout, rows) for layout in PUBLISHED_GB for rows in ROWS]
    result = {"environment": environment(), "unit": "bytes on rank 0", "rows": rows}
    write_json(options.out / "memory.json", result)
    page = HEAD + table(COLUMNS, map(cells_of, rows)) + "\n"
    (options.out / "memory.md").write_text(page, encoding="utf-8")
    print(page)


def row_of(layout: str, rows: int) -> dict[str, Any]:
    """Return states and predicted peaks of one run file."""
    cfg = load_config(ROOT / "configs" / "gpt2-large" / f"{layout}-{rows}.yaml")
    # Nothing is read with the tokenizer, and the corpus that it comes from need not be there.
    model = replace(cfg.model, path=str(ROOT / cfg.model.path), tokenizer=None)
    cfg = replace(cfg, model=model)
    states = states_of(cfg, NUM_GPUS[layout])
    predicted = {}
    for loss in ("chunked", "plain"):
        of_loss = replace(cfg, training=replace(cfg.training, loss=loss))
        predicted[loss] = moments(of_loss, states, NUM_GPUS[layout])
    return {
        "layout": layout,
        "rows_per_device": rows,
        "state_bytes": states,
        "moments": predicted,
        "published_peak_gb": PUBLISHED_GB[layout],
    }


def states_of(cfg: RunConfig, world_size: int) -> dict[str, int]:
    """Return the bytes of weights, gradients and optimizer that rank 0 of a run holds."""
    run, first = describe(cfg, world_size), dict.fromkeys(AXES, 0)
    return state_bytes(cfg, share_of(cfg, run, first), run.sizes, first)


def moments(
    cfg: RunConfig, states: dict[str, int], num_gpus: int, gpu: bool = True
) -> dict[str, int]:
    """Return the predicted bytes on a rank at the moments that may be the peak; see above."""
    config = read_config(cfg.model)
    d, layers, vocab, tp = config.n_embd, config.n_layer, config.vocab_size, cfg.parallel.tp
    tokens = cfg.training.micro_batch_size * cfg.data.sequence_length
    hidden = 4 * tokens * d
    own_vocab = -(-vocab // tp)
    layer_weights = 12 * d * d // tp  # elements
    sharded = cfg.parallel.data == "fsdp2" and num_gpus > 1
    gradients = states["gradients"]
    kept = sum(states.values()) - gradients
    gathered = 4 * (own_vocab + config.n_positions + 2) * d if sharded else 0
    before = kept + gathered
    if cfg.parallel.data == "ddp" and tp == 1:
        before += gradients

    checkpoints = layers * hidden
    head_gradient = 4 * own_vocab * d
    if cfg.training.loss != "plain":
        chunk = 6 * min(tokens * own_vocab, CHUNK_BYTES // 4)
        loss = 10 * tokens * d + 8 * own_vocab * d + chunk
    else:
        loss = 2 * own_vocab * d + 12 * tokens * vocab
    wide = (64 if gpu else 40) + 8 + (32 if gpu else 16)
    layer = tokens * d * (8 + wide / tp) + 2 * hidden + 2 * layer_weights
    # Two layers are gathered, and one's full gradient is there twice.
    gathered_layers = 4 * layer_weights * 4 if sharded else 0
    update = states["weights"] if gpu else 2 * head_gradient
    copies = 2 * layer_weights * layers if tp == 1 else 0  # autocast's, of all layers
    last = head_gradient if sharded else 0  # the tied head's, not reduced before the end
    sizes = {
        "forward": before + gathered_layers // 2 + checkpoints + copies,
        "loss": before + checkpoints + 2 * hidden + loss,
        "last layer": before + gathered_layers + checkpoints + head_gradient + layer,
        "first layer": kept + gathered + gradients + gathered_layers + hidden + layer + last,
        "step": kept + gradients + update,
    }
    return {moment: int(size) for moment, size in sizes.items()}


def cells_of(row: dict[str, Any]) -> list[str]:
    """Return the cells of a row of the page, in GB of 10^9 bytes."""
    states = list(row["state_bytes"].values())
    sizes = [f"{size / 1e9:.2f}" for size in (*states, sum(states))]
    cells = [row["layout"], str(row["rows_per_device"]), *sizes]
    for loss in ("chunked", "plain"):
        sizes_at = row["moments"][loss]
        most = max(sizes_at, key=sizes_at.__getitem__)
        cells += [f"{sizes_at[most] / 1e9:.1f}", most]
    return [*cells, str(row["published_peak_gb"])]


if __name__ == "__main__":
    main()
