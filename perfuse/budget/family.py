"""The cuts to choose from. They depend on the graph alone, never on the budget.

Besides the levels of the partitioner there are *segments*: the forward is cut into parts of about
equal saved bytes, at points that few bytes cross. What crosses is saved, and the backward
recomputes the first few segments as it reaches them, from the last of these to the first: their
values would be held the longest, and by then the rest is freed.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from perfuse.budget.estimate import Estimate, estimate
from perfuse.budget.values import Values
from perfuse.config import Settings
from perfuse.graph.facts import reached
from perfuse.graph.partition import Joint
from perfuse.graph.saving.choose import choose_saved
from perfuse.graph.saving.costs import is_tuple

LEVEL = "level"
HIGHEST_LEVEL = 3
# A costlier cut has to be smaller than the next cheaper one by this part of the unconstrained peak.
LEAST_GAIN = 0.01
STRETCHES = (2, 3, 4, 6, 8, 12, 16, 24)
MOST_PER_COUNT = 6  # how many of the possible numbers of recomputed segments are tried


@dataclass(frozen=True, slots=True)
class Candidate:
    """One cut: what it saves, and its estimated peak and cost."""

    name: str
    saved: frozenset[int]  # numbers of nodes
    wanted: frozenset[int]  # what its backward is written for: see `Joint.cut`
    estimate: Estimate


def frontier(joint: Joint, values: Values, settings: Settings) -> list[Candidate]:
    """The cut without a budget, then others, each more expensive than the last, likely smaller."""
    plain, *others = _candidates(joint, values, settings)
    best = [plain]
    for candidate in sorted(others, key=lambda c: (c.estimate.flops, c.estimate.peak, c.name)):
        gain = best[-1].estimate.peak - candidate.estimate.peak
        if gain > LEAST_GAIN * plain.estimate.peak:
            best.append(candidate)
    return best


def _candidates(joint: Joint, values: Values, settings: Settings) -> Iterator[Candidate]:
    plain = _chosen(joint, values, settings.recompute_level)
    yield Candidate("no budget", plain, plain, estimate(values, plain, plain))
    seen = {plain}
    for name, saved in _cuts(joint, values, settings.recompute_level, plain):
        if saved not in seen:
            seen.add(saved)
            wanted = saved if name.startswith(LEVEL) else plain
            yield Candidate(name, saved, wanted, estimate(values, saved, wanted))


def _chosen(joint: Joint, values: Values, level: int) -> frozenset[int]:
    saved = choose_saved(joint.module.graph, joint.roles, level)
    return frozenset(values.number[n] for n in saved)


def _cuts(
    joint: Joint, values: Values, base: int, plain: frozenset[int]
) -> Iterator[tuple[str, frozenset[int]]]:
    for level in range(base + 1, HIGHEST_LEVEL + 1):
        yield f"{LEVEL} {level}", _chosen(joint, values, level)
    crossing = _Crossing(values)
    masks = _narrow_and_random(values, plain)
    for count in STRETCHES:
        points = crossing.points(count, plain)
        if len(points) < count - 1:
            break  # more segments than the graph has narrow points
        for number in _spread(len(points)):
            for with_products in (False, True):
                what = "all" if with_products else "all but matmuls"
                name = f"{what} of {number} of {count} segments"
                kept = crossing.kept(points[:number], plain) | masks
                yield name, _walk(values, kept, points[number - 1], with_products)
    yield "everything", _walk(values, masks, len(values.nodes), True)


def _narrow_and_random(values: Values, plain: frozenset[int]) -> frozenset[int]:
    """Saved values derived from larger random ones (dropout masks), which are not recomputed."""
    drawn: list[int] = []  # for each value the bytes of what it was drawn from, 0 if it was not
    for v in range(len(values.nodes)):
        is_source = values.forward[v] and not values.can_recompute[v]
        from_inputs = max((drawn[i] for i in values.inputs[v]), default=0)
        is_loop = values.forward[v] and not values.is_product[v]
        drawn.append(values.num_bytes[v] if is_source else from_inputs if is_loop else 0)
    return frozenset(
        v for v in plain if values.can_recompute[v] and 0 < values.held_bytes(v) < drawn[v]
    )


def _spread(count: int) -> list[int]:
    """Up to a few numbers from 1 to `count`, evenly."""
    few = min(count, MOST_PER_COUNT)
    return sorted({round(1 + i * (count - 1) / max(few - 1, 1)) for i in range(few)})


class _Crossing:
    """Which values of the forward are needed again after each place of it."""

    def __init__(self, values: Values) -> None:
        self._values = values
        self._last = [-1] * len(values.nodes)
        for v in range(len(values.nodes)):
            if values.forward[v]:
                for source in values.inputs[v]:
                    self._last[source] = v
        self._bytes = self._crossing_bytes()

    def _crossing_bytes(self) -> list[int]:
        """Bytes made at or before each node and read after it."""
        ends: dict[int, int] = {}
        held, found = 0, []
        for v in range(len(self._values.nodes)):
            held -= ends.pop(v, 0)
            if self._values.forward[v] and self._last[v] > v:
                size = self._values.held_bytes(v)
                held += size
                ends[self._last[v]] = ends.get(self._last[v], 0) + size
            found.append(held)
        return found

    def points(self, count: int, plain: frozenset[int]) -> list[int]:
        """Where to cut the forward into `count` segments that save about the same each."""
        values = self._values
        forward = [v for v in range(len(values.nodes)) if values.forward[v]]
        total = sum(values.num_bytes[v] for v in plain if values.forward[v])
        sums, held = [], 0
        for v in forward:
            held += values.num_bytes[v] if v in plain else 0
            sums.append(held)
        points: list[int] = []
        for i in range(1, count):
            low, high = (total * (i + by) / count for by in (-0.4, 0.4))
            near = [v for v, s in zip(forward, sums, strict=True) if low <= s <= high]
            if near:
                points.append(min(near, key=lambda v: (self._bytes[v], v)))
        return sorted(set(points))

    def kept(self, points: list[int], plain: frozenset[int]) -> frozenset[int]:
        """The values that cross these points, and those saved anyway after the last of them."""
        values, last = self._values, self._last
        crossing = {
            v
            for point in points
            for v in range(point + 1)
            if values.forward[v] and last[v] > point and not is_tuple(values.nodes[v])
        }
        crossing = {v for v in crossing if v in plain or not values.must_recompute[v]}
        return frozenset(crossing | {v for v in plain if v > points[-1]})


def _walk(values: Values, kept: frozenset[int], until: int, with_products: bool) -> frozenset[int]:
    """The values to save if everything before `until` is recomputed from `kept`."""

    def is_saved(v: int) -> bool:
        is_expensive = values.is_product[v] and v <= until and not with_products
        return v in kept or is_expensive or not values.can_recompute[v]

    seen = reached(values.first_reads, lambda v: () if is_saved(v) else values.inputs[v])
    return frozenset(v for v in seen if is_saved(v) and values.nodes[v].op != "get_attr")
