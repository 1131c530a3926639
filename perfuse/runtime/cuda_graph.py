"""CUDA graphs: a program's launches recorded once for each set of sizes, then replayed as one.

What makes a replay right, and what is done where it would not be:

- Inputs. A graph reads the addresses it was recorded with. Inputs that stayed at one address from
  one call to the next (parameters, what a recorded forward saved) are read where they are, and
  every replay compares their addresses. Others are copied to memory of the graph before a replay,
  and copied back after it if the program writes to them.
- Results. A replay writes its results to the same memory each time. Small user results are returned
  as copies. Large ones, saved values and gradients are borrowed: while one of them is still held,
  the program runs without its graph, so that nothing is overwritten.
- Everything else (another stream, another thread in the middle of a replay, a capture of the user's
  own, more sizes than are kept) runs without the graph, and is counted with its reason.

Each graph has a memory pool of its own, so that no replay can touch what is borrowed from another.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, Protocol

import torch

from perfuse.codegen.host.tables import GpuTables
from perfuse.counters import Counters
from perfuse.runtime.bind_gpu import aligned
from perfuse.runtime.host_names import Call, memory_of
from perfuse.torch_compat.devices import raw_stream_getter
from perfuse.torch_compat.tensors import storage_users

CLONED_BYTES = 16 << 20  # user results up to this size are returned as copies
MISMATCHES = 3  # calls with moved inputs after which these are copied instead


@dataclass(frozen=True, slots=True)
class Recording:
    """Launches that can be replayed, and the results that every replay writes."""

    replay: Callable[[], None]
    outputs: tuple[Any, ...]


class Recorder(Protocol):
    """Records a call: a GPU, or a stand-in for tests."""

    def stream(self) -> int:
        """The stream that work is now put on."""

    def is_capturing(self) -> bool:
        """Whether the user is recording a CUDA graph around this call."""

    def record(self, call: Call, args: list[Any], written: Sequence[int]) -> Recording:
        """Record the call on these arguments without running it, after a run on copies."""


class GpuRecorder:
    """Records on a stream of its own, as CUDA graph capture requires."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.side: Any = None
        self._get_stream = raw_stream_getter()

    def stream(self) -> int:
        return self._get_stream(self.device.index or 0)

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def record(self, call: Call, args: list[Any], written: Sequence[int]) -> Recording:
        if self.side is None:
            self.side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        current = torch.cuda.current_stream(self.device)
        self.side.wait_stream(current)
        with torch.cuda.stream(self.side):
            # Frames, libraries and their workspaces for this stream are created here, not in the
            # capture. What the program writes to must not be written twice.
            call([aligned(a) if k in written else a for k, a in enumerate(args)])
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=self.side, capture_error_mode="thread_local"):
                outputs = call(list(args))
        except Exception:
            torch.cuda.set_stream(current)  # a failed capture leaves its own stream behind
            self.side = None
            raise
        current.wait_stream(self.side)
        return Recording(graph.replay, outputs)


@dataclass(slots=True)
class Sizes:
    """The state of one set of sizes: the calls so far, then the recorded graph."""

    addresses: list[int]
    num_calls: int = 1
    copied: set[int] = field(default_factory=set)  # inputs that do not stay where they are
    mismatches: int = 0
    graph: Recorded | None = None


class Recorded:
    """A graph with its own inputs, and the results borrowed from it."""

    def __init__(
        self, recording: Recording, stream: int, inputs: dict[int, torch.Tensor], num_cloned: int
    ) -> None:
        self.recording = recording
        self.stream = stream
        self.inputs = inputs  # by number of the argument: the graph's own copy of it
        self.cloned = [
            isinstance(o, torch.Tensor)
            and k < num_cloned
            and o.numel() * o.element_size() <= CLONED_BYTES
            for k, o in enumerate(recording.outputs)
        ]
        storages = [  # all of them first: these hold it too
            o.untyped_storage()
            for o, is_cloned in zip(recording.outputs, self.cloned, strict=True)
            if isinstance(o, torch.Tensor) and not is_cloned
        ]
        self.borrowed = [(storage, storage_users(storage)) for storage in storages]

    def is_in_use(self) -> bool:
        """Whether a result that the next replay would overwrite is still held."""
        return any(storage_users(storage) > own for storage, own in self.borrowed)

    def run(self, args: list[Any], written: Sequence[int]) -> tuple[Any, ...]:
        """Replay on these arguments."""
        for number, own in self.inputs.items():
            _copy(args[number], own)
        self.recording.replay()
        for number in written:
            if number in self.inputs:
                _copy(self.inputs[number], args[number])
        return tuple(
            o.clone() if is_cloned else o.detach() if isinstance(o, torch.Tensor) else o
            for o, is_cloned in zip(self.recording.outputs, self.cloned, strict=True)
        )


@contextmanager
def _without_collection() -> Iterator[None]:
    """No garbage collection: freeing another program's memory or code would end the capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy all memory between the first and the last element: strides may overlap."""
    if target.is_contiguous():
        target.copy_(source)
    else:
        memory_of(target).copy_(memory_of(source))


