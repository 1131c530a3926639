"""Artefacts: compiled ahead of time, loaded, checked, and refused where they do not fit."""

from __future__ import annotations

import errno
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import perfuse
from perfuse.runtime.package import read_package, write_package
from perfuse.runtime.signing import new_key_pair
from perfuse.system import System, replaced
from tests.behaviour.scripts import finish, start

X3 = torch.linspace(-1, 1, 3)


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


def test_writes_to_overlapping_windows_are_refused(tmp_path: Path) -> None:
    """The artefact would copy each window back over its neighbours."""

    def add_to_row(x: Tensor) -> Tensor:
        x[1].fill_(5)
        return x + 1

    windows = torch.arange(20.0).unfold(0, 6, 2)
    with pytest.raises(perfuse.ArtefactError, match="overlap in memory"):
        perfuse.aot_compile(add_to_row, (windows,), path=tmp_path / "windows")


def test_wrong_counts_and_a_bare_argument_are_named(
    made: tuple[Path, Model, dict[str, Tensor]],
) -> None:
    with pytest.raises(perfuse.ArtefactError, match="for 1 items, got 0"):
        perfuse.load(made[0])(scale=2.0)
    with pytest.raises(perfuse.ArtefactError, match="must be a tuple, got a Tensor"):
        perfuse.aot_compile(torch.sin, torch.randn(3))


def copy_of(path: Path, folder: Path) -> Path:
    folder.mkdir()
    for file in path.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.mark.parametrize(
    "name", ["0-library.so", "0-program.json", "parameters.bin", "manifest.json"]
)
def test_damage_is_noticed(
    made: tuple[Path, Model, dict[str, Tensor]], tmp_path: Path, name: str
) -> None:
    damaged = copy_of(made[0], tmp_path / "damaged") / name
    damaged.write_bytes(damaged.read_bytes()[:-7])
    with pytest.raises(perfuse.ArtefactError, match=r"damaged|not a Perfuse artefact"):
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


@pytest.mark.parametrize(
    "document",
    [b"", b"[]", b"{}", b'{"files": 3}', b"[" * 100_000, b"\xff\xfe", b'{"kind": "cake"}'],
    ids=["empty", "list", "no_fields", "number", "deep", "not_text", "another_kind"],
)
def test_an_odd_manifest_is_refused(
    made: tuple[Path, Model, dict[str, Tensor]], tmp_path: Path, document: bytes
) -> None:
    manifest = copy_of(made[0], tmp_path / "odd") / "manifest.json"
    manifest.write_bytes(document)
    with pytest.raises(perfuse.ArtefactError, match="not a Perfuse artefact"):
        perfuse.load(manifest.parent)


def test_a_path_can_be_compiled_and_loaded_again(tmp_path: Path) -> None:
    """The loader knows a library by its path: a second one there must be another library."""
    path = tmp_path / "hot.perfuse"
    for k in range(3):
        x = torch.randn(3 + k, 4)

        def f(x: Tensor, k: int = k) -> Tensor:
            return (x * 2 + k).cumsum(0)

        loaded = perfuse.load(perfuse.aot_compile(f, (x,), path=path))
        assert torch.allclose(loaded(x), f(x), atol=1e-5)


@pytest.mark.parametrize("name", ["manifest.json", "notes.txt", "manifest.json/inner"])
def test_folders_of_others_are_left_alone(tmp_path: Path, name: str) -> None:
    precious = tmp_path / "mine" / name
    precious.parent.mkdir(parents=True)
    precious.write_text('{"files": {}}')
    with pytest.raises(perfuse.ArtefactError, match="did not write"):
        perfuse.aot_compile(torch.sin, (torch.randn(3),), path=tmp_path / "mine")
    assert precious.read_text() == '{"files": {}}'


