"""Peak memory against sums done by hand, in bytes; KIB is a tensor of 256 float32."""

from __future__ import annotations

import mmap
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from shardwise.metrics import cpu_allocations
from shardwise.metrics.live_tensors import (
    collectable_tensors,
    cpu_tensors,
    freeze_imports,
    live_tensors,
)
from shardwise.metrics.memory import PeakMemory, memory_in_use, state_bytes, tensor_bytes
from tests.distributed import run_ranks

CPU = torch.device("cpu")
KIB = 1024


def kib(count: int = 1) -> torch.Tensor:
    return torch.ones(count * 256)


def rise(peak: PeakMemory) -> int:
    return peak.peak_bytes - peak.entry_bytes


def growth(peak: PeakMemory) -> int:
    return peak.exit_bytes - peak.entry_bytes


def test_tensor_bytes_counts_storages_once():
    base = kib(4)
    tied = nn.Parameter(kib(2))
    assert tensor_bytes([base, base[:10], base.view(2, -1)]) == 4 * KIB
    assert tensor_bytes([tied, tied]) == 2 * KIB
    assert tensor_bytes([base[:10]]) == 4 * KIB  # a view keeps all of its storage alive
    assert (
        tensor_bytes([torch.ones(100, dtype=torch.bfloat16), torch.ones(3, dtype=torch.int64)])
        == 200 + 24
    )
    assert tensor_bytes([]) == 0


def test_state_bytes_of_adamw():
    frozen, trained = nn.Parameter(kib(4), requires_grad=False), nn.Parameter(kib(2))
    optimizer = torch.optim.AdamW([trained])
    assert state_bytes([frozen, trained], optimizer) == {
        "weights": 6 * KIB,
        "gradients": 0,
        "optimizer": 0,
    }
    trained.sum().backward()
    optimizer.step()
    # Two moments of 2 KiB each and a step counter of one float32.
    expected = {"weights": 6 * KIB, "gradients": 2 * KIB, "optimizer": 4 * KIB + 4}
    assert state_bytes([frozen, trained], optimizer) == expected


def test_what_was_alive_before_counts_at_entry():
    keep = kib(8)
    keep.grad = kib(8)  # reached through the tensor alone
    with PeakMemory(CPU) as before:
        pass
    del keep
    with PeakMemory(CPU) as after:
        pass
    assert before.entry_bytes - after.entry_bytes == 16 * KIB
    assert rise(before) == growth(before) == 0


def test_a_tensor_freed_inside_makes_room():
    with PeakMemory(CPU) as peak:
        a = kib(3)
        del a
        b = kib(2)
        c = b.clone()
        del b, c
    assert rise(peak) == 4 * KIB  # 3, then 2 + 2
    assert growth(peak) == 0


def test_tensors_from_before_that_are_freed_inside_make_room():
    a, b = kib(4), nn.Parameter(kib(2))
    view = a[:8]
    b.grad = kib(2)
    with PeakMemory(CPU) as peak:
        del a
        c = kib(1)  # +1: the view still holds a's 4
        del view
        b.grad = None  # -4 and -2
        d = kib(6)  # +6: 1 - 6 + 6
    assert rise(peak) == KIB
    assert growth(peak) == KIB
    del c, d


