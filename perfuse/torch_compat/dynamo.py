"""Dynamo's own state: how a function was compiled, and captures that leave it unchanged.

Dynamo keeps what it compiled with the code object of a function, for every backend together, and
remembers which sizes changed between calls. `call_isolated` captures a function without touching
either.
"""

import inspect
import logging
import os
import sys
import threading
import types
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from perfuse.forking import ForkLock

Function = Callable[..., Any]
Method = TypeVar("Method", bound=Function)
FAKE_TENSORS = "torch._subclasses.fake_tensor"  # the logger of PyTorch's fake tensors

_TURN = ForkLock()  # the state that is put aside is global to the process


@dataclass(frozen=True, slots=True)
class CompiledAs:
    """A function, and how `torch.compile` was asked to compile it."""

    function: Function  # the one behind it
    backend: Function | None = None  # None where it was not compiled
    settings: Mapping[str, Any] = field(default_factory=dict)  # `mode` and `options`
    is_dynamic: bool | None = None
    is_fullgraph: bool = False


def compiled_as(fn: Function) -> CompiledAs:
    """How a function was compiled, if it was; otherwise just the function."""
    context = _context_of(fn)
    if context is None:
        return CompiledAs(fn)
    from torch._dynamo.eval_frame import innermost_backend

    backend: Any = innermost_backend(context.callback)
    return CompiledAs(
        _original(fn),
        getattr(backend, "compiler_fn", backend),
        dict(getattr(backend, "kwargs", {})),
        getattr(context, "_dynamic", None),
        bool(getattr(context, "fullgraph", False)),
    )


def _context_of(fn: Any) -> Any:
    """Dynamo's context of a compiled function or module; None for others."""
    if isinstance(fn, torch.nn.Module) and fn._compiled_call_impl is not None:
        fn = fn._compiled_call_impl  # by module.compile()
    getter = getattr(fn, "get_compiler_config", None)
    cells = getattr(getter, "__closure__", None) or ()
    found = (cell.cell_contents for cell in cells)
    return next((value for value in found if hasattr(value, "callback")), None)


def _original(fn: Any) -> Function:
    from torch._dynamo.eval_frame import OptimizedModule

    if isinstance(fn, OptimizedModule):
        module: Function = fn._orig_mod
        return module
    if isinstance(fn, torch.nn.Module):
        return fn
    behind: Function = fn._torchdynamo_orig_callable
    if isinstance(fn, types.MethodType):
        return types.MethodType(behind, fn.__self__)
    return behind


def call_isolated(
    fn: Function,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    backend: Function,
    is_fullgraph: bool = False,
    is_dynamic: bool | None = None,
) -> Any:
    """Compile `fn` for this one call. Functions that are compiled already stay so.

    The function is captured under a code object of its own, which goes away with what was compiled
    for it. If a graph break makes Dynamo compile other functions too, their entries are recognised
    by the backend, and dropped.
    """
    own = partial(backend)  # equal to no other backend, so that it shares no cache entry
    codes: list[types.CodeType] = []
    with _TURN, _own_frame_state(), _seeing(codes), _without_fake_errors():
        try:
            compiled: Function = torch.compile(
                _with_own_code(fn),
                backend=own,
                fullgraph=is_fullgraph,
                dynamic=is_dynamic,
                **_isolation(),
            )
            return compiled(*args, **kwargs)
        finally:
            _forget(own, codes)


@dataclass(frozen=True, slots=True)
class GraphBreak:
    """Why Dynamo could not capture a function as one graph, and at which line of it."""

    reason: str
    line: str | None

    @staticmethod
    def of(error: BaseException) -> "GraphBreak | None":
        """The graph break that this error reports; None for any other error."""
        from torch._dynamo import exc

        kinds = (exc.Unsupported, exc.UserError, exc.UncapturedHigherOrderOpError)
        if not isinstance(error, kinds):
            return None
        lines = [line.strip() for line in str(error).splitlines()]
        reason = [lines[0] if lines else type(error).__name__]
        reason += [line for line in lines if line.startswith("Explanation:")][:1]
        own = str(Path(torch.__file__).parent)
        frames = [f for f in getattr(error, "real_stack", None) or () if own not in f.filename]
        if not frames:
            return GraphBreak("\n  ".join(reason), None)
        last = frames[-1]
        line = f"{last.filename}:{last.lineno}, in {last.name}: {last.line or ''}"
        return GraphBreak("\n  ".join(reason), line)


def left_to_python(method: Method) -> Method:
    """A method that Dynamo traces as part of what calls it, and never compiles for itself.

    PyTorch calls a function mode from C++, for each call of a frame that Dynamo gave up. Dynamo
    would compile the mode then, with the call of one moment for a constant: no guard is on it.
    """
    frames: Any = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(method.__code__, frames._FrameExecStrategy(skip, skip))
    return method


