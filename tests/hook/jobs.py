"""Training programs for the hook's tests. None of them uses BootSeer."""

import textwrap

import warm

MARKED = warm.Parent("hook.marked_torch", PYTHONPATH=warm.python_path)
START = "import time; from bootseer.hook import watch; watch.start(time.monotonic_ns())\n"
"""The first line of a program that runs in a copy of `MARKED`."""

TRAIN = """
import gc, os, sys, torch, torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file, load_file
from torch.nn.parallel import DistributedDataParallel
folder = sys.argv[1]
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 32))
state = {"model": model.state_dict()}
dcp.save(state, checkpoint_id=folder + "/dcp")
torch.save(model.state_dict(), f"{folder}/plain{rank}.pt")
save_file(model.state_dict(), f"{folder}/safe{rank}.safetensors")
dcp.load(state, checkpoint_id=folder + "/dcp")
model.load_state_dict(torch.load(f"{folder}/plain{rank}.pt"))
model.load_state_dict(load_file(f"{folder}/safe{rank}.safetensors"))
with torch.no_grad():
    model.eval()(torch.zeros(1, 32))
ddp = DistributedDataParallel(model.train())
optimizer = torch.optim.AdamW(ddp.parameters())
data = torch.utils.data.DataLoader(torch.randn(480, 32), batch_size=8, num_workers=1)
for batch in data:
    optimizer.zero_grad()
    ddp(batch).square().sum().backward()
    optimizer.step()
import torch.distributed.distributed_c10d as c10d
import torch.nn.modules.module as module
import torch.optim.optimizer as optim
ours = [f.__name__ for f in (torch.load, dcp.load, dist.all_reduce, c10d.all_reduce, dist.barrier)
        if "bootseer" in f.__code__.co_filename + type(f).__module__]
counts = [len(module._global_forward_pre_hooks), len(optim._global_optimizer_pre_hooks),
          len(optim._global_optimizer_post_hooks)]
path = [p for p in sys.path if "bootseer" in p and "hook" in p]
print(f"left behind {ours} {counts} path {path} {torch.__spec__.loader.__class__.__name__}", flush=True)
dist.destroy_process_group()
gc.freeze()  # otherwise Python collects all objects of PyTorch at exit, in 0.6 s of processor time
"""

TWELVE_STEPS = """
import time, torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(12):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    time.sleep(0.05)  # steps of equal duration, also on a busy machine
"""

FORKS_RANKS = f"""
import os, sys, torch, torch.distributed as dist
ranks = []
for rank in range(2):
    ranks.append(os.fork())
    if ranks[-1] == 0:
        dist.init_process_group("gloo", init_method=f"file://{{sys.argv[1]}}", rank=rank, world_size=2)
        dist.barrier()
{textwrap.indent(TWELVE_STEPS, 8 * " ")}
        dist.destroy_process_group()
        os._exit(0)
assert [os.waitpid(pid, 0)[1] for pid in ranks] == [0, 0]
"""

HOOKED_BY_OTHERS = f"""
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
counts = [0, 0]
register_optimizer_step_pre_hook(lambda *_: counts.__setitem__(0, counts[0] + 1))
register_optimizer_step_post_hook(lambda *_: counts.__setitem__(1, counts[1] + 1))
{TWELVE_STEPS}print(counts)
import gc
gc.freeze()  # see `TRAIN`
"""

INITIALIZES_OPTIMIZER = """
import time, torch
from torch.distributed.checkpoint.state_dict import get_state_dict
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
get_state_dict(model, optimizer)
print(time.monotonic_ns())
warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(step / 10, 1.0))
for _ in range(3):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    warm_up.step()
    print(time.monotonic_ns())
"""

DIES_IN_FIRST_STEP = """
import os, signal, torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loss = model(torch.ones(2, 4)).sum()
os.kill(os.getpid(), signal.SIGKILL)
"""

COMPILED = """
import sys, torch, torch._dynamo
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

@torch.compile(backend="eager", fullgraph=True)
def forward(batch):
    return model(batch).sum()

@torch.compile(backend="eager")
def step():
    optimizer.step()

for how in sys.argv[1:]:
    for _ in range(6):
        optimizer.zero_grad()
        forward(torch.ones(2, 8)).backward()
        step() if how == "compiled_step" else optimizer.step()
    counters = torch._dynamo.utils.counters
    print("graphs", counters["stats"]["unique_graphs"], "breaks", sum(counters["graph_break"].values()),
          "recompiles", len(counters["recompiles"]))
    torch._dynamo.reset()
    counters.clear()
"""