def test_an_artefact_with_a_file_of_somebody_is_left_alone(tmp_path: Path) -> None:
    path = perfuse.aot_compile(torch.sin, (torch.randn(3),), path=tmp_path / "a")
    (path / "notes.txt").write_text("mine")
    with pytest.raises(perfuse.ArtefactError, match=r"notes\.txt"):
        perfuse.aot_compile(torch.cos, (torch.randn(3),), path=path)
    assert (path / "notes.txt").read_text() == "mine"
    assert torch.equal(perfuse.load(path)(torch.zeros(3)), torch.zeros(3))


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(perfuse.ArtefactError, match="link"):
        perfuse.aot_compile(torch.sin, (torch.randn(3),), path=tmp_path / "link")
    assert list((tmp_path / "real").iterdir()) == []


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    layers = (torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.LayerNorm(16))
    return torch.nn.Sequential(*layers)


def test_any_size(tmp_path: Path) -> None:
    model = net().eval()
    path = perfuse.aot_compile(model, (torch.randn(6, 8),), path=tmp_path / "a", dynamic=True)
    loaded = perfuse.load(path)
    for n in (2, 5, 33):
        x = torch.randn(n, 8)
        assert torch.allclose(loaded(x), model(x), atol=1e-5)
    with pytest.raises(perfuse.ArtefactError, match=r"\[5, 9\]"):
        loaded(torch.randn(5, 9))
    with pytest.raises(perfuse.ArtefactError, match=">= 2"):  # a size of one is traced as such
        loaded(torch.randn(1, 8))


SQUARE = torch.nn.Linear(8, 8).eval()
FOUR = torch.linspace(0, 1, 4)


@pytest.mark.parametrize(
    ("function", "example", "taken", "refused", "words"),
    [
        (SQUARE, [(8, 8)], [(3, 8)], [(3, 9)], "dimension 1 must be 8"),
        (
            lambda x, y: x.sum(0) * y.sum(0),
            *([(5, 4), (5, 4)], [(5, 3), (6, 3)], [(5, 3), (6, 4)]),
            "dimension 1 must equal dimension 1 of tensor argument 0, which is 3",
        ),
        (lambda x: x @ x, [(5, 5)], [(3, 3)], [(3, 4)], "must equal dimension 0"),
        (lambda x: FOUR + x, [(4, 4)], [(7, 4)], [(4, 7)], "dimension 1 must be 4"),
        (
            lambda x, y: torch.cat([x, x]) * y,
            *([(6,), (12,)], [(5,), (10,)], [(5,), (9,)], "2 \\* s0"),
        ),
        (lambda x, y: x * 2, [(4,), (4,)], [(3,), (0,)], [(1,), (4,)], "s0 >= 2.*dimension 0"),
        (lambda x, y: x * y.shape[0], [(4,), (4, 4)], [(3,), (5, 2)], [(3,), (0, 2)], "s1 >= 2"),
    ],
    ids=["module", "untied", "square", "held", "formula", "unused", "size_only"],
)
def test_sizes_are_as_free_as_the_function_leaves_them(
    tmp_path: Path, function: Any, example: Any, taken: Any, refused: Any, words: str
) -> None:
    """Example sizes that are equal by chance do not tie anything."""
    args = tuple(map(torch.randn, example))
    loaded = perfuse.load(perfuse.aot_compile(function, args, tmp_path / "a", dynamic=True))
    for sizes in (example, taken):
        given = tuple(map(torch.randn, sizes))
        torch.testing.assert_close(loaded(*given), function(*given).detach())
    with pytest.raises(perfuse.ArtefactError, match=words):
        loaded(*map(torch.randn, refused))


def test_a_small_size_names_the_way_out(tmp_path: Path) -> None:
    def double(x: Tensor) -> Tensor:
        return x * 2

    args = (torch.randn(5),)
    small = [(torch.randn(1),), (torch.randn(0),)]
    path = perfuse.aot_compile(double, args, tmp_path / "a", dynamic=True)
    with pytest.raises(perfuse.ArtefactError, match=r"variants=\[") as caught:
        perfuse.load(path)(torch.randn(1))
    assert "sizes 0 and 1" in str(caught.value)
    path = perfuse.aot_compile(double, args, tmp_path / "a", dynamic=True, variants=small)
    for n in (0, 1, 9):
        x = torch.randn(n)
        assert torch.equal(perfuse.load(path)(x), x * 2)


