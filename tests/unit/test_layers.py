"""The shape of the code: imports point back, and none reaches into what Perfuse replaces."""

from __future__ import annotations

import ast
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


def imports_in(path: Path) -> Iterator[Import]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(path, node.lineno, alias.name)
        elif isinstance(node, ast.ImportFrom):
            yield from (Import(path, node.lineno, name) for name in names_from(path, node))


def names_from(path: Path, node: ast.ImportFrom) -> Iterator[str]:
    module = node.module or ""
    if node.level:
        folder = path.parents[node.level - 1].relative_to(ROOT)
        module = ".".join([*folder.parts, *([module] if module else [])])
    for alias in node.names:
        yield f"{module}.{alias.name}"


def dotted_names_in(path: Path) -> Iterator[Import]:
    """Names spelled out in code, such as torch._dynamo.config, wherever they are used."""
    for node in ast.walk(ast.parse(path.read_text())):
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


# The files that touch private PyTorch APIs: in general, and by subject.
COMPAT = (
    "torch_compat.py",
    "torch_autograd.py",
    "torch_guards.py",
    "torch_dynamo.py",
    "torch_records.py",
)


def test_private_torch_only_in_torch_compat() -> None:
    wrong = [
        str(found)
        for found in all_names()
        if is_private_torch(found.name) and found.path.name not in COMPAT
    ]
    assert not wrong, "\n".join(wrong)


def test_no_pickles() -> None:
    modules = ("pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "torch.load")
    wrong = [str(i) for i in all_names() for module in modules if is_below(i.name, module)]
    assert not wrong, "\n".join(wrong)


def test_the_environment_is_read_in_config_alone() -> None:
    reads = ("os.environ", "os.getenv", "os.putenv")
    wrong = [
        str(found)
        for found in all_names()
        if any(is_below(found.name, read) for read in reads) and found.path != PACKAGE / "config.py"
    ]
    assert not wrong, "\n".join(wrong)
