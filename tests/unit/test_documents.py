"""README, CONTRIBUTING and docs/: what they name exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import perfuse
from perfuse import config, logs

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]


def anchor(heading: str) -> str:
    """A heading as links refer to it."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    anchors = {anchor(heading) for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("#"):
            assert target[1:] in anchors, target
        elif "://" not in target:
            assert (page.parent / target.partition("#")[0]).exists(), target


def test_python_blocks_parse_and_use_what_there_is() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) >= 8
    for block in blocks:
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert node.value.id != "perfuse" or hasattr(perfuse, node.attr), node.attr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:`|^    )make ([\w-]+)", page.read_text(), re.MULTILINE)) <= targets


def test_settings_and_variables_exist() -> None:
    known = {row.name for row in config.describe()}
    groups = "|".join({name.partition(".")[0] for name in known if "." in name})
    named = set(re.findall(rf"`((?:{groups})\.\w+)`", README))
    named |= set(re.findall(r'options=\{"([\w.]+)"', README))
    assert len(named) >= 4 and named <= known
    variables = {f"PERFUSE_{name.upper().replace('.', '_')}" for name in known} | {"PERFUSE_LOG"}
    assert set(re.findall(r"PERFUSE_[A-Z]\w+", README)) <= variables


def test_log_channels_are_listed() -> None:
    table = README.partition("| channel |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == list(logs.CHANNELS)
