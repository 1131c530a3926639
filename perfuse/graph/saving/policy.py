"""How much the backward may recompute of what the forward could have saved."""

from dataclasses import dataclass

from perfuse.graph.saving.costs import Work


@dataclass(frozen=True, slots=True)
class SavePolicy:
    """One point between fastest and smallest: the same graph and policy give the same cut.

    The levels are a family of cuts, each keeping at most the bytes of the one before:

        0  views alone are made again: what the backward reads is kept
        1  and what fuses into a loop: pointwise work, casts, masks
        2  and whatever is one pass over memory: reductions, gathers, scans
        3  and products, convolutions and attention: all but random values, effects, collectives
    """

    level: int = Work.LOOP
    # A value that costs more than this is kept at any level; None sets no limit.
    max_recompute_flops: int | None = None
    must_save: tuple[str, ...] = ()  # names of nodes, which rule over the level
    must_recompute: tuple[str, ...] = ()
