"""`Instance`: the template arguments of one universal GEMM of Composable Kernel.

CK lists its instances as lines of template arguments, some of which are placeholders for several.
The shipped table holds such lines, sorted, without duplicates and without those that CK's own
sources comment out.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_name("instances.json")

SCHEDULERS = ("Intrawave", "Interwave")
PADDINGS = ("Default", "M", "N", "K", "MN", "MK", "NK", "MNK")
ANY_SCHEDULER, ANY_PADDING = "BlkGemmPipeSched", "GemmSpec"  # the placeholders of CK's lines
NUM_OPTIONAL = 2  # arguments at the end that a line may leave out

# A comma that is not inside of S<...>.
_COMMA = re.compile(r",(?![^<]*>)")
Extents = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Instance:
    """The template arguments in CK's order, without those of the D tensors of an epilogue."""

    a_layout: str  # Row or Col; A is MxK, B is KxN, C is MxN
    b_layout: str
    c_layout: str
    a_dtype: str  # F16, BF16, F8, I4
    b_dtype: str
    c_dtype: str
    accumulator_dtype: str
    shuffle_dtype: str
    a_op: str
    b_op: str
    c_op: str
    padding: str  # GemmSpecialization::MNKPadding
    block_size: int
    m_per_block: int
    n_per_block: int
    k_per_block: int
    a_k1: int
    b_k1: int
    m_per_xdl: int
    n_per_xdl: int
    m_xdl_per_wave: int
    n_xdl_per_wave: int
    a_cluster: Extents  # threads that copy A, over k0, m, k1
    a_cluster_order: Extents
    a_source_order: Extents
    a_vector_dim: int
    a_vector: int  # elements of A that a thread reads at once
    a_store_vector: int
    a_extra: int
    b_cluster: Extents
    b_cluster_order: Extents
    b_source_order: Extents
    b_vector_dim: int
    b_vector: int
    b_store_vector: int
    b_extra: int
    m_shuffle: int
    n_shuffle: int
    c_cluster: Extents
    c_vector: int  # elements of C that a thread writes at once
    scheduler: str  # BlockGemmPipelineScheduler::Intrawave
    version: str  # BlockGemmPipelineVersion::v3
    a_compute_dtype: str = ""
    b_compute_dtype: str = ""

    @property
    def text(self) -> str:
        """The arguments as CK writes them, which `instance_of` reads again."""
        cells = [spelled(getattr(self, leaf.name)) for leaf in fields(self)]
        while not cells[-1]:
            cells.pop()
        return ", ".join(cells)

    @property
    def name(self) -> str:
        """A short name, unique among instances: types, tile, pipeline, padding, digest."""
        types = f"{self.a_dtype}x{self.b_dtype}->{self.c_dtype}".lower()
        layouts = self.a_layout[0] + self.b_layout[0] + self.c_layout[0]
        tile = f"{self.m_per_block}x{self.n_per_block}x{self.k_per_block}"
        pipeline = f"{self.pipeline} {self.scheduler.rpartition('::')[2].lower()}"
        digest = hashlib.sha256(self.text.encode()).hexdigest()[:6]
        return f"ck {types} {layouts} {tile} {pipeline} {self.padded or 'unpadded'} {digest}"

    @property
    def padded(self) -> str:
        """The letters of the sizes that it pads: M, N, K."""
        return self.padding.rpartition("::")[2].removesuffix("Padding").replace("Default", "")

    @property
    def pipeline(self) -> str:
        """The version of its pipeline: v1 to v5."""
        return self.version.rpartition("::")[2]


def spelled(value: object) -> str:
    """A template argument as C++."""
    if isinstance(value, tuple):
        return f"S<{', '.join(map(str, value))}>"
    return str(value)


def instance_of(text: str) -> Instance:
    """The instance of a line of arguments; raises ValueError if it is not one."""
    cells = [cell.strip() for cell in _COMMA.split(text)]
    leaves = fields(Instance)
    if not len(leaves) - NUM_OPTIONAL <= len(cells) <= len(leaves):
        raise ValueError(f"{len(cells)} template arguments, expected {len(leaves)}")
    values: dict[str, Any] = {}
    for leaf, cell in zip(leaves, cells, strict=False):
        values[leaf.name] = _value(cell, str(leaf.type))
    return Instance(**values)


def _value(cell: str, kind: str) -> str | int | tuple[int, ...]:
    if kind == "str":
        return cell
    numbers = tuple(map(int, re.findall(r"\d+", cell)))
    if kind == "int" and len(numbers) == 1:  # batched lines have S<8> for the vector of C
        return numbers[0]
    if kind != "int" and cell.startswith("S<"):
        return numbers
    raise ValueError(f"{cell!r} is not of type {kind}")


def expanded(line: Instance) -> Iterator[Instance]:
    """The instances that a line with placeholders stands for."""
    schedulers, paddings = [line.scheduler], [line.padding]
    if line.scheduler == ANY_SCHEDULER:
        schedulers = _named("BlockGemmPipelineScheduler", SCHEDULERS, "")
    if line.padding == ANY_PADDING:
        paddings = _named("GemmSpecialization", PADDINGS, "Padding")
    for scheduler in schedulers:
        for padding in paddings:
            yield replace(line, scheduler=scheduler, padding=padding)


def _named(enum: str, names: Iterable[str], ending: str) -> list[str]:
    return [f"{enum}::{name}{'' if name == 'Default' else ending}" for name in names]


def distinct(lines: Iterable[str]) -> tuple[Instance, ...]:
    """All instances of some lines, each once, in an order that does not depend on theirs."""
    every = {each.text: each for line in lines for each in expanded(instance_of(line))}
    return tuple(every[text] for text in sorted(every))


@functools.cache
def _table() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(TABLE.read_text())
    return document


@functools.cache
def shipped_instances(*, is_batched: bool = False) -> tuple[Instance, ...]:
    """The instances of the table that is part of Perfuse."""
    return distinct(_table()["batched" if is_batched else "base"])


@functools.cache
def preselected_instances() -> tuple[Instance, ...]:
    """The few that are known to do well for float16, in the order of the table."""
    return tuple(map(instance_of, _table()["preselected"]))


def shipped_version() -> str:
    """Where the table comes from."""
    source = _table()["source"]
    return f"{source['date']} {source['commit'][:10]}"
