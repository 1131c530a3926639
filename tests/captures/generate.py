"""Programs whose Python values come from everywhere, and the values of every call and process.

A program is text: a function over two tensors that reads numbers, truth values, strings and None
from its arguments (nested or not), a dataclass, a module's attributes, globals, and a closure.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np

# Where values of a kind are read from. `np0` and `np1` are NumPy's scalars.
SLOTS: dict[str, tuple[str, ...]] = {
    "float": (
        "a_float", "opts['float']", "opts['nested']['float']", "pair[0]", "cfg.float",
        "net.float", "G_FLOAT", "c_float", "kw_float", "np0",
    ),
    "int": (
        "a_int", "opts['int']", "pair[1]", "cfg.int", "net.int", "G_INT", "c_int", "kw_int", "np1",
    ),
    "bool": ("a_bool", "opts['bool']", "cfg.bool", "net.bool", "G_BOOL", "c_bool"),
    "str": ("a_str", "opts['str']", "cfg.str", "net.str", "G_STR", "c_str"),
    "maybe": ("a_maybe", "opts['maybe']", "cfg.maybe", "net.maybe", "G_MAYBE", "c_maybe"),
}  # fmt: skip

# One line of a program each. S stands for a slot of the kind; x, y and v are 4 by 4.
STEPS: dict[str, tuple[str, ...]] = {
    "float": (
        "v = v * S",
        "v = S - v",
        "v = v + y * (1 - 0.1 * S)",
        "v = (v * (1 - 0.1 * S)).add(y, alpha=-S)",
        "v = torch.sub(v, y, alpha=S)",
        "v = v.clamp(min=-abs(S))",
        "v = v.clamp(-abs(S), abs(S)) + S",
        "v = torch.where(y > S, v, y)",
        "v = v.masked_fill(y > 0, S)",
        "v = v + torch.full_like(v, S)",
        "v = F.leaky_relu(v, S)",
        "v = F.elu(v, abs(S) + 0.1)",
        "v = F.softplus(v, beta=abs(S) + 0.5)",
        "v = torch.lerp(v, y, S)",
        "v = torch.addcmul(v, y, y, value=S)",
        "v = F.layer_norm(v, (4,), eps=abs(S) + 1e-3)",
        "v = v.clone().add_(y, alpha=S)",
        "v = v.clone().mul_(S)",
        "v = F.threshold(v, S, 0.5)",
        "v = v * math.exp(min(S, 2.0))",
        "v = v + 1 if S > 0.4 else v - y",
        "v = v / (abs(S) + 1)",
        "v = (v.abs() + 1) ** S",
        "v = v + torch.arange(4) * S",
        "v = v + torch.tensor(S)",
        "v = v * int(S * 4)",
        "v = F.dropout(v, p=min(abs(S), 0.9), training=False)",
        "v = v.sum(0, keepdim=True).mul(S) + v",
        "v = (v == v.round()).float() * S + v",
    ),
    "int": (
        "v = v + S",
        "v = v * (S % 5 + 1)",
        "v = v.roll(S, -1)",
        "v = v + v[:, : abs(S) % 4 + 1].sum(-1, keepdim=True)",
        "v = v.tril(S)",
        "v = v + v.sum(S % 2, keepdim=True)",
        "v = v ** (abs(S) % 3)",
        "v = v + torch.ones(abs(S) % 5 + 1).sum()",
        "v = F.pad(v, (abs(S) % 3, 0))[..., -4:]",
        "for _ in range(abs(S) % 3): v = v.sin()",
        "v = v + torch.full((4,), S)",
        "v = v.flatten().view(-1, abs(S) % 2 * 2 + 2).sum(-1).sum() + v",
        "v = torch.add(v, y, alpha=S)",
        "v = v + S / 3",
    ),
    "bool": (
        "v = v if S else -v",
        "v = v * S",
        "v = v.sum(-1, keepdim=S) + v",
        "v = torch.sort(v, descending=S).values",
        "v = v.std(-1, unbiased=S, keepdim=True) + v",
        "v = v + (not S)",
        "v = F.dropout(v, 0.0, training=S)",
    ),
    "str": (
        "v = getattr(torch, S)(v)",
        "v = v + len(S)",
        "v = v * 2 if S == 'sin' else v + 1",
        "v = v + {'sin': 1.5, 'cos': 2.5, 'tanh': -1.0}[S]",
    ),
    "maybe": (
        "v = v if S is None else v * S",
        "v = torch.clamp(v, min=S, max=3.0)",
        "v = v + (S or 0.25)",
        "v = v.mean(dim=None if S is None else 0) + v",
    ),
}

HEAD = """
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

