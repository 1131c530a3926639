"""Artefacts: compiled ahead of time, loaded, checked, and refused where they do not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import perfuse


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(6, 4)
        self.norm = torch.nn.BatchNorm1d(4)

    def forward(self, batch: dict[str, Tensor], scale: float = 1.0) -> Any:
        hidden = self.norm(self.linear(batch["x"]) * scale)
        return {"hidden": hidden, "pair": (hidden.sum(), [hidden.argmax(-1), None, 3])}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Model, dict[str, Tensor]]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, batch = Model().eval(), {"x": torch.randn(5, 6)}
    path = tmp_path_factory.mktemp("artefacts") / "model"
    assert perfuse.aot_compile(model, (batch,), path=path, kwargs={"scale": 2.0}) == path
    return path, model, batch


def test_runs_like_the_model(made: tuple[Path, Model, dict[str, Tensor]]) -> None:
    path, model, batch = made
    got, want = perfuse.load(path)(batch, scale=2.0), model(batch, scale=2.0)
    assert torch.allclose(got["hidden"], want["hidden"], atol=1e-6)
    assert torch.allclose(got["pair"][0], want["pair"][0], atol=1e-5)
    assert torch.equal(got["pair"][1][0], want["pair"][1][0])
    assert got["pair"][1][1:] == [None, 3]
    assert not got["hidden"].requires_grad


def test_other_strides_are_taken(made: tuple[Path, Model, dict[str, Tensor]]) -> None:
    path, model, batch = made
    turned = {"x": batch["x"].t().contiguous().t()}
    got, want = perfuse.load(path)(turned, scale=2.0), model(batch, scale=2.0)
    assert torch.allclose(got["hidden"], want["hidden"], atol=1e-6)


@pytest.mark.parametrize(
    ("batch", "scale", "words"),
    [
        ({"x": torch.randn(4, 6)}, 2.0, r"float32\[4, 6\]"),
        ({"x": torch.randn(5, 6).double()}, 2.0, "float64"),
        ({"y": torch.randn(5, 6)}, 2.0, "keys"),
        ({"x": torch.randn(5, 6)}, 3.0, "2.0"),
        (torch.randn(5, 6), 2.0, "dictionary"),
    ],
)
def test_other_arguments_are_refused(
    made: tuple[Path, Model, dict[str, Tensor]], batch: Any, scale: float, words: str
) -> None:
    with pytest.raises(perfuse.ArtefactError, match=words):
        perfuse.load(made[0])(batch, scale=scale)


def test_wrong_counts_and_a_bare_argument_are_named(
    made: tuple[Path, Model, dict[str, Tensor]],
) -> None:
    with pytest.raises(perfuse.ArtefactError, match="for 1 items, not for 0"):
        perfuse.load(made[0])(scale=2.0)
    with pytest.raises(perfuse.ArtefactError, match=r"in a tuple, not as a Tensor"):
        perfuse.aot_compile(torch.sin, torch.randn(3))


def copy_of(path: Path, folder: Path) -> Path:
    folder.mkdir()
    for file in path.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.mark.parametrize("name", ["library.so", "program.json", "parameters.bin", "manifest.json"])
def test_damage_is_noticed(
    made: tuple[Path, Model, dict[str, Tensor]], tmp_path: Path, name: str
) -> None:
    damaged = copy_of(made[0], tmp_path / "damaged") / name
    damaged.write_bytes(damaged.read_bytes()[:-7])
    with pytest.raises(perfuse.ArtefactError, match=r"damaged|not an artefact"):
        perfuse.load(damaged.parent)


@pytest.mark.parametrize(
    ("what", "value"), [("isa", "sve9"), ("perfuse", "0.0.1"), ("torch", "1.13"), ("format", 99)]
)
def test_another_machine_or_version_is_refused(
    made: tuple[Path, Model, dict[str, Tensor]], tmp_path: Path, what: str, value: Any
) -> None:
    manifest = copy_of(made[0], tmp_path / "other") / "manifest.json"
    document = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**document, what: value}))
    with pytest.raises(perfuse.ArtefactError, match="compil"):
        perfuse.load(manifest.parent)


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(perfuse.ArtefactError, match="not an artefact"):
        perfuse.load(tmp_path / "nowhere")


def test_views_of_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="views"):
        perfuse.aot_compile(lambda x: x.t(), (torch.randn(3, 4),), path=tmp_path / "a")
