"""Index arithmetic: polynomials over loop variables and sizes, with floor division and modulo.

Everything is canonical and interned, so two indices are equal exactly when they are the same
object. A constant index is a plain Python int. sympy stays at the boundary to PyTorch: this small
algebra decides what schedulers ask (contiguity, bounds, equality) in microseconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import reduce
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from perfuse.ir import atoms
from perfuse.ir.atoms import Atom, Division, Indirect, Quotient, Remainder, Symbol, Variable

if TYPE_CHECKING:
    from perfuse.ir.expr import Expr


class Index:
    """A sum of monomials with integer coefficients, plus a constant. Build with the functions."""

    __slots__ = ("__weakref__", "_atoms", "const", "terms")
    terms: tuple[tuple[tuple[Atom, ...], int], ...]
    const: int
    _atoms: frozenset[Atom] | None

    def __add__(self, other: int | Index) -> int | Index:
        return add(self, other)

    __radd__ = __add__

    def __sub__(self, other: int | Index) -> int | Index:
        return add(self, mul(other, -1))

    def __rsub__(self, other: int | Index) -> int | Index:
        return add(other, mul(self, -1))

    def __mul__(self, other: int | Index) -> int | Index:
        return mul(self, other)

    __rmul__ = __mul__

    def __repr__(self) -> str:
        return render(self, lambda atom: atom.sort_key)


Dim = int | Index
UNBOUNDED: tuple[Dim, Dim | None] = (-(2**62), None)

_INDICES: WeakValueDictionary[tuple[Any, ...], Index] = WeakValueDictionary()


def _index(terms: tuple[tuple[tuple[Atom, ...], int], ...], const: int) -> Dim:
    if not terms:
        return const
    key = (terms, const)
    found = _INDICES.get(key)
    if found is None:
        found = Index()
        found.terms, found.const, found._atoms = terms, const, None
        _INDICES[key] = found
    return found


def _term(monomial: tuple[Atom, ...], coefficient: int) -> Dim:
    return _index(((monomial, coefficient),), 0) if monomial else coefficient


def _of(atom: Atom) -> Index:
    made = _term((atom,), 1)
    assert isinstance(made, Index)
    return made


def var(name: str, size: Dim) -> Dim:
    """The loop variable `name` in [0, size); of a loop of one step it is the constant 0."""
    if size == 1:
        return 0
    return _of(atoms.interned(Variable, name, name=name, size=size))


def symbol(name: str, lower: int = 0, is_from_data: bool = False) -> Index:
    """A size known only at run time, at least `lower`."""
    return _of(atoms.interned(Symbol, name, name=name, lower=lower, is_from_data=is_from_data))


def indirect(value: Expr, size: Dim) -> Index:
    """An index read from data at run time, already wrapped and checked to be in [0, size)."""
    return _of(atoms.interned(Indirect, f"[{value.short_text()}]", value=value, size=size))


def as_atom(index: Dim) -> Atom | None:
    """The single atom an index consists of, if it is just that."""
    if isinstance(index, int) or index.const or len(index.terms) != 1:
        return None
    monomial, coefficient = index.terms[0]
    return monomial[0] if coefficient == 1 and len(monomial) == 1 else None


def _canonical(collected: dict[tuple[Atom, ...], int], const: int) -> Dim:
    terms = [(m, c) for m, c in collected.items() if c]
    if len(terms) > 1:
        terms.sort(key=lambda term: [a.sort_key for a in term[0]])
        if any(isinstance(a, Remainder) for m, _ in terms for a in m):
            rebuilt = _rejoin(dict(terms), const)
            if rebuilt is not None:
                return rebuilt
    return _index(tuple(terms), const)


def _rejoin(collected: dict[tuple[Atom, ...], int], const: int) -> Dim | None:
    """d*(x//d) + x%d is x again: what a reshape there and back leaves behind."""
    for monomial, coefficient in collected.items():
        for remainder in monomial:
            if not isinstance(remainder, Remainder):
                continue
            numerator, divisor = remainder.numerator, remainder.divisor
            rest = _monomial_quotient(monomial, (remainder,))
            scale = _term(rest or (), coefficient)
            quotient = mul(mul(floordiv(numerator, divisor), divisor), scale)
            if isinstance(quotient, int) or quotient.const:
                continue
            if all(collected.get(m) == c for m, c in quotient.terms):
                gone = {monomial, *(m for m, _ in quotient.terms)}
                kept = {m: c for m, c in collected.items() if m not in gone}
                return add(_canonical(kept, const), mul(numerator, scale))
    return None


def add(a: Dim, b: Dim) -> Dim:
    if isinstance(a, int):
        if isinstance(b, int):
            return a + b
        a, b = b, a
    if isinstance(b, int):
        return a if b == 0 else _index(a.terms, a.const + b)
    collected = dict(a.terms)
    for monomial, coefficient in b.terms:
        collected[monomial] = collected.get(monomial, 0) + coefficient
    return _canonical(collected, a.const + b.const)


def mul(a: Dim, b: Dim) -> Dim:
    if isinstance(a, int):
        if isinstance(b, int):
            return a * b
        a, b = b, a
    if isinstance(b, int):
        if b == 0:
            return 0
        return a if b == 1 else _index(tuple((m, c * b) for m, c in a.terms), a.const * b)
    collected: dict[tuple[Atom, ...], int] = {}
    for ma, ca in (*a.terms, ((), a.const)):
        for mb, cb in (*b.terms, ((), b.const)):
            monomial = tuple(sorted(ma + mb, key=lambda atom: atom.sort_key))
            collected[monomial] = collected.get(monomial, 0) + ca * cb
    const = collected.pop((), 0)
    return _canonical(collected, const)


def product(sizes: Iterable[Dim]) -> Dim:
    total: Dim = 1
    return reduce(mul, sizes, total)


def dot(position: Iterable[Dim], strides: Iterable[Dim]) -> Dim:
    """The place in memory of a position."""
    return sum(mul(at, stride) for at, stride in zip(position, strides, strict=True))


def flat(sizes: Iterable[Dim], position: Iterable[Dim]) -> Dim:
    """The number of a position among all those of a shape, counted row by row."""
    total: Dim = 0
    for size, at in zip(sizes, position, strict=True):
        total = add(mul(total, size), at)
    return total


def _monomial_quotient(monomial: tuple[Atom, ...], by: tuple[Atom, ...]) -> tuple[Atom, ...] | None:
    rest = list(monomial)
    for atom in by:
        if atom not in rest:
            return None
        rest.remove(atom)
    return tuple(rest)


def _split_by(numerator: Dim, divisor: Dim) -> tuple[Dim, Dim]:
    """(q, r) with numerator == q*divisor + r, q taking every term that divides evenly."""
    if isinstance(numerator, int):
        if isinstance(divisor, int):
            return numerator // divisor, numerator % divisor
        return 0, numerator
    if isinstance(divisor, int):
        by: tuple[Atom, ...] = ()
        factor = divisor
    elif len(divisor.terms) == 1 and divisor.const == 0:
        by, factor = divisor.terms[0]
    else:
        return _split_by_sum(numerator, divisor)
    out: dict[tuple[Atom, ...], int] = {}
    out_const = 0
    left: dict[tuple[Atom, ...], int] = {}
    for monomial, coefficient in numerator.terms:
        rest = _monomial_quotient(monomial, by)
        if rest is None or coefficient % factor:
            left[monomial] = coefficient
        elif rest:
            out[rest] = coefficient // factor
        else:
            out_const += coefficient // factor
    left_const = numerator.const
    if not by:
        out_const, left_const = out_const + left_const // factor, left_const % factor
    return _canonical(out, out_const), _canonical(left, left_const)


def _split_by_sum(numerator: Index, divisor: Index) -> tuple[Dim, Dim]:
    """Like `_split_by`, for a divisor of several terms: a size such as 2*n + m - 2.

    The numerator is a sum of variables, each times a polynomial of sizes; a variable goes into the
    quotient when its polynomial is a multiple of the divisor, and stays whole when it is not.
    """
    quotient: Dim = 0
    rest: Dim = 0
    for variables, stride in _strides(numerator).items():
        even = _even_quotient(stride, divisor)
        if even is not None:
            quotient = add(quotient, mul(even, variables))
        else:
            rest = add(rest, mul(stride, variables))
    return quotient, rest


def _strides(index: Index) -> dict[Dim, Dim]:
    """The coefficient of each variable (or product of variables; 1 for none): sizes only."""
    found: dict[Dim, Dim] = {1: index.const} if index.const else {}
    for monomial, coefficient in index.terms:
        sizes = tuple(a for a in monomial if _is_size(a))
        others = tuple(a for a in monomial if not _is_size(a))
        variables = _term(others, 1)
        found[variables] = add(found.get(variables, 0), _term(sizes, coefficient))
    return found


def _is_size(atom: Atom) -> bool:
    """Whether an atom has one value for the whole kernel: a symbol, or made of symbols alone."""
    return all(isinstance(a, Symbol) for a in atoms_of(_of(atom)))


def _even_quotient(numerator: Dim, divisor: Index) -> Dim | None:
    """numerator / divisor by long division in graded order when it comes out even, else None."""
    lead, factor = max(divisor.terms, key=_graded)
    left = dict(_all_terms(numerator))
    quotient: dict[tuple[Atom, ...], int] = {}
    while left:
        monomial, coefficient = max(left.items(), key=_graded)
        by = _monomial_quotient(monomial, lead)
        # Each step removes the greatest term for good, unless two atoms share their text.
        if by is None or coefficient % factor or by in quotient:
            return None
        times = quotient[by] = coefficient // factor
        for other, c in _all_terms(divisor):
            grown = tuple(sorted(by + other, key=lambda atom: atom.sort_key))
            left[grown] = left.get(grown, 0) - times * c
            if not left[grown]:
                del left[grown]
    const = quotient.pop((), 0)
    return _canonical(quotient, const)


def _all_terms(index: Dim) -> tuple[tuple[tuple[Atom, ...], int], ...]:
    """The terms, the constant among them as the coefficient of the empty product."""
    if isinstance(index, int):
        return (((), index),) if index else ()
    return (*index.terms, ((), index.const)) if index.const else index.terms


def _graded(term: tuple[tuple[Atom, ...], int]) -> tuple[int, list[str]]:
    return len(term[0]), [atom.sort_key for atom in term[0]]


def exact_div(numerator: Dim, divisor: Dim) -> Dim | None:
    """numerator / divisor when it comes out even, else None."""
    if isinstance(divisor, int) and divisor == 0:
        return None
    quotient, rest = _split_by(numerator, divisor)
    return quotient if rest == 0 else None


def _part_by_scale(index: Index, divisor: int) -> tuple[int, Dim, Dim] | None:
    """(g, coarse, fine) with index == g*coarse + fine, 0 <= fine < g and g dividing the divisor."""
    scales = {math.gcd(c, divisor) for _, c in index.terms}
    for scale in sorted(scales - {1}, reverse=True):
        coarse = {m: c // scale for m, c in index.terms if c % scale == 0}
        fine = {m: c for m, c in index.terms if c % scale}
        if coarse and (fine or index.const):
            small = _canonical(fine, index.const % scale)
            if is_within(small, scale):
                return scale, _canonical(coarse, index.const // scale), small
    return None


def _content(index: Dim) -> int:
    """The greatest number that divides an index whatever its symbols are."""
    return math.gcd(*(c for _, c in _all_terms(index)))


def _shrunk(index: Dim, by: int) -> Dim:
    """The index divided by a number that divides all its terms; the constant is rounded down."""
    if isinstance(index, int):
        return index // by
    return _index(tuple((m, c // by) for m, c in index.terms), index.const // by)


def floordiv(numerator: Dim, divisor: Dim) -> Dim:
    if divisor == 1:
        return numerator
    if isinstance(numerator, int) and isinstance(divisor, int):
        return numerator // divisor
    quotient, rest = _split_by(numerator, divisor)
    if is_within(rest, divisor):
        return quotient
    if is_within(add(rest, divisor), divisor):
        return add(quotient, -1)  # n*k - 1, the last of n*k, is in block n - 1
    inner = as_atom(rest)
    if isinstance(inner, Quotient):
        return add(quotient, floordiv(inner.numerator, mul(inner.divisor, divisor)))
    if isinstance(rest, Index):
        content = _content(divisor)
        common = math.gcd(content, *(c for _, c in rest.terms))
        if common > 1:
            return add(quotient, floordiv(_shrunk(rest, common), _shrunk(divisor, common)))
        parted = _part_by_scale(rest, content)
        if parted is not None:
            scale, coarse, _ = parted
            return add(quotient, floordiv(coarse, _shrunk(divisor, scale)))
    return add(quotient, _of(_division(Quotient, rest, divisor, "//")))


def mod(numerator: Dim, divisor: Dim) -> Dim:
    if divisor == 1:
        return 0
    if isinstance(numerator, int) and isinstance(divisor, int):
        return numerator % divisor
    _, rest = _split_by(numerator, divisor)
    if is_within(rest, divisor):
        return rest
    if is_within(add(rest, divisor), divisor):
        return add(rest, divisor)
    if isinstance(rest, Index):
        content = _content(divisor)
        common = math.gcd(content, rest.const, *(c for _, c in rest.terms))
        if common > 1:
            return mul(mod(_shrunk(rest, common), _shrunk(divisor, common)), common)
        parted = _part_by_scale(rest, content)
        if parted is not None:
            scale, coarse, fine = parted
            return add(mul(mod(coarse, _shrunk(divisor, scale)), scale), fine)
    inner = as_atom(rest)
    if isinstance(inner, Remainder) and isinstance(inner.divisor, int):
        if isinstance(divisor, int) and inner.divisor % divisor == 0:
            return mod(inner.numerator, divisor)
    return _of(_division(Remainder, rest, divisor, "%"))


def _division(kind: type[Division], numerator: Dim, divisor: Dim, sign: str) -> Division:
    text = f"({_factor_text(numerator)} {sign} {_factor_text(divisor)})"
    return atoms.interned(kind, text, numerator=numerator, divisor=divisor)


def _factor_text(index: Dim) -> str:
    """The text of an index as it stands in a quotient: in brackets unless it is one atom."""
    return repr(index) if isinstance(index, int) or as_atom(index) else f"({index!r})"


def _atom_bounds(atom: Atom) -> tuple[Dim, Dim | None]:
    """(least, most) value of an atom; most is None when nothing is known."""
    if isinstance(atom, Variable | Indirect):
        return 0, add(atom.size, -1)
    if isinstance(atom, Symbol):
        return atom.lower, _of(atom)
    assert isinstance(atom, Division)
    numerator, divisor = atom.numerator, atom.divisor
    if isinstance(atom, Remainder):
        return 0, add(divisor, -1)
    low, high = bounds(numerator)
    if not is_nonnegative(low):
        return UNBOUNDED
    if high is None:
        return 0, None
    if not isinstance(divisor, int):
        # Below k times the divisor, the quotient is below k.
        blocks = exact_div(add(high, 1), divisor)
        return 0, None if blocks is None else add(blocks, -1)
    least = low // divisor if isinstance(low, int) else 0
    return least, floordiv(high, divisor)


def bounds(index: Dim) -> tuple[Dim, Dim | None]:
    """Least and most value over all loop variables, as expressions of the size symbols."""
    if isinstance(index, int):
        return index, index
    composite = _bounds_by_stride(index)
    if composite is not None:
        return composite
    low: Dim = index.const
    high: Dim | None = index.const
    for monomial, coefficient in index.terms:
        if len(monomial) > 1 and any(isinstance(a, Symbol) and a.lower < 0 for a in monomial):
            return UNBOUNDED  # nothing is known of a product with such a factor
        least: Dim = 1
        most: Dim | None = 1
        for atom in monomial:
            a, b = _atom_bounds(atom)
            if isinstance(atom, Symbol):
                a = _of(atom)
            elif isinstance(a, int) and a < 0 and len(monomial) > 1:
                return UNBOUNDED  # times what may be zero, the least is no longer a bound
            least = mul(least, a)
            most = None if most is None or b is None else mul(most, b)
        start, end = (least, most) if coefficient > 0 else (most, least)
        if start is None:
            return UNBOUNDED
        low, high = _extended(low, high, (start, end), coefficient)
    return low, high


def _extended(
    low: Dim, high: Dim | None, ends: tuple[Dim, Dim | None], factor: Dim
) -> tuple[Dim, Dim | None]:
    """The bounds of a sum to which a value is added, `factor` times something between `ends`."""
    least, most = ends
    top = None if high is None or most is None else add(high, mul(most, factor))
    return add(low, mul(least, factor)), top


def _bounds_by_stride(index: Index) -> tuple[Dim, Dim | None] | None:
    """Like `bounds`, if a variable has a stride of several terms: x*n - x alone may be negative.

    None where no variable has one, or the sign of one is not known.
    """
    if len(index.terms) < 2:
        return None
    strides = _strides(index)
    sums = {v: s for v, s in strides.items() if v != 1 and len(_all_terms(s)) > 1}
    if not sums:
        return None
    low, high = bounds(sum(mul(s, v) for v, s in strides.items() if v not in sums))
    for variables, stride in sums.items():
        least, most = bounds(variables)
        if is_nonnegative(stride):
            low, high = _extended(low, high, (least, most), stride)
        elif most is not None and is_nonnegative(mul(stride, -1)):
            low, high = _extended(low, high, (most, least), stride)
        else:
            return None
    return low, high


def is_nonnegative(index: Dim) -> bool:
    """Provably >= 0, taking every symbol at its least."""
    if isinstance(index, int):
        return index >= 0
    scaled = _without_quotient(index)
    if scaled is not None:
        return is_nonnegative(scaled)
    # Substituting sym -> lower + t (t >= 0) makes a sufficient test: no negative coefficient.
    total: Dim = index.const
    for monomial, coefficient in index.terms:
        factor: Dim = coefficient
        for atom in monomial:
            if isinstance(atom, Symbol):
                factor = mul(factor, add(symbol(atom.name + "'"), atom.lower))
            else:
                low, _ = _atom_bounds(atom)
                if not isinstance(low, int) or low < 0:
                    return False
                factor = mul(factor, _of(atom))
        total = add(total, factor)
    if isinstance(total, int):
        return total >= 0
    return total.const >= 0 and all(c >= 0 for _, c in total.terms)


def _without_quotient(index: Index) -> Dim | None:
    """d times the index, one subtracted n//d replaced by n/d: no greater, so a sufficient test."""
    for monomial, coefficient in index.terms:
        for atom in monomial if coefficient < 0 else ():
            if isinstance(atom, Quotient) and isinstance(atom.divisor, int):
                others = _term(_monomial_quotient(monomial, (atom,)) or (), coefficient)
                if is_nonnegative(mul(others, -1)):
                    kept = add(index, _term(monomial, -coefficient))
                    return add(mul(kept, atom.divisor), mul(atom.numerator, others))
    return None


def is_within(index: Dim, size: Dim) -> bool:
    """Provably 0 <= index < size."""
    low, high = bounds(index)
    if high is None or not is_nonnegative(low):
        return False
    return is_nonnegative(add(add(size, mul(high, -1)), -1))


def substitute(index: Dim, mapping: Mapping[Atom, Dim], on_value: Callable[[Expr], Expr]) -> Dim:
    """The index with variables replaced; `on_value` rewrites the expressions inside value atoms."""
    if isinstance(index, int):
        return index
    total: Dim = index.const
    for monomial, coefficient in index.terms:
        factor: Dim = coefficient
        for atom in monomial:
            factor = mul(factor, _substitute_atom(atom, mapping, on_value))
        total = add(total, factor)
    return total


def _substitute_atom(
    atom: Atom, mapping: Mapping[Atom, Dim], on_value: Callable[[Expr], Expr]
) -> Dim:
    found = mapping.get(atom)
    if found is not None:
        return found
    if isinstance(atom, Division):
        parts = (substitute(p, mapping, on_value) for p in atom.operands)
        return floordiv(*parts) if isinstance(atom, Quotient) else mod(*parts)
    if isinstance(atom, Indirect):
        value = on_value(atom.value)
        return _of(atom) if value is atom.value else indirect(value, atom.size)
    return _of(atom)


def divisions_of(index: Dim) -> list[Division]:
    """The quotients and remainders that are terms or factors of an index."""
    terms = () if isinstance(index, int) else index.terms
    return [atom for monomial, _ in terms for atom in monomial if isinstance(atom, Division)]


def atoms_of(index: Dim) -> frozenset[Atom]:
    """Every variable, symbol and value atom reached, also inside quotients and remainders."""
    if isinstance(index, int):
        return frozenset()
    if index._atoms is None:
        found: set[Atom] = set()
        for monomial, _ in index.terms:
            for atom in monomial:
                if isinstance(atom, Division):
                    found |= atoms_of(atom.numerator) | atoms_of(atom.divisor)
                else:
                    found.add(atom)
        index._atoms = frozenset(found)
    return index._atoms


def coefficient_of(index: Dim, variable: Atom) -> Dim | None:
    """The stride of a variable in an index; None when it occurs other than linearly."""
    if isinstance(index, int):
        return 0
    total: Dim = 0
    for monomial, coefficient in index.terms:
        if variable in monomial:
            rest = _monomial_quotient(monomial, (variable,)) or ()
            if any(variable in atoms_of(_of(a)) for a in rest):
                return None
            total = add(total, _term(rest, coefficient))
        elif any(variable in atoms_of(_of(a)) for a in monomial if isinstance(a, Division)):
            return None
        elif any(_value_uses(a, variable) for a in monomial):
            return None
    return total


def _value_uses(atom: Atom, variable: Atom) -> bool:
    if isinstance(atom, Indirect):
        return variable in atom.value.variables()
    return isinstance(atom, Division) and any(
        _value_uses(a, variable) for a in atoms_of(atom.numerator) | atoms_of(atom.divisor)
    )


def render(index: Dim, spell: Callable[[Atom], str]) -> str:
    """The index as an expression text, with atoms spelled by the caller."""
    if isinstance(index, int):
        return str(index)
    pieces = []
    for monomial, coefficient in index.terms:
        factors = [spell(atom) for atom in monomial]
        if coefficient == -1:
            factors[0] = "-" + factors[0]
        elif coefficient != 1:
            factors.insert(0, str(coefficient))
        pieces.append("*".join(factors))
    if index.const or not pieces:
        pieces.append(str(index.const))
    return " + ".join(pieces)
