import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from shardwise.metrics import memory
from shardwise.metrics.memory import _EventType
from tests.distributed import run_ranks
import tests.metrics.test_memory as T
def f():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    mesh = init_device_mesh("cpu", (2,))
    for layer in model: fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    x = torch.ones(4, 64)
    model(x).sum().backward(); model.zero_grad()
    with torch.no_grad(): model(x)
    out=[]
    for _ in range(6):
        r=memory._CpuRecorder(); r.start()
        model(x).sum().backward(); model.zero_grad()
        import time; time.sleep(0.05); e,xx,p=r.stop()
        reach=memory.tensor_bytes(memory._reachable_tensors())
        ev=sorted([v for v in memory._events(r.profile.kineto_results.experimental_event_tree())], key=lambda v:v.start_time_ns)
        bad=xx-reach
        dump=[]
        if bad:
            prev=None
            for v in ev:
                if v.name.startswith("shardwise"): dump.append((v.name, r.at_entry.get(int(v.name.split(":")[1]))))
                elif v.tag==_EventType.Allocation:
                    b=v.extra_fields
                    gap=None if prev is None else b.total_allocated-prev-b.alloc_size
                    prev=b.total_allocated
                    if abs(b.alloc_size)>=8192 or gap or b.ptr in r.at_entry: dump.append((b.ptr,b.alloc_size,b.total_allocated,"gap",gap,v.start_tid, "entry" if b.ptr in r.at_entry else "", r.at_entry.get(b.ptr)))
        out.append((bad,dump))
    return out
def test_x():
    for n in sorted(dir(T)):
        if n.startswith("test_") and "fsdp" not in n: getattr(T,n)()
    for i in range(8):
        for o in run_ranks(2,f)[0]:
            if o[0]:
                print("BAD",o[0])
                for d in o[1]: print("   ",d)
                return