STEPS_BEFORE = """
import sys, time, torch
how = sys.argv[1]
weight = torch.nn.Parameter(torch.ones(4))
optimizer = (torch.optim.LBFGS if how == "closure" else torch.optim.AdamW)([weight], lr=0.1)

def closure():
    optimizer.zero_grad()
    loss = (weight * 3).sum()
    loss.backward()
    return loss

if how != "closure":
    if how == "zero_gradients":
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    optimizer.zero_grad()
print(time.monotonic_ns())
for _ in range(3):
    if how == "closure":
        optimizer.step(closure)
    else:
        closure()
        optimizer.step()
    print(time.monotonic_ns())
"""

KEEPS_THE_READER = f"""
import copy, pickle, sys, time, torch
kept = torch.load
class Data:
    reader = torch.load
    def __init__(self): self.read = torch.load
data = Data()
defaults = kept.__kwdefaults__, kept.__code__.co_varnames  # some programs look for `weights_only` there
{TWELVE_STEPS}restored = kept is not torch.load
assert defaults == (torch.load.__kwdefaults__, torch.load.__code__.co_varnames)
print(restored, pickle.loads(pickle.dumps(data)).read is torch.load, copy.deepcopy(data).read is torch.load)
torch.save(torch.ones(1), sys.argv[1])
print(kept(sys.argv[1]), kept.__module__, kept.__name__)
"""

TWO_LAUNCHERS = """
import os, socket, sys, time
import torch.distributed.elastic.rendezvous.dynamic_rendezvous as dynamic
from torch.distributed.elastic.rendezvous import RendezvousParameters, registry
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    endpoint = f"127.0.0.1:{free.getsockname()[1]}"
slept, sleep, delay = [], time.sleep, dynamic._delay
waits, asked = os.pipe()

def note(seconds):
    slept.append(seconds)
    if len(slept) == 4:
        os.write(asked, b".")
    sleep(seconds)

time.sleep = note
child = os.fork()
if child == 0:
    os.read(waits, 1)  # until the other one has asked several times
words = {"min_nodes": 2, "max_nodes": 2, "local_addr": "127.0.0.1", "is_host": child != 0}
handler = registry.get_rendezvous_handler(RendezvousParameters("c10d", endpoint, "job", **words))
joined = handler.next_rendezvous()
if child == 0:
    os._exit(0 if joined.world_size == 2 else 1)
assert os.waitpid(child, 0)[1] == 0
print(len(slept), max(slept), dynamic._delay is delay, handler._state_holder._cache_duration)
"""

RENDEZVOUS_AGAIN = """
import os, socket
from torch.distributed.elastic.rendezvous import RendezvousParameters, registry
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    endpoint = f"127.0.0.1:{free.getsockname()[1]}"
words = {"min_nodes": 1, "max_nodes": 1, "local_addr": "127.0.0.1", "is_host": True}
handler = registry.get_rendezvous_handler(RendezvousParameters("c10d", endpoint, "job", **words))
for _ in range(3):
    handler.next_rendezvous()
    print(os.environ["BOOTSEER_RENDEZVOUS"])
"""

SPARE_LAUNCHER = """
import socket, threading, time
from torch.distributed.elastic.rendezvous import RendezvousGracefulExitError, RendezvousParameters, registry
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    endpoint = f"127.0.0.1:{free.getsockname()[1]}"
words = {"min_nodes": 1, "max_nodes": 1, "local_addr": "127.0.0.1"}
first, spare = (
    registry.get_rendezvous_handler(RendezvousParameters("c10d", endpoint, "job", **words, is_host=is_host))
    for is_host in (True, False)
)
assert first.next_rendezvous().world_size == 1
slept, sleep = [], time.sleep

def note(seconds):
    if threading.current_thread() is waiting:
        slept.append(seconds)
    sleep(seconds)

def wait_for_the_next_round():
    try:
        spare.next_rendezvous()
    except RendezvousGracefulExitError:
        print(*slept)

waiting = threading.Thread(target=wait_for_the_next_round)
time.sleep = note
waiting.start()
until_s = time.monotonic() + 60
while not slept and time.monotonic() < until_s:
    sleep(0.05)
first.set_closed()
waiting.join()
"""
