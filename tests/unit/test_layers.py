"""The shape of the code: imports point back, and none reaches into what Perfuse replaces."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent.parent
PACKAGE = ROOT / "perfuse"

# The system that Perfuse is built beside, and measured against.
PEER = (
    "torch._inductor",
    "torch._functorch.partitioners",
    "torch._functorch.compile_utils.fx_graph_cse",
)


class Import(NamedTuple):
    """One imported name, with the file that imports it."""

    path: Path
    line: int
    name: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line} imports {self.name}"


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports_in(path: Path) -> Iterator[Import]:
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(path, node.lineno, alias.name)
        elif isinstance(node, ast.ImportFrom):
            yield from (Import(path, node.lineno, name) for name in names_from(path, node))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "deferred":
            place = getattr(node.args[0], "value", "")
            yield Import(path, node.lineno, str(place).replace(":", "."))


def names_from(path: Path, node: ast.ImportFrom) -> Iterator[str]:
    module = node.module or ""
    if node.level:
        folder = path.parents[node.level - 1].relative_to(ROOT)
        module = ".".join([*folder.parts, *([module] if module else [])])
    for alias in node.names:
        yield f"{module}.{alias.name}"


def dotted_names_in(path: Path) -> Iterator[Import]:
    """Names spelled out in code, such as torch._dynamo.config, wherever they are used."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            if re.fullmatch(r"[\w.]+", name):
                yield Import(path, node.lineno, name)


@cache
def all_imports() -> list[Import]:
    return [found for path in sorted(PACKAGE.rglob("*.py")) for found in imports_in(path)]


@cache
def all_names() -> list[Import]:
    names = (found for path in sorted(PACKAGE.rglob("*.py")) for found in dotted_names_in(path))
    return [*all_imports(), *names]


def layers() -> tuple[str, ...]:
    """The list of the chapter Layers of docs/architecture.md."""
    text = (ROOT / "docs" / "architecture.md").read_text().partition("## Layers")[2]
    block = re.search(r"((?:^    .*\n)+)", text, re.MULTILINE)
    assert block is not None
    return tuple(re.findall(r"\w+", block.group(1)))


def layer_of(name: str) -> str | None:
    """The room of a module of Perfuse; None for the package itself and for other packages."""
    parts = name.split(".")
    return parts[1] if parts[0] == "perfuse" and len(parts) > 1 else None