@pytest.mark.parametrize("is_dynamic", [False, True])
def test_equal_example_tensors_are_different_arguments(tmp_path: Path, is_dynamic: bool) -> None:
    def mix(a: Tensor, b: Tensor) -> Tensor:
        return SQUARE(a) * 2 + b

    both = (SQUARE.weight, SQUARE.weight)  # one tensor, and a parameter besides
    loaded = perfuse.load(perfuse.aot_compile(mix, both, tmp_path / "a", dynamic=is_dynamic))
    given = (torch.randn(8, 8), torch.randn(8, 8))
    torch.testing.assert_close(loaded(*given), mix(*given).detach())


def test_a_slice_as_an_example_fixes_no_strides(tmp_path: Path) -> None:
    def function(x: Tensor) -> Tensor:
        return x.sin() + 1

    example = (torch.randn(5, 9)[:, :4],)
    loaded = perfuse.load(perfuse.aot_compile(function, example, tmp_path / "a", dynamic=True))
    for x in (torch.randn(3, 7), torch.randn(7, 3).t(), torch.randn(6, 20)[::2, 2:5]):
        torch.testing.assert_close(loaded(x), function(x))


def halves(x: Tensor, y: Tensor, steps: int) -> Tensor:
    assert x.shape[0] % 2 == 0
    return x.view(2, -1, x.shape[1]).sum(0)[:, : y.shape[0]] * steps + y


def test_what_tracing_assumed_of_sizes_is_checked(tmp_path: Path) -> None:
    args = (torch.randn(6, 7), torch.randn(5), 3)
    loaded = perfuse.load(perfuse.aot_compile(halves, args, path=tmp_path / "a", dynamic=True))
    for n, m in ((8, 4), (4, 3), (10, 6)):
        given = (torch.randn(n, 7), torch.randn(m), 3)
        assert torch.allclose(loaded(*given), halves(*given))
    for n, m, steps in ((7, 5, 3), (6, 8, 3), (6, 5, 4)):
        with pytest.raises(perfuse.ArtefactError):
            loaded(torch.randn(n, 7), torch.randn(m), steps)


def test_the_variant_that_fits_is_taken(tmp_path: Path) -> None:
    model = net().eval()
    more = [(torch.randn(3, 8),), (torch.randn(2, 2, 8),)]
    path = perfuse.aot_compile(model, (torch.randn(6, 8),), path=tmp_path / "a", variants=more)
    loaded = perfuse.load(path)
    for shape in ((6, 8), (3, 8), (2, 2, 8)):
        x = torch.randn(shape)
        assert torch.allclose(loaded(x), model(x), atol=1e-5)
    with pytest.raises(perfuse.ArtefactError, match="none of the 3 variants"):
        loaded(torch.randn(5, 8))
    assert str(loaded).count("inference") == 3


def test_a_training_step(tmp_path: Path) -> None:
    layers = (torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.BatchNorm1d(16))
    model = torch.nn.Sequential(*layers)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    given = (torch.randn(6, 8, requires_grad=True),)
    path = perfuse.aot_compile(model, given, path=tmp_path / "a", training=True)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), "compiling is not a training step"
    loaded = perfuse.load(path)
    assert {name for name, _ in loaded.named_parameters()} == dict(model.named_parameters()).keys()
    rivals = [(f, torch.optim.SGD(f.parameters(), lr=0.1)) for f in (model, loaded)]
    for _ in range(3):
        x = torch.randn(6, 8)
        losses, gradients = [], []
        for f, optimiser in rivals:
            leaf = x.clone().requires_grad_()
            losses.append(f(leaf).square().sum())
            optimiser.zero_grad()
            losses[-1].backward()
            optimiser.step()
            gradients.append(leaf.grad)
        torch.testing.assert_close(losses[1], losses[0])
        torch.testing.assert_close(gradients[1], gradients[0], atol=1e-4, rtol=1e-4)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], tensor, atol=1e-5, rtol=1e-4)
    with torch.no_grad():
        assert not loaded(given[0]).requires_grad


def test_a_gradient_that_was_not_compiled_is_refused(tmp_path: Path) -> None:
    model, x = torch.nn.Linear(3, 2), torch.randn(4, 3)
    loaded = perfuse.load(perfuse.aot_compile(model, (x,), path=tmp_path / "a", training=True))
    loaded(x).sum().backward()
    with pytest.raises(perfuse.ArtefactError, match="without one"):
        loaded(x.requires_grad_())


