"""Generated sources for PyTorch's own switches: TORCH_LOGS=output_code, TORCH_COMPILE_DEBUG=1.

The log prints each graph's kernels and host program. The folder of a debugged run,
`torch_compile_debug/run_.../perfuse`, gets every stage of each graph as a file. `PERFUSE_LOG=+code`
prints the same text as TORCH_LOGS does.
"""

from __future__ import annotations

import logging
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from torch.fx import GraphModule

from perfuse.capture.observe import Observer
from perfuse.environment import is_debugging_compiles
from perfuse.logs import channel
from perfuse.torch_compat.graphs import source_line
from perfuse.torch_compat.records import debug_folder, is_output_code_wanted, output_code_log

if TYPE_CHECKING:
    from perfuse.pipeline import Compiled

LOG = channel("code")


def summary(module: GraphModule) -> str:
    """Describe a captured graph: its number of ops and the user's first line in it."""
    calls = [n for n in module.graph.nodes if n.op not in ("placeholder", "output", "get_attr")]
    line = next(filter(None, map(source_line, calls)), "")
    return f"graph of {len(calls)} ops{f' at {line}' if line else ''}"


def source_observers() -> tuple[Observer, ...]:
    """Observers of sources; with any, graphs are recompiled, since caches hold no stages."""
    found: list[Observer] = []
    if is_output_code_wanted() or LOG.isEnabledFor(logging.DEBUG):
        found.append(log_sources)
    if is_debugging_compiles():
        found.append(write_stages)
    return tuple(found)


def log_sources(compiled: Compiled) -> None:
    """Log the generated text of one graph, as PyTorch's log and as our own."""
    text = "\n".join(compiled.texts())
    message = f"Output code of the {compiled.kind} graph:\n{text}"
    LOG.debug("%s", message)
    log = output_code_log()
    if log is not None and is_output_code_wanted():
        log.debug("%s", message)


def write_stages(compiled: Compiled) -> None:
    """Write every stage of one graph into a new folder of PyTorch's debug folder."""
    root = debug_folder()
    if root is None:
        return
    folder = _new_folder(root / "perfuse", compiled.kind)
    *kernels, host = compiled.texts()
    suffix = "cpp" if compiled.context.target.gpu is None else "py"
    files = {f"kernels_{i}.{suffix}": text for i, text in enumerate(kernels)}
    files |= {
        "host.py": host,
        "graph.txt": str(compiled.module.graph),
        "program.txt": str(compiled.program),
        "plan.txt": str(compiled.plan),
    }
    for name, text in files.items():
        (folder / name).write_text(f"{text}\n")
    LOG.info("stages of the %s graph written to %s", compiled.kind, folder)


def _new_folder(home: Path, kind: str) -> Path:
    """The first number that no other graph of the run has taken."""
    home.mkdir(parents=True, exist_ok=True)
    for number in count():
        folder = home / f"graph_{number}_{kind}"
        if any(home.glob(f"graph_{number}_*")):
            continue
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder
    raise AssertionError("unreachable: there is always a next number")
