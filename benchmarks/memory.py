"""Memory that a training step saves between forward and backward, and its time.

    python -m benchmarks.memory                     everything, on the CPU
    python -m benchmarks.memory --device cuda       the same programs, larger, on a GPU
    python -m benchmarks.memory --only 'layer|mlp'

Eager, TorchInductor and Perfuse, each program in a process of its own. Kept bytes are those of
every storage that autograd saves, once, without what is the caller's anyway (arguments, parameters,
buffers). The last table is the time that each compiler's partitioner takes for a 12-layer GPT-2.
Results go to benchmarks/results/<date>-memory-<device>/.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # also when started as a script
    sys.path.insert(0, str(ROOT))

from benchmarks import machine, report  # noqa: E402
from benchmarks.contest import take_turns  # noqa: E402
from benchmarks.cpu import in_process  # noqa: E402
from benchmarks.gpu_worker import device_times  # noqa: E402
from benchmarks.interleaved import CpuClock  # noqa: E402
from benchmarks.memory_cases import Program, cases  # noqa: E402
from benchmarks.report import OURS, PEER, Row  # noqa: E402
from benchmarks.turns import TURN, my_turn  # noqa: E402

ENGINES = ("eager", PEER, OURS)
PARTITION_RUNS = 3


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", default="", help="regular expression on the names of programs")
    parser.add_argument("--budget", type=float, default=3.0, help="seconds of measuring a program")
    parser.add_argument("--jobs", type=int, help="programs that compile at a time; 6 for a GPU")
    parser.add_argument("--results", type=Path, help="where the results go")
    parser.add_argument("--case", help="measure this one program here and print JSON")
    parser.add_argument("--partition", help="time this compiler's partitioner and print JSON")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    if arguments.case:
        print(json.dumps(measure(arguments.case, arguments.device, arguments.budget)))
    elif arguments.partition:
        print(json.dumps(partition_seconds(arguments.partition, arguments.device)))
    else:
        measure_all(arguments)


def measure_all(arguments: argparse.Namespace) -> None:
    console = Console() if sys.stdout.isatty() else Console(width=120)
    document: Row = {"machine": machine.describe(), "device": arguments.device}
    names = [n for n in cases(False) if re.search(arguments.only, n)]
    rows = measured_rows(names, arguments, console)
    document["memory"] = rows
    tables = [memory_table(rows)]
    # The partitioner does not know of devices, and twelve layers take long to compile for a GPU.
    if re.search(arguments.only, "partition") and (arguments.device == "cpu" or arguments.only):
        document["partition"] = partition_rows(arguments.device)
        tables.append(partition_table(document["partition"]))
    for table in tables:
        console.print(table)
    date = datetime.date.today().isoformat()
    default = ROOT / "benchmarks" / "results" / f"{date}-memory-{arguments.device}"
    report.save(arguments.results or default, document, tables)


def measured_rows(names: list[str], arguments: argparse.Namespace, console: Console) -> list[Row]:
    """A row a program, printed as they come; what compiles together is timed one by one."""
    common = ["--device", arguments.device, "--budget", str(arguments.budget)]
    jobs = arguments.jobs or (1 if arguments.device == "cpu" else 6)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        turn = {TURN: str(Path(folder) / "turn")} if jobs > 1 else {}

        def row(name: str) -> Row:
            found = in_process(["benchmarks.memory", "--case", name, *common], turn)
            console.print({"name": name, **found})
            console.file.flush()
            return {"name": name, **found}

        return list(pool.map(row, names))


# -- one program ---------------------------------------------------------------------------------


def measure(name: str, device_name: str, budget_s: float) -> Row:
    device = torch.device(device_name)
    program = cases(device.type != "cpu")[name](device)
    functions: dict[str, Callable[..., Any]] = {"eager": program.function}
    for engine in (PEER, OURS):
        functions[engine] = torch.compile(program.function, backend=engine)
    steps = {engine: step_of(program, fn) for engine, fn in functions.items()}
    for step in steps.values():
        step()  # compiles
    kept = {engine: kept_bytes(program, fn) for engine, fn in functions.items()}
    with my_turn():
        if device.type == "cpu":
            times = take_turns(steps, budget_s, CpuClock(steps))
        else:
            times = device_times(steps, device_name, budget_s)["ms"]
    return {"name": name, "kept_bytes": kept, "times_ms": times}


def step_of(program: Program, function: Callable[..., Any]) -> Callable[[], Any]:
    """Forward and backward, with the gradients of everything that wants one."""
    wanted = [t for t in program.owned() if t.requires_grad]

    def step() -> Any:
        result = function(*program.inputs)
        return torch.autograd.grad(result, wanted, torch.ones_like(result), allow_unused=True)

    return step


def kept_bytes(program: Program, function: Callable[..., Any]) -> int:
    owned = {t.untyped_storage().data_ptr() for t in program.owned()}
    kept: dict[int, Tensor] = {}

    def note(tensor: Tensor) -> Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in owned:
            kept[place] = tensor  # held, so that its place is not given to another
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        result = function(*program.inputs)
    del result
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


# -- partitioning --------------------------------------------------------------------------------


def partition_rows(device: str) -> list[Row]:
    """The best of some processes each, caches off: a found capture is not partitioned at all."""
    off = {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1", "PERFUSE_CACHE_ENABLED": "0"}
    rows = []
    for engine in (PEER, OURS):
        command = ["benchmarks.memory", "--partition", engine, "--device", device]
        found = [in_process(command, off) for _ in range(PARTITION_RUNS)]
        seconds = [run["seconds"] for run in found if "seconds" in run]
        rows.append({"engine": engine, "seconds": min(seconds) if seconds else None})
    return rows


def partition_seconds(engine: str, device: str) -> Row:
    """Time of one compiler's partitioner for the largest graph of a GPT-2 with 12 layers."""
    import transformers

    config = transformers.GPT2Config(use_cache=False)
    model = transformers.GPT2LMHeadModel(config).to(device).train()
    tokens = torch.randint(0, 1000, (1, 64), device=device)
    times = own_times() if engine == OURS else peer_times()
    torch.compile(model, backend=engine)(input_ids=tokens, labels=tokens)
    return {"seconds": max(times)}