def test_gradients_are_not_lost_silently(tmp_path: Path) -> None:
    """Parameters require gradients and that is no reason to refuse; an argument is."""
    model, x = torch.nn.Linear(3, 2), torch.randn(4, 3)
    loaded = perfuse.load(perfuse.aot_compile(model, (x,), tmp_path / "a"))
    want = model(x).detach()
    torch.testing.assert_close(loaded(x), want)
    x.requires_grad_()
    with pytest.raises(perfuse.ArtefactError, match="argument 0 requires a gradient") as caught:
        loaded(x)
    assert "training=True" in str(caught.value) and "no_grad" in str(caught.value)
    with torch.no_grad():
        torch.testing.assert_close(loaded(x), want)
    with torch.inference_mode():
        torch.testing.assert_close(loaded(x), want)
    torch.testing.assert_close(loaded(x.detach()), want)


def breaks(x: Tensor) -> Tensor:
    y = x * 2
    print("here")
    return y + 1


def asks_data(x: Tensor) -> Tensor:
    return x * 2 if x.sum() > 0 else x


@pytest.mark.parametrize(("function", "line"), [(breaks, "print("), (asks_data, "x.sum() > 0")])
def test_a_graph_break_names_the_line(tmp_path: Path, function: Any, line: str) -> None:
    with pytest.raises(perfuse.ArtefactError, match="one graph") as caught:
        perfuse.aot_compile(function, (torch.randn(3),), tmp_path / "a")
    told = str(caught.value)
    assert "test_artefact.py:" in told and line in told and "what to do:" in told
    assert len(told.splitlines()) <= 5


def never(x: Tensor) -> Tensor:
    raise AssertionError("nothing is captured before keys and paths are checked")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"sign_with": object()}, "not an Ed25519 key"),
        ({"sign_with": "keys/release.pub"}, "is a public key"),
        ({"sign_with": b"short"}, "Ed25519"),
        ({"sign_with": Path("/nowhere/key")}, "cannot read a key"),
        ({"path": Path(__file__) / "a"}, "not a folder"),
    ],
    ids=["kind", "public", "length", "missing", "path"],
)
def test_keys_and_paths_are_checked_first(
    tmp_path: Path, changed: dict[str, Any], words: str
) -> None:
    with pytest.raises(perfuse.ArtefactError, match=words):
        perfuse.aot_compile(never, (torch.randn(3),), **{"path": tmp_path / "a", **changed})


def test_nothing_to_train_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(perfuse.ArtefactError, match="nothing to train"):
        perfuse.aot_compile(torch.sin, (torch.randn(3),), path=tmp_path / "a", training=True)


def bump(x: Tensor, y: Tensor) -> Tensor:
    x.add_(1)
    return x * y


def test_written_arguments(tmp_path: Path) -> None:
    x, y = torch.randn(4), torch.randn(4)
    kept = x.clone()
    loaded = perfuse.load(perfuse.aot_compile(bump, (x, y), path=tmp_path / "a"))
    assert torch.equal(x, kept), "compiling leaves the example arguments as they were"
    assert torch.allclose(loaded(x, y), (kept + 1) * y)
    assert torch.equal(x, kept + 1)
    with pytest.raises(perfuse.ArtefactError, match="share memory"):
        loaded(x, x)


