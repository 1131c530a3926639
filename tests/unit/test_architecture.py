"""docs/architecture.md against the code: the picture, the walks, every file and function named."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from perfuse import config
from perfuse.autotune.sites import sites_of, with_choice
from perfuse.candidates.triton import template_choices
from perfuse.codegen.triton.unit import generate_triton
from perfuse.gpu import gpu_of_name
from perfuse.ir.program import Matmul
from perfuse.schedule.plan import Kernel
from perfuse.schedule.schedule import place
from tests.triton.contractions import context_for
from tests.unit.lower.samples import bf16
from tests.unit.planning import plans_of, wants_grad

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "perfuse"
PAGE = (ROOT / "docs" / "architecture.md").read_text()
PICTURE = PAGE.partition("    Python callable\n")[2].partition("\n\n")[0]
FILE = r"`((?:[\w.]+/)*\w+\.(?:py|h|cpp))`"

# The op of the chapter "An op, from end to end": it has a scalar function of its own.
OP = "asinh"


def section(heading: str) -> str:
    """The text under a heading, up to the next of its level."""
    level = re.escape(heading.split(" ")[0])
    text = PAGE.partition(f"\n{heading}\n")[2]
    assert text, heading
    return re.split(rf"^{level} ", text, flags=re.MULTILINE)[0]


def files_in(text: str) -> Iterator[Path]:
    """The files that a text names: from the root, from perfuse/, or from the room at hand."""
    room = ""
    for paragraph in text.split("\n\n"):
        heading = re.match(r"\*\*([\w/]+)/\*\*", paragraph)
        room = heading[1] if heading else room
        for name in re.findall(FILE, paragraph):
            yield located(name, room)


def located(name: str, room: str = "") -> Path:
    places = [PACKAGE / name, ROOT / name, PACKAGE / room / name]
    return next((place for place in places if place.exists()), PACKAGE / name)


@cache
def names_in(path: Path) -> set[str]:
    """Functions, classes and constants that a file defines; C++ ones by their text."""
    if path.suffix != ".py":
        return set(re.findall(r"\b(\w+)\(", path.read_text()))
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def stages_of_the_pipeline() -> list[str]:
    """The names under which `pipeline.py` runs its stages, `plan_graph` first."""
    functions = {
        node.name: node
        for node in ast.parse((PACKAGE / "pipeline.py").read_text()).body
        if isinstance(node, ast.FunctionDef)
    }
    return [
        str(call.args[0].value)
        for name in ("plan_graph", "compile_graph")
        for call in ast.walk(functions[name])
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "run"
        if isinstance(call.args[0], ast.Constant)
    ]


def test_picture_has_the_stages_in_order() -> None:
    drawn = re.findall(r"^ +\| (\w+)", PICTURE, re.MULTILINE)
    assert drawn == ["capture", *stages_of_the_pipeline()]


def test_picture_has_every_room() -> None:
    drawn = set(re.findall(r"\b(\w+)/", PICTURE + PAGE.partition(PICTURE)[2].partition("\n## ")[0]))
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name[0] != "_"}
    assert rooms <= drawn
    for _, folder in re.findall(r"^ +\| (\w+) +([\w/]+)/ ", PICTURE, re.MULTILINE):
        assert (PACKAGE / folder).is_dir(), folder


def test_every_room_is_described_in_the_order_of_the_data() -> None:
    drawn = [folder for _, folder in re.findall(r"^ +\| (\w+) +([\w/]+)/ ", PICTURE, re.MULTILINE)]
    told = re.findall(r"^\*\*([\w/]+)/\*\*", section("## Room by room"), re.MULTILINE)
    assert [room for room in told if room in drawn] == list(dict.fromkeys(drawn))
    for room in told:
        assert (PACKAGE / room).is_dir(), room


def test_files_named_exist() -> None:
    named = set(files_in(PAGE))
    assert len(named) >= 80
    assert [path for path in sorted(named) if not path.exists()] == []


def test_functions_named_exist() -> None:
    pairs = re.findall(rf"{FILE},\s+`(\w+)`", PAGE)
    assert len(pairs) >= 40
    missing = [pair for pair in pairs if pair[1] not in names_in(located(pair[0]))]
    assert missing == []


def test_settings_named_exist() -> None:
    known = {row.name for row in config.describe()}
    named = set(re.findall(r"`((?:thresholds|gpu|cpu|cache)\.\w+)`", PAGE))
    assert len(named) >= 3
    assert {name for name in named if not name.endswith("py")} <= known


@pytest.mark.parametrize("walk", re.findall(r"^### .*$", PAGE, re.MULTILINE))
def test_walks_go_through_the_stages_in_order(walk: str) -> None:
    assert re.findall(r"\*\*(\w+)\*\*:", section(walk)) == stages_of_the_pipeline()


def test_softmax_is_planned_as_the_walk_says() -> None:
    def fn(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return torch.softmax(x * w + b, -1)

    inputs = wants_grad(torch.ones(64, 512), torch.ones(512), torch.ones(512))
    forward, backward = plans_of(fn, *inputs)
    (kernel,) = forward.kernels
    assert [member.stage for member in kernel.members] == [0, 1, 1, 2, 2]
    assert [axis.size for axis in kernel.axes] == [64, 512]
    assert len(forward.memory.turns) == 1
    assert len([name for name in kernel.stored if name in forward.program.buffers]) == 3
    assert len(backward.kernels) == 2 and len(backward.memory.turns) == 1
    outer = [m for m in backward.kernels[1].members if m.role == "outer"]
    assert len(outer) == 2, "the gradients of w and b"


def test_linear_and_gelu_are_planned_as_the_walk_says() -> None:
    def fn(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.gelu(F.linear(x, w, b))

    context = context_for("sm_90")
    (plan,) = plans_of(fn, bf16(48, 64), bf16(40, 64), bf16(40), context=context)
    matmul, kernel = plan.steps
    assert isinstance(matmul, Matmul) and isinstance(kernel, Kernel) and kernel.name == "k1"
    assert len(kernel.axes) == 1 and len(plan.memory.turns) == 2
    assert plan.memory.turns[1].freed == (matmul.out,)
    (site,) = sites_of(plan)
    first, *_ = template_choices(site, plan.program, gpu_of_name("sm_90"), tf32=False)
    fused = place(with_choice(plan, site, first), context)
    assert [step.name for step in fused.kernels] == ["k1"] and fused.templates == {"k1": first}
    assert [a.name for a in fused.memory.allocations()] == [kernel.members[-1].loop.out]
    assert "tl.dot" in generate_triton(fused, context).text


def test_op_from_end_to_end() -> None:
    """Every file that the table lists has the op, and no file of perfuse/ has it besides."""
    table = re.findall(
        rf"^\| .* \| {FILE}.*\|$", section("## An op, from end to end"), re.MULTILINE
    )
    listed = {located(name) for name in table}
    assert len(listed) >= 10
    for path in listed:
        assert re.search(rf"\b{OP}\b", path.read_text()), path
    sources = [path for path in PACKAGE.rglob("*") if path.suffix in (".py", ".h", ".cpp")]
    having = {path for path in sources if re.search(rf"\b{OP}\b", path.read_text())}
    assert having == {path for path in listed if path.is_relative_to(PACKAGE)}


def test_rooms_say_what_comes_in_and_goes_out() -> None:
    """Two sentences at least: what becomes of what, and what a room leaves alone."""
    for path in sorted(PACKAGE.glob("*/**/__init__.py")):
        text = ast.get_docstring(ast.parse(path.read_text())) or ""
        assert len(re.findall(r"\.(?:\s|$)", text)) >= 2, path
        assert re.search(r"\b(?:[Nn]othing|[Nn]o|[Nn]ot|never)\b", text), path
