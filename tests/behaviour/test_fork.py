"""Forked processes: what a child computes is its own, and no lock or thread is waited for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.behaviour.scripts import finish, start

LOADER = """
import json
import torch
import perfuse
from torch.utils.data import DataLoader, Dataset

NUM_SAMPLES = {num_samples}

def transform(x):
    return (x - x.mean()) / (x.std() + 1e-5) * 2 + x.flip(0)

compiled = torch.compile(transform, backend="perfuse")

def sample(index):
    return torch.randn(1024, 1024, generator=torch.Generator().manual_seed(index))

class Samples(Dataset):
    def __len__(self):
        return NUM_SAMPLES
    def __getitem__(self, index):
        return index, compiled(sample(index))

held = [compiled(sample(0)) for _ in range(3)]  # the pool of the parent has blocks, free and used
kept = held.pop().clone()
held.pop()
seen = wrong = 0
loader = DataLoader(Samples(), num_workers=4, batch_size=None, multiprocessing_context="fork")
for index, got in loader:
    want = transform(sample(int(index)))
    wrong += not torch.allclose(got, want, rtol=1e-4, atol=1e-4)
    seen += 1
assert torch.equal(held[0], kept), "a child wrote into the parent's memory"
print(json.dumps({{"seen": seen, "wrong": wrong}}))
"""


@pytest.mark.parametrize(
    "num_samples", [12, pytest.param(640, marks=pytest.mark.slow, id="640_samples")]
)
def test_workers_of_a_data_loader(num_samples: int, tmp_path: Path) -> None:
    process = start(LOADER.format(num_samples=num_samples), tmp_path)
    assert finish(process, 120 + 2 * num_samples) == {"seen": num_samples, "wrong": 0}


CHILD = """
import json, os, threading
import torch
import perfuse
from perfuse import config
from perfuse.counters import counters
from perfuse.runtime.pool import POOL

torch.set_num_threads(2)
compiled = torch.compile(lambda x, y: (x * 2 + y).exp().sum(-1), backend="perfuse")
x, y = torch.rand(2, 600, 600)
want = compiled(x, y)  # on two threads, which a child does not have

holding, done = threading.Event(), threading.Event()

def hold():
    with POOL._lock, config._lock, counters._lock:
        holding.set()
        done.wait()

thread = threading.Thread(target=hold)
thread.start()
holding.wait()
child = os.fork()
if child == 0:
    config.cpu.pool_limit_bytes = 1 << 28
    got = compiled(x, y)
    other = torch.compile(lambda x: x.cos() + 1, backend="perfuse")(x)
    torch.set_num_threads(1)  # eager would wait for threads that are gone
    os._exit(0 if torch.allclose(got, want) and torch.allclose(other, x.cos() + 1) else 1)
_, status = os.waitpid(child, 0)
done.set()
thread.join()
print(json.dumps({"child": os.waitstatus_to_exitcode(status)}))
"""


def test_a_child_waits_for_no_thread_of_its_parent(tmp_path: Path) -> None:
    assert finish(start(CHILD, tmp_path), 120) == {"child": 0}


WHILE_COMPILING = """
import gc, json, os, threading
import torch
import perfuse

inside, go_on = threading.Event(), threading.Event()

def backend(graph, inputs):
    inside.set()
    go_on.wait()
    return graph

def compile_slowly():
    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(3))

other = torch.compile(lambda x: x * 3, backend="perfuse")
other(torch.ones(4))  # from here on, collecting is paused while something is compiled
thread = threading.Thread(target=compile_slowly)
thread.start()
inside.wait()
child = os.fork()
if child == 0:
    doubled = torch.compile(lambda x: x * 2, backend="perfuse")(torch.ones(3))
    right = torch.equal(doubled, torch.full((3,), 2.0))
    os._exit(0 if right and gc.isenabled() else 3)
_, status = os.waitpid(child, 0)
go_on.set()
thread.join()

def forks(graph, inputs):
    child = os.fork()  # by the thread that compiles: it goes on compiling in both
    if child == 0:
        pids.append("child")
    else:
        pids.append(os.waitpid(child, 0)[1])
    return graph

pids = []
torch.compile(lambda x: x - 1, backend=forks)(torch.ones(3))
if pids == ["child"]:
    os._exit(0 if gc.isenabled() else 3)
print(json.dumps({"status": status, "own": pids, "collects": gc.isenabled()}))
"""


def test_forked_while_another_thread_compiles(tmp_path: Path) -> None:
    got = finish(start(WHILE_COMPILING, tmp_path), 120)
    assert got == {"status": 0, "own": [0], "collects": True}
