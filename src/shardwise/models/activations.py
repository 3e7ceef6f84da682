"""The memory that one micro-batch takes in a unit of a model, by formula.

A unit is the embedding, a layer, or the final norm with head and loss. Nothing here makes a tensor:
the forwards of models/kinds run on a tape of sizes (tape.py).
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

from transformers import PreTrainedModel

from shardwise.base.layouts import strategy_facts
from shardwise.base.schedule.context import reach_of, way_taken
from shardwise.base.schedules import HALVING
from shardwise.config import RunConfig, Way, way_of
from shardwise.kernels.attention.blocks import computed
from shardwise.kernels.linear_cross_entropy.chunked import CHUNK_BYTES, CPU_ROWS
from shardwise.kernels.quantised import Format
from shardwise.models.alike import known
from shardwise.models.dtypes import autocast_dtype, copied_names, hidden_dtype
from shardwise.models.elementwise import SharedRows
from shardwise.models.expert_plan import cuts_of as expert_cuts_of
from shardwise.models.facts import context_facts
from shardwise.models.families import spec_of
from shardwise.models.moves import SMALL, WIDE, loss_in_chunks
from shardwise.models.operations import TapedBlock
from shardwise.models.published import stored_form
from shardwise.models.quantise import stored_paths
from shardwise.models.spec import LayerSpec, ModelSpec
from shardwise.models.tape import Memory, Moves, Slot, Tape, Tensor
from shardwise.models.tensor_plan import parameter_cuts, split_blocks
from shardwise.models.walk import is_windowed, norm_of, run_layer, tables_of


class UnitMoves(NamedTuple):
    """Moves of the operators that one micro-batch runs one by one in a unit on a rank."""

    forward: Moves
    backward: Moves
    """Empty where no backward reaches the unit."""
    weight_bytes: int
    """Bytes that copies of weights in another dtype move in the forward."""


class UnitMemory(NamedTuple):
    """Bytes of one micro-batch in one unit on a rank."""

    kept: int
    """Alive from its forward to its backward, its input included if it is, its output not."""
    forward: int
    """The most alive at once during its forward, beyond what was alive before it."""
    backward: int
    """The most alive at once during its backward, beyond what was alive at its start: what it kept
    and the gradient of its output."""
    late: int = 0
    """Bytes that the first half of a backward leaves for the second beside what is kept: the
    gradients of what is computed with trained weights."""
    inputs: int = 0
    """The same while only gradients of inputs are computed, and what it kept stays."""
    keeps_input: bool = True
    """Whether its input is alive so long. A norm that computes in float32 keeps its input in that
    dtype, and no other operation reads bfloat16 hidden states again."""


def unit_memory(
    cfg: RunConfig,
    hf: PreTrainedModel,
    spec: ModelSpec,
    unit_index: int,
    has_whole_experts: bool = False,
) -> UnitMemory:
    """Return the memory of a unit, from the embedding (0) up, of a model on any device.

    `has_whole_experts`: each data rank has experts of its own, which nothing gathers. Every rank of
    `tp` counts as the first one, whose share is the largest. The cores are the project's own
    (kernels/*); those of other packages keep somewhat more or less.
    """
    unit = partial(_Unit, cfg, hf, spec, unit_index, has_whole_experts)
    memory = unit().memory_of_unit()
    if cfg.parallel.schedule not in HALVING:
        return memory
    halved = unit(is_halved=True).memory_of_unit()
    return memory._replace(late=halved.late, inputs=halved.backward)


def unit_moves(cfg: RunConfig, hf: PreTrainedModel, spec: ModelSpec, unit_index: int) -> UnitMoves:
    """Return what the operators of a unit read and write, computed once and not recomputed."""
    unit = _Unit(cfg, hf, spec, unit_index)
    out = unit.forward()(unit.x)
    num_bytes, slot = out.num_bytes, out.slot
    del out
    if slot is not None:
        unit.tape.backward(slot, Memory(unit.tape, num_bytes))
    return UnitMoves(unit.tape.forward_moves, unit.tape.backward_moves, unit.tape.weight_bytes)


def seen_by_units(
    cfg: RunConfig, hf: PreTrainedModel, spec: ModelSpec, checkpointing: object = None
) -> str:
    """Return what units see of a run, as a key; `checkpointing`: in its place, by default all."""
    parallel, hidden = cfg.parallel, ("global_batch_size", "checkpointing")
    context = known(hf, ("context", spec), lambda: context_facts(hf, spec))
    layout = parallel.cp, parallel.tp, parallel.ep, parallel.sequence_parallel
    layout = *layout, context.way_and_cut(parallel)[0], parallel.schedule in HALVING
    training = [value for key, value in vars(cfg.training).items() if key not in hidden]
    training.append(cfg.training.checkpointing if checkpointing is None else checkpointing)
    copies = strategy_facts(parallel).gathers_copies
    return repr((layout, copies, training, cfg.model, cfg.data, cfg.lora))


def way_of_unit(cfg: RunConfig, spec: ModelSpec, unit_index: int) -> Way:
    """Return how the layer of a unit is recomputed; `none` of the embedding and the head."""
    layers = spec.layers[max(0, unit_index - 1) : unit_index]
    ways = [way_of(cfg.training.checkpointing, layer.number, layer.kind) for layer in layers]
    return ways[0] if ways else "none"


class _Unit:
    """One unit of a run, whose forward can be run on a tape."""

    def __init__(
        self,
        cfg: RunConfig,
        hf: Any,
        spec: ModelSpec,
        unit_index: int,
        has_whole_experts: bool = False,
        is_halved: bool = False,
    ) -> None:
        self.has_whole_experts = has_whole_experts
        self.cfg, self.hf, self.spec, self.unit_index = cfg, hf, spec, unit_index
        self.tape = Tape(is_halved=is_halved)
        self.hidden = hidden_dtype(cfg).itemsize
        self.length = cfg.data.sequence_length // cfg.parallel.cp
        self.num_shares = cfg.parallel.tp if cfg.parallel.sequence_parallel else 1
        """Ranks of `tp` that share the tokens between blocks."""
        numel = cfg.training.micro_batch_size * self.length * spec.hidden_size
        self.x = self.tape.tensor(numel // self.num_shares, self.hidden)
        if cfg.parallel.schedule in HALVING or is_trained_below(hf, spec, unit_index):
            self.x.slot = Slot(self.x.num_bytes)

    def memory_of_unit(self) -> UnitMemory:
        """Return the memory of the unit."""
        forward = self.forward()
        if self.unit_index == 0:
            return self.memory(forward, itself=False)
        if self.unit_index == len(self.spec.layers) + 1:
            return self.memory(forward)
        layer = self.spec.layers[self.unit_index - 1]
        way = way_of(self.cfg.training.checkpointing, layer.number, layer.kind)
        if way != "none":
            return self.memory_recomputed(forward, way == "operators")
        return self.memory(forward)

    def forward(self) -> Callable[[Tensor], Tensor]:
        """Return the forward of the unit."""
        if self.unit_index == 0:
            return self.embedding
        if self.unit_index == len(self.spec.layers) + 1:
            return self.head
        return partial(self.layer, self.spec.layers[self.unit_index - 1])

    def memory(self, forward: Callable[[Tensor], Tensor], itself: bool = True) -> UnitMemory:
        """Return the memory of a unit; `itself`: it has hidden states for an input."""
        tape, before = self.tape, self.tape.alive_bytes
        tape.peak_bytes = 0
        out = forward(self.x)
        forward_bytes = tape.peak_bytes - before
        kept, slot = tape.alive_bytes - before - out.num_bytes, out.slot
        keeps_input = not itself or tape.reads(self.x)
        if itself and keeps_input:
            kept += self.x.num_bytes
        num_bytes = out.num_bytes
        if slot is None:
            return UnitMemory(0, forward_bytes, 0)
        del out
        backward_bytes = self._backward(slot, [Memory(tape, num_bytes)])
        late = tape.late_bytes
        return UnitMemory(kept, forward_bytes, backward_bytes, late, keeps_input=keeps_input)

    def memory_recomputed(
        self, forward: Callable[[Tensor], Tensor], keeps_products: bool
    ) -> UnitMemory:
        """Return the memory of a layer that is computed again in its backward."""
        tape, before = self.tape, self.tape.alive_bytes
        tape.keeps, tape.keeps_products = False, keeps_products
        tape.peak_bytes = 0
        out = forward(self.x)
        forward_bytes, num_bytes = tape.peak_bytes - before, out.num_bytes
        if out.slot is None:
            return UnitMemory(0, forward_bytes, 0)
        del out
        tape.forget()
        kept = self.x.num_bytes + tape.alive_bytes - before
        tape.keeps, tape.keeps_products, tape.takes_products = True, False, keeps_products
        gradient = Memory(tape, num_bytes)
        start = tape.alive_bytes
        tape.peak_bytes = 0
        slot = forward(self.x).slot
        assert slot is not None
        rerun = tape.peak_bytes - start
        recomputed = tape.alive_bytes - start
        return UnitMemory(
            kept, forward_bytes, max(rerun, recomputed + self._backward(slot, [gradient]))
        )

    def _backward(self, slot: Slot, gradients: list[Memory]) -> int:
        """Return what a backward adds at most; it takes the gradient from its caller."""
        start, self.tape.peak_bytes = self.tape.alive_bytes, 0
        self.tape.backward(slot, gradients.pop())
        return max(0, self.tape.peak_bytes - start)

    def layer(self, layer: LayerSpec, x: Tensor) -> Tensor:
        """Return the output of a layer."""
        return run_layer(self._block(layer.name, layer), layer, x, self.num_shares)

    def embedding(self, x: Tensor) -> Tensor:
        """Return embedded tokens; kept are their numbers, and the mask of a dropout."""
        block = self._block(self.spec.embed, None)
        weight, rows = block.weight("weight"), x.numel * self.hidden
        (out,) = self.tape.run(
            [weight],
            [(x.numel, self.hidden)],
            forward_moves=(2 * rows,),
            backward_moves=(rows + weight.num_bytes,),
        )
        if out.slot is None and x.slot is not None and self.cfg.parallel.schedule in HALVING:
            out.slot = Slot(out.num_bytes)
        return block.dropped(out, "embd_pdrop")

    def head(self, x: Tensor) -> Tensor:
        """Return the loss: the final norm, the head and the cross entropy."""
        norm = self._block(self.spec.norm, None)
        h = norm_of(norm, "", x)
        block = self._block(self.spec.head, None)
        if self.cfg.training.loss == "plain":
            logits = block.as_dtype(block.linear("", h), WIDE)
            del h
            shares = block.pointwise(logits, keeps_outputs=True)
            # The gradient of the loss is a number for each row, among zeros.
            (loss,) = self.tape.run(
                [shares], [(1, WIDE)], forward_moves=(SMALL,), backward_moves=(shares.num_bytes,)
            )
            return loss
        kernel = self.cfg.training.loss
        if kernel == "auto":
            kernel = "chunked" if block.on_cpu else "triton"
        return _chunked_loss(block, h, kernel == "triton")

    def _block(self, path: str, layer: LayerSpec | None) -> TapedBlock:
        cfg, cast = self.cfg, autocast_dtype(self.cfg)
        layout = path, cfg.parallel.tp, cfg.parallel.ep, cfg.model.base
        block = TapedBlock(
            self.tape,
            **known(self.hf, ("tables", layout), lambda: self._tables(path, layer)),
            rows=cfg.training.micro_batch_size,
            length=self.length,
            hidden=self.hidden,
            cast=cast.itemsize if cast else None,
            on_cpu=cfg.training.device == "cpu",  # else it is planned for a GPU
            shares_rows=self._shared_rows(layer),
            spreads_experts=cfg.parallel.ep > 1,
            is_windowed=is_windowed(layer),
        )
        return self._reading_copies(block, path, layer) if cfg.training.casts_weights else block

    def _tables(self, path: str, layer: LayerSpec | None) -> dict[str, Any]:
        cuts = [*self._cuts_of_tp(path, layer), *self._cuts_of_ep(path, layer)]
        base, hf = self.cfg.model.base, self.hf
        stored = _stored(hf, base) if base != "none" else {}
        within = {n.removeprefix(f"{path}."): f for n, f in stored.items() if n.startswith(path)}
        return tables_of(hf.get_submodule(path), hf.config, cuts, within)

    def _reading_copies(self, block: TapedBlock, path: str, layer: LayerSpec | None) -> TapedBlock:
        """Return a block that reads weights in the dtype of hidden states: as they are gathered, or
        copies.
        """
        copied_ones, read = copied_names(self.cfg, self.hf), dict(block.parameters)
        are_gathered = strategy_facts(self.cfg.parallel).gathers_copies
        experts = {name for name, _, _ in self._cuts_of_ep(path, layer)}
        for name, weight in block.parameters.items():
            if f"{path}.{name}" not in copied_ones:
                continue
            copied = None
            if not are_gathered or (self.has_whole_experts and name in experts):
                copied = block.as_dtype(weight.on_tape, self.hidden)
            read[name] = replace(weight, itemsize=self.hidden, copied=copied)
        return replace(block, parameters=read)

    def _shared_rows(self, layer: LayerSpec | None) -> SharedRows | None:
        parallel, kinds = self.cfg.parallel, [b.kind for b in layer.attention] if layer else []
        is_alone = parallel.cp == 1
        if is_alone and not any(kind.functions for kind in kinds):
            return None
        cores = [core for kind in kinds for core in kind.cores(self.hf.config)]
        cap = next((getattr(core, "cap", None) for core in cores), None)
        window = getattr(self.hf.config, "sliding_window", None) if is_windowed(layer) else None
        way, cut = context_facts(self.hf, self.spec).way_and_cut(parallel)
        chunk = self.length // cut.chunks_per_rank
        way = "gather" if is_alone else way_taken(way, cut, reach_of(window, chunk))
        row = range(self.length * parallel.cp)
        if way == "ulysses" or is_alone:  # all queries, of some heads
            return SharedRows(way, parallel.cp, (*computed(row, row, window, cap),), bool(cap))
        places = [range(chunk * i, chunk * (i + 1)) for i in range(len(row) // chunk)]
        own = [places[i] for i in cut.chunks(parallel.cp - 1)]
        keys = [row] if way == "gather" else places
        pieces = (piece for q in own for k in keys for piece in computed(q, k, window, cap))
        return SharedRows(way, parallel.cp, tuple(pieces), bool(cap))

    def _cuts_of_tp(self, path: str, layer: LayerSpec | None) -> Iterator[tuple[str, int, int]]:
        """Yield each parameter that `tp` cuts, the dim, and the size that is left."""
        tp = self.cfg.parallel.tp
        if tp == 1:
            return
        if layer is None:
            if path in (self.spec.embed, self.spec.head):
                yield "weight", 0, -(-self.spec.vocab_size // tp)
            return
        for place, split in split_blocks(self.hf, layer, tp).items():
            if split is not None:
                block = self.hf.get_submodule(f"{path}.{place}")
                for name, cut in parameter_cuts(block, split).items():
                    yield f"{place}.{name}", cut.dim, cut.rows.local_size

    def _cuts_of_ep(self, path: str, layer: LayerSpec | None) -> Iterator[tuple[str, int, int]]:
        """Yield each parameter of experts, the dim along which `ep` cuts it, and what is left."""
        if layer is not None and self.cfg.parallel.ep > 1:
            one = replace(self.spec, layers=(layer,))
            for name, cut in expert_cuts_of(self.hf, one, self.cfg.parallel.ep).items():
                yield name.removeprefix(f"{path}."), cut.dim, cut.rows.local_size


def is_trained_below(hf: Any, spec: ModelSpec, unit_index: int) -> bool:
    """Return whether the backward goes on below a unit."""
    paths = [spec.embed, *(layer.name for layer in spec.layers)][:unit_index]
    return any(p.requires_grad for path in paths for p in hf.get_submodule(path).parameters())


@lru_cache(maxsize=1)
def _stored(hf: PreTrainedModel, base: Format) -> dict[str, Format]:
    """Return the form of each matrix that `model.base` stores in few bits, by its name."""
    form = stored_form(hf.config, base)
    return dict.fromkeys(stored_paths(hf, spec_of(hf.config, hf), base), form)


def _chunked_loss(block: TapedBlock, x: Tensor, in_triton: bool) -> Tensor:
    """Return the loss of a head that computes it in chunks; see kernels/linear_cross_entropy.

    It keeps the gradients of its input and of a trained weight, in 32 bits. A chunk has its
    logits in the dtype of products and in 32 bits, and the gradient that they give.
    """
    num_tokens, num_in = block.parameters["weight"].shape
    size = x.num_bytes
    (rows,) = block.tape.run([x], [(x.numel, x.itemsize)], backward_moves=(size, 3 * size))
    weight = block.weight("weight")
    itemsize = block.cast or x.itemsize
    chunk = (
        min(CPU_ROWS, block.tokens)
        if block.on_cpu
        else max(1, min(block.tokens, CHUNK_BYTES // (num_tokens * WIDE)))
    )
    copied = 0 if itemsize == WIDE else WIDE
    scratch = chunk * (num_tokens * (itemsize + copied) + num_in * itemsize)
    if itemsize != x.itemsize:
        scratch += (rows.numel + num_tokens * num_in) * itemsize
    if copied and weight.slot is not None and block.on_cpu:
        scratch += num_tokens * num_in * itemsize  # a product that is added to the gradient
    kept = []
    if rows.slot is not None:
        kept.append(block.tape.tensor(rows.numel, WIDE))
    if weight.slot is not None:
        kept.append(block.tape.tensor(weight.numel, WIDE))
        if weight.itemsize == WIDE:
            # What is kept becomes the gradient: the backward makes no other.
            weight = block.tape.run([weight], [(1, WIDE)], view=True, passes=True)[0]
    moves, moves_back = loss_in_chunks(
        (block.tokens, num_in, num_tokens),
        (rows.itemsize, itemsize, block.parameters["weight"].itemsize),
        chunk,
        in_triton=in_triton,
        needs=(rows.slot is not None, weight.slot is not None),
    )
    return block.tape.run(
        [rows, weight],
        [(1, WIDE)],
        keeps=kept,
        forward=scratch,
        forward_moves=moves,
        backward_moves=moves_back,
    )[0]
