"""A program of the training kind in the making, and how the tokens of a row become text."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from torch import Tensor

from tests.random_programs.helper_functions import HELPERS
from tests.random_programs.program import DTYPES, NAMES, Statement

TOKEN = re.compile(r"\{(\w+)(?:\[([^\]]*)\])?\}")
# Values by the number of the call: the second is new, the third may be an old one again.
SCALARS = ("(0.5, 0.25, 0.125, 0.75)[k]", "0.1 / (k + 1)", "(0.9, 0.7, 0.7, 0.3)[k]")


@dataclass
class NetDraft:
    """A program in the making; a scope for every set of sizes."""

    rng: Random
    sizes: tuple[tuple[int, ...], ...]
    has_backward: bool
    float_dtype: str
    scopes: list[dict[str, Any]]
    inputs: list[Statement] = field(default_factory=list)
    body: list[Statement] = field(default_factory=list)
    is_exact: dict[str, bool] = field(default_factory=dict)
    shapes: dict[str, str] = field(default_factory=dict)  # of inputs, as text

    def value(self, name: str) -> Tensor:
        value: Tensor = self.scopes[0][name]
        return value

    @property
    def is_low(self) -> bool:
        return self.float_dtype in ("f16", "bf16")


def scope_of(sizes: tuple[int, ...]) -> dict[str, Any]:
    scope = NAMES | DTYPES | {helper.__name__: helper for helper in HELPERS}
    scope["g"] = torch.Generator().manual_seed(7)
    return scope | dict(zip("abck", sizes, strict=True))


def add_input(draft: NetDraft, text: str, shape: str = "") -> str:
    prefix = "s" if text[0] in "(01j" else "x"
    name = f"{prefix}{len(draft.inputs)}"
    for scope in draft.scopes:
        scope[name] = eval(text, scope)
    draft.inputs.append(Statement(name, text))
    draft.shapes[name] = shape
    if prefix == "x":
        draft.is_exact[name] = True
    return name


class Filling:
    """The tokens of one statement; a number is drawn once and then stays."""

    def __init__(self, draft: NetDraft, x: str) -> None:
        self.draft, self.x = draft, x
        self.value = draft.value(x)
        self.drawn: dict[str, Any] = {}

    def filled(self, text: str) -> str | None:
        try:
            return TOKEN.sub(lambda m: str(self.token(m[1], m[2])), text)
        except (IndexError, ZeroDivisionError):
            return None  # the operand has no such dimension, or no such number exists

    def token(self, name: str, dims: str | None) -> Any:
        if dims is not None:
            return self.new_input(name, dims)
        if name in ("like", "pos", "t"):
            return self.new_like(name)
        if name in ("s", "j"):
            return self.scalar(name)
        if name not in self.drawn:
            self.drawn[name] = self.draw(name)
        return self.drawn[name]

    def draw(self, name: str) -> Any:
        draft, rng, shape = self.draft, self.draft.rng, self.value.shape
        num_dims = len(shape)
        draws: dict[str, Callable[[], Any]] = {
            "x": lambda: self.x,
            "y": lambda: rng.choice(self.alike()),
            "d": lambda: rng.randrange(max(num_dims, 1)),  # a scalar has a dimension 0 for most ops
            "e": lambda: rng.choice([i for i in range(num_dims) if i != self.token("d", None)]),
            "dd": lambda: tuple(sorted(rng.sample(range(num_dims), rng.randint(1, num_dims)))),
            "perm": lambda: ", ".join(map(str, rng.sample(range(num_dims), num_dims))),
            "k": lambda: rng.random() < 0.5,
            "float": lambda: rng.choice(("f32", "f64", "bf16", "f16")),
            "N": lambda: shape[0],
            "C": lambda: shape[1],
            "H": lambda: shape[-2],
            "D": lambda: shape[-1],
            "R": lambda: shape[self.token("d", None)],
            "O": lambda: rng.choice((1, 2, 3, 4, 5, 8)),
            "G": lambda: rng.choice([g for g in range(1, shape[1] + 1) if shape[1] % g == 0]),
            "K": lambda: rng.choice((1, 2, 3, 3)),
            "S": lambda: rng.choice((1, 1, 2)),
            "P": lambda: rng.choice((0, 1, 1)),
            "Q": lambda: rng.choice((0, 1, 1, 2)),
        }
        if name == "float" and draft.has_backward:
            return rng.choice(("f32", "f64"))
        return draws[name]()

    def alike(self) -> list[str]:
        """Values of the operand's dtype and shape, whatever the sizes; itself among them."""
        scopes, x = self.draft.scopes, self.x
        return [
            n
            for n in self.draft.is_exact
            if scopes[0][n].dtype == self.value.dtype
            and all(s[n].shape == s[x].shape for s in scopes)
        ]

    def numbers(self, dims: str) -> str:
        """A shape with its letters replaced: "O, C // G" becomes "4, 2"."""
        letters = {n: self.token(n, None) for n in dict.fromkeys(re.findall(r"\b[A-Z]\b", dims))}
        values = eval(f"({dims},)", dict(letters))
        return ", ".join(map(str, values))

    def new_input(self, name: str, dims: str) -> str:
        draft = self.draft
        bound, _, shape = dims.rpartition("|")
        shape, bound = self.numbers(shape), self.numbers(bound) if bound else ""
        dtype = self.float_name()
        texts = {
            "w": f"(torch.randn(({shape},), generator=g) * 0.5).to({dtype})",
            "b": f"torch.zeros(({shape},)).to({dtype})",
            "q": f"torch.rand(({shape},), generator=g).add(0.5).to({dtype})",
            "i": f"torch.randint(0, {bound}, ({shape},), generator=g)",
            "u": f"torch.randperm({bound}, generator=g)[:{shape}]",
            "m": f"(torch.rand(({shape},), generator=g) < 0.5)",
        }
        text = texts[name].replace("(torch.randn", "torch.randn", 1).replace(" * 0.5)", ".mul(0.5)")
        grad = ".requires_grad_()" if name == "w" and draft.has_backward else ""
        return add_input(draft, text + grad)

    def new_like(self, name: str) -> str:
        if name == "t":
            return add_input(self.draft, "torch.full((), k + 1.0)")
        shape = self.draft.shapes.get(self.x)
        if not shape:
            raise IndexError
        made = f"torch.randn(({shape},), generator=g)"
        if name == "pos":
            made = f"torch.rand(({shape},), generator=g).add(0.5)"
        return add_input(self.draft, f"{made}.to({self.float_name()})", shape)

    def float_name(self) -> str:
        names = {v: k for k, v in DTYPES.items()}
        found = names.get(self.value.dtype, self.draft.float_dtype)
        return found if self.value.is_floating_point() else self.draft.float_dtype

    def scalar(self, name: str) -> str:
        known = [n for s in self.draft.inputs if (n := s.target or "")[0] == "s"]
        texts = {s.target: s.text for s in self.draft.inputs}
        fitting = [n for n in known if (texts[n] == "1 + k") == (name == "j")]
        if fitting and self.draft.rng.random() < 0.7:
            return self.draft.rng.choice(fitting)
        return add_input(self.draft, self.draft.rng.choice(SCALARS) if name == "s" else "1 + k")
