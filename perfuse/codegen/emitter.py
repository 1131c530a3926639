"""The core of every code generator: an expression as statements, each where it belongs.

A generator adds syntax: how a constant, an operation, a load, a check, an assignment is written.
The rest is here: the names of arguments and variables, the values computed so far, the scope where
each of them is computed (its home), which loads the kernel itself resolves, the kernel's members.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, Self, TypeVar

from perfuse.codegen.writer import Writer
from perfuse.ir import expr as ex
from perfuse.ir import index as ix
from perfuse.ir.atoms import Atom, Division, Indirect, Symbol, Variable
from perfuse.ir.dtype import DType
from perfuse.ir.expr import Expr
from perfuse.ir.index import Dim
from perfuse.ir.post_order import post_order
from perfuse.ir.program import Buffer
from perfuse.schedule.plan import Kernel, Member, Role


@dataclass(frozen=True, slots=True)
class Value:
    """An expression of the generated language: its text, dtype, and the lanes it varies along."""

    text: str
    dtype: DType
    lanes: int  # 0: one number


class Names(ABC):
    """Arguments of one kernel, numbered by first use so that equal kernels have equal text."""

    def __init__(self, buffers: Mapping[str, Buffer]) -> None:
        self.buffers = buffers
        self.arguments: dict[str, str] = {}  # buffer -> a0, a1, ...
        self.symbols: dict[str, str] = {}  # size symbol -> n0, n1, ...
        self._num_locals = 0

    def argument(self, buffer: str) -> str:
        return self.arguments.setdefault(buffer, f"a{len(self.arguments)}")

    def symbol(self, name: str) -> str:
        return self.symbols.setdefault(name, f"n{len(self.symbols)}")

    def local(self) -> str:
        self._num_locals += 1
        return f"t{self._num_locals}"

    @abstractmethod
    def quotient(self, atom: Division, numerator: str, divisor: str) -> str:
        """A quotient or remainder of an index, which rounds down."""

    def dim(self, dim: Dim) -> str:
        """A size, or an index that no data is part of."""
        return ix.render(dim, self.atom)

    def atom(self, atom: Atom, spell: Callable[[Dim], str] | None = None) -> str:
        """A part of an index; `spell` writes the operands of a division."""
        if isinstance(atom, Variable):
            return atom.name
        if isinstance(atom, Symbol):
            return self.symbol(atom.name)
        assert isinstance(atom, Division), f"{atom} is read from data"
        a, b = map(spell or self.dim, atom.operands)
        return self.quotient(atom, a, b)


N = TypeVar("N", bound=Names)
V = TypeVar("V", bound=Value)


class Scope(Generic[V]):
    """A place where statements go, inside others, and what is known there."""

    def __init__(self, writer: Writer, variables: frozenset[Atom], parent: Scope[V] | None) -> None:
        self.writer = writer
        self.variables: frozenset[Atom] = variables | (parent.variables if parent else frozenset())
        self.parent = parent
        self.known: dict[Expr, V] = {}
        self.known_indices: dict[Dim, str] = {}

    def find(self, value: Expr) -> V | None:
        scope: Scope[V] | None = self
        while scope is not None:
            if (found := scope.known.get(value)) is not None:
                return found
            scope = scope.parent
        return None

    def home_of(self, variables: frozenset[Atom]) -> Scope[V]:
        """The outermost scope where all these variables are known."""
        scope = self
        while scope.parent is not None and variables <= scope.parent.variables:
            scope = scope.parent
        return scope


@dataclass(frozen=True, slots=True)
class Formula(Generic[V]):
    """An expression to compute in place of a load, and the resolver for its own loads."""

    value: Expr
    resolve: Resolver[V]


# Resolves loads of the kernel's own results; None: read memory.
Resolver = Callable[[Expr], V | Formula[V] | None]


class Emitter(ABC, Generic[N, V]):
    """Writes the statements of values at one place of a kernel."""

    def __init__(self, names: N, scope: Scope[V], resolve: Resolver[V]) -> None:
        self.names = names
        self.scope = scope
        self.resolve = resolve

    # -- spelling --------------------------------------------------------------------------

    @abstractmethod
    def at(self, scope: Scope[V], resolve: Resolver[V]) -> Self:
        """This emitter, writing into another scope."""

    @abstractmethod
    def stays(self, e: Expr) -> bool:
        """Whether a value has to be computed where it is used, because memory may change."""

    @abstractmethod
    def constant(self, e: Expr) -> V: ...

    @abstractmethod
    def computed(self, e: Expr, args: list[V]) -> V:
        """An operation on values."""

    @abstractmethod
    def position(self, e: Expr) -> V:
        """An index as a value."""

    @abstractmethod
    def read(self, e: Expr) -> V:
        """A load from memory, in a variable."""

    @abstractmethod
    def check(self, source: V, value: Expr, size: Dim) -> V:
        """An index read from data, checked to be within a size."""

    @abstractmethod
    def cast(self, value: V, dtype: DType) -> str: ...

    @abstractmethod
    def assignment(self, name: str, text: str) -> str: ...

    def operands(self, e: Expr) -> tuple[Expr, ...]:
        """The values that an operation is computed from."""
        return e.args

    # -- values ----------------------------------------------------------------------------

    def value(self, e: Expr) -> V:
        if e.op == "const":
            return self.constant(e)
        found = self.scope.find(e)
        if found is None:
            for emitter, each in post_order((self._at_home(e), e), _needed, _is_known):
                found = emitter.scope.known[each] = emitter._made(each)
        assert found is not None
        return found

    def needed(self, e: Expr) -> Iterable[tuple[Emitter[N, V], Expr]]:
        """The values that `_made` will need, and where, so that recursion stays shallow."""
        emitter, values = self, self.operands(e)
        if e.op == "load" and (answer := self.resolve(e)) is not None:
            if isinstance(answer, Value):
                return
            emitter, values = self.at(self.scope, answer.resolve), (answer.value,)
        elif e.op in ("load", "index"):
            values = (*e.args, *ex.index_values(e))
        for value in values:
            yield emitter._at_home(value), value

    def _at_home(self, e: Expr) -> Self:
        """This emitter where a value belongs: what does not vary in a loop goes before it."""
        if self.scope.parent is None or self.stays(e):
            return self
        home = self.scope.home_of(e.variables())
        return self if home is self.scope else self.at(home, self.resolve)

    def _made(self, e: Expr) -> V:
        if e.op == "load":
            return self._load(e)
        if e.op == "index":
            return self.named(self.position(e))
        return self.named(self.computed(e, [self.value(a) for a in self.operands(e)]))

    def _load(self, e: Expr) -> V:
        answer = self.resolve(e)
        if isinstance(answer, Formula):
            inner = self.at(self.scope, answer.resolve)
            # What goes through memory is narrowed to the buffer's type; only bool and ints differ.
            return self.converted(inner.value(answer.value), e.dtype)
        return self.read(e) if answer is None else answer

    def named(self, value: V) -> V:
        """The value in a variable of this scope."""
        name = self.names.local()
        self.line(self.assignment(name, value.text))
        return type(value)(name, value.dtype, value.lanes)

    def converted(self, value: V, dtype: DType) -> V:
        """The value in another compute type."""
        if value.dtype is dtype:
            return value
        return self.named(type(value)(self.cast(value, dtype), dtype, value.lanes))

    def line(self, text: str) -> None:
        self.scope.writer.line(text)

    # -- indices ---------------------------------------------------------------------------

    def index(self, index: Dim) -> str:
        return ix.render(index, self.atom)

    def atom(self, atom: Atom) -> str:
        if isinstance(atom, Indirect):
            return self.checked(atom).text
        return self.names.atom(atom, self.index)

    def checked(self, atom: Indirect) -> V:
        """An index read from data; it is checked once per scope."""
        source = ex.cast(atom.value, DType.I64)
        marker = ex.apply("fma", source, source, source)  # a key no formula produces
        found = self.scope.find(marker)
        if found is None:
            found = self.scope.known[marker] = self.check(self.value(source), atom.value, atom.size)
        return found


def _needed(place: tuple[Emitter[N, V], Expr]) -> Iterable[tuple[Emitter[N, V], Expr]]:
    emitter, value = place
    return emitter.needed(value)


def _is_known(place: tuple[Emitter[N, V], Expr]) -> bool:
    emitter, value = place
    return value.op == "const" or emitter.scope.find(value) is not None


class KernelFrame(Generic[N, V]):
    """One kernel being written: its members, its names, and the formulas of its results."""

    def __init__(self, kernel: Kernel, buffers: Mapping[str, Buffer], names: N) -> None:
        self.kernel = kernel
        self.buffers = buffers
        self.names = names

    def of_role(self, *roles: Role) -> list[Member]:
        return [m for m in self.kernel.members if m.role in roles]

    def short(self, member: Member) -> str:
        """A name for what belongs to a member: equal kernels have equal ones."""
        return f"m{self.kernel.members.index(member)}"

    def is_read_inside(self, name: str) -> bool:
        """Whether a member reads the buffer, and so may take its value from a register."""
        return any(r.buffer == name for m in self.kernel.members for r in m.loop.reads())

    def formula_of(self, member: Member, *, is_for_store: bool = False) -> Expr:
        """A member's formula, unrounded if only a store uses it, which rounds anyway."""
        formula, out = member.loop.value, member.loop.out
        if formula.op == "round_to" and formula.attr is self.buffers[out].dtype:
            if is_for_store or not self.is_read_inside(out):
                return formula.args[0]
        return formula

    def value_of(self, emitter: Emitter[N, V], member: Member, *, is_for_store: bool = False) -> V:
        """A member's value in the compute type of its buffer."""
        value = emitter.value(self.formula_of(member, is_for_store=is_for_store))
        return emitter.converted(value, self.buffers[member.loop.out].dtype.compute)

    def dim(self, dim: Dim) -> str:
        """A size, in terms of the kernel's size arguments."""
        return self.names.dim(dim)