def test_signatures(tmp_path: Path) -> None:
    (private, public), (_, other) = new_key_pair(), new_key_pair()
    x = torch.randn(3)
    path = perfuse.aot_compile(torch.sin, (x,), path=tmp_path / "a", sign_with=private)
    key_file = tmp_path / "key.pub".rjust(63 - len(str(tmp_path)), "k")  # as long as a key
    key_file.write_text(public.hex() + "\n")
    for trusted in (public, public.hex(), key_file, str(key_file)):
        assert torch.allclose(perfuse.load(path, trusted_keys=[other, trusted])(x), x.sin())
    with pytest.raises(perfuse.ArtefactError, match="none of the trusted keys"):
        perfuse.load(path, trusted_keys=[other])
    with pytest.raises(perfuse.ArtefactError, match="Ed25519"):
        perfuse.load(path, trusted_keys=[b"short"])
    with pytest.raises(perfuse.ArtefactError, match="not an Ed25519 key: object"):
        perfuse.load(path, trusted_keys=[object()])  # type: ignore[list-item]
    with pytest.raises(perfuse.ArtefactError, match="list of keys"):
        perfuse.load(path, trusted_keys=public)  # type: ignore[arg-type]
    manifest = path / "manifest.json"
    manifest.write_bytes(manifest.read_bytes() + b" ")
    with pytest.raises(perfuse.ArtefactError, match="none of the trusted keys"):
        perfuse.load(path, trusted_keys=[public])
    unsigned = perfuse.aot_compile(torch.sin, (x,), path=tmp_path / "b")
    with pytest.raises(perfuse.ArtefactError, match="no signature"):
        perfuse.load(unsigned, trusted_keys=[public])


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(perfuse.ArtefactError, match="does not exist"):
        perfuse.load(tmp_path / "nowhere")


def test_views_of_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(perfuse.ArtefactError, match="views"):
        perfuse.aot_compile(lambda x: x.t(), (torch.randn(3, 4),), path=tmp_path / "a")


class Branches(torch.nn.Module):
    """Saves sizes for the backward, and gives a size as a result."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(8, 12, bias=False)  # before a norm its gradient would be zero
        self.norm = torch.nn.BatchNorm1d(12)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, int]:
        hidden = self.norm(self.up(torch.cat([x, y]))).relu()
        return hidden.cumsum(0) * x.shape[0], x.t() @ y[: x.shape[0]].softmax(0), len(y) * 2


def gradients(function: Any, parameters: Any, given: Any) -> list[Any]:
    leaves = [tensor.clone().requires_grad_() for tensor in given]
    first, second, number = function(*leaves)
    loss = first.square().sum() + second.sin().sum()
    return [first.detach(), second.detach(), number, *torch.autograd.grad(
        loss, [*leaves, *(parameters[name] for name in sorted(parameters))]
    )]  # fmt: skip


def test_training_at_any_size_in_a_new_process(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, kind = Branches().double(), torch.float64
    example = tuple(torch.randn(8, 8, dtype=kind, requires_grad=True) for _ in range(2))
    path = perfuse.aot_compile(model, example, tmp_path / "a", dynamic=True, training=True)
    sizes = ((2, 3), (5, 9), (33, 40))
    cases = [(torch.randn(n, 8, dtype=kind), torch.randn(m, 8, dtype=kind)) for n, m in sizes]
    wanted = [gradients(model, dict(model.named_parameters()), case) for case in cases]
    torch.save((cases, wanted), tmp_path / "wanted.pt")
    finish(start(TRAIN, tmp_path / "cache", str(path), str(tmp_path / "wanted.pt")))


TRAIN = """
import sys, torch, perfuse
from tests.behaviour.test_artefact import gradients

cases, wanted = torch.load(sys.argv[2])
loaded = perfuse.load(sys.argv[1])
for case, want in zip(cases, wanted, strict=True):
    got = gradients(loaded, dict(loaded.named_parameters()), case)
    torch.testing.assert_close(got, want)
assert not perfuse.counters.snapshot().get("capture.traced")
print("{}")
"""


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x * 2, x.shape[0]),
        lambda x: {"y": x * 2, "n": [x.shape[0] * 2 + 1, 3]},
        lambda x: (x * 2, tuple(x.size())),
        lambda x: (x * 2, list(x.shape), x.numel(), x.stride(0)),
    ],
    ids=["size", "formula", "tuple", "list"],
)
def test_sizes_as_results_are_those_of_the_call(tmp_path: Path, function: Any) -> None:
    args = (torch.randn(5, 4),)
    loaded = perfuse.load(perfuse.aot_compile(function, args, tmp_path / "a", dynamic=True))
    x = torch.randn(7, 3)
    torch.testing.assert_close(loaded(x), function(x))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x * 2, x.shape),
        lambda x: (x * 2, x.shape[0] / 2),
        lambda x: (x * 2, x.shape[0] > 3),
    ],
    ids=["shape", "float", "bool"],
)
def test_numbers_that_would_be_constants_are_refused(tmp_path: Path, function: Any) -> None:
    with pytest.raises(perfuse.ArtefactError, match="a result is"):
        perfuse.aot_compile(function, (torch.randn(5, 4),), tmp_path / "a", dynamic=True)


class Writes(torch.nn.Module):
    """Writes to its argument, its buffer and its parameter, then indexes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("buffer", torch.zeros(4))
        self.weight = torch.nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        x.add_(1)
        self.get_buffer("buffer").mul_(2).add_(torch.rand(4))
        with torch.no_grad():
            self.weight.sub_(1)
        return (x * self.weight + self.get_buffer("buffer"))[at]


