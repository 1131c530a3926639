"""`Attention`: softmax attention with the user's functions of scores, as nodes of a Program.

The functions are expressions over the position of a score: `b` and `h` its batch and head, `q` and
`k` its query and key. They load the score itself from the pseudo-buffer SCORE, and its gradient
from SCORE_GRADIENT; in the kernel both are in registers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from perfuse.ir import expr as ex
from perfuse.ir import index as ix
from perfuse.ir.atoms import Atom
from perfuse.ir.dtype import DType
from perfuse.ir.expr import Expr
from perfuse.ir.index import Dim
from perfuse.ir.program import KEPT, NOWHERE, LibraryCall, Origin, View

# A variable of its own: what is computed of a score varies with it, whatever the sizes are.
_AT_SCORE = ix.var("score", 2)
SCORE = ex.load("score", _AT_SCORE, DType.F32)
SCORE_GRADIENT = ex.load("score gradient", _AT_SCORE, DType.F32)
REGISTERS = frozenset({SCORE.buffer, SCORE_GRADIENT.buffer})


class AttentionPart(StrEnum):
    """The kernel that a node stands for; each recomputes the scores it needs."""

    FORWARD = "attention"
    QUERY_GRADIENT = "attention_query_gradient"
    KEY_GRADIENT = "attention_key_gradient"  # and that of the values


@dataclass(frozen=True, slots=True)
class BlockList:
    """For each block of rows, the blocks of the other side that it is computed with."""

    counts: View | None  # [batch, head, block]; None: one
    indices: View | None  # [batch, head, block, place in the list]; None: there is one block


@dataclass(frozen=True, slots=True)
class BlockMask:
    """Which blocks of scores are computed: some through the mask, in `full` ones all of it.

    A causal mask, of keys up to the query's position, needs no lists.
    """

    partial: BlockList
    full: BlockList | None
    rows: int | None  # in a block of the side that the lists are of; None: all are one block
    others: int | None  # in a block that a list names, likewise
    is_causal: bool = False


WHOLE = BlockMask(BlockList(None, None), None, None, None)  # one block
CAUSAL = BlockMask(BlockList(None, None), None, None, None, is_causal=True)


@dataclass(frozen=True, slots=True)
class Saved:
    """Operands of the gradients: that of the result, and two numbers for each query."""

    grad_out: View
    logsumexp: View
    delta: View  # what is subtracted from the gradient of each weight of a query


@dataclass(frozen=True, slots=True)
class ScoreScatter:
    """A sum over scores, at an element of a float32 buffer: a captured tensor's gradient."""

    buffer: str
    index: Dim
    value: Expr

    def __str__(self) -> str:
        return f"{self.buffer}[{self.index!r}] += {self.value.text()}"


@dataclass(frozen=True, slots=True)
class Attention(LibraryCall):
    """out = softmax(score(scale * query @ key.T)) @ value over the keys that `mask` keeps, or a
    part of its gradient.

    Operands have the sizes [batch, head, position, feature]; several heads of queries may share one
    of keys and values. The results: of the forward out, logsumexp and largest score, both of base
    2 unless the sums are natural; else the gradient of the queries, or of the keys and of the
    values.
    """

    part: AttentionPart
    query: View
    key: View
    value: View
    blocks: BlockMask
    scale: float
    score: Expr
    mask: Expr
    results: tuple[str, ...]
    captured: tuple[View, ...] = ()  # buffers that the functions read
    score_gradient: Expr | None = None
    saved: Saved | None = None
    has_natural_sums: bool = False  # logsumexp is of base e; 0 for a query without keys
    scatters: tuple[ScoreScatter, ...] = ()
    mutates: tuple[str, ...] = ()  # the buffers of `scatters`
    reason: str = "computed by a kernel"
    origin: Origin = field(default=NOWHERE, compare=False)
    _reads: tuple[str, ...] | None = KEPT

    @property
    def op(self) -> str:
        return f"perfuse.{self.part}"

    @property
    def outs(self) -> tuple[str | None, ...]:
        return self.results

    @property
    def args(self) -> tuple[Any, ...]:
        mask, saved = self.blocks, self.saved
        lists = [mask.partial, *([] if mask.full is None else [mask.full])]
        given = [view for each in lists for view in (each.counts, each.indices)]
        tables = [view for view in given if view is not None]
        kept = [] if saved is None else [saved.grad_out, saved.logsumexp, saved.delta]
        return (self.query, self.key, self.value, *tables, *kept, *self.captured)

    @property
    def kwargs(self) -> tuple[tuple[str, Any], ...]:
        functions = [("score", self.score.text()), ("mask", self.mask.text())]
        if self.score_gradient is not None:
            functions.append(("score_gradient", self.score_gradient.text()))
        added = [("adds", str(scatter)) for scatter in self.scatters]
        return (("scale", self.scale), *functions, *added)

    @property
    def sizes(self) -> tuple[Dim, Dim, Dim, Dim]:
        """Batch, heads, queries, keys."""
        batch, heads, queries, _ = self.query.shape
        return batch, heads, queries, self.key.shape[2]

    @property
    def is_masked(self) -> bool:
        """Whether the mask leaves out scores, in blocks that are not full."""
        return not (self.mask.op == "const" and self.mask.attr)

    @property
    def groups(self) -> Dim:
        """Heads of queries that share one of keys."""
        found = ix.exact_div(self.query.shape[1], self.key.shape[1])
        assert found is not None, "heads of queries are a multiple of those of keys"
        return found

    @property
    def products(self) -> tuple[tuple[Dim, ...], ...]:
        """The sizes of each product of matrices that the kernel computes, as if nothing is masked.

        (batch, heads, queries, keys, depth)
        """
        inner, outer = self.query.shape[3], self.value.shape[3]
        depths = {
            AttentionPart.FORWARD: (inner, outer),
            AttentionPart.QUERY_GRADIENT: (inner, outer, inner),
            AttentionPart.KEY_GRADIENT: (inner, outer, inner, outer),
        }
        return tuple((*self.sizes, depth) for depth in depths[self.part])


def score_position(sizes: tuple[Dim, Dim, Dim, Dim]) -> tuple[Dim, Dim, Dim, Dim]:
    """The variables b, h, q and k of a score's position."""
    names = ("b", "h", "q", "k")
    b, h, q, k = (ix.var(name, size) for name, size in zip(names, sizes, strict=True))
    return b, h, q, k


def position_atoms(sizes: tuple[Dim, Dim, Dim, Dim]) -> tuple[frozenset[Atom], ...]:
    """The variables b, h, q and k: one each, none of a size of one."""
    found = (ix.as_atom(place) for place in score_position(sizes))
    return tuple(frozenset() if atom is None else frozenset({atom}) for atom in found)


def score_atom() -> Atom:
    """The variable that everything computed of a score varies with."""
    atom = ix.as_atom(_AT_SCORE)
    assert atom is not None
    return atom
