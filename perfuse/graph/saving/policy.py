"""How much the backward may recompute of what the forward could have saved."""

from dataclasses import dataclass

from perfuse.graph.saving.costs import Work


@dataclass(frozen=True, slots=True)
class SavePolicy:
    """One point between fastest and smallest: the same graph and policy give the same cut.

    The levels are a family of cuts, each keeping at most the bytes of the one before:

        0  only views are recomputed: what the backward reads is saved
        1  and what fuses into a loop: pointwise work, casts, masks
        2  and single passes over memory: reductions, gathers, scans
        3  and matmuls, convolutions and attention: all but random values, effects, collectives
    """

    level: int = Work.LOOP
    # A value that costs more than this is saved at any level; None sets no limit.
    max_recompute_flops: int | None = None
    must_save: tuple[str, ...] = ()  # names of nodes, which override the level
    must_recompute: tuple[str, ...] = ()