G_FLOAT: Any = 0.5
G_INT: Any = 1
G_BOOL: Any = True
G_STR: Any = "sin"
G_MAYBE: Any = None


@dataclass
class Config:
    float: Any
    int: Any
    bool: Any
    str: Any
    maybe: Any


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(-1, 1, 4))


def make(c_float=0.5, c_int=1, c_bool=True, c_str="sin", c_maybe=None):
    def set_closure(values):
        nonlocal c_float, c_int, c_bool, c_str, c_maybe
        c_float, c_int, c_bool, c_str, c_maybe = values

    def program(net, x, y, a_float, a_int, a_bool, a_str, a_maybe, opts, pair, cfg, np0, np1,
                *, kw_float=0.5, kw_int=1):
        v = x * net.weight
"""
TAIL = """
        return v

    def keep():
        return c_float, c_int, c_bool, c_str, c_maybe

    return program, set_closure
"""

FLOATS = (0.5, 0.25, -0.75, 1.5, 2.0, 0.1, 0.05, 0.025, 0.9, 0.7, 1e-3, 0.0, 1.0, -1.0, 3.25)
INTS = (0, 1, 2, 3, 4, 5, 7, -1, -2, 12)
STRINGS = ("sin", "cos", "tanh")
AMBIENT = ("", "", "", "no_grad", "float64", "deterministic")


@dataclass(frozen=True, slots=True)
class Values:
    """The Python values of one call, by the names of the slots they fill."""

    slots: dict[str, Any]
    ambient: str


@dataclass(frozen=True, slots=True)
class Program:
    """A program, and how it is compiled."""

    seed: int
    text: str
    used: tuple[str, ...]  # the slots it reads
    is_dynamic: bool | None
    needs_grad: bool

    def body(self) -> str:
        """The lines that are this program's own."""
        return self.text.removeprefix(HEAD).removesuffix(TAIL)


def program_of(seed: int) -> Program:
    """The program of a seed."""
    rng = random.Random(seed)
    lines, used = [], []
    for _ in range(rng.randint(2, 5)):
        kind = rng.choices(list(STEPS), weights=(5, 2, 1, 1, 1))[0]
        slot, step = rng.choice(SLOTS[kind]), rng.choice(STEPS[kind])
        used.append(slot)
        lines.append("        " + step.replace("S", slot))
    body = "\n".join(lines)
    is_dynamic = rng.choice((None, None, None, True))
    return Program(seed, HEAD + body + TAIL, tuple(used), is_dynamic, rng.random() < 0.4)


def calls_of(program: Program, process: int, num_calls: int = 4) -> list[Values]:
    """The values of each call in one process: some change from call to call, some stay."""
    rng = random.Random(f"{program.seed}/{process}")
    slots = {slot: _draw(kind, slot, rng) for kind, names in SLOTS.items() for slot in names}
    ambient = rng.choice(AMBIENT)
    made = []
    for _ in range(num_calls):
        made.append(Values(dict(slots), ambient))
        for kind, names in SLOTS.items():
            for slot in names:
                if slot in program.used and rng.random() < 0.7:
                    slots[slot] = _draw(kind, slot, rng)
    return made


def _draw(kind: str, slot: str, rng: random.Random) -> Any:
    if slot == "np0":
        return rng.choice((np.float64, np.float32))(rng.choice(FLOATS))
    if slot == "np1":
        return np.int64(rng.choice(INTS))
    if kind == "maybe":
        return rng.choice((None, rng.choice(FLOATS)))
    return rng.choice({"float": FLOATS, "int": INTS, "bool": (True, False), "str": STRINGS}[kind])