@pytest.mark.parametrize("is_training", [False, True])
def test_tensors_are_put_back_when_the_run_raises(tmp_path: Path, is_training: bool) -> None:
    model, x = Writes(), torch.randn(4)
    kept = [tensor.clone() for tensor in (x, *model.state_dict().values())]
    state = torch.get_rng_state()
    with pytest.raises(IndexError):
        given = (x, torch.tensor([9]))
        perfuse.aot_compile(model, given, path=tmp_path / "a", training=is_training)
    for now, before in zip((x, *model.state_dict().values()), kept, strict=True):
        assert torch.equal(now, before)
    assert torch.equal(torch.get_rng_state(), state)


OUTSIDE = torch.full((3,), 5.0)


class OddNames(torch.nn.Module):
    """Parameters with the names that tensors without one are given."""

    def __init__(self) -> None:
        super().__init__()
        self.p0 = torch.nn.Parameter(torch.full((3,), 2.0))
        self.p1 = torch.nn.Parameter(torch.full((3,), 3.0))

    def forward(self, x: Tensor) -> Tensor:
        return (x + OUTSIDE) * self.p0 + self.p1


def test_tensors_without_a_name_take_no_others(tmp_path: Path) -> None:
    model, x = OddNames(), torch.randn(3)
    loaded = perfuse.load(perfuse.aot_compile(model, (x,), path=tmp_path / "a"))
    torch.testing.assert_close(loaded(x), model(x))
    assert {"p0", "p1"} <= set(loaded.state_dict())


@pytest.mark.parametrize("can_exchange", [True, False])
def test_there_is_always_an_artefact(tmp_path: Path, can_exchange: bool) -> None:
    """Looked for after each operation; where names cannot be exchanged, missing once."""

    class Watching(System):
        missing = 0

        def exchange(self, one: str | Path, other: str | Path) -> None:
            if not can_exchange:
                raise OSError(errno.ENOSYS, "cannot")
            super().exchange(one, other)
            self.missing += not (path / "manifest.json").exists()

        def rename(self, *args: Any) -> None:
            super().rename(*args)
            self.missing += not (path / "manifest.json").exists()

    path = perfuse.aot_compile(lambda x: x + 1, (X3,), path=tmp_path / "a")
    package = read_package(path)
    about = {k: v for k, v in package.about.items() if k not in ("kind", "files")}
    with replaced(Watching()) as watching:
        write_package(path, package.files, about)
    assert isinstance(watching, Watching)
    assert watching.missing == (0 if can_exchange else 1)
    assert os.listdir(tmp_path) == ["a"]
    assert torch.equal(perfuse.load(path)(X3), X3 + 1)


def test_a_path_without_an_artefact_is_named(tmp_path: Path) -> None:
    with pytest.raises(perfuse.ArtefactError, match="does not exist"):
        perfuse.load(tmp_path / "missing.perfuse")


def test_keys_in_another_order_are_shown(tmp_path: Path) -> None:
    """Who iterates over a dictionary depends on the order of its keys."""
    x, y = torch.randn(3), torch.randn(3)
    path = perfuse.aot_compile(lambda d: d["a"] - d["b"], ({"a": x, "b": y},), tmp_path / "d")
    loaded = perfuse.load(path)
    assert torch.equal(loaded({"a": x, "b": y}), x - y)
    with pytest.raises(perfuse.ArtefactError, match=r"keys \['a', 'b'\], got \['b', 'a'\]"):
        loaded({"b": y, "a": x})


