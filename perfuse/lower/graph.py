"""`lower_graph`: walks an ATen graph in order and collects its Program."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import torch
from torch.fx import GraphModule
from torch.fx import Node as FxNode

from perfuse.context import Context
from perfuse.errors import UnsupportedCast
from perfuse.graph.blame import working_on
from perfuse.graph.facts import DONATED, ROUNDED
from perfuse.graph.quantised import rounded_to_eight_bits
from perfuse.graph.saving.roundings import read_beside_statistics
from perfuse.graph.saving.ties import compared_with_themselves
from perfuse.graph.storage_ops import Treatment, addressed_bases, storage_treatment
from perfuse.ir import expr as ex
from perfuse.ir import index as ix
from perfuse.ir.atoms import Symbol
from perfuse.ir.dtype import from_torch
from perfuse.ir.index import Dim
from perfuse.ir.program import ARGUMENTS, BufferKind, LibraryCall, Matmul, Opaque, Program, View
from perfuse.lower import fallback, families, traced
from perfuse.lower.aliases import alias_root, views_from
from perfuse.lower.builder import Builder, same_layout
from perfuse.lower.fallback import AtenCall
from perfuse.lower.layout import dense_strides, own_strides, reaches_outside
from perfuse.lower.mutations import Mutations
from perfuse.lower.offsets import learn_offset
from perfuse.lower.origins import Origins
from perfuse.lower.registry import CannotLower, lowering_of
from perfuse.lower.result_windows import EagerWindows, may_overlap, own_memory
from perfuse.lower.size_formulas import with_formulas
from perfuse.lower.stored_values import (
    feeds_calls,
    is_returned_and_read,
    is_shown_often,
    runs_in_library,
)
from perfuse.lower.tensor import Tensor, positions, reindex
from perfuse.torch_compat.ops import is_effect, is_view_op, schema_of
from perfuse.torch_compat.sizes import symbol_hints

assert families  # importing the op families fills the registry

# Recomputing a value for each of its users beats storing it while it is this cheap.
_CHEAP_COST, _CHEAP_LOADS = 2, 1
# Beyond this an inlined formula costs more in registers than a round trip through memory.
_MOST_COST, _MOST_LOADS = 600, 24
# An offset of this many elements suits every dtype that memory may be viewed as.
_ALIGNED_ELEMENTS = 16
_LISTED = "an element of a list that a call returned"


def lower_graph(module: GraphModule, context: Context) -> Program:
    """One forward sweep: each node becomes a formula, a loop or an ATen call."""
    return _Lowering(module, context).run()


def _shorten(table: dict[Any, Any], length: int) -> None:
    """Undo the last additions. Restoring a copy would cost a whole table for every op."""
    while len(table) > length:
        table.popitem()


class _Lowering:
    def __init__(self, module: GraphModule, context: Context) -> None:
        self.module = module
        self.context = context
        self.device = context.device
        self.builder = Builder(context.settings, self.device, context.target.isa)
        self.symbols = self.builder.symbols
        self.values: dict[FxNode, Any] = {}
        self.moved: dict[FxNode, Tensor] = {}  # CPU scalars that GPU loops read
        self.inputs: list[str] = []
        self.donated: list[str] = []
        self.outputs: tuple[Any, ...] = ()
        self.owners: dict[str, FxNode] = {}
        self.origins = Origins()
        self.mutations = Mutations(module.graph, self.builder, self.values)
        self.quantised = rounded_to_eight_bits(module.graph)
        self.rounded = self.quantised | compared_with_themselves(module.graph)
        self.rounded |= read_beside_statistics(module.graph)

    def run(self) -> Program:
        handlers = {
            "placeholder": self._placeholder,
            "get_attr": self._get_attr,
            "call_function": self._call,
            "output": self._output,
        }
        self._learn_sizes()
        for node in self.module.graph.nodes:
            self.builder.origin = self.origins.of(node)
            known, num_emitted = len(self.builder.buffers), len(self.builder.nodes)
            with working_on(node):
                handlers[node.op](node)
            num_new = len(self.builder.buffers) - known
            for name in islice(reversed(self.builder.buffers), num_new):
                self.owners[name] = node
            is_call = any(isinstance(n, LibraryCall) for n in self.builder.nodes[num_emitted:])
            self.origins.settle(node, self.values.get(node), self.builder, is_call)
            self.mutations.note(node)
        nodes, formulas = with_formulas(self.builder.nodes, self.symbols)
        return Program(
            inputs=tuple(self.inputs),
            buffers=self.builder.buffers,
            nodes=nodes,
            outputs=self.outputs,
            symbols=tuple((formula.symbol, formula.text) for formula in formulas),
            constants=self._constants(),
            donated=tuple(self.donated),
            hints=symbol_hints(map(traced.value, self.module.graph.find_nodes(op="placeholder"))),
        )

    def _learn_sizes(self) -> None:
        """Sizes that arguments give: plain ones first, by which formulas can be solved."""
        values = [*map(traced.value, self.module.graph.find_nodes(op="placeholder"))]
        tensors = {f"i{i}": v for i, v in enumerate(values) if traced.is_plain_tensor(v)}
        for number in values:
            if isinstance(number, torch.SymInt):
                self.symbols.learn_number(number)
        for tensor in tensors.values():
            self.symbols.learn(tensor)
        for name, tensor in tensors.items():
            self.symbols.learn_formulas(name, tensor)

    def _constants(self) -> dict[str, Any]:
        """The values that the graph module holds, without functions that became formulas."""
        calls = [node for node in self.builder.nodes if isinstance(node, LibraryCall)]
        passed = {name for call in calls for name in call.reads()}
        held = self.builder.constants.items()
        return {n: v for n, v in held if n in passed or not isinstance(v, GraphModule)}

    # -- leaves ----------------------------------------------------------------------------

    def _placeholder(self, node: FxNode) -> None:
        value = node.meta.get("val")
        name = f"i{len(self.inputs)}"
        if isinstance(value, torch.SymInt | int) and not isinstance(value, bool):
            if isinstance(value, torch.SymInt) and not self.symbols.learn_number(value):
                self.symbols.give(value, name)
            dim = self.symbols.dim(value)
            atom = ix.as_atom(dim)
            self.inputs.append(atom.name if isinstance(atom, Symbol) else name)
            self.values[node] = dim
            return
        self.inputs.append(name)
        if isinstance(value, torch.SymFloat):
            self.symbols.give(value, name)
        if node.meta.get(DONATED):
            self.donated.append(name)
        self.values[node] = self._tensor_leaf(name, value, BufferKind.INPUT)

    def _get_attr(self, node: FxNode) -> None:
        found: Any = self.module
        for part in str(node.target).split("."):
            found = getattr(found, part)
        name = f"c{len(self.builder.constants)}"
        self.builder.constants[name] = found
        if isinstance(found, torch.Tensor):
            self.values[node] = self._tensor_leaf(name, found, BufferKind.CONSTANT)
        else:
            self.values[node] = Opaque(name)

    def _tensor_leaf(self, name: str, value: Any, kind: BufferKind) -> Any:
        if not traced.is_plain_tensor(value):
            return Opaque(name)
        dtype = from_torch(value.dtype)
        if dtype is None or not traced.is_computable(value, self.device):
            return Opaque(name, value)
        start = value.storage_offset()
        buffer = self.builder.new_buffer(
            dtype,
            self.symbols.dims(value.shape),
            self.symbols.strides(value.stride()),
            kind=kind,
            name=name,
            is_aligned=isinstance(start, int) and start * dtype.num_bytes % 16 == 0,
        )
        return self.builder.tensor_of(buffer)

    # -- calls -----------------------------------------------------------------------------

    def _call(self, node: FxNode) -> None:
        expected = node.meta.get("val")
        learn_offset(node, self.symbols)
        if isinstance(expected, torch.SymInt):
            if not self._is_data_dependent(node):
                self.values[node] = self.symbols.dim(expected)
                return
        elif isinstance(expected, int | float | bool) and not traced.has_tensor_input(node):
            self.values[node] = expected
            return
        if node.target is operator.getitem:
            source, at = self._value(node.args[0]), node.args[1]
            is_listed = isinstance(source, Opaque)  # a list among the results of a call
            self.values[node] = self._fallback(node, _LISTED) if is_listed else source[at]
            return
        if node.target is torch.ops.aten.copy_.default and self._try_copy(node):
            return
        if storage_treatment(node.target) is Treatment.LOWERED and _counts_from_start(node):
            # Nothing guards the storage offset of an input: the call reads it each time.
            reason = "its offset is relative to the start of the storage"
            self.values[node] = self._called_on_storage(node, reason)
        elif node.target is torch.ops.aten.as_strided.default:
            self.values[node] = self._as_strided(node, expected)
        else:
            self.values[node] = self._lowered(node, expected)

    def _as_strided(self, node: FxNode, expected: Any) -> Any:
        """A view of the storage at the root of a chain of views, or a formula of its value."""
        source: Any = node.args[0]
        root = alias_root(source)
        value = self.values[root]
        if isinstance(value, Tensor) and self.builder.window_on(value) is None:
            return self._lowered(node, expected)
        window = self._window_like(node, expected)
        return self._fallback(node, "the storage of an opaque value") if window is None else window

    def _window_like(self, node: FxNode, expected: Any) -> Any:
        """The result of a view op, as views of the storage at the root of its chain of views."""
        if isinstance(expected, list | tuple):
            windows = [self._window_like(node, e) for e in expected]
            return None if any(w is None for w in windows) else windows
        root = alias_root(node.args[0])  # type: ignore[arg-type]
        meta, value = root.meta["val"], self.values[root]
        if not isinstance(value, Tensor) or from_torch(expected.dtype) is not value.dtype:
            return None
        if expected.is_neg():  # its elements are not those in memory
            return None
        base = self.builder.realize(value, dense_strides(meta, self.symbols))
        view = self.builder.memory_of(base)
        if not same_layout(view, self.symbols.strides(meta.stride())):
            return None
        self.values[root] = base
        start = self.symbols.dim(meta.storage_offset())
        offset = self.symbols.dim(expected.storage_offset())
        shape = self.symbols.dims(expected.shape)
        strides = self.symbols.strides(expected.stride())
        if self.symbols.unknown([*shape, *strides, offset, start]):
            return None
        moved = ix.add(ix.add(offset, ix.mul(start, -1)), view.offset)
        window = View(view.buffer, shape, strides, moved)
        if reaches_outside(window, self.builder.buffers[view.buffer]):
            return self._called_on_storage(node, "it reads memory outside its argument")
        return self.builder.tensor_of_view(window)

    def _called_on_storage(self, node: FxNode, reason: str) -> Any:
        """An ATen call that gets its first argument in storage with eager's layout."""
        self.context.counters.inc(f"fallback.{node.target}")
        source: Any = node.args[0]
        args = [self._storage_of(source), *self._args(node.args[1:])]
        is_alias = is_view_op(node.target) and not _is_written(alias_root(source))
        call = AtenCall.of(node, is_alias)
        return fallback.call_aten(self.builder, call, args, self._kwargs(node), reason)

    def _storage_of(self, node: FxNode) -> Any:
        """The value of a node in storage as eager has it: an input, or a copy."""
        root = alias_root(node)
        chain = views_from(root, node)
        if node is not root and not chain:
            return self.values[node]  # views of an input that was written to
        value = self.values[root]
        if root.op not in ("placeholder", "get_attr") and isinstance(value, Tensor):
            value = fallback.owned(self.builder, value, root.meta["val"])
        return self._viewed(value, chain, "an op accesses its storage")

    def _viewed(self, value: Any, chain: list[FxNode], reason: str) -> Any:
        """A value seen through the program's own view ops, each run by ATen."""
        for view in chain:
            args = [value, *self._args(view.args[1:])]
            call = AtenCall.of(view, is_alias=True)
            value = fallback.call_aten(self.builder, call, args, self._kwargs(view), reason)
        return value

    def _bases(self, node: FxNode) -> dict[str, Any]:
        """The tensors of which an op writes views that are addressed by their place in storage."""
        bases: Any = node.kwargs.get("_all_bases", ())
        addressed = addressed_bases(node.kwargs) if bases else ()
        if not addressed:
            return {}
        pairs = enumerate(bases)
        found = [self._storage_of(b) if i in addressed else self._value(b) for i, b in pairs]
        return {"_all_bases": found}

    def _in_own_memory(self, node: Any, value: Any) -> Any:
        """An argument whose storage offset matters: at the start of a buffer, or at eager's offset.

        Copies that eager makes may be formulas here, and these windows on an input at any offset.
        """
        view = self.builder.window_on(value) if isinstance(value, Tensor) else None
        if view is None or self.owners.get(view.buffer) is alias_root(node):
            return value
        is_ours = self.builder.buffers[view.buffer].kind not in ARGUMENTS
        if is_ours and isinstance(view.offset, int) and view.offset % _ALIGNED_ELEMENTS == 0:
            return value
        return self.builder.realize_copy(value, dense_strides(node.meta["val"], self.symbols))

    def _is_data_dependent(self, node: FxNode) -> bool:
        return traced.has_tensor_input(node) and "sym_" not in str(node.target)

    def _lowered(self, node: FxNode, expected: Any) -> Any:
        lowering = lowering_of(node.target)
        reason = "no lowering for this op"
        if lowering is not None and traced.all_plain(node, expected, self.device):
            self.builder.feeds_calls = feeds_calls(node)
            self.builder.is_exact = node in self.quantised
            self.builder.may_overwrite(self.mutations.overwritable(node))
            mark = len(self.builder.nodes), len(self.builder.buffers), len(self.moved)
            self.builder.arguments = tuple(traced.value(a) for a in node.args)
            try:
                args = self._args(node.args, self._read)
                result = lowering(self.builder, *args, **self._kwargs(node, self._read))
                result = traced.checked(result, expected, self.symbols)
                if self.builder.overwritten is not None:
                    self.mutations.overwrote(node, self.builder.overwritten)
                return self._settle(node, result, expected)
            except Exception as error:
                reason = self._refused(node, error)
                del self.builder.nodes[mark[0] :]
                _shorten(self.builder.buffers, mark[1])
                _shorten(self.moved, mark[2])
        elif lowering is not None:
            reason = "unsupported dtype or device"
        return self._fallback(node, reason)

    def _refused(self, node: FxNode, error: Exception) -> str:
        """Why the op runs in ATen. A failed lowering is a bug in Perfuse, raised only in tests."""
        if isinstance(error, CannotLower):
            return str(error)
        if isinstance(error, UnsupportedCast):
            raise error
        if self.context.settings.verify:
            raise error
        self.context.counters.inc(f"lower.error.{node.target}")
        return f"its lowering failed: {type(error).__name__}: {error}"

    def _fallback(self, node: FxNode, reason: str) -> Any:
        # A view of a plain number (the conjugate of a complex constant) has no memory.
        if is_view_op(node.target) and isinstance(node.args[0], FxNode):
            window = self._window_like(node, node.meta["val"])
            if window is not None:
                return window
        seen = storage_treatment(node.target)
        if seen is Treatment.LOWERED:
            return self._called_on_storage(node, reason)
        args, kwargs = self._args(node.args), self._kwargs(node) | self._bases(node)
        is_alias = False
        if args:
            args[0], is_alias = self._shared(node, args[0])
        if seen is Treatment.OWNED:
            args[0] = self._in_own_memory(node.args[0], args[0])
        if seen is Treatment.HELD:
            args = [self._in_own_memory(n, a) for n, a in zip(node.args, args, strict=True)]
        if is_effect(node.target):
            made = fallback.call_effect(self.builder, node, args, kwargs)
        else:
            call = AtenCall.of(node, is_alias)
            made = fallback.call_aten(self.builder, call, args, kwargs, reason)
        if not isinstance(self.builder.nodes[-1], Matmul):  # those are for a library
            self.context.counters.inc(f"fallback.{node.target}")
        return made

    def _shared(self, node: FxNode, value: Any) -> tuple[Any, bool]:
        """The argument of a view op, and whether the view may share its memory, as in eager.

        It may where the program never reuses that memory: a tensor that PyTorch owns, or an input.
        """
        source = node.args[0] if is_view_op(node.target) else None
        if not isinstance(source, FxNode) or _is_written(alias_root(node)):
            return value, False
        if isinstance(value, Opaque):
            return value, True
        if alias_root(node).op not in ("placeholder", "get_attr"):
            return value, False
        return self._storage_of(source), True

    def _settle(self, node: FxNode, result: Any, expected: Any) -> Any:
        """Put a value into memory when inlining it into its users would cost more."""
        if not isinstance(result, Tensor):
            return result
        if self._is_rounded(node, result):
            result = Tensor(result.shape, result.dtype, ex.round_to(result.value, result.dtype))
        if not is_view_op(node.target) and is_shown_often(node):
            return own_memory(self.builder, result, expected)
        value = result.value
        if value.op in ("load", "const") and not value.args:
            return result
        if self._frees_operand(node, result):
            return self._realized(result, expected)
        shared = len(node.users) > 1
        if shared and (value.cost > _CHEAP_COST or _whole_loads(result) > _CHEAP_LOADS):
            return self._realized(result, expected)
        if value.cost > _MOST_COST or value.num_loads > _MOST_LOADS:
            return self._realized(result, expected)
        return result

    def _is_rounded(self, node: FxNode, result: Tensor) -> bool:
        """Whether all readers of a value see it rounded to its dtype.

        An element and the maximum it is compared with must be rounded in the same way, and elements
        of which the mean is, what is rounded to eight bits as eager rounds it before, and what is
        returned (to a backward too) as it is in memory.
        """
        if node in self.rounded or node.meta.get(ROUNDED):
            return not self._is_of_call(result.value)
        return result.value.op != "load" and is_returned_and_read(node)

    def _is_of_call(self, value: ex.Expr) -> bool:
        """Whether a value is read from memory that a library call wrote, and so rounded there."""
        if value.op != "load" or value.args:
            return False
        calls = (n for n in reversed(self.builder.nodes) if isinstance(n, LibraryCall))
        return any(value.buffer in call.makes() for call in calls)

    def _frees_operand(self, node: FxNode, result: Tensor) -> bool:
        """Whether users should read a returned value, not the result of a call that it is made of.

        So that memory is free: a matmul, of which the sum with a bias is returned.
        """
        if self.device.type != "cpu" or not is_returned_and_read(node):
            return False
        reads = {read.buffer for read in ex.loads_of(result.value)}
        sizes = {name: self.builder.buffers[name].num_elements for name in reads}
        large = [name for name, size in sizes.items() if size == ix.product(result.shape)]
        return any(runs_in_library(self.owners.get(name, node)) for name in large)

    def _realized(self, tensor: Tensor, expected: Any) -> Tensor:
        return self.builder.realize(tensor, dense_strides(expected, self.symbols))

    def _known(self, node: FxNode) -> Any:
        return self.values[node]

    def _read(self, node: FxNode) -> Any:
        """The value as a loop reads it: a CPU scalar is copied to the GPU first."""
        if not traced.is_movable(node.meta.get("val"), self.device):
            return self.values[node]
        if node not in self.moved:
            self.moved[node] = self._number(node) or fallback.move(
                self.builder, self.values[node], node.meta["val"]
            )
        return self.moved[node]

    def _number(self, node: FxNode) -> Tensor | None:
        """A number that is a literal in the graph."""
        if node.target not in _NUMBERS or not isinstance(node.args[-1], bool | int | float):
            return None
        dtype = from_torch(node.meta["val"].dtype)
        assert dtype is not None
        return Tensor((), dtype, ex.round_to(ex.const(node.args[-1], dtype.compute), dtype))

    def _value(self, arg: Any, find: Callable[[FxNode], Any] | None = None) -> Any:
        if isinstance(arg, FxNode):
            return (find or self._known)(arg)
        if isinstance(arg, list | tuple):
            items = [self._value(a, find) for a in arg]
            return tuple(items) if type(arg) is tuple else items
        if isinstance(arg, dict):
            return {k: self._value(v, find) for k, v in arg.items()}
        return arg

    def _args(self, args: Any, find: Callable[[FxNode], Any] | None = None) -> list[Any]:
        return [self._value(a, find) for a in args]

    def _kwargs(self, node: FxNode, find: Callable[[FxNode], Any] | None = None) -> dict[str, Any]:
        return {k: self._value(v, find) for k, v in node.kwargs.items()}

    # -- mutation and results --------------------------------------------------------------

    def _try_copy(self, node: FxNode) -> bool:
        """An input that the graph mutates: written in place."""
        target = self._value(node.args[0])
        view = self.builder.window_on(target) if isinstance(target, Tensor) else None
        source = self._value(node.args[1], self._read if view is not None else None)
        if view is None or not isinstance(source, Tensor):
            return False
        self.mutations.copy_into(node, target, source)
        return True

    def _output(self, node: FxNode) -> None:
        results = node.args[0]
        if not isinstance(results, list | tuple):
            results = [results]
        claimed: dict[str, FxNode] = {}
        made: dict[FxNode, View] = {}
        windows = EagerWindows(self.builder, self.values, self.owners, self.mutations.outdated)
        outputs: list[Any] = []
        for result in results:
            value = self._value(result)
            if isinstance(value, Tensor) and isinstance(result, FxNode):
                if result not in made:
                    made[result] = (
                        self._replayed(result)
                        or windows.of(result, claimed)
                        or self._output_view(result, value, claimed)
                    )
                outputs.append(made[result])
            else:
                outputs.append(value)
        self.outputs = tuple(outputs)

    def _replayed(self, node: FxNode) -> View | None:
        """A result that aliases overlapping elements of an input, by the program's own view ops.

        Autograd goes back through the views it finds: `as_strided`, which could express all others,
        divides a gradient evenly among elements that share memory, and no other view does.
        """
        root = alias_root(node)
        if root.op != "placeholder" or not may_overlap(root, self.symbols):
            return None
        chain = views_from(root, node)
        value = self._viewed(self.values[root], chain, "autograd differentiates through it")
        return self.builder.window_on(value) if chain and isinstance(value, Tensor) else None

    def _output_view(self, node: FxNode, value: Tensor, claimed: dict[str, FxNode]) -> View:
        shape = self.symbols.dims(node.meta["val"].shape)
        strides = self.symbols.strides(node.meta["val"].stride())
        repeated = [st == 0 and sz != 1 for st, sz in zip(strides, shape, strict=True)]
        if any(repeated):
            once = [1 if r else size for r, size in zip(repeated, shape, strict=True)]
            at = positions(once)
            view = self._window(node, reindex(value, once, at), own_strides(once, strides), claimed)
            spread = [0 if r else st for r, st in zip(repeated, view.strides, strict=True)]
            return View(view.buffer, value.shape, tuple(spread), view.offset)
        return self._window(node, value, own_strides(shape, strides), claimed)

    def _window(
        self, node: FxNode, value: Tensor, strides: Sequence[Dim] | None, claimed: dict[str, FxNode]
    ) -> View:
        value = self.builder.realize(value, strides)
        view, root = self.builder.memory_of(value), alias_root(node)
        owner = self.owners.get(view.buffer)
        kind = self.builder.buffers[view.buffer].kind
        first = claimed.setdefault(view.buffer, root)
        if owner is not root and (kind in ARGUMENTS or first is not root):
            return self.builder.memory_of(self.builder.realize_copy(value, strides))
        return view


def _is_written(root: FxNode) -> bool:
    return any(user.target is torch.ops.aten.copy_.default for user in root.users)


def _counts_from_start(node: FxNode) -> bool:
    """Whether an offset is given that counts from the start of an input's storage."""
    names = [argument.name for argument in schema_of(node.target).arguments]
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    root = alias_root(node.args[0])  # type: ignore[arg-type]
    is_input = root.op == "placeholder" and not _is_written(root)
    return is_input and given.get("storage_offset") is not None


_NUMBERS = {torch.ops.aten.full.default, torch.ops.aten.scalar_tensor.default}


def _whole_loads(tensor: Tensor) -> int:
    """Loads that run through the whole tensor; values repeated along an axis are free."""
    axes = {ix.as_atom(p) for p in positions(tensor.shape)} - {None}
    return sum(axes <= read.variables() for read in ex.loads_of(tensor.value))
