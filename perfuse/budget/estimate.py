"""Estimates of the peak and the cost of a cut, from the joint graph alone.

A few milliseconds for each cut, where lowering and scheduling it takes a second: good enough to put
cuts in order. Which of them is taken is decided by their real plans.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from perfuse.budget.values import Values

# Work between a value and a reader that it is still fused with: about that of a block.
FUSED_REACH = 48

Inputs = Callable[[int], Sequence[int]]


@dataclass(frozen=True, slots=True)
class Estimate:
    """The likely peak of a cut, and the operations its backward recomputes."""

    peak: int
    flops: int


def estimate(values: Values, saved: frozenset[int], wanted: frozenset[int]) -> Estimate:
    """The estimate of the cut that saves `saved` for a backward written for `wanted`."""
    walk = _Backward(values, saved, wanted - saved)
    forward = [v for v in range(len(values.nodes)) if values.forward[v]]
    ahead = _peak(values, forward, values.inputs.__getitem__, values.results | saved, frozenset())
    back = _peak(values, walk.order, walk.inputs, values.gradients, values.results | saved)
    again = (v % walk.second for v in walk.order)
    return Estimate(max(ahead, back), sum(values.num_flops[v] for v in again if values.forward[v]))


class _Backward:
    """The backward's work, some of it in a second forward (see graph/partition.py)."""

    def __init__(self, values: Values, saved: frozenset[int], remade: frozenset[int]) -> None:
        self.second = len(values.nodes)  # added to the number of a value in the second forward
        self._values = values
        self._remade = remade
        self._given = [
            v in saved or node.op != "call_function" for v, node in enumerate(values.nodes)
        ]
        self.order = self._walk()  # each recomputed value just before its first reader

    def inputs(self, code: int) -> list[int]:
        is_second = code >= self.second
        sources = self._values.inputs[code % self.second]
        return [self._meant(v, is_second) for v in sources]

    def _meant(self, v: int, is_second: bool) -> int:
        is_second = is_second or v in self._remade
        return v + self.second if is_second and not self._given[v] else v

    def _walk(self) -> list[int]:
        done = self._given + [False] * self.second
        order: list[int] = []
        for root in (*self._values.backward, *sorted(self._values.gradients)):
            stack = [self._meant(root, False)]
            while stack:
                top = stack[-1]
                missing = [] if done[top] else [v for v in self.inputs(top) if not done[v]]
                if missing:
                    stack.extend(reversed(missing))
                    continue
                stack.pop()
                if not done[top]:
                    done[top] = True
                    order.append(top)
        return order


def _peak(
    values: Values, order: list[int], inputs: Inputs, staying: frozenset[int], given: frozenset[int]
) -> int:
    """The most bytes held while `order` runs, `given` being there from its start."""
    count = len(values.nodes)
    last = _last_reads(values, order, inputs)
    stays = {values.root[v] for v in staying}
    freed: dict[int, int] = {}
    held = 0
    for root, at in _given_until(values, given, last).items():
        held += values.num_bytes[root]
        if root not in stays:
            freed[at] = freed.get(at, 0) + values.num_bytes[root]
    peak = held
    held -= freed.pop(-1, 0)
    for place, code in enumerate(order):
        v = code % count
        if code in stays or _is_stored(values, v, place, last.get(code, place)):
            held += values.num_bytes[v]
            if code not in stays:
                at = last.get(code, place)
                freed[at] = freed.get(at, 0) + values.num_bytes[v]
        peak = max(peak, held)
        held -= freed.pop(place, 0)
    return peak


def _is_stored(values: Values, v: int, place: int, last: int) -> bool:
    """In memory from `place` to `last`: always, or because its readers are too far to fuse with."""
    return values.is_stored[v] or last - place > FUSED_REACH


def _given_until(values: Values, given: frozenset[int], last: dict[int, int]) -> dict[int, int]:
    """The last place at which the memory of what is given is read."""
    ends: dict[int, int] = {}
    for v in given:
        ends[values.root[v]] = max(ends.get(values.root[v], -1), last.get(v, -1))
    return ends


def _last_reads(values: Values, order: list[int], inputs: Inputs) -> dict[int, int]:
    """The last place at which each value is read from memory."""
    count = len(values.nodes)
    last: dict[int, int] = {}
    for place in range(len(order) - 1, -1, -1):
        code = order[place]
        # What is fused into its readers is read when they are.
        is_stored = _is_stored(values, code % count, place, last.get(code, place))
        read_at = place if is_stored else last.get(code, place)
        for source in inputs(code):
            if last.get(source, -1) < read_at:
                last[source] = read_at
    return last
