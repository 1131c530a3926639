"""Programs for new processes: compile a little, say as JSON what it took."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

COMPILE = """
import json
import torch
import torch.nn.functional as F
import perfuse

torch.set_num_threads(1)
torch.manual_seed(0)
x, w = torch.randn(33, 65), torch.randn(65, requires_grad=True)

def function(x, w):
    return F.layer_norm(x, (65,), w).softmax(0).sum(1), (x * w).cumsum(1).tanh()

def run(f):
    a, b = f(x, w)
    return a.detach(), b.detach(), torch.autograd.grad(a.square().sum() + b.sum(), w)[0]

got, eager = run(torch.compile(function, backend="perfuse")), run(function)
close = all(torch.allclose(g, e, rtol=1e-4, atol=1e-5) for g, e in zip(got, eager))
print(json.dumps({"is_right": close, "counters": perfuse.counters.snapshot()}))
"""

LOAD = """
import json
import sys
import torch
import torch._dynamo
import perfuse

def refuse(*args, **kwargs):
    raise AssertionError("a loaded artefact must not trace")

torch._dynamo.optimize = refuse
loaded = perfuse.aot_load(sys.argv[1])
x = torch.linspace(-1, 1, 12).reshape(3, 4)
got = loaded(x)
print(json.dumps({"values": got.tolist(), "counters": perfuse.counters.snapshot()}))
"""


def start(source: str, cache: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", source, *arguments],
        cwd=ROOT,
        env={**os.environ, "PERFUSE_CACHE_DIR": str(cache)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str], timeout_s: float = 300.0) -> dict[str, Any]:
    output, errors = process.communicate(timeout=timeout_s)
    assert process.returncode == 0, errors[-2000:]
    return dict(json.loads(output.strip().splitlines()[-1]))
