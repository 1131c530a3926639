"""The order in which instances are tried: by a model of their time, and a sample of the rest."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

from perfuse.codegen.ck.instance import Instance
from perfuse.codegen.ck.problem import ELEMENT_BYTES, CkProblem
from perfuse.gpu import Gpu

SEED = 2240  # any number; the same on every machine
# Part of the matrix units' peak that a pipeline keeps busy: deeper ones hide more latency. An
# estimate, not a measurement: it orders candidates and decides nothing else.
_PIPELINES = {"v1": 0.6, "v2": 0.65, "v3": 0.9, "v4": 0.85, "v5": 0.85}


def estimated_seconds(instance: Instance, problem: CkProblem, gpu: Gpu) -> float:
    """The time of an instance by the waves of its tiles, and the work and bytes of each."""
    i = instance
    tiles = math.ceil(problem.m / i.m_per_block) * math.ceil(problem.n / i.n_per_block)
    waves = math.ceil(tiles * (problem.batch or 1) / gpu.multiprocessors)
    depth = math.ceil(problem.k / i.k_per_block) * i.k_per_block
    flops = 2 * i.m_per_block * i.n_per_block * depth
    rate = gpu.flops_f16 * (2 if i.a_dtype == i.b_dtype == "F8" else 1) / gpu.multiprocessors
    moved = i.m_per_block * ELEMENT_BYTES[i.a_dtype] + i.n_per_block * ELEMENT_BYTES[i.b_dtype]
    bandwidth = 4 * gpu.bandwidth / gpu.multiprocessors  # tiles that share rows find them in L2
    busy = _PIPELINES.get(i.pipeline, 0.5)
    return waves * max(flops / (rate * busy), moved * depth / bandwidth)


def ranked(instances: Sequence[Instance], problem: CkProblem, gpu: Gpu) -> tuple[Instance, ...]:
    """The instances, the most promising first; equal ones in the order of their text."""

    def order(instance: Instance) -> tuple[float, int, str]:
        # Padding that is not needed costs a little.
        return estimated_seconds(instance, problem, gpu), len(instance.padded), instance.text

    return tuple(sorted(instances, key=order))


def _least_padded(in_order: Sequence[Instance]) -> list[Instance]:
    """Of instances that differ only in what they pad, the one that pads least."""
    best: dict[Instance, Instance] = {}
    for instance in in_order:
        known = best.setdefault(replace(instance, padding=""), instance)
        if len(instance.padded) < len(known.padded):
            best[replace(instance, padding="")] = instance
    kept = set(best.values())
    return [instance for instance in in_order if instance in kept]


def sampled(in_order: Sequence[Instance], most: int) -> tuple[Instance, ...]:
    """At most this many: the best-ranked half, and a sample of the others, in their order.

    The model may be wrong about a whole family of instances; the sample covers all of them. It
    depends only on the instances. A limit of 0 takes all.
    """
    if not most or len(in_order) <= most:
        return tuple(in_order)
    in_order = _least_padded(in_order)
    if len(in_order) <= most:
        return tuple(in_order)
    num_best = (most + 1) // 2
    rest = range(num_best, len(in_order))
    chosen = random.Random(SEED).sample(rest, most - num_best)
    return tuple(in_order[number] for number in (*range(num_best), *sorted(chosen)))