def own_times() -> list[float]:
    """Filled as Perfuse partitions."""
    from perfuse.capture.trace import Capture

    times: list[float] = []
    partition = Capture.partition

    def timed(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        halves = partition(*args, **kwargs)
        times.append(time.perf_counter() - began)
        return halves

    Capture.partition = timed  # type: ignore[method-assign]
    return times


def peer_times() -> list[float]:
    """PyTorch's own clock around the peer's partitioner, filled as it runs."""
    from torch._dynamo.utils import compilation_time_metrics

    return compilation_time_metrics.setdefault("min_cut_rematerialization_partition", [])


# -- tables --------------------------------------------------------------------------------------


def memory_table(rows: list[Row]) -> Table:
    view = Table(title="kept between forward and backward, and the step (best of the rounds)")
    heads = ("eager MB", "TorchInductor MB", "Perfuse MB", "eager ms", "TorchInductor ms")
    for i, head in enumerate(("", *heads, "Perfuse ms", "over peer")):
        view.add_column(head, justify="right" if i else "left")
    for row in rows:
        if "error" in row:
            view.add_row(row["name"], f"[red]{row['error'][-200:]}[/]")
            continue
        kept = [f"{row['kept_bytes'][engine] / 1e6:.3f}" for engine in ENGINES]
        if row["kept_bytes"][OURS] > row["kept_bytes"][PEER]:
            kept[-1] = f"[red]{kept[-1]}[/]"
        times = [row["times_ms"][engine]["best"] for engine in ENGINES]
        faster = times[1] / times[2]
        colour = "green" if faster >= 0.97 else "red"
        shown = [f"{ms:.3f}" for ms in times]
        view.add_row(row["name"], *kept, *shown, f"[{colour}]{faster:.2f}x[/]")
    return view


def partition_table(rows: list[Row]) -> Table:
    view = Table(title="partitioning a 12-layer GPT-2 (best of the processes)")
    view.add_column("")
    view.add_column("seconds", justify="right")
    for row in rows:
        seconds = row["seconds"]
        view.add_row(
            report.TITLES[row["engine"]], "failed" if seconds is None else f"{seconds:.3f}"
        )
    return view


if __name__ == "__main__":
    main()
