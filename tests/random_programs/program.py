"""A random program: inputs, statements and outputs as text that prints as Python and runs alone."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.optim import _functional as optim

from tests.random_programs.helper_functions import sources_in

DTYPES = {
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f32": torch.float32,
    "f64": torch.float64,
    "i64": torch.int64,
    "i32": torch.int32,
    "u8": torch.uint8,
    "b8": torch.bool,
    "c64": torch.complex64,
}
FLOATS = ("f16", "bf16", "f32", "f64")
WIDE = {**dict.fromkeys(FLOATS, torch.float64), "c64": torch.complex128}
NAMES: dict[str, Any] = {"torch": torch, "F": F, "optim": optim}
NAME = re.compile(r"\b[xt]\d+\b")


@dataclass(frozen=True, slots=True)
class Statement:
    """`target = text`, or `text` alone when it works in place."""

    target: str | None
    text: str

    def reads(self) -> set[str]:
        return set(NAME.findall(self.text))

    def __str__(self) -> str:
        return f"{self.target} = {self.text}" if self.target else self.text


@dataclass(frozen=True, slots=True)
class Program:
    seed: int
    inputs: tuple[Statement, ...]
    body: tuple[Statement, ...]
    outputs: tuple[str, ...]
    # The first for the compile, the others for reruns. A fourth number, where there is one, is the
    # number of the call: Python scalars among the inputs change with it.
    sizes: tuple[tuple[int, ...], ...]
    is_dynamic: bool | None
    has_backward: bool

    @property
    def is_training(self) -> bool:
        return len(self.sizes[0]) == 4

    def source(self) -> str:
        names = ", ".join(s.target or "" for s in self.inputs)
        texts = "\n".join(s.text for s in (*self.inputs, *self.body))
        lines = [f"{source}\n" for source in sources_in(texts)]
        lines += [f"def inputs({'a, b, c, k' if self.is_training else 'a, b, c'}):"]
        lines += ["    g = torch.Generator().manual_seed(7)"]
        lines += [f"    {s}" for s in self.inputs]
        lines += [f"    return [{names}]", "", "", f"def program({names}):"]
        lines += [f"    {s}" for s in self.body]
        lines += [f"    return [{', '.join(self.outputs)}]"]
        return "\n".join(lines)

    def standalone(self) -> str:
        """The source with all it needs: paste it into a file and run it."""
        names = ", ".join(f"{k}={v}" for k, v in DTYPES.items()).replace("=", " = ")
        header = ["import torch", "import torch.nn.functional as F"]
        header += ["from torch.optim import _functional as optim", ""]
        header += [line.strip() for line in names.split(",")]
        calls = [f"# dynamic={self.is_dynamic}, backward={self.has_backward}"]
        calls += [
            f"compiled = torch.compile(program, backend='perfuse', dynamic={self.is_dynamic})"
        ]
        for sizes in self.sizes:
            calls += [f"print(program(*inputs{sizes}), compiled(*inputs{sizes}))"]
        return "\n".join([*header, "", "", self.source(), "", "", *calls])

    def functions(self, *, exact: bool = False) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """`inputs` and `program`; with `exact`, every cast to a float is one to float64."""
        names = DTYPES | (WIDE if exact else {})
        scope = NAMES | names
        # A file name of its own, so that Dynamo does not mix the code of two programs.
        exec(compile(self.source(), f"<program {self.seed}>", "exec"), scope)
        return scope["inputs"], scope["program"]

    def without(self, index: int) -> Program | None:
        """The program less one statement and all that needs its result."""
        gone: set[str] = set()
        kept = []
        for i, statement in enumerate(self.body):
            if i == index or statement.reads() & gone:
                gone |= {statement.target} if statement.target else set()
            else:
                kept.append(statement)
        outputs = tuple(o for o in self.outputs if o not in gone)
        return replace(self, body=tuple(kept), outputs=outputs) if outputs else None

    def float_eps(self) -> float:
        """The coarsest rounding anywhere in it."""
        text = self.source()
        used = [DTYPES[n] for n in FLOATS if re.search(rf"\b{n}\b", text)]
        return max((torch.finfo(d).eps for d in used), default=torch.finfo(torch.float32).eps)