def is_below(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


def is_private_torch(name: str) -> bool:
    parts = name.split(".")
    if parts[:2] == ["torch", "ops"]:  # names of operators, which are data: aten._softmax
        return False
    private = any(part.startswith("_") and not part.startswith("__") for part in parts[1:])
    return parts[0] in ("torch", "functorch") and private


def test_every_room_has_its_layer() -> None:
    rooms = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__", "__main__"}
    rooms |= {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert rooms <= set(layers())


def test_imports_point_back() -> None:
    order = layers()
    wrong = []
    for found in all_imports():
        source = found.path.relative_to(PACKAGE).with_suffix("").parts[0]
        target = layer_of(found.name)
        if source in order and target in order and order.index(target) > order.index(source):
            wrong.append(str(found))
    assert not wrong, "\n".join(wrong)


def test_deferred_functions_exist() -> None:
    """Names in text are not seen by a type checker."""
    found = [
        (path, node)
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "deferred"
    ]
    assert len(found) > 10
    for path, node in found:
        (place,) = node.args
        assert isinstance(place, ast.Constant), f"{path}:{node.lineno} computes a name"
        module, _, name = str(place.value).partition(":")
        assert callable(getattr(importlib.import_module(module), name)), place.value


def modules_imported_by(path: Path) -> set[Path]:
    """Files of Perfuse that are imported with this one, those for type checkers left out."""
    found: set[Path] = set()
    for node in parsed(path).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += list(names_from(path, node)) if isinstance(node, ast.ImportFrom) else []
            found |= {file for name in names for file in files_of(name)}
    return found - {path}


def files_of(name: str) -> list[Path]:
    """The files that importing `perfuse.room.module.thing` may run first: the module's."""
    parts = name.split(".")
    tries = [ROOT.joinpath(*parts[:length]) for length in (len(parts), len(parts) - 1)]
    found = [t.with_suffix(".py") for t in tries] + [t / "__init__.py" for t in tries]
    return [file for file in found if PACKAGE in file.parents and file.exists()][:1]


def test_no_import_cycle() -> None:
    graph = {path: modules_imported_by(path) for path in sorted(PACKAGE.rglob("*.py"))}
    assert sum(map(len, graph.values())) > 500
    done: set[Path] = set()

    def visit(path: Path, trail: tuple[Path, ...]) -> None:
        assert path not in trail, " -> ".join(str(p.relative_to(ROOT)) for p in (*trail, path))
        if path not in done:
            for other in sorted(graph[path]):
                visit(other, (*trail, path))
            done.add(path)

    for path in graph:
        visit(path, ())


def test_what_a_host_program_may_call_is_defined_where_it_is_loaded() -> None:
    """Ops of our own: a process that finds its programs in the cache imports little else."""
    loaded: set[Path] = set()
    waiting = [PACKAGE / "runtime" / "host_names.py"]
    while waiting:
        path = waiting.pop()
        if path not in loaded:
            loaded.add(path)
            waiting += modules_imported_by(path)
    defining = {p for p in PACKAGE.rglob("*.py") if "torch.library.Library" in p.read_text()}
    assert len(defining) >= 3 and defining <= loaded


def test_nothing_imports_the_package_itself() -> None:
    """Inside the package, `from perfuse import x` names a module, never what __init__ exports."""
    order = layers()
    wrong = [str(i) for i in all_imports() if i.name == "perfuse" and i.path.parent != PACKAGE]
    wrong += [str(i) for i in all_imports() if (room := layer_of(i.name)) and room not in order]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("module", PEER)
def test_nothing_touches_the_peer(module: str) -> None:
    wrong = [str(found) for found in all_names() if is_below(found.name, module)]
    assert not wrong, "\n".join(wrong)


# The room that uses private PyTorch APIs, and the file that uses Triton's.
COMPAT, TRITON = PACKAGE / "torch_compat", PACKAGE / "runtime" / "interpreted.py"


def test_private_torch_only_in_torch_compat() -> None:
    wrong = [
        str(found)
        for found in all_names()
        if is_private_torch(found.name) and COMPAT not in found.path.parents
    ]
    assert not wrong, "\n".join(wrong)


def private_attributes_in(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Private attributes of other objects that this file does not define itself."""
    own = {name for node in ast.walk(tree) for name in defined_by(node)}
    for node in ast.walk(tree):
        name = ""
        if isinstance(node, ast.Attribute) and not is_own_object(node.value):
            name = node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "setattr"):
            name = str(getattr(node.args[1], "value", ""))
        if name.startswith("_") and not name.startswith("__") and name not in own:
            yield node.lineno, ast.unparse(node)


def defined_by(node: ast.AST) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.AnnAssign):
        return [getattr(node.target, "id", "") or getattr(node.target, "attr", "")]
    if isinstance(node, ast.Assign):  # self._x = ..., and __slots__ = ("_x", ...)
        text = [leaf.value for leaf in ast.walk(node.value) if isinstance(leaf, ast.Constant)]
        return [t.attr for t in node.targets if isinstance(t, ast.Attribute)] + list(map(str, text))
    return []


def is_own_object(value: ast.expr) -> bool:
    """self, cls, super(), and the tables of operators, whose names are data."""
    text = ast.unparse(value)
    return text in ("self", "cls", "super()") or bool(re.match(r"(torch\.ops|aten)\b", text))


def test_private_attributes_only_in_torch_compat() -> None:
    """Attributes of objects, which imports do not show: op._schema, graph._root."""
    wrong = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if COMPAT not in path.parents and path != TRITON:
            found = private_attributes_in(parsed(path))
            wrong += [f"{path.relative_to(ROOT)}:{line} reads {text}" for line, text in found]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("line", ["op._schema", "getattr(op, '_schema', None)", "x.y._cdata"])
def test_a_private_attribute_is_found(line: str) -> None:
    assert list(private_attributes_in(ast.parse(line)))


def test_no_pickles() -> None:
    modules = ("pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "torch.load")
    wrong = [str(i) for i in all_names() for module in modules if is_below(i.name, module)]
    assert not wrong, "\n".join(wrong)


ENVIRONMENT = PACKAGE / "environment.py"


def test_the_environment_is_read_in_one_file() -> None:
    reads = ("os.environ", "os.getenv", "os.putenv")
    wrong = [
        str(found)
        for found in all_names()
        if any(is_below(found.name, read) for read in reads) and found.path != ENVIRONMENT
    ]
    assert not wrong, "\n".join(wrong)
