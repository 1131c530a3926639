"""One row of the wide benchmark: contestants are built, judged, and timed in turns.

Judged as the sweep does it: float32 in limits derived from eager's own error, bfloat16 by norms.
"""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import perfuse
from benchmarks import machine
from benchmarks.cases import num_bytes
from benchmarks.contest import Step, Steps, take_turns
from benchmarks.gpu_worker import MEGA, device_times, warm_up
from benchmarks.interleaved import CpuClock
from benchmarks.report import OURS
from benchmarks.turns import Turn
from benchmarks.wide_models import subject_of
from perfuse.testing import peak_memory
from tests.harness.compare import DIRECTIONS, cotangent, norm_complaints
from tests.harness.devices import synchronize
from tests.harness.draws import moved_model
from tests.harness.pool import Result, Task
from tests.sweep.judge import complaints_of
from tests.sweep.packages import use_packages
from tests.sweep.subject import Call, Compile, NotMade, Subject, accepted, numbers

# Wall time needs a machine of its own. Where there is none, processor time, of one thread, is what
# neighbours do not change; waking threads is not in it.
CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
MAX_MESSAGE = 400
Candidate = Callable[..., Any]


def measured(task: Task, turn: Turn) -> Result:
    """The row's times, peaks, first calls and complaints; or why there are none."""
    use_packages()
    try:
        subject = placed(subject_of(task["row"], task["device"]), task["device"], task["row"])
    except NotMade as error:
        return {"status": "skip", "message": str(error)[:MAX_MESSAGE]}
    warm_up(task["backends"], task["device"])
    return Contest(subject, task).result(turn)


