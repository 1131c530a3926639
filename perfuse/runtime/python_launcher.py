"""A Python version of launcher.cpp: slower, for machines without a C++ compiler."""

from __future__ import annotations

import ctypes
from typing import Any

from perfuse.errors import PerfuseError
from perfuse.gpu import Platform

# The names of the functions in NVIDIA's and in AMD's driver.
NAMES = {
    "launch": ("cuLaunchKernel", "hipModuleLaunchKernel"),
    "memset8": ("cuMemsetD8Async", "hipMemsetD8Async"),
    "memset16": ("cuMemsetD16Async", "hipMemsetD16Async"),
    "memset32": ("cuMemsetD32Async", "hipMemsetD32Async"),
    "memset2d32": ("cuMemsetD2D32Async", "hipMemsetD2D32Async"),
    "load_module": ("cuModuleLoadData", "hipModuleLoadData"),
    "get_function": ("cuModuleGetFunction", "hipModuleGetFunction"),
}
LIBRARIES = {Platform.CUDA: "libcuda.so.1", Platform.HIP: "libamdhip64.so"}
INVALID_CONTEXT = 201
MAX_DYNAMIC_SHARED, PREFER_SHARED, SHARED_WITHOUT_ASKING = 8, 1, 48 << 10


# Of tensor maps: the kind of elements by their bytes, interleaving, fetching (see launcher.cpp).
UNSIGNED, SWIZZLE_128, FETCH_128 = {1: 0, 2: 1, 4: 2}, 3, 2
UNSUPPORTED = 801


class Map(ctypes.Structure):
    """As in launcher.cpp."""

    _fields_ = [
        ("address", ctypes.POINTER(ctypes.c_uint64)),
        ("known", ctypes.c_uint64),
        ("made", ctypes.c_void_p),
        *((name, ctypes.c_uint64) for name in ("offset", "width", "rows", "columns", "stride")),
        *((name, ctypes.c_uint64) for name in ("block_rows", "block_columns")),
    ]


class Record(ctypes.Structure):
    """As in launcher.cpp."""

    _fields_ = [
        ("function", ctypes.c_void_p),
        ("num_threads", ctypes.c_int64),
        ("shared_bytes", ctypes.c_int64),
        ("grid", ctypes.POINTER(ctypes.c_int64)),
        ("arguments", ctypes.c_void_p),
        ("memory", ctypes.POINTER(ctypes.c_uint64)),
        ("pattern", ctypes.c_uint64),
        ("width", ctypes.c_int64),
        ("maps", ctypes.POINTER(Map)),
        ("num_maps", ctypes.c_int64),
    ]


class Segment(ctypes.Structure):
    """As in launcher.cpp."""

    _fields_ = [
        ("count", ctypes.c_int64),
        ("records", ctypes.POINTER(Record)),
        ("device", ctypes.c_int64),
    ]


