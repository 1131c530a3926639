"""Simulates the memory of a cut: both halves planned as they will be compiled, and summed."""

import dataclasses

from torch.fx import GraphModule

from perfuse.context import Context
from perfuse.counters import Counters
from perfuse.graph.partition import Cut
from perfuse.pipeline import plan_graph
from perfuse.schedule.lifetimes import Lifetimes, Placement, lifetimes
from perfuse.schedule.timeline import Link, Timeline, step_timeline


def simulate(cut: Cut, context: Context) -> Timeline:
    """The memory of a training step, from the plans of its halves."""
    links = [Link(output, taken) for output, taken in cut.links()]
    forward, backward = _lifetimes(cut.forward, context), _lifetimes(cut.backward, context)
    # Frames, and with them arenas, are kept between calls unless there is a budget.
    keeps_arenas = context.settings.memory_budget is None
    return step_timeline(forward, backward, cut.num_results, links, keeps_arenas)


def _lifetimes(half: GraphModule, context: Context) -> Lifetimes:
    own = dataclasses.replace(context, counters=Counters())
    return lifetimes(plan_graph(half, own).plan, Placement.of(context))
