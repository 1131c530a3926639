"""PyTorch's records for users: origins of nodes, Dynamo's events, where sources are written.

Looked up when they are used; a PyTorch version without them is supported too.
"""

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from perfuse.torch_compat.ops import OpOverload, op_name


def module_path(node: Any) -> str:
    """The module an FX node comes from, as in `named_modules` (`layers.3.mlp`), or "".

    A backward node has the module of the forward one that it differentiates.
    """
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return ""
    paths = [str(entry[0]) for entry in stack.values() if isinstance(entry, tuple)]
    if not paths or not re.match(r"[LG]\[", paths[-1]):
        return paths[-1] if paths else ""  # torch.export names modules as `named_modules` does
    dotted = re.sub(r"\['?([^'\]]+)'?\]", r".\1", paths[-1])[2:]
    root, _, rest = re.sub(r"\b(_modules|_orig_mod)\.", "", dotted).partition(".")
    # What is compiled is not part of the name, unless it is a function that calls the module.
    is_whole = root in ("self", "fn") or (f"L['{root}']" not in paths and paths[0][0] == "L")
    return rest if is_whole else f"{root}.{rest}".rstrip(".")


def original_op(node: Any) -> str:
    """The op that an FX node was decomposed from, as PyTorch names it: layer_norm, gelu, ..."""
    original = node.meta.get("original_aten")
    target = original if isinstance(original, OpOverload) else node.target
    name = str(target).split(".")[1] if isinstance(target, OpOverload) else op_name(target)[3:]
    plain = name.strip("_").removeprefix("native_")
    for suffix in ("_functional", "_legit", "_no_training", "_by_chunks"):
        plain = plain.removesuffix(suffix)
    return plain


def op_identity(node: Any) -> tuple[Any, ...]:
    """Equal for the FX nodes that one op of the user's program was decomposed into."""
    sources = node.meta.get("from_node") or ()
    where = sources[0].name if sources else node.meta.get("seq_nr", node.name)
    is_backward = bool(node.meta.get("autograd_backward"))
    return (str(node.meta.get("original_aten", node.name)), where, is_backward)


@dataclass(frozen=True, slots=True)
class DynamoEvents:
    """Graph breaks and recompiles of Dynamo: their reasons, one per occurrence."""

    graph_breaks: tuple[str, ...] = ()
    recompiles: tuple[str, ...] = ()


@contextmanager
def dynamo_events() -> Iterator[Callable[[], DynamoEvents]]:
    """Watch Dynamo in a block; the function returned reports what has happened since."""
    from torch._dynamo import utils

    metrics: Callable[[], Sequence[Any]] = getattr(utils, "get_compilation_metrics", list)
    breaks_before = dict(utils.counters["graph_break"])
    known = {id(entry) for entry in metrics()}
    kept = list(metrics())  # so that no id is used again

    def happened() -> DynamoEvents:
        breaks: list[str] = []
        for reason, count in utils.counters["graph_break"].items():
            breaks += [reason.partition("\n")[0]] * (count - breaks_before.get(reason, 0))
        added = [entry for entry in metrics() if id(entry) not in known]
        recompiles = [getattr(entry, "recompile_reason", None) for entry in added]
        lines = tuple(reason.partition("\n")[0] for reason in recompiles if reason)
        return DynamoEvents(tuple(breaks), lines)

    yield happened
    del kept


@cache
def output_code_log() -> logging.Logger | None:
    """The log that TORCH_LOGS=output_code turns on; None where PyTorch has no such thing.

    Under PyTorch's own name, because its handlers are at those.
    """
    try:
        from torch._logging._internal import getArtifactLogger

        return getArtifactLogger("torch._dynamo.backends.perfuse", "output_code")
    except (ImportError, AttributeError, ValueError):
        return None


def is_output_code_wanted() -> bool:
    """Whether TORCH_LOGS=output_code, or `torch._logging.set_logs`, asks for generated sources."""
    log = output_code_log()
    return log is not None and log.propagate and log.isEnabledFor(logging.DEBUG)


def debug_folder() -> Path | None:
    """Where PyTorch's compilers write under TORCH_COMPILE_DEBUG=1: one folder for each run."""
    try:
        from torch._dynamo.utils import get_debug_dir

        return Path(get_debug_dir())
    except (ImportError, AttributeError):
        return None