class PythonLibrary:
    """The functions of launcher.cpp, calling the driver through ctypes."""

    def __init__(self, kind: Platform) -> None:
        self.is_hip = kind is Platform.HIP
        try:
            self.driver = ctypes.CDLL(LIBRARIES[kind])
            self.calls: dict[str, Any] = {
                what: getattr(self.driver, names[self.is_hip]) for what, names in NAMES.items()
            }
        except (OSError, AttributeError) as error:
            raise PerfuseError(f"the {kind} GPU driver cannot be used: {error}") from error

    def pf_load(
        self, code: bytes, symbol: bytes, shared_bytes: int, device: int, function: Any
    ) -> int:
        """The function `symbol` of a code object, prepared for this much shared memory."""
        module = ctypes.c_void_p()
        status = self._make_current(device)
        status = status or self.calls["load_module"](ctypes.byref(module), code)
        status = status or self.calls["get_function"](function, module, symbol)
        if status == 0 and not self.is_hip and shared_bytes > SHARED_WITHOUT_ASKING:
            made = ctypes.cast(function, ctypes.POINTER(ctypes.c_void_p))[0]
            handle = ctypes.c_void_p(made)
            status = self.driver.cuFuncSetCacheConfig(handle, PREFER_SHARED)
            status = status or self.driver.cuFuncSetAttribute(
                handle, MAX_DYNAMIC_SHARED, shared_bytes
            )
        return int(status)

    def _make_current(self, index: int) -> int:
        if self.is_hip:
            return int(self.driver.hipSetDevice(index))
        device, context = ctypes.c_int(), ctypes.c_void_p()
        status = self.driver.cuDeviceGet(ctypes.byref(device), index)
        status = status or self.driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
        return int(status or self.driver.cuCtxSetCurrent(context))

    def pf_launch(self, segment_at: int, stream: int) -> int:
        """Every record of a segment in order; the code of the first that fails, else 0."""
        segment = Segment.from_address(segment_at)
        for k in range(segment.count):
            record = segment.records[k]
            status = self._run(record, stream)
            if status == INVALID_CONTEXT and self._make_current(segment.device) == 0:
                status = self._run(record, stream)
            if status:
                return status
        return 0

    def _run(self, record: Any, stream: int) -> int:
        if not record.function:
            return self._fill(record, ctypes.c_void_p(stream))
        if not record.num_threads:
            return self._call(record, stream)
        x, y, z = record.grid[0], record.grid[1], record.grid[2]
        if min(x, y, z) <= 0:
            return 0
        for k in range(record.num_maps):
            if status := self._encode(record.maps[k]):
                return status
        function, arguments = ctypes.c_void_p(record.function), ctypes.c_void_p(record.arguments)
        shape = (x, y, z, record.num_threads, 1, 1, record.shared_bytes)
        return int(self.calls["launch"](function, *shape, ctypes.c_void_p(stream), arguments, None))

    def _encode(self, made: Any) -> int:
        """Rebuild a tensor map if the address of its matrix has changed."""
        at = made.address[0] + made.offset
        if at == made.known:
            return 0
        encode = getattr(self.driver, "cuTensorMapEncodeTiled", None)
        if encode is None:
            return UNSUPPORTED
        sizes = (ctypes.c_uint64 * 2)(made.columns, made.rows)
        strides = (ctypes.c_uint64 * 1)(made.stride)
        block = (ctypes.c_uint32 * 2)(made.block_columns, made.block_rows)
        steps = (ctypes.c_uint32 * 2)(1, 1)
        into, start = ctypes.c_void_p(made.made), ctypes.c_void_p(at)
        shape = (UNSIGNED[made.width], 2, start, sizes, strides, block, steps)
        status = int(encode(into, *shape, 0, SWIZZLE_128, FETCH_128, 0))
        if status == 0:
            made.known = at
        return status

    def _call(self, record: Any, stream: int) -> int:
        """A host call: see launcher.cpp for what the fields mean."""
        count, word = record.shared_bytes, ctypes.POINTER(ctypes.c_uint64)
        places = ctypes.cast(record.arguments, ctypes.POINTER(word))
        addresses = [places[k][0] + record.memory[k] for k in range(count)]
        function = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 5)(record.function)
        pointers = (ctypes.c_void_p * count)(*(at & (1 << 64) - 1 for at in addresses))
        sizes = ctypes.cast(record.grid, ctypes.c_void_p)
        tables = (ctypes.cast(pointers, ctypes.c_void_p), sizes, record.pattern)
        return int(function(*tables, record.width or None, stream or None))

    def _fill(self, record: Any, stream: Any) -> int:
        at, count, width = record.memory[0], record.grid[0], record.width
        low, high = record.pattern & 0xFFFFFFFF, record.pattern >> 32
        size = ctypes.c_size_t
        if not count:
            return 0
        where = ctypes.c_uint64(at)
        if width < 8:
            return int(self.calls[f"memset{8 * width}"](where, low, size(count), stream))
        if low == high:
            return int(self.calls["memset32"](where, low, size(2 * count), stream))
        for k, half in enumerate((low, high)):
            place = ctypes.c_uint64(at + 4 * k)
            status = self.calls["memset2d32"](place, size(8), half, size(1), size(count), stream)
            if status:
                return int(status)
        return 0

    def pf_error(self, code: int) -> bytes:
        """The driver's text for an error code."""
        if self.is_hip:
            self.driver.hipGetErrorString.restype = ctypes.c_char_p
            return bytes(self.driver.hipGetErrorString(code) or b"")
        text = ctypes.c_char_p()
        self.driver.cuGetErrorString(code, ctypes.byref(text))
        return text.value or b""
