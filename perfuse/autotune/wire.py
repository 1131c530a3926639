"""Messages between a process and its tuning workers: JSON over a pipe, objects by name.

A request is an object of any importable class whose fields are plain values. It travels as the name
of its class and its fields, so nothing is unpickled. This file imports no PyTorch: a worker starts
with it.
"""

from __future__ import annotations

import base64
import contextlib
import enum
import importlib
import json
import os
import runpy
import select
import struct
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from types import ModuleType
from typing import Any

HEADER = struct.Struct(">Q")
MOST_BYTES = 64 << 20  # of one message: a longer one is not valid
CLASS, FIELDS, TUPLE, MAPPING, TORCH = "$class", "$fields", "$tuple", "$mapping", "$torch"
BYTES = "$bytes"
MAIN_PATH = "$main"


class NoMessage(Exception):
    """The other end is gone, is silent, or sent something that is not a message."""


def document_of(value: Any) -> Any:
    """A value as JSON; TypeError where it is neither plain nor an object of plain fields."""
    if isinstance(value, enum.Enum):
        return {CLASS: _name_of(type(value)), FIELDS: document_of(value.value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes):
        return {BYTES: base64.b64encode(value).decode()}
    if isinstance(value, list):
        return [document_of(item) for item in value]
    if isinstance(value, tuple):
        return {TUPLE: [document_of(item) for item in value]}
    if isinstance(value, Mapping):
        return {MAPPING: [[document_of(k), document_of(v)] for k, v in value.items()]}
    if type(value).__module__ == "torch" and type(value).__name__ in ("dtype", "device"):
        return {TORCH: [type(value).__name__, str(value).removeprefix("torch.")]}
    return _object_document(value)


def _object_document(value: Any) -> dict[str, Any]:
    if is_dataclass(value) and not isinstance(value, type):
        held = {row.name: getattr(value, row.name) for row in fields(value)}
    elif _has_plain_fields(value):
        held = dict(vars(value))
    else:
        raise TypeError(f"a {type(value).__name__} cannot be sent to a worker")
    document = {CLASS: _name_of(type(value)), FIELDS: document_of(held)}
    if type(value).__module__ == "__main__":
        document[MAIN_PATH] = os.path.abspath(getattr(sys.modules["__main__"], "__file__", ""))
    return document


def _has_plain_fields(value: Any) -> bool:
    """Not a tensor, a function or a module: those hold more than their fields."""
    is_torch = type(value).__module__.partition(".")[0] == "torch"
    is_own = not is_torch and not callable(value) and not isinstance(value, ModuleType)
    return is_own and hasattr(value, "__dict__")


def _name_of(kind: type) -> str:
    if "<" in kind.__qualname__:
        raise TypeError(f"{kind.__qualname__} is local to a function: a worker cannot import it")
    return f"{kind.__module__}:{kind.__qualname__}"


def value_of(document: Any) -> Any:
    """The value of a document that `document_of` made, here or in another process."""
    if isinstance(document, list):
        return [value_of(item) for item in document]
    if not isinstance(document, dict):
        return document
    if TUPLE in document:
        return tuple(value_of(item) for item in document[TUPLE])
    if MAPPING in document:
        return {value_of(k): value_of(v) for k, v in document[MAPPING]}
    if BYTES in document:
        return base64.b64decode(document[BYTES])
    if TORCH in document:
        kind, name = document[TORCH]
        torch = importlib.import_module("torch")
        return torch.device(name) if kind == "device" else getattr(torch, name)
    return _object_of(document)


def _object_of(document: dict[str, Any]) -> Any:
    kind, held = _class_of(document), value_of(document[FIELDS])
    if issubclass(kind, enum.Enum):
        return kind(held)
    made = object.__new__(kind)
    for name, value in held.items():
        object.__setattr__(made, name, value)  # also where the class is frozen
    return made


def _class_of(document: dict[str, Any]) -> Any:
    module, _, qualname = document[CLASS].partition(":")
    first, *rest = qualname.split(".")
    if MAIN_PATH in document:
        found = _main_names(document[MAIN_PATH])[first]
    else:
        found = getattr(importlib.import_module(module), first)
    for name in rest:
        found = getattr(found, name)
    return found


_MAINS: dict[str, dict[str, Any]] = {}


def _main_names(path: str) -> dict[str, Any]:
    """The names of the parent's main script, run under another name so that it does not start."""
    if path not in _MAINS:
        _MAINS[path] = runpy.run_path(path, run_name="__perfuse_worker__")
    return _MAINS[path]


def write_message(fd: int, document: Any, deadline: float | None = None) -> None:
    """Send one document; raises NoMessage if it is not received before the deadline."""
    data = json.dumps(document).encode()
    rest = memoryview(HEADER.pack(len(data)) + data)
    while rest:
        _wait(fd, deadline, for_writing=True)
        try:
            rest = rest[os.write(fd, rest[: select.PIPE_BUF]) :]
        except OSError as error:
            raise NoMessage("the other process is gone") from error


def read_message(
    fd: int, deadline: float | None = None, clock: Callable[[], float] = time.monotonic
) -> Any:
    """Receive one document; raises NoMessage if none arrives in time, or it is not a document."""
    (length,) = HEADER.unpack(_read_exactly(fd, HEADER.size, deadline, clock))
    if length > MOST_BYTES:
        raise NoMessage(f"a message of {length} bytes")
    data = _read_exactly(fd, length, deadline, clock)
    try:
        return json.loads(data)
    except ValueError as error:
        raise NoMessage("a message that is not JSON") from error


def _read_exactly(fd: int, count: int, deadline: float | None, clock: Callable[[], float]) -> bytes:
    data = bytearray()
    while len(data) < count:
        _wait(fd, deadline, clock=clock)
        try:
            chunk = os.read(fd, min(count - len(data), 1 << 20))
        except OSError as error:
            raise NoMessage("the other process is gone") from error
        if not chunk:
            raise NoMessage("the other process is gone")
        data += chunk
    return bytes(data)


class TimedOut(NoMessage):
    """Nothing arrived before the deadline."""


def _wait(
    fd: int,
    deadline: float | None,
    *,
    for_writing: bool = False,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    if deadline is None:
        return
    poller = select.poll()  # select() takes no descriptor above 1023
    poller.register(fd, select.POLLOUT if for_writing else select.POLLIN)
    milliseconds = max(0, int(1000 * (deadline - clock())))
    if not poller.poll(milliseconds):
        raise TimedOut("no answer in time")


def close_quietly(*fds: int) -> None:
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)
