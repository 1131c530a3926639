"""The kinds of random programs: a name, and the program of a seed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace

from tests.random_programs import generate, mutate, training
from tests.random_programs.program import Program

MUTATIONS_EVERY = 5  # in the training kind, one program in so many is a mutation
MODES = ("drawn", "static", "dynamic")


def training_program(seed: int) -> Program:
    make = mutate.from_seed if seed % MUTATIONS_EVERY == 4 else training.from_seed
    return make(seed)


KINDS: dict[str, Callable[[int], Program]] = {
    "plain": generate.from_seed,
    "training": training_program,
    "mutations": mutate.from_seed,
}


def program_of(kind: str, seed: int, mode: str = "drawn") -> Program:
    """The program of a seed: static or dynamic as it was drawn, or as asked for."""
    program = KINDS[kind](seed)
    return program if mode == "drawn" else replace(program, is_dynamic=mode == "dynamic")


def digest_of_programs(count: int = 40) -> str:
    """The hash of the first programs of all kinds."""
    texts = [program_of(kind, seed).standalone() for kind in sorted(KINDS) for seed in range(count)]
    return hashlib.sha256("".join(texts).encode()).hexdigest()
