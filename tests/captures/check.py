"""One program in one process: each call against eager, and differences traced to their cause."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import perfuse
from tests.captures.generate import Program, Values, calls_of, program_of
from tests.harness.compare import Tolerance, complaints

# Rounding is the business of other tests: a value that is not the call's own shows far above this.
FALLBACK = Tolerance(1e-4, 1e-4)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a program: `pass`, `wrong`, `error`, or `foreign` where PyTorch's own
    tracing (`aot_eager`) makes the same mistake."""

    seed: int
    status: str
    text: str = ""


class Runner:
    """A program with its state, callable with the values of a call."""

    def __init__(self, program: Program) -> None:
        self.program = program
        module = types.ModuleType(f"captured_{program.seed}")
        sys.modules[module.__name__] = module  # where dataclasses look for their names
        self.space = vars(module)
        name = f"<captured {program.seed}>"
        exec(compile(program.text, name, "exec", dont_inherit=True), self.space)
        self.function, self.set_closure = self.space["make"]()
        self.net = self.space["Net"]()

    def compiled(self, backend: str) -> Callable[..., Any]:
        return torch.compile(self.function, backend=backend, dynamic=self.program.is_dynamic)

    def call(self, function: Callable[..., Any], values: Values) -> Any:
        """The results of one call, and the gradients where it has some."""
        slots = values.slots
        kinds = ("float", "int", "bool", "str", "maybe")
        for kind in kinds:
            self.space[f"G_{kind.upper()}"] = slots[f"G_{kind.upper()}"]
            setattr(self.net, kind, slots[f"net.{kind}"])
        self.set_closure([slots[f"c_{kind}"] for kind in kinds])
        self.net.requires_grad_(self.program.needs_grad)
        self.net.zero_grad()
        opts = {kind: slots[f"opts['{kind}']"] for kind in kinds}
        opts["nested"] = {"float": slots["opts['nested']['float']"]}
        positional = [slots[f"a_{kind}"] for kind in kinds]
        pair = (slots["pair[0]"], slots["pair[1]"])
        cfg = self.space["Config"](*(slots[f"cfg.{kind}"] for kind in kinds))
        x, y = inputs()
        with ambient(values.ambient):
            result = function(
                self.net, x, y, *positional, opts, pair, cfg, slots["np0"], slots["np1"],
                kw_float=slots["kw_float"], kw_int=slots["kw_int"],
            )  # fmt: skip
        return with_gradients(result, self.net.weight)


def inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(4, 4, generator=generator, dtype=torch.float32) for _ in range(2))
    return x, y


def with_gradients(result: Tensor, weight: Tensor) -> list[Tensor]:
    if not result.requires_grad:
        return [result]
    (gradient,) = torch.autograd.grad(result.square().sum(), weight, allow_unused=True)
    return [result.detach(), *([] if gradient is None else [gradient])]


@contextlib.contextmanager
def ambient(name: str) -> Iterator[None]:
    """The state of the process that a call runs under."""
    if name == "no_grad":
        with torch.no_grad():
            yield
        return
    changes: dict[str, tuple[Callable[[Any], Any], Any, Any]] = {
        "float64": (torch.set_default_dtype, torch.float64),
        "deterministic": (torch.use_deterministic_algorithms, True, False),
    }
    change = changes.get(name)
    if change is not None:
        change[0](change[1])
    try:
        yield
    finally:
        if change is not None:
            change[0](change[2])


def check_program(seed: int, process: int) -> Outcome:
    """Every call of one process, with whatever the cache holds by now."""
    program = program_of(seed)
    torch._dynamo.reset()
    runner = Runner(program)
    compiled = runner.compiled("perfuse")
    for number, values in enumerate(calls_of(program, process)):
        problem = difference(runner, compiled, values)
        if problem:
            where = f"process {process}, call {number}"
            return blamed(program, process, number, f"{where}: {problem}")
    return Outcome(seed, "pass")


def difference(runner: Runner, compiled: Callable[..., Any], values: Values) -> str:
    """A complaint about a call; "" if there is none, or if eager refuses the call too."""
    try:
        eager = runner.call(runner.function, values)
    except Exception:
        return ""
    try:
        got = runner.call(compiled, values)
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:300]}"
    found = complaints(got, eager, fallback=FALLBACK)
    return "; ".join(found)[:300]


def blamed(program: Program, process: int, number: int, problem: str) -> Outcome:
    """The outcome of a difference: ours, the cache's, or of what Perfuse stands on."""
    if _differs(program, process, number, "aot_eager"):
        return Outcome(program.seed, "foreign", problem)
    with perfuse.config.patch({"cache.enabled": False}):
        also_uncached = _differs(program, process, number, "perfuse")
    cause = "uncached too" if also_uncached else "right without the cache"
    return Outcome(program.seed, "wrong", f"{problem} ({cause})\n{program.body()}")


def _differs(program: Program, process: int, number: int, backend: str) -> bool:
    """Whether the calls up to this one go wrong with a backend, in a Dynamo that knows nothing."""
    torch._dynamo.reset()
    runner = Runner(program)
    compiled = runner.compiled(backend)
    values = calls_of(program, process)[: number + 1]
    return any(difference(runner, compiled, one) for one in values)
