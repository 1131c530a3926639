"""Training under twenty memory budgets: the peak that was simulated, and the one that is measured.

    python -m benchmarks.budget                     three models on the CPU
    python -m benchmarks.budget --device cuda       the same, larger, on a GPU, a process each
    python -m benchmarks.budget --only bert --points 5

Budgets are spread evenly from a little below the least that a model can do with up to what it
takes without one. On the CPU every allocation of PyTorch and of Perfuse's pool is traced, on a GPU
its allocator tells the peak. Results go to benchmarks/results/<date>-<device>-budget/.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # also when started as a script
    sys.path.insert(0, str(ROOT))

import perfuse  # noqa: E402
from benchmarks import machine  # noqa: E402
from benchmarks.report import Row, pyplot, write_csv  # noqa: E402
from perfuse.capture.observe import observing_cuts  # noqa: E402
from perfuse.report.memory import TrainingReport  # noqa: E402
from perfuse.testing import peak_memory  # noqa: E402

POINTS = 20
MOST_OFF = 0.10  # by how much measured and simulated may differ
STEPS = 3
KEPT = "every peak monotone, and within 10 % of the simulated one"
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large the models are: their width is that of one layer of each."""

    layers: int
    width: int
    batch: int
    length: int


SIZES = {"cpu": Sizes(4, 192, 4, 128), "cuda": Sizes(4, 768, 32, 512)}
Loss = Callable[[], Tensor]


@dataclass(frozen=True, slots=True)
class Training:
    """A model with the arguments of its training step."""

    model: nn.Module
    loss: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]