def test_what_only_torch_could_reach_makes_no_room():
    """torch remembers a block of an earlier measurement, which a later one has not found."""
    leaf = torch.ones(4 * KIB // 4, requires_grad=True)
    with PeakMemory(CPU):
        result = leaf.exp().sum()  # keeps the exponentials for its backward
    with PeakMemory(CPU) as peak:
        del result
        a = kib(1)
    assert rise(peak) == growth(peak) == KIB - 4  # the sum itself was found
    del a


def test_the_peak_itself_counts_what_has_been_freed():
    a = kib(4)
    with PeakMemory(CPU) as peak:
        del a
        b = kib(6)
    assert rise(peak) == growth(peak) == 2 * KIB
    del b


def test_resized_storages():
    a, b = kib(4), kib(1)
    with PeakMemory(CPU) as peak:
        inside = kib(3)
        inside.untyped_storage().resize_(0)  # 3, 0
        a.untyped_storage().resize_(0)  # -4
        b.untyped_storage().resize_(0)  # -5
        inside.untyped_storage().resize_(2 * KIB)  # -3
        a.untyped_storage().resize_(8 * KIB)  # 5
        a.untyped_storage().resize_(0)  # -3
        a.untyped_storage().resize_(4 * KIB)  # 1
    assert rise(peak) == 5 * KIB
    assert growth(peak) == KIB
    assert "resize_" not in vars(torch.UntypedStorage)  # the watch is gone
    del inside


def test_a_storage_from_before_that_grows_is_held_twice_while_it_is_copied():
    a = kib(4)
    with PeakMemory(CPU) as peak:
        a.untyped_storage().resize_(6 * KIB)
    assert rise(peak) == 6 * KIB  # 4 + 6 while copying
    assert growth(peak) == 2 * KIB


def test_a_product_and_its_temporary():
    a = torch.ones(64, 32)  # 8 KiB
    b = torch.ones(32, 16)
    with PeakMemory(CPU) as peak:
        c = (a @ b).relu()  # a @ b and relu's result together: 4 KiB each
    assert rise(peak) == 8 * KIB
    assert growth(peak) == 4 * KIB
    del c


def test_what_an_operator_allocates_inside_itself():
    x = kib(2)
    with PeakMemory(CPU) as peak:
        torch.logsumexp(x, 0)
    # The result is 4 bytes; the exponentials, 2 KiB, exist inside the operator only.
    assert rise(peak) >= 2 * KIB
    assert growth(peak) == 0


def test_backward():
    x = nn.Parameter(kib(4))
    with PeakMemory(CPU) as peak:
        x.exp().sum().backward()
    # exp is saved, 4 KiB; its sum and the gradient of one, 4 bytes each; the sum's gradient is
    # expanded, not copied; the gradient of x, 4 KiB, made of exp times that, while exp is alive. It
    # stays.
    assert 8 * KIB <= rise(peak) <= 8 * KIB + 8
    assert growth(peak) == 4 * KIB


def test_an_error_in_the_block_leaves_the_figures():
    def grow_and_fail() -> None:
        a = kib(2)
        raise ValueError(a.shape)

    peak = PeakMemory(CPU)
    with pytest.raises(ValueError, match="512"), peak:
        grow_and_fail()
    assert rise(peak) == 2 * KIB


def test_other_threads_count():
    kept = [kib(1)]

    def work() -> None:
        kept.append(kib(4))
        kept.append(kib(2))
        del kept[1]

    with PeakMemory(CPU) as peak:
        inside = kib(3)
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        del inside
    # Seen in this thread's next event: 3 + 2 while `inside` is still alive. The other thread's own
    # peak, 3 + 4 + 2, is seen only if this one allocates meanwhile.
    assert growth(peak) == 2 * KIB
    assert 3 * KIB <= rise(peak) <= 9 * KIB


def _fsdp2_steps() -> tuple[int, int, int]:
    torch.manual_seed(0)
    # 16 KiB each.
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    mesh = init_device_mesh("cpu", (2,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    x = torch.ones(4, 64)
    model(x).sum().backward()
    model.zero_grad()
    with torch.no_grad():
        # The last layer's weights stay gathered: the next block begins with memory that it frees.
        model(x)
    weights = tensor_bytes(model.parameters())
    # A thread of gloo may hold a message that Python no longer sees until the machine runs it
    # again; a false count stays false however long one waits.
    for seconds in (0.2, 1, 5, 20):
        with PeakMemory(CPU) as peak:
            model(x).sum().backward()
            model.zero_grad()
            time.sleep(seconds)
        mistake = peak.exit_bytes - tensor_bytes(cpu_tensors(live_tensors()))
        worst = torch.tensor(abs(mistake))
        dist.all_reduce(worst, dist.ReduceOp.MAX)  # both ranks take as many steps
        if worst == 0:
            break
    return mistake, weights, rise(peak)


def test_fsdp2_in_two_processes():
    for mistake, weights, peak in run_ranks(2, _fsdp2_steps):
        assert mistake == 0  # entry plus all allocations and frees are the bytes at exit
        assert weights == 16 * KIB  # half of 32
        assert peak >= 16 * KIB  # one layer gathered


def _ddp_step() -> list[tuple[int, int]]:
    model = nn.Linear(64, 64, bias=False)  # 16 KiB
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    x = torch.ones(4, 64)
    figures = []
    for set_to_none in (False, True):
        for _ in range(2):  # the first step makes new buckets
            wrapped(x).sum().backward()
            model.zero_grad(set_to_none=set_to_none)
        with PeakMemory(CPU) as peak:
            wrapped(x).sum().backward()
        figures.append((peak.entry_bytes, peak.exit_bytes))
    return figures


def test_operators_are_not_recorded(monkeypatch):
    # They are twenty times as many as allocations, and Python would look at each of them.
    names = set()
    raw_events = cpu_allocations._Profiler.raw_events

    def watched(profiler):
        events = raw_events(profiler)
        names.update(event.name for event in events)
        return events

    monkeypatch.setattr(cpu_allocations._Profiler, "raw_events", watched)
    x = nn.Parameter(kib(4))
    with PeakMemory(CPU) as peak:
        x.exp().sum().backward()
    assert rise(peak) >= 8 * KIB
    assert names == {"[memory]", cpu_allocations._MARK}


def test_without_torchs_private_calls_bytes_are_sampled_and_a_warning_says_so(monkeypatch):
    def missing(profiler):
        raise ImportError("no such name")

    monkeypatch.setattr(cpu_allocations._Profiler, "__init__", missing)
    kept, left = kib(8), kib(2)
    with pytest.warns(UserWarning, match="lower bound.*no such name"):
        peak = PeakMemory(CPU, lambda: {"weights": [kept]})
    with peak:
        grown = kib(4)
        peak.mark(ends_forward=True)
        del left
        temporary = kib(16)  # no mark sees it
        del temporary
    assert rise(peak) == 4 * KIB
    assert growth(peak) == 2 * KIB
    assert (peak.parts["weights"], peak.parts["activations"]) == (8 * KIB, 4 * KIB)
    assert sum(peak.parts.values()) == peak.peak_bytes
    del grown


def _frozen() -> tuple[int, int, int]:
    kept, left = kib(8), kib(2)
    freeze_imports()
    with PeakMemory(CPU) as before:
        pass
    with PeakMemory(CPU) as peak:
        kept.grad = kib(8)
        del left
    hidden = sum(tensor is kept for tensor in collectable_tensors())
    return hidden, before.entry_bytes - peak.exit_bytes, growth(peak)


def test_tensors_that_were_frozen_count():
    # In a separate process, which has nothing else to collect.
    assert run_ranks(1, _frozen) == [(0, -6 * KIB, 6 * KIB)]


def test_buckets_of_ddp_count_although_only_their_gradients_show_them():
    for zeroed, unset in run_ranks(2, _ddp_step):
        assert unset == zeroed


def test_memory_in_use_grows_with_what_is_touched():
    before = memory_in_use(torch.device("cpu"))
    area = mmap.mmap(-1, 2**26)  # new pages: what torch allocates may be memory freed before
    touched = torch.frombuffer(area, dtype=torch.uint8).fill_(1)
    assert 2**25 < memory_in_use(torch.device("cpu")) - before < 2**27
    del touched
