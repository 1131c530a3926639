"""Assembly text of a code object -> instructions, labels, and what a launch has to know."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

MNEMONIC = re.compile(r"(s|v|ds|global|buffer|flat|scratch)_\w+$")
REGISTER = re.compile(r"([vas])(?:(\d+)|\[(\d+):(\d+)\])$")
# A name that stands for scalar registers: the number of the first, and how many.
SPECIAL = {
    "flat_scratch_lo": (102, 1),
    "flat_scratch_hi": (103, 1),
    "flat_scratch": (102, 2),
    "vcc_lo": (106, 1),
    "vcc_hi": (107, 1),
    "vcc": (106, 2),
    "m0": (124, 1),
    "exec_lo": (126, 1),
    "exec_hi": (127, 1),
    "exec": (126, 2),
}
VCC, EXEC = SPECIAL["vcc"][0], SPECIAL["exec"][0]


@dataclass(frozen=True, slots=True)
class Operand:
    """A register range ("v", "a", "s"), a number, or a name, and how its value is modified."""

    kind: str  # "v", "a", "s", "int", "float", "name"
    first: int = 0
    count: int = 1
    text: str = ""
    negative: bool = False
    absolute: bool = False
    extended: bool = False  # sext(): the selected part of a register is sign-extended


@dataclass(frozen=True, slots=True)
class Instruction:
    """One line: `op` is the mnemonic without the suffix of its encoding."""

    op: str
    encoding: str  # "", "e32", "e64", "dpp" or "sdwa"
    operands: tuple[Operand, ...]
    modifiers: dict[str, str]
    text: str

    def flag(self, name: str) -> bool:
        return name in self.modifiers

    def number(self, name: str) -> int:
        return int(self.modifiers.get(name, "0"), 0)

    def bits(self, name: str, default: Sequence[int]) -> tuple[int, ...]:
        """The numbers of a modifier such as op_sel:[1,0]."""
        given = self.modifiers.get(name)
        return tuple(default) if given is None else tuple(map(int, given.strip("[]").split(",")))


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument in the kernarg segment."""

    offset: int
    size: int
    kind: str  # global_buffer, by_value, hidden_*


@dataclass(frozen=True)
class Assembly:
    """The text of one code object with one kernel."""

    symbol: str
    instructions: tuple[Instruction, ...]
    labels: dict[str, int]  # the number of the instruction that a label precedes
    settings: dict[str, int]  # the .amdhsa_* directives of the kernel descriptor
    arguments: tuple[Argument, ...]
    target: str

    @property
    def kernarg_bytes(self) -> int:
        return self.settings["kernarg_size"]

    @cached_property
    def num_registers(self) -> dict[str, int]:
        """The number of vector and accumulation registers that the text names."""
        found = {"v": 1, "a": 1}
        for instruction in self.instructions:
            for operand in instruction.operands:
                if operand.kind in found:
                    last = operand.first + operand.count
                    found[operand.kind] = max(found[operand.kind], last)
        return found

    @cached_property
    def leaders(self) -> frozenset[int]:
        """Targets of branches: waves that took different ones may meet there."""
        named = {o.text for i in self.instructions for o in i.operands if o.kind == "name"}
        return frozenset(place for label, place in self.labels.items() if label in named)


def parse_assembly(text: str) -> Assembly:
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    settings: dict[str, int] = {}
    symbol = ""
    for raw in _code_lines(text):
        word, _, rest = raw.partition(" ")
        if word.endswith(":"):
            labels[word[:-1]] = len(instructions)
        elif MNEMONIC.match(word):
            instructions.append(parse_instruction(raw))
        elif word == ".amdhsa_kernel":
            symbol = rest.strip()
        elif word.startswith(".amdhsa_") and rest.strip().isdecimal():
            settings[word.removeprefix(".amdhsa_")] = int(rest)
    found = re.search(r'\.amdgcn_target\s+"([^"]*)"', text)
    target = found.group(1) if found else ""
    return Assembly(symbol, tuple(instructions), labels, settings, _arguments(text), target)


def _code_lines(text: str) -> list[str]:
    code = text.partition(".amdgpu_metadata")[0]
    lines = (re.sub(r"\s+", " ", line.split(";")[0]).strip() for line in code.splitlines())
    return [line for line in lines if line]


def _arguments(text: str) -> tuple[Argument, ...]:
    """The rows of .args in the metadata: each ends with its value_kind."""
    rows = re.findall(
        r"\.offset:\s+(\d+)\s+\.size:\s+(\d+)\s+\.value_kind:\s+(\w+)",
        text.partition(".amdgpu_metadata")[2],
    )
    return tuple(Argument(int(offset), int(size), kind) for offset, size, kind in rows)


def parse_instruction(line: str) -> Instruction:
    mnemonic, _, rest = line.partition(" ")
    found = re.match(r"(v_\w+)_(e32|e64|dpp|sdwa)$", mnemonic)
    op, encoding = found.groups() if found else (mnemonic, "")
    pieces = split_outside(rest, ",")
    operands = [piece.strip() for piece in pieces[:-1]]
    last = split_outside(pieces[-1].strip(), " ") if pieces else []
    if last and (len(pieces) > 1 or not _is_modifier(last[0])):
        operands.append(last.pop(0))
    modifiers = {}
    for word in last:
        name, _, value = word.partition(":")
        modifiers[name] = value
    return Instruction(op, encoding, tuple(map(parse_operand, operands)), modifiers, line)


def _is_modifier(word: str) -> bool:
    return word in ("sc0", "sc1", "nt", "off") or ":" in re.sub(r"\[.*?\]", "", word)


def split_outside(text: str, separator: str) -> list[str]:
    """The parts between separators that stand in no brackets."""
    parts, depth, start = [], 0, 0
    for place, character in enumerate(text):
        depth += (character in "([") - (character in ")]")
        if character == separator and depth == 0:
            parts.append(text[start:place])
            start = place + 1
    return [part for part in (*parts, text[start:]) if part.strip()]


def parse_operand(text: str) -> Operand:
    inner = text
    extended = inner.startswith("sext(")
    inner = inner.removeprefix("sext(").removesuffix(")") if extended else inner
    negative = inner.startswith("-") and not re.match(r"-[\d.]", inner)
    inner = inner[1:] if negative else inner
    absolute = inner.startswith("|")
    inner = inner.strip("|")
    kind, first, count = _place(inner)
    return Operand(kind, first, count, inner, negative, absolute, extended)


def _place(text: str) -> tuple[str, int, int]:
    """The kind of an operand, its first register or its value, and the number of registers."""
    if text in SPECIAL:
        return ("s", *SPECIAL[text])
    found = REGISTER.match(text)
    if found:
        kind, alone, first, last = found.groups()
        return (kind, int(alone), 1) if alone else (kind, int(first), int(last) - int(first) + 1)
    if re.fullmatch(r"-?(0x[0-9a-f]+|\d+)", text):
        return "int", int(text, 0), 1
    if re.fullmatch(r"-?\d+\.\d*(e[+-]?\d+)?", text):
        return "float", 0, 1
    return "name", 0, 1
