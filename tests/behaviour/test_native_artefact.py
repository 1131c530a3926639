"""Artefacts in C++ programs: built and run here with the example that the README shows."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import perfuse
from perfuse.context import Context

ROOT = Path(__file__).parents[2]
NATIVE, EXAMPLE = ROOT / "perfuse" / "native", ROOT / "examples" / "native"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("native") / "run_model"
    sources = [str(EXAMPLE / "main.cpp"), str(NATIVE / "perfuse.cpp")]
    compiler = Context.default().target.compiler_command()[0]
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-fopenmp", f"-I{NATIVE}"]
    subprocess.run([compiler, *flags, *sources, "-ldl", "-o", str(made)], check=True)
    return made


def given(shape: tuple[int, ...]) -> Tensor:
    """The values that main.cpp fills its argument with."""
    numbers = torch.arange(torch.Size(shape).numel()) % 7 - 3
    return numbers.float().view(shape)


def run(program: Path, path: Path, shape: tuple[int, ...]) -> subprocess.CompletedProcess[str]:
    command = [str(program), str(path), *map(str, shape)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


class Attention(nn.Module):
    """Products of batches, a bias that is broadcast, a constant, two results."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.table = torch.arange(5.0)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = self.qkv(x).tanh().chunk(3, -1)
        mixed = torch.baddbmm(self.table, q, k.transpose(1, 2), beta=0.5, alpha=2.0)
        return torch.bmm(mixed.sigmoid(), v), mixed.amax(-1)


CASES: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "mlp": (
        nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 9)),
        (4, 64),
    ),
    "attention": (Attention(), (3, 5, 16)),
    "kernels_alone": (lambda x: (x.flip(0).cumsum(1), x.softmax(0)), (37, 53)),
    "embedding": (lambda x: x[x[:, 0].abs().long()] * 2, (6, 4)),
}


@pytest.mark.parametrize("name", CASES)
def test_gives_what_eager_gives(program: Path, tmp_path: Path, name: str) -> None:
    fn, shape = CASES[name]
    x = given(shape)
    with torch.no_grad():
        want = fn(x)
    path = perfuse.aot_compile(fn, (x,), path=tmp_path / name, native=True)
    done = run(program, path, shape)
    assert done.returncode == 0, done.stderr
    rows = [line.partition(": ")[2].split() for line in done.stdout.splitlines()]
    results = want if isinstance(want, tuple) else (want,)
    for row, result in zip(rows, results, strict=True):
        got = torch.tensor([float(value) for value in row]).view_as(result)
        torch.testing.assert_close(got, result, rtol=1e-4, atol=1e-4)
    assert perfuse.load(path) is not None


def test_wrong_sizes_damage_and_other_artefacts_are_errors(program: Path, tmp_path: Path) -> None:
    path = perfuse.aot_compile(torch.sin, (given((3, 4)),), path=tmp_path / "a", native=True)
    done = run(program, path, (4, 4))
    assert done.returncode == 1 and "float32[3, 4]" in done.stderr
    (path / "0-library.so").write_bytes((path / "0-library.so").read_bytes()[:-1] + b"x")
    done = run(program, path, (3, 4))
    assert done.returncode == 1 and "0-library.so is damaged" in done.stderr
    plain = perfuse.aot_compile(torch.sin, (given((3, 4)),), path=tmp_path / "b")
    done = run(program, plain, (3, 4))
    assert done.returncode == 1 and "native.txt" in done.stderr


def test_any_damage_of_the_table_is_an_error(program: Path, tmp_path: Path) -> None:
    """The table is the program: a changed number in it would be another result."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.SiLU(), torch.nn.Linear(6, 3))
    path = perfuse.aot_compile(model.eval(), (given((5, 4)),), path=tmp_path / "a", native=True)
    table = path / "native.txt"
    whole = table.read_bytes()
    assert run(program, path, (5, 4)).returncode == 0
    places = range(0, len(whole), 1 + len(whole) // 40)
    for place in places:
        flipped = whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]
        for damaged in (flipped, whole[:place]):
            table.write_bytes(damaged)
            done = run(program, path, (5, 4))
            assert done.returncode == 1 and "native.txt" in done.stderr, (place, done)
    lines = whole.splitlines(keepends=True)
    table.write_bytes(b"".join(lines[:-2] + lines[-1:]))
    assert "native.txt is damaged" in run(program, path, (5, 4)).stderr


@pytest.mark.parametrize(
    ("fn", "more", "words"),
    [
        (lambda x: torch.fft.fft(x).abs(), {}, "fft"),
        (lambda x: x * 2, {"dynamic": True}, "sizes"),
        (lambda x: x.double() @ x.double().t(), {}, "float32"),
        (torch.nn.functional.dropout, {}, "random"),
    ],
    ids=["library_call", "dynamic", "double", "random"],
)
def test_what_needs_pytorch_is_refused_with_the_reason(
    tmp_path: Path, fn: Any, more: dict[str, Any], words: str
) -> None:
    with pytest.raises(perfuse.ArtefactError, match=f"without PyTorch.*{words}"):
        perfuse.aot_compile(fn, (given((8, 8)),), path=tmp_path / "a", native=True, **more)