def gpt2(sizes: Sizes, device: str) -> Training:
    config = transformers.GPT2Config(
        n_layer=sizes.layers,
        n_embd=sizes.width,
        n_head=sizes.width // 64,
        vocab_size=1024,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return _language(transformers.GPT2LMHeadModel(config), sizes, device)


def bert(sizes: Sizes, device: str) -> Training:
    config = transformers.BertConfig(
        num_hidden_layers=sizes.layers,
        hidden_size=sizes.width,
        num_attention_heads=sizes.width // 64,
        intermediate_size=4 * sizes.width,
        vocab_size=1024,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.0,
    )
    return _language(transformers.BertForMaskedLM(config), sizes, device)


def _language(model: Any, sizes: Sizes, device: str) -> Training:
    model = model.to(device).train()
    ids = torch.randint(0, 1024, (sizes.batch, sizes.length), device=device)

    def loss(ids: Tensor) -> Tensor:
        return F.cross_entropy(model(ids).logits.flatten(0, 1), ids.flatten())

    return Training(model, loss, (ids,))


def vit(sizes: Sizes, device: str) -> Training:
    config = transformers.ViTConfig(
        num_hidden_layers=sizes.layers,
        hidden_size=sizes.width,
        num_attention_heads=sizes.width // 64,
        intermediate_size=4 * sizes.width,
        image_size=128 if device == "cpu" else 224,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model: Any = transformers.ViTModel(config, add_pooling_layer=False).to(device).train()
    images = torch.randn(2 * sizes.batch, 3, config.image_size, config.image_size, device=device)

    def loss(images: Tensor) -> Tensor:
        return model(images).last_hidden_state.square().mean()  # type: ignore[no-any-return]

    return Training(model, loss, (images,))


MODELS: dict[str, Callable[[Sizes, str], Training]] = {"gpt2": gpt2, "bert": bert, "vit": vit}


def measure(training: Training, budget: int | float, device: str) -> Row:
    """One budget: what it became, and the peak and the time of a step under it."""
    reports: list[TrainingReport] = []
    torch._dynamo.reset()
    call = torch.compile(
        training.loss, backend="perfuse", fullgraph=True, options={"memory_budget": budget}
    )

    def step() -> None:
        call(*training.inputs).backward()

    with (
        warnings.catch_warnings(),
        observing_cuts(lambda cut, context: reports.append(TrainingReport.of(cut, context))),
    ):
        warnings.simplefilter("ignore", perfuse.BudgetWarning)
        step()
    training.model.zero_grad(set_to_none=True)
    seconds = _seconds(step, training, device)
    measured = peak_memory(step, device)
    training.model.zero_grad(set_to_none=True)
    report = reports[0]
    return {
        "budget": budget,
        "simulated": report.peak,
        "measured": measured,
        "off": measured / report.peak - 1,
        "saved": report.timeline.saved_bytes,
        "recomputed_gflops": report.recomputed_flops / 1e9,
        "step_ms": 1e3 * seconds,
    }


def _seconds(step: Callable[[], None], training: Training, device: str) -> float:
    best = float("inf")
    for _ in range(STEPS):
        start = time.perf_counter()
        step()
        if device != "cpu":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
        training.model.zero_grad(set_to_none=True)
    return best


def sweep(
    name: str, points: range, device: str, sizes: Sizes, told: Callable[[Row], None]
) -> list[Row]:
    """The rows of a model from the largest budget to the smallest; `points` may be the last."""
    torch.manual_seed(0)
    training = MODELS[name](sizes, device)
    first, last = (measure(training, fraction, device) for fraction in (1.0, 0.0))
    most, least = first["simulated"], last["simulated"]
    low = least - (most - least) // 10
    rows: list[Row] = []
    for point in points:
        budget = most - (most - low) * point // max(points.stop - 1, 1)
        known = last if budget <= least else rows[-1] if rows else first
        # What fits a smaller budget too is chosen for it too: the same program, measured already.
        is_known = known["simulated"] <= budget or known is last
        row = {**(known if is_known else measure(training, budget, device))}
        row |= {"model": name, "budget": budget, "fits": row["simulated"] <= budget}
        rows.append(row)
        told(row)
    return rows


def complaints(rows: Sequence[Row]) -> list[str]:
    """Promises that a sweep did not keep."""
    found = []
    for before, row in zip([None, *rows[:-1]], rows, strict=True):
        where = f"{row['model']} at {row['budget'] / MIB:.1f} MiB"
        if abs(row["off"]) > MOST_OFF:
            found.append(f"{where}: measured is {100 * row['off']:+.1f} % off the simulated peak")
        is_next = before is not None and before["model"] == row["model"]
        # The smallest blocks of PyTorch's own differ from step to step by some kilobytes.
        if before is not None and is_next and row["measured"] > before["measured"] * 1.001:
            found.append(f"{where}: a smaller budget took more")
    return found


def table(rows: Sequence[Row]) -> Table:
    view = Table(title="Peak of a training step under a memory budget, MiB")
    heads = ("model", "budget", "fits", "simulated", "measured", "off", "saved", "recomputed", "ms")
    for head in heads:
        view.add_column(head, justify="left" if head == "model" else "right")
    for row in rows:
        view.add_row(
            row["model"],
            f"{row['budget'] / MIB:.1f}",
            "yes" if row["fits"] else "no",
            *(f"{row[key] / MIB:.1f}" for key in ("simulated", "measured")),
            f"{100 * row['off']:+.1f} %",
            f"{row['saved'] / MIB:.1f}",
            f"{row['recomputed_gflops']:.2f} Gflop",
            f"{row['step_ms']:.0f}",
        )
    return view


def draw(rows: Sequence[Row], path: Path) -> None:
    """Measured and simulated peaks over the budget, a picture for each model."""
    plt = pyplot()
    if plt is None:
        return
    names = list(dict.fromkeys(row["model"] for row in rows))
    figure, axes = plt.subplots(
        1, len(names), figsize=(5 * len(names), 4), squeeze=False, layout="constrained"
    )
    for axis, name in zip(axes[0], names, strict=True):
        mine = [row for row in rows if row["model"] == name]
        budgets = [row["budget"] / MIB for row in mine]
        axis.plot(budgets, budgets, color="grey", linestyle=":", label="budget")
        for key, style in (("simulated", "-"), ("measured", "x")):
            axis.plot(budgets, [row[key] / MIB for row in mine], style, label=key)
        axis.set_title(name)
        axis.set_xlabel("budget, MiB")
        axis.set_ylabel("peak, MiB")
        axis.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--only", default="", help="one of the models")
    parser.add_argument("--points", type=int, default=POINTS)
    parser.add_argument("--first", type=int, default=0, help="the point to begin with")
    parser.add_argument("--results", type=Path, help="where the results go")
    parser.add_argument("--rows", type=Path, help="only measure, and leave the rows in this file")
    arguments = parser.parse_args()
    console = Console(width=120)
    names = [name for name in MODELS if arguments.only in ("", name)]
    # Compiling is most of the time there. Peaks are each process's own; milliseconds are not.
    apart = arguments.device == "cuda" and len(names) > 1
    rows = _in_processes(names, arguments) if apart else _here(names, arguments, console)
    if arguments.rows:
        arguments.rows.write_text(json.dumps(rows))
        return
    today = datetime.date.today().isoformat()
    folder = arguments.results or ROOT / f"benchmarks/results/{today}-{arguments.device}-budget"
    folder.mkdir(parents=True, exist_ok=True)
    missing = [name for name in names if all(row["model"] != name for row in rows)]
    found = [*complaints(rows), *missing]
    save(folder, {"machine": machine.describe(), "budget": rows}, console)
    raise SystemExit(1 if found else 0)


def _here(names: Sequence[str], arguments: argparse.Namespace, console: Console) -> list[Row]:
    def told(row: Row) -> None:
        console.print(row)
        console.file.flush()

    rows: list[Row] = []
    points = range(arguments.first, arguments.points)
    for name in names:
        rows += sweep(name, points, arguments.device, SIZES[arguments.device], told)
    return rows


def _in_processes(names: Sequence[str], arguments: argparse.Namespace) -> list[Row]:
    """Each model in a process of its own, all at once, their rows printed as they come."""
    common = ["--device", arguments.device, "--points", str(arguments.points)]
    common += ["--first", str(arguments.first)]
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{name}.json" for name in names]
        command = [sys.executable, "-m", "benchmarks.budget", *common]
        running = [
            subprocess.Popen([*command, "--only", name, "--rows", str(file)], cwd=ROOT)
            for name, file in zip(names, files, strict=True)
        ]
        failed = [name for name, job in zip(names, running, strict=True) if job.wait() != 0]
        if failed:
            print(f"failed: {', '.join(failed)}", flush=True)
        return [row for file in files if file.exists() for row in json.loads(file.read_text())]


def save(folder: Path, document: Row, console: Console) -> None:
    """The table, on the console and in a file, the rows as CSV and JSON, and a chart."""
    rows = document["budget"]
    with (folder / "tables.txt").open("w") as file:
        for out in (console, Console(file=file, width=120)):
            out.print("\n".join(f"{k}: {v}" for k, v in document["machine"].items()), markup=False)
            out.print(table(rows))
            for line in complaints(rows) or [KEPT]:
                out.print(line)
    write_csv(folder / "budget.csv", rows)
    (folder / "results.json").write_text(json.dumps(document, indent=1) + "\n")
    draw(rows, folder / "chart.png")


if __name__ == "__main__":
    main()
