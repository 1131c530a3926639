"""Binding a GPU's host program: streams, memory and devices, and what launches its segments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import torch

from perfuse.build.bundle import Bundle
from perfuse.codegen.host.source import HostSource
from perfuse.codegen.host.tables import GpuTables
from perfuse.context import Context
from perfuse.errors import ForkedGpuCall
from perfuse.forking import is_forked
from perfuse.gpu import Platform
from perfuse.runtime.driver import Driver, open_library
from perfuse.runtime.frame import GpuFrame
from perfuse.runtime.guard import Guard, GuardLayout
from perfuse.runtime.host_library import NO_UNITS, HostLibrary
from perfuse.runtime.host_names import Call, are_misaligned, memory_of, new_seeds, run_host
from perfuse.runtime.interpreted import Interpreter
from perfuse.runtime.pool import IdleFrames
from perfuse.runtime.python_launcher import PythonLibrary
from perfuse.torch_compat import devices
from perfuse.torch_compat.tensors import cpu_allocator

ALIGNMENT = 16


class Launcher(Protocol):
    """Launches kernels: a driver, or an interpreter."""

    @property
    def keeps_memory(self) -> bool:
        """Whether its frames hold memory of the device."""

    def prepare(self, frame: GpuFrame) -> None:
        """Give a new frame the segments that `launch` takes."""

    @property
    def launch(self) -> Callable[[Any, int], int]:
        """Launch a segment in stream order; the result is not zero if that failed."""

    def failed(self, code: int) -> None:
        """Raise the error that a non-zero launch result means."""


def launcher_of(
    bundle: Bundle,
    context: Context,
    library: bytes | None,
    units: Mapping[str, HostLibrary] = NO_UNITS,
) -> Launcher:
    """The launcher of these kernels on the context's device: the library, if one was built."""
    if bundle.kind is Platform.INTERPRETED:
        return Interpreter(bundle.text, bundle.kernels, units)
    if library is None:
        context.counters.inc("launcher.python")
        return Driver(bundle, context.device, PythonLibrary(bundle.kind), units)
    return Driver(bundle, context.device, open_library(library, bundle.kind), units)


def bind_gpu(host: HostSource, launcher: Launcher, constants: Mapping[str, Any]) -> Call:
    """The callable of a host program: takes the graph's arguments in a list, which it empties."""
    assert host.gpu is not None
    tables = host.gpu
    device = torch.device(tables.device)
    space = {**_space(device), "take_frame": _frames(host, launcher)}
    layout = GuardLayout(host, ALIGNMENT)
    space["guard"] = lambda frame: Guard(layout, frame.arena)
    space |= {"launch": launcher.launch, "failed": launcher.failed}
    space["realigned"] = lambda args: _realigned(call, args, tables)
    call: Call = run_host(host, space, constants)
    return call if device.type == "cpu" else _on_device(call, device)


def _space(device: torch.device) -> dict[str, Any]:
    """The names that a host program finds."""
    on_gpu = device.type != "cpu"
    stream = partial(devices.raw_stream_getter(), device.index) if on_gpu else lambda: 0
    return {
        "current_stream": stream,
        "empty": devices.gpu_allocator() if on_gpu else cpu_allocator(),
        "aligned": aligned,
        "are_misaligned": are_misaligned,
        "new_seeds": partial(new_seeds, device),
    }


def _frames(host: HostSource, launcher: Launcher) -> Callable[[int], GpuFrame]:
    """Frames by stream: memory that a frame keeps is only used in the order of its stream.

    While a CUDA graph is recorded, a frame that keeps memory is created for this recording only:
    its memory belongs to the graph, and each replay fills it.
    """
    homes: dict[int, IdleFrames] = {}
    assert host.gpu is not None
    on_gpu = torch.device(host.gpu.device).type != "cpu"
    has_own = bool(host.gpu.kept) or launcher.keeps_memory or host.arena_bytes > 0
    keeps_memory, is_capturing = on_gpu and has_own, devices.capture_getter()

    def new_frame(home: list[GpuFrame]) -> GpuFrame:
        frame = GpuFrame(host, home)
        launcher.prepare(frame)
        return frame

    def take_frame(stream: int) -> GpuFrame:
        if on_gpu and is_forked():
            raise ForkedGpuCall
        if keeps_memory and is_capturing():
            return new_frame([])
        home = homes.get(stream)
        if home is None:
            home = homes.setdefault(stream, IdleFrames())
        # Checking first would be a race: another thread may take the last frame in between.
        try:
            found: GpuFrame = home.pop()
        except IndexError:
            return new_frame(home)
        return found

    return take_frame


def _on_device(call: Call, device: torch.device) -> Call:
    """The call, run with its device as the current one."""
    if torch.cuda.device_count() == 1:
        return call
    index, current_gpu = device.index, devices.current_gpu_getter()

    def guarded(args: list[Any]) -> tuple[Any, ...]:
        if current_gpu() == index:
            return call(args)
        with torch.cuda.device(index):
            return call(args)

    return guarded


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in memory aligned as kernels assume."""
    memory = memory_of(tensor).clone()
    return memory.as_strided(tensor.shape, tensor.stride())


def _realigned(call: Call, args: list[Any], tables: GpuTables) -> tuple[Any, ...]:
    """The call with copies of misaligned arguments; what it writes is copied back."""
    given = list(args)
    misaligned = {k for k, v in enumerate(given) if _is_misaligned(v)}
    moved = [aligned(v) if k in misaligned else v for k, v in enumerate(given)]
    args.clear()
    results = call(list(moved))
    for k in misaligned & set(tables.written):
        memory_of(given[k]).copy_(memory_of(moved[k]))
    homes = {moved[k].untyped_storage().data_ptr(): given[k] for k in misaligned}
    return tuple(_at_home(result, homes) for result in results)


def _is_misaligned(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.data_ptr() % ALIGNMENT != 0


def _at_home(result: Any, homes: dict[int, torch.Tensor]) -> Any:
    """Replace a result that is a view of an argument's copy with the same view of the argument."""
    if not isinstance(result, torch.Tensor):
        return result
    home = homes.get(result.untyped_storage().data_ptr())
    if home is None or not result.numel():
        return result
    start = home.storage_offset() + result.storage_offset()
    return home.as_strided(result.shape, result.stride(), start)
