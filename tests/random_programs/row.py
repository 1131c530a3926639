"""Statements of the training kind, as rows of text by group.

A text holds tokens in braces:

- `{x}` the operand, `{y}` another value of its shape; `{d}`, `{e}` dimensions of x, `{dd}` several,
  `{perm}` an order of all of them, `{k}` a bool
- capital letters are numbers: N, C, H, D the sizes of x along dimensions 0, 1, -2, -1, R along d;
  O a number of channels, G a divisor of C, K a kernel, S a stride, P a padding, Q a small number
- `{w[O, C]}` a new parameter of that shape, `{b[C]}` a buffer, `{q[C]}` a positive buffer,
  `{i[R|4]}` new indices below R of shape (4,), `{u[R|4]}` the same without repetitions,
  `{m[4]}` a bool mask; `{like}` and `{pos}` new tensors of the shape of x
- `{s}` a Python float that changes from call to call, `{j}` an int that does

Kinds are those of `ops.py` and two more: `kink`, a continuous function whose derivative jumps, and
`inplace`, which changes its operand and gives no result.
"""

from __future__ import annotations

from dataclasses import dataclass

ANY = (0, 1, 2, 3, 4, 5)


@dataclass(frozen=True, slots=True)
class NetRow:
    kind: str
    text: str
    ranks: tuple[int, ...] = ANY
    operand: str = "float"  # float, int, bool or complex


def net_rows(
    kind: str, *texts: str, ranks: tuple[int, ...] = ANY, operand: str = "float"
) -> tuple[NetRow, ...]:
    return tuple(NetRow(kind, t, ranks, operand) for t in texts)
