"""Functions and example arguments as the command line names them."""

import contextlib
import importlib
import importlib.util
import inspect
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch
import typer
from rich.console import Console

MOST_LINES = 12
OWN_ADVICE = "call the function without Perfuse to see where it fails."
# How Dynamo reports an op that failed, and the user's lines that led to it.
RAISED_BY_OP = re.compile(
    r"got (?P<kind>\w+)\((?P<quote>['\"])(?P<message>.*?)(?P=quote)\)", re.DOTALL
)
USER_FRAME = re.compile(r'File "(.+)", line (\d+), in (\S+)\n\s*(.*)')
# Code that is not the user's: PyTorch, Perfuse, other packages, and Python's own library.
LIBRARIES = (
    str(Path(__file__).parent),
    str(Path(torch.__file__).parent),
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
)
console = Console()

FUNCTION = typer.Argument(help="module:function, or path/to/file.py:function")
ARGUMENTS = typer.Option("--args", help="The function there that returns example arguments.")


def found_call(function: str, arguments: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Resolve `module:function` or `file.py:function`, with what `arguments()` there returns."""
    place, _, name = function.rpartition(":")
    if not place:
        fail(f"{function!r}: expected module:function or file.py:function")
    module = _loaded(place) if place.endswith(".py") else _imported(place)
    found, make = getattr(module, name, None), getattr(module, arguments, None)
    if not callable(found):
        fail(f"{place} has no function {name!r}")
    if not callable(make):
        fail(f"{place} has no function {arguments!r} for example arguments")
    if isinstance(found, type):
        fail(f"{name!r} is a class: name a function, or an instance of the class")
    _check_takes(make, (), f"{arguments!r} must take no arguments")
    made = make()
    given = made if isinstance(made, tuple) else (made,)
    _check_takes(found, given, f"{name!r} does not take what {arguments}() returns")
    return found, given


def _check_takes(function: Callable[..., Any], given: tuple[Any, ...], message: str) -> None:
    with contextlib.suppress(ValueError):  # builtin functions may have no signature
        try:
            inspect.signature(function).bind(*given)
        except TypeError as error:
            fail(f"{message}: {error}")


def _imported(place: str) -> Any:
    sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{place}.".startswith(f"{error.name}."):
            raise  # one that the module itself imports
        fail(f"no module named {place!r}")


def _loaded(place: str) -> Any:
    spec = importlib.util.spec_from_file_location(Path(place).stem, place)
    if spec is None or spec.loader is None or not Path(place).exists():
        fail(f"{place} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def mistake(error: Exception) -> str:
    """Describe an exception of the user's own code in a few lines: its message and location."""
    if (captured := _captured_mistake(str(error))) is not None:
        return "\n".join([*captured, f"  what to do: {OWN_ADVICE}"])
    message_lines = str(error).strip().splitlines()
    lines = [
        f"{type(error).__name__}: {message_lines[0] if message_lines else '(no message)'}",
        *message_lines[1:MOST_LINES],
    ]
    if len(message_lines) > MOST_LINES:
        lines.append(f"... ({len(message_lines) - MOST_LINES} more lines)")
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, SyntaxError) and error.filename:  # its place is not in the traceback
        frames.append(
            traceback.FrameSummary(
                str(error.filename), error.lineno, "the module", line=(error.text or "").strip()
            )
        )
    own = [frame for frame in frames if not frame.filename.startswith((*LIBRARIES, "<"))]
    for frame in own[-MOST_LINES:]:
        lines.append(f"  {frame.filename}:{frame.lineno}, in {frame.name}: {frame.line or ''}")
    # Dynamo raises from its own frames and names the user's in its message.
    is_own = own or isinstance(error, SyntaxError) or "from user code" in str(error)
    lines.append(
        f"  what to do: {OWN_ADVICE if is_own else 'please report it: this looks like a bug.'}"
    )
    return "\n".join(lines)


def _captured_mistake(text: str) -> list[str] | None:
    """The error of an op while Dynamo captured it, and the user's line; else None."""
    raised = RAISED_BY_OP.search(text)
    _, _, below = text.partition("from user code:")
    places = USER_FRAME.findall(below)
    if raised is None or not places:
        return None
    file, number, function, line = places[-1]
    return [f"{raised['kind']}: {raised['message']}", f"  {file}:{number}, in {function}: {line}"]


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """A block that writes to a path that the user named."""
    try:
        yield
    except OSError as error:
        fail(f"{path} cannot be written: {error.strerror}; choose another path")


def fail(message: str) -> NoReturn:
    console.print(f"error: {message}", style="red", markup=False, soft_wrap=True)
    raise typer.Exit(1)
