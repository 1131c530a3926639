"""The choice: the cheapest cut whose real plan fits; lowering the budget never raises the peak.

Real plans are made for few of the cuts: the frontier is searched by bisection. A cut is accepted
when its peak fits and is at least that of the accepted, more expensive one. So whenever two
budgets part ways at some cut, the larger one ends at or above that cut's peak and the smaller one
below it, even where estimates put cuts in a wrong order.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from perfuse.budget.family import Candidate, frontier
from perfuse.budget.simulate import simulate
from perfuse.budget.values import Values
from perfuse.context import Context
from perfuse.errors import BudgetWarning, OverBudget
from perfuse.graph.partition import Cut, Joint, plain_cut
from perfuse.schedule.timeline import Timeline
from perfuse.sizes import Budget, parse_budget, spell_bytes

TRUST = 1.25  # how far estimates may be off when looking for the smallest cut


def pick(
    peak_of: Callable[[int], int], estimates: Sequence[int], limit: Callable[[int], int]
) -> int:
    """The index of the choice in a frontier of rising cost; `limit` gets the first peak."""
    first = peak_of(0)
    most = limit(first)
    if first <= most:
        return 0
    low, high, accepted = 1, len(estimates) - 1, None
    while low <= high:
        middle = (low + high) // 2
        peak = peak_of(middle)
        if peak <= most and (accepted is None or peak >= peak_of(accepted)):
            accepted, high = middle, middle - 1
        else:
            low = middle + 1
    if accepted is not None:
        return accepted
    return _pick_of_all(peak_of, estimates, most)


def _pick_of_all(peak_of: Callable[[int], int], estimates: Sequence[int], most: int) -> int:
    """Try every cut that might be the smallest: the first that fits, else the smallest."""
    most_likely = TRUST * min(estimates)
    peaks = {i: peak_of(i) for i, e in enumerate(estimates) if i == 0 or e <= most_likely}
    smallest = min(peaks, key=lambda i: (peaks[i], i))
    return next((i for i in sorted(peaks) if peaks[i] <= most), smallest)


@dataclass(frozen=True, slots=True)
class CutDecision:
    """A cut, with the memory of its plan."""

    name: str
    cut: Cut
    timeline: Timeline
    budget: Budget
    unconstrained: int  # the peak of the cut without a budget
    limit: int  # the budget in bytes

    @property
    def fits(self) -> bool:
        return self.timeline.peak <= self.limit


def choose_cut(joint: Joint, context: Context) -> tuple[Cut, bool]:
    """The cut of this graph under the settings, and whether it meets the budget, if any."""
    if context.settings.memory_budget is None:
        return plain_cut(joint, context.settings), True
    choice = choose_within(joint, context)
    if not choice.fits:
        _report_missed(choice, context)
    return choice.cut, choice.fits


def choose_within(joint: Joint, context: Context) -> CutDecision:
    """The cheapest cut whose simulated peak fits the budget; the smallest if none does."""
    assert context.settings.memory_budget is not None
    budget = parse_budget(context.settings.memory_budget)
    values = Values.of(joint)
    candidates = frontier(joint, values, context.settings)
    made: dict[int, tuple[Cut, Timeline]] = {}

    def peak_of(number: int) -> int:
        if number not in made:
            made[number] = _simulated(candidates[number], joint, values, context)
        return made[number][1].peak

    picked = pick(peak_of, [c.estimate.peak for c in candidates], budget.limit)
    context.counters.inc("budget.candidates", len(candidates))
    context.counters.inc("budget.simulated", len(made))
    first = peak_of(0)
    name, (cut, timeline) = candidates[picked].name, made[picked]
    return CutDecision(name, cut, timeline, budget, first, budget.limit(first))


def _simulated(
    candidate: Candidate, joint: Joint, values: Values, context: Context
) -> tuple[Cut, Timeline]:
    both = (candidate.saved, candidate.wanted)
    saved, wanted = ([values.nodes[v] for v in sorted(numbers)] for numbers in both)
    cut = joint.cut(saved, wanted)
    return cut, simulate(cut, context)


def _report_missed(choice: CutDecision, context: Context) -> None:
    """Report that the budget cannot be met, and the lowest peak that can."""
    context.counters.inc("budget.missed")
    text = (
        f"memory_budget {choice.budget} cannot be met: this training step needs at least "
        f"{spell_bytes(choice.timeline.peak)} ({choice.timeline.peak:,} bytes, simulated), "
        f"{spell_bytes(choice.unconstrained)} without a budget"
    )
    if context.settings.over_budget == "raise":
        raise OverBudget(text, least_bytes=choice.timeline.peak)
    warnings.warn(f"{text}; using the lowest peak", BudgetWarning, stacklevel=2)