@contextmanager
def untied_sizes() -> Iterator[None]:
    """A block in which sizes that are equal by chance do not share a symbol.

    Otherwise Dynamo gives equal sizes of example arguments one symbol ("duck shaping"), as if the
    program itself required them to be equal.
    """
    from torch.fx.experimental import _config

    settings: Any = _config
    with settings.patch(use_duck_shape=False):
        yield


def _isolation() -> dict[str, Any]:
    """Since PyTorch 2.13, entries of one `torch.compile` need not count against another's limit."""
    name = "isolate_recompiles"
    return {name: True} if name in inspect.signature(torch.compile).parameters else {}


def _with_own_code(fn: Function) -> Function:
    """The function with a code object of its own: a copy, or a function around it."""
    from torch._dynamo import external_utils, trace_rules

    if isinstance(fn, types.MethodType) and not isinstance(fn.__self__, torch.nn.Module):
        return types.MethodType(_with_own_code(fn.__func__), fn.__self__)
    if isinstance(fn, types.FunctionType) and not trace_rules.check(fn):
        own = types.FunctionType(
            fn.__code__.replace(), fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__
        )
        own.__kwdefaults__ = fn.__kwdefaults__
        own.__qualname__, own.__module__ = fn.__qualname__, fn.__module__
        return own
    around: Any = external_utils.wrap_inline(fn)
    around.__code__ = around.__code__.replace()
    made: Function = around
    return made


@contextmanager
def _own_frame_state() -> Iterator[None]:
    """A block in which Dynamo knows of no earlier call, and after which it knows of none here."""
    from torch._dynamo import config, pgo

    state: Any = pgo
    before = state._CODE_STATE
    state._CODE_STATE = defaultdict(pgo.CodeState)
    try:
        with config.patch(automatic_dynamic_local_pgo=False, automatic_dynamic_remote_pgo=False):
            yield
    finally:
        state._CODE_STATE = before


@contextmanager
def _without_fake_errors() -> Iterator[None]:
    """A block in which this thread's failing meta functions are not logged as errors.

    They are the user's own mistakes (shapes that do not match), and are raised anyway. TORCH_LOGS
    still shows the details.
    """
    logger = logging.getLogger(FAKE_TENSORS)
    if logger.getEffectiveLevel() < logging.WARNING:
        yield
        return
    thread = threading.get_ident()

    def is_shown(record: logging.LogRecord) -> bool:
        return record.thread != thread or record.levelno > logging.ERROR

    logger.addFilter(is_shown)
    try:
        yield
    finally:
        logger.removeFilter(is_shown)


@contextmanager
def _seeing(codes: list[types.CodeType]) -> Iterator[None]:
    """A block in which the code objects that Dynamo compiles are noted."""
    from torch._dynamo.convert_frame import register_bytecode_hook

    def note(code: types.CodeType, new_code: types.CodeType) -> types.CodeType | None:
        codes.append(code)
        return None

    handle: Any = register_bytecode_hook(note)
    try:
        yield
    finally:
        handle.remove()


def _forget(backend: Function, codes: list[types.CodeType]) -> None:
    """Drop what was compiled by this backend, and nothing else."""
    from torch._dynamo import eval_frame, guards

    for key, known in list(eval_frame.cached_backends.items()):
        if getattr(known, "compiler_fn", known) is backend:
            eval_frame.cached_backends.pop(key, None)
    for code in codes:
        for entry in eval_frame._debug_get_cache_entry_list(code):
            if getattr(entry.backend, "compiler_fn", entry.backend) is not backend:
                continue
            manager: Any = entry.guard_manager
            state = getattr(manager, "extra_state", None)
            if state is not None:
                reason = "it was compiled for a single call"
                state.invalidate(entry, guards.DeletedGuardManagerWrapper(reason))


def is_compiling_here() -> bool:
    """Whether Dynamo is compiling in the calling thread."""
    lock = _compile_lock()
    return lock is not None and bool(lock._is_owned())


def _compile_lock() -> Any:
    """The lock under which Dynamo compiles, where it was imported."""
    return getattr(sys.modules.get("torch._dynamo.convert_frame"), "compile_lock", None)


def _free_after_fork() -> None:
    """Release the lock of a thread of the parent, which does not exist in this process.

    Without this, a child that was forked while another thread compiled waits forever when it
    compiles itself, with any backend.
    """
    lock = _compile_lock()
    if lock is not None and not lock._is_owned():
        lock._at_fork_reinit()


os.register_at_fork(after_in_child=_free_after_fork)
