"""Mutations of programs that once failed: other shapes, dtypes, layouts, neighbours and calls.

What broke once breaks again nearby: the same statements between other ops, at other sizes, on
other layouts, twice, or called again with other numbers.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from random import Random

from tests.random_programs.corpus import CORPUS
from tests.random_programs.program import Program, Statement
from tests.random_programs.training import draw_sizes, is_accepted, without_refusals

MAX_MUTATIONS = 5
MAX_TRIES = 24
BEFORE = (
    "{x} * 2 - 1",
    "torch.tanh({x})",
    "{x}.flip(0)",
    "{x} + {x}.mean()",
    "{x}.clone()",
    "{x}.transpose(0, -1).contiguous().transpose(0, -1)",
    "torch.cat([{x}, {x}])[: {x}.shape[0]]",
    "{x}.roll(1, 0)",
    "F.softplus({x})",
)
AFTER = (
    *BEFORE,
    "{x}.sum()",
    "{x}.sum(-1)",
    "{x} @ {x}.transpose(-1, -2)",
    "{x}.unsqueeze(0).expand(2, *{x}.shape)",
    "{x}.flatten()[1:]",
    "torch.softmax({x}, -1)",
    "torch.index_add({x}, 0, torch.arange({x}.shape[0], device={x}.device) // 2, {x})",
)
Mutation = Callable[[Random, Program], Program]


def from_seed(seed: int) -> Program:
    rng = Random(f"mutations {seed}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = original(rng, rng.choice(tuple(CORPUS)), seed)
        goal, num_done = rng.randint(1, MAX_MUTATIONS), 0
        for _ in range(MAX_TRIES):
            if num_done == goal:
                break
            mutated = rng.choice(MUTATIONS)(rng, program)
            if mutated != program and runs_everywhere(mutated):
                program, num_done = mutated, num_done + 1
        return program


def original(rng: Random, name: str, seed: int) -> Program:
    texts, body, outputs = CORPUS[name]
    inputs = []
    for index, text in enumerate(texts):
        prefix = "x" if text.startswith("torch") else "s"
        inputs.append(Statement(f"{prefix}{index}", text))
    sizes = (*draw_sizes(rng), 0)
    program = Program(
        seed, tuple(inputs), tuple(map(statement, body)), outputs, (sizes,), False, False
    )
    differentiable = with_gradients(rng, program)
    return without_refusals(differentiable if runs_everywhere(differentiable) else program)


def statement(text: str) -> Statement:
    match = re.fullmatch(r"(t\d+) = (.*)", text, re.DOTALL)
    return Statement(match[1], match[2]) if match else Statement(None, text)


def runs_everywhere(program: Program) -> bool:
    return all(is_accepted(replace(program, sizes=(s,))) for s in program.sizes)


def floats(program: Program) -> list[int]:
    return [i for i, s in enumerate(program.inputs) if "randn" in s.text]


def with_input(program: Program, index: int, text: str) -> Program:
    changed = list(program.inputs)
    changed[index] = replace(changed[index], text=text)
    return replace(program, inputs=tuple(changed))


def with_gradients(rng: Random, program: Program) -> Program:
    """A training step of it: float inputs want gradients."""
    inputs = [
        replace(s, text=f"{s.text}.requires_grad_()")
        if "randn" in s.text and "requires_grad" not in s.text
        else s
        for s in program.inputs
    ]
    return replace(program, inputs=tuple(inputs), has_backward=True)


def other_sizes(rng: Random, program: Program) -> Program:
    return replace(program, sizes=tuple((*draw_sizes(rng), s[3]) for s in program.sizes))


def other_dtype(rng: Random, program: Program) -> Program:
    dtype = rng.choice(("f64", "f64") if program.has_backward else ("f64", "bf16", "f16"))

    def changed(one: Statement) -> Statement:
        return replace(one, text=re.sub(r"\bf32\b", dtype, one.text))

    return replace(program, inputs=tuple(map(changed, program.inputs)))


def other_layout(rng: Random, program: Program) -> Program:
    index = rng.choice(floats(program))
    text, _, grad = program.inputs[index].text.partition(".requires_grad_()")
    layouts = (
        f"offset_view({text})",
        f"{text}.contiguous(memory_format=torch.channels_last)",
        f"{text}.transpose(0, -1).contiguous().transpose(0, -1)",
        f"torch.stack([{text}, {text}], -1)[..., 0]",
        f"{text}[:1].expand({text}.shape)",
    )
    ending = ".requires_grad_()" if "requires_grad" in program.inputs[index].text else ""
    return with_input(program, index, f"{rng.choice(layouts)}.detach(){ending}{grad}")


def fresh_name(program: Program) -> str:
    return f"t{1 + max([int(s.target[1:]) for s in program.body if s.target] or [-1])}"


def op_before(rng: Random, program: Program) -> Program:
    """A value of its own between an input and the statements that read it."""
    name, new = program.inputs[rng.choice(floats(program))].target, fresh_name(program)
    first = Statement(new, rng.choice(BEFORE).format(x=name))
    rest = (replace(s, text=re.sub(rf"\b{name}\b", new, s.text)) for s in program.body)
    return replace(program, body=(first, *rest))


def op_after(rng: Random, program: Program) -> Program:
    new, name = fresh_name(program), rng.choice(program.outputs)
    last = Statement(new, rng.choice(AFTER).format(x=name))
    outputs = (*program.outputs, new) if rng.random() < 0.5 else (new,)
    return replace(program, body=(*program.body, last), outputs=outputs)


def repeated(rng: Random, program: Program) -> Program:
    """The statements again on what they gave, where shapes allow, or beside themselves."""
    base = int(fresh_name(program)[1:])
    source = rng.choice([s.target for s in program.inputs if (s.target or "")[0] == "x"])
    fed = rng.choice((source, *program.outputs)) or ""

    def renamed(text: str) -> str:
        text = re.sub(rf"\b{source}\b", "SOURCE", text)
        text = re.sub(r"\bt(\d+)\b", lambda m: f"t{int(m[1]) + base}", text)
        return text.replace("SOURCE", fed)

    again = [Statement(s.target and renamed(s.target), renamed(s.text)) for s in program.body]
    outputs = (*program.outputs, *map(renamed, program.outputs))
    return replace(program, body=(*program.body, *again), outputs=outputs)


def flipped_dynamic(rng: Random, program: Program) -> Program:
    return replace(program, is_dynamic=rng.choice((True, None, False)))


def called_again(rng: Random, program: Program) -> Program:
    """Other calls of the compiled function: other scalars, and other sizes where they may vary."""
    first = program.sizes[0]
    sizes = [first]
    for k in (1, 2):
        sizes.append((*(first[:3] if program.is_dynamic is False else draw_sizes(rng)), k))
    return replace(program, sizes=tuple(sizes))


MUTATIONS: tuple[Mutation, ...] = (
    with_gradients,
    other_sizes,
    other_dtype,
    other_layout,
    other_layout,
    op_before,
    op_after,
    op_after,
    repeated,
    flipped_dynamic,
    called_again,
)