def test_autocast_counts_where_it_is_compiled(tmp_path: Path) -> None:
    x = torch.randn(4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        path = perfuse.aot_compile(lambda a: a @ a, (x,), tmp_path / "cast")
    assert perfuse.load(path)(x).dtype is torch.bfloat16


def test_keyword_arguments_are_arguments_of_their_own(tmp_path: Path) -> None:
    """Whatever else the example tensors are: passed twice, parameters, or slices."""
    layer = torch.nn.Linear(3, 3, bias=False)

    def function(*, x: Tensor, y: Tensor) -> Tensor:
        return layer(x) + 2 * y

    example = {"x": layer.weight, "y": layer.weight}
    with torch.no_grad():
        loaded = perfuse.load(perfuse.aot_compile(function, (), tmp_path / "a", example))
        x, y = torch.randn(3, 3, requires_grad=True), torch.randn(3, 3, requires_grad=True)
        torch.testing.assert_close(loaded(x=x, y=y), function(x=x, y=y))
    slices = {"x": torch.randn(4, 6)[:, :3], "y": torch.randn(4, 6)[:, 3:]}
    made = perfuse.aot_compile(function, (), tmp_path / "b", slices, dynamic=True)
    x, y = torch.randn(5, 3), torch.randn(5, 3)
    torch.testing.assert_close(perfuse.load(made)(x=x, y=y), function(x=x, y=y).detach())


class Rebinds(torch.nn.Module):
    """Each call puts a new tensor in the place of its buffer."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        self.calls += 1
        return x * self.count


STATE: dict[str, Any] = {"sum": torch.zeros(3)}


def adds_up(x: Tensor) -> Tensor:
    STATE["sum"] = STATE["sum"] + x
    return STATE["sum"] * 2  # type: ignore[no-any-return]


def summing() -> Callable[[Tensor], Tensor]:
    total = torch.zeros(3)

    def function(x: Tensor) -> Tensor:
        nonlocal total
        total = total + x
        return total * 2

    return function


@pytest.mark.parametrize("make", [Rebinds, lambda: adds_up, summing])
def test_state_that_an_artefact_would_not_keep_is_refused(
    tmp_path: Path, make: Callable[[], Any]
) -> None:
    function = make()
    with pytest.raises(perfuse.ArtefactError, match="another tensor in the place of") as raised:
        perfuse.aot_compile(function, (X3,), tmp_path / "a")
    assert "copy_" in raised.value.hint
    expected = X3 if isinstance(function, Rebinds) else X3 * 2
    torch.testing.assert_close(function(X3), expected)  # as if it had not been called before


def test_a_weight_that_each_call_computes_anew_is_no_state(tmp_path: Path) -> None:
    layer, x = torch.nn.utils.weight_norm(torch.nn.Linear(3, 3)), torch.randn(2, 3)
    loaded = perfuse.load(perfuse.aot_compile(layer, (x,), tmp_path / "a"))
    torch.testing.assert_close(loaded(x), layer(x).detach())


def sets_an_item(x: Tensor, found: dict[str, Tensor]) -> Tensor:
    found["x"] = x * 2
    return x + 1


def appends_a_number(x: Tensor, sizes: list[int]) -> Tensor:
    sizes.append(x.shape[0])
    return x + 1


@pytest.mark.parametrize(
    ("function", "given", "message"),
    [
        (sets_an_item, {}, "changes a list or dictionary"),
        (appends_a_number, [], "changes a list or dictionary"),
        (lambda x, n: {n: x * 2}, 3, "dictionary with the key 3"),
        (lambda x, n: x + random.uniform(1, 2), 3, "Python's random"),
    ],
)
def test_what_an_artefact_cannot_do_is_refused(
    tmp_path: Path, function: Callable[..., Any], given: Any, message: str
) -> None:
    with pytest.raises(perfuse.ArtefactError, match=message) as raised:
        perfuse.aot_compile(function, (X3, given), tmp_path / "a")
    assert "recompile" not in raised.value.hint