class Replayed:
    """A program's call that records itself and then replays, wherever that is right."""

    def __init__(
        self,
        call: Call,
        tables: GpuTables,
        recorder: Recorder,
        counters: Counters,
        *,
        num_cloned: int,
        num_warm_up: int,
        limit: int,
    ) -> None:
        self.call = call
        self.written = tables.written
        self.is_dynamic = tables.is_dynamic
        self.device = torch.device(tables.device)
        self.recorder = recorder
        self.counters = counters
        self.num_cloned = num_cloned
        self.num_warm_up = num_warm_up
        self.limit = limit
        self.known: dict[tuple[Any, ...], Sizes] = {}
        self.refusal = tables.unfit
        self.lock = Lock()
        if self.refusal:
            counters.inc(f"cudagraph.refused.{self.refusal}")

    def __call__(self, args: list[Any]) -> tuple[Any, ...]:
        if self.refusal:
            return self.call(args)
        if not self.lock.acquire(blocking=False):
            return self._plain(args, "busy")
        try:
            return self._locked(args)
        finally:
            self.lock.release()

    def _plain(self, args: list[Any], reason: str) -> tuple[Any, ...]:
        self.counters.inc(f"cudagraph.plain.{reason}")
        return self.call(args)

    def _refuse(self, args: list[Any], reason: str) -> tuple[Any, ...]:
        """Never try again."""
        self.refusal = reason
        self.known.clear()
        self.counters.inc(f"cudagraph.refused.{reason}")
        return self.call(args)

    def _locked(self, args: list[Any]) -> tuple[Any, ...]:
        if self.recorder.is_capturing():
            return self._plain(args, "captured_by_user")
        key = _key(args) if self.is_dynamic else ()
        sizes = self.known.get(key)
        addresses = [a.data_ptr() for a in args if isinstance(a, torch.Tensor)]
        if sizes is None:
            return self._first(args, key, addresses)
        if sizes.graph is None:
            return self._next(args, sizes, addresses)
        return self._replay(args, sizes, addresses)

    def _first(
        self, args: list[Any], key: tuple[Any, ...], addresses: list[int]
    ) -> tuple[Any, ...]:
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        if any(tensor.device != self.device for tensor in tensors):
            return self._refuse(args, "input_on_another_device")
        if len(self.known) >= self.limit:
            return self._plain(args, "too_many_sizes")
        self.known[key] = Sizes(addresses)
        return self.call(args)

    def _next(self, args: list[Any], sizes: Sizes, addresses: list[int]) -> tuple[Any, ...]:
        """One more call before the recording, or the recording."""
        moved = _moved(args, sizes.addresses, addresses)
        sizes.addresses, sizes.num_calls = addresses, sizes.num_calls + 1
        if sizes.num_calls <= self.num_warm_up:
            return self.call(args)
        sizes.copied |= moved
        return self._record(args, sizes)

    def _record(self, args: list[Any], sizes: Sizes) -> tuple[Any, ...]:
        given = list(args)
        own = {number: aligned(given[number]) for number in sorted(sizes.copied)}
        passed = [own.get(k, a) for k, a in enumerate(given)]
        try:
            with _without_collection():
                recording = self.recorder.record(self.call, passed, self.written)
        except Exception as error:  # whatever the driver or an op reports about being recorded
            if not _is_about_capturing(error):
                raise
            return self._refuse(args, "capture_failed")
        if _looks_at(recording.outputs, passed):
            return self._refuse(args, "result_is_an_input")
        self.counters.inc("cudagraph.recorded")
        stream = self.recorder.stream()
        sizes.graph = Recorded(recording, stream, own, self.num_cloned)
        args.clear()
        return sizes.graph.run(given, self.written)

    def _replay(self, args: list[Any], sizes: Sizes, addresses: list[int]) -> tuple[Any, ...]:
        graph = sizes.graph
        assert graph is not None
        if graph.stream != self.recorder.stream():
            return self._plain(args, "another_stream")
        if graph.is_in_use():
            return self._plain(args, "results_in_use")
        if addresses != sizes.addresses:
            moved = _moved(args, sizes.addresses, addresses) - sizes.copied
            if moved:
                return self._mismatch(args, sizes, moved)
        given = list(args)
        args.clear()
        return graph.run(given, self.written)

    def _mismatch(self, args: list[Any], sizes: Sizes, moved: set[int]) -> tuple[Any, ...]:
        """Inputs are not where they were: without the graph, or with a new one that copies them."""
        sizes.mismatches += 1
        if sizes.mismatches < MISMATCHES:
            return self._plain(args, "inputs_moved")
        sizes.mismatches, sizes.graph = 0, None
        sizes.copied |= moved
        return self._record(args, sizes)


def _key(args: list[Any]) -> tuple[Any, ...]:
    """The sizes that a call is for."""
    return tuple(a.shape if isinstance(a, torch.Tensor) else a for a in args)


def _moved(args: list[Any], before: list[int], now: list[int]) -> set[int]:
    """The numbers of the tensor arguments whose addresses differ."""
    numbers = [k for k, a in enumerate(args) if isinstance(a, torch.Tensor)]
    return {k for k, a, b in zip(numbers, before, now, strict=True) if a != b}


def _looks_at(outputs: Sequence[Any], inputs: Sequence[Any]) -> bool:
    """Whether a result is a window on the memory of an input."""
    known = {_storage_of(a) for a in inputs if isinstance(a, torch.Tensor) and a.numel()}
    return any(_storage_of(o) in known for o in outputs if isinstance(o, torch.Tensor))


def _storage_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.numel() else -1


def _is_about_capturing(error: Exception) -> bool:
    text = str(error).lower()
    return "captur" in text or "cudagraph" in text or "cuda graph" in text