def placed(subject: Subject, device: str, row: str) -> Subject:
    """The subject on its device, in the dtype that is usual there, once eager has run it."""
    dtype = DTYPES[device]

    def put(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return x.to(device, dtype) if x.is_floating_point() else x.to(device)

    model = subject.model.to(device, dtype)
    run = training_results if row.endswith("/train") else forward_results
    return accepted(replace(subject, model=model, call=pytree.tree_map(put, subject.call), run=run))


# -- steps ---------------------------------------------------------------------------------------


def forward_step(model: nn.Module, call: Call, candidate: Candidate) -> Any:
    args, kwargs = call
    with torch.no_grad():
        return candidate(*args, **kwargs)


def training_step(model: nn.Module, call: Call, candidate: Candidate) -> Any:
    """Forward and backward, from the loss where there is one."""
    args, kwargs = call
    model.zero_grad(set_to_none=True)
    outputs = candidate(*args, **kwargs)
    if "labels" in kwargs:
        outputs["loss"].backward()
    else:
        roots = [o for o in numbers(outputs) if o.requires_grad]
        torch.autograd.backward(roots, [weights(r.shape, r.dtype, r.device) for r in roots])
    return outputs


@functools.cache
def weights(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Fixed numbers: the mean square of a normalised result has no gradient."""
    return cotangent(torch.empty(shape, dtype=dtype, device=device))


def forward_results(model: nn.Module, call: Call, compile_it: Compile) -> list[Tensor]:
    return numbers(forward_step(model, call, compile_it(model)))


def training_results(model: nn.Module, call: Call, compile_it: Compile) -> list[Tensor]:
    """Results, gradients of all parameters, and the buffers that a step may have moved."""
    outputs = numbers(training_step(model, call, compile_it(model)))
    # What no output depends on has no gradient, or one of zeros: both are right.
    wanted = [p for p in model.parameters() if p.requires_grad]
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in wanted]
    return [x.detach().clone() for x in (*outputs, *gradients, *numbers(list(model.buffers())))]


# -- the contest ---------------------------------------------------------------------------------


class Contest:
    """Eager and each backend on one model; each first call finds the buffers of the beginning."""

    def __init__(self, subject: Subject, task: Task) -> None:
        self.subject, self.device, self.budget_s = subject, task["device"], task["budget_s"]
        self.now = CLOCKS[task["clock"]]
        model = subject.model
        self.buffers = [b.clone() for b in model.buffers()]
        self.candidates: dict[str, Candidate] = {"eager": model}
        for backend in task["backends"]:
            if backend != "eager":
                self.candidates[backend] = torch.compile(model, backend=backend)
        self.failures: dict[str, str] = {}

    def result(self, turn: Turn) -> Result:
        results, first_s = self.first_calls()
        if "eager" not in results:
            return {"status": "error", "message": self.failures["eager"]}
        for backend, got in results.items():
            if backend != "eager":
                self.judge(backend, got, results["eager"])
        del results
        steps = {name: self.step(name) for name in first_s}
        peaks = {name: self.peak_mb(step) for name, step in steps.items()}
        with turn.alone():
            times, others = beside(lambda: self.times(steps))
        is_right = OURS not in self.failures
        return {
            "status": "pass" if is_right else "wrong" if OURS in first_s else "error",
            "message": self.failures.get(OURS, ""),
            "failures": self.failures,
            "recipe": self.subject.recipe,
            "ms": times,
            "cores_of_others": others,
            "first_s": first_s,
            "peak_mb": peaks,
        }

    def first_calls(self) -> tuple[dict[str, list[Tensor]], dict[str, float]]:
        results, seconds = {}, {}
        for name, candidate in self.candidates.items():
            self.restore()
            synchronize(self.device)
            began = time.perf_counter()
            try:
                results[name] = self.run(candidate)
                synchronize(self.device)
                seconds[name] = round(time.perf_counter() - began, 3)
            except Exception as error:  # a contestant that cannot run is a row, not the end
                self.failures[name] = why(error)
        self.restore()
        return results, seconds

    def run(self, candidate: Candidate) -> list[Tensor]:
        torch.manual_seed(0)
        return self.subject.run(self.subject.model, self.subject.call, lambda _: candidate)

    def restore(self) -> None:
        model = self.subject.model
        model.zero_grad(set_to_none=True)
        with torch.no_grad():
            for buffer, kept in zip(model.buffers(), self.buffers, strict=True):
                buffer.copy_(kept)

    def step(self, name: str) -> Step:
        run = training_step if self.subject.run is training_results else forward_step
        return functools.partial(run, self.subject.model, self.subject.call, self.candidates[name])

    def judge(self, backend: str, got: list[Tensor], eager: list[Tensor]) -> None:
        if DTYPES[self.device] == torch.float32:
            found = complaints_of(self.subject, eager, got, backend)
        else:
            found = self.complaints_in_norm(got, eager)
        if found:
            self.failures[backend] = "; ".join(found)[:MAX_MESSAGE]

    def complaints_in_norm(self, got: list[Tensor], eager: list[Tensor]) -> list[str]:
        if len(got) != len(eager):
            return [f"{len(got)} results, eager gives {len(eager)}"]
        exact, *spreads = (self.exact(direction) for direction in ("", *DIRECTIONS))
        return norm_complaints(got, eager, exact, spreads)

    @functools.cache  # noqa: B019  (a process has one contest)
    def exact(self, direction: str) -> list[Tensor]:
        model = moved_model(self.subject.model, direction).float()
        call = pytree.tree_map(
            lambda x: x.float() if isinstance(x, Tensor) and x.is_floating_point() else x,
            self.subject.call,
        )
        return self.subject.run(model, call, lambda function: function)

    def times(self, steps: Steps) -> dict[str, Any]:
        if self.device == "cpu":
            return take_turns(steps, self.budget_s, CpuClock(steps, self.now))
        found: dict[str, Any] = device_times(steps, self.device, self.budget_s)["ms"]
        return found

    def peak_mb(self, step: Step) -> float:
        """At the peak of a step: weights, inputs, and what programs keep between calls included."""
        model = self.subject.model
        model.zero_grad(set_to_none=True)
        perfuse.release_memory()
        gc.collect()
        fixed = num_bytes(list(model.parameters()), list(model.buffers()), self.subject.call)
        kept: list[Any] = []
        peak = peak_memory(lambda: kept.append(step()), self.device)
        return round((fixed + peak) / MEGA, 3)


def beside(measure: Callable[[], dict[str, Any]]) -> tuple[dict[str, Any], float]:
    """The times, and how many cores other processes kept busy meanwhile: what they are worth."""
    (total, own), began = machine.busy_seconds(), time.perf_counter()
    found = measure()
    total_now, own_now = machine.busy_seconds()
    others = (total_now - total) - (own_now - own)
    return found, round(max(0.0, others) / (time.perf_counter() - began), 2)


def why(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:MAX_MESSAGE]
