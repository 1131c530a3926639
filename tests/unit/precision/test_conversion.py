"""Which layers run in FP8, the reasons for the others, and the state that delayed scaling keeps."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import perfuse
from perfuse.precision import LayerRules, Recipe, Scaling, prepare, without_fp8_state
from perfuse.precision.recipe import PRECISIONS, RECIPES, precision_of, recipe_of

RULES = LayerRules(min_features=16, keeps_head=False)
DELAYED = Recipe(Scaling.DELAYED, layers=RULES, history_length=4)
STATE = ("fp8_amax_history", "fp8_gradient_amax_history")


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(256, 768)
        self.bias_net = nn.Linear(256, 8)
        self.odd = nn.Linear(256, 300)
        self.router = nn.Linear(256, 256)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(512, 256)
        self.attention = Attention()
        self.double = nn.Linear(256, 256, dtype=torch.float64)
        self.tied = nn.Linear(256, 512, bias=False)
        self.tied.weight = self.embed.weight
        self.head = nn.Linear(256, 512)


def reasons(model: nn.Module, recipe: str | Recipe) -> dict[str, str | None]:
    return {layer.name: layer.reason for layer in prepare(model, recipe).layers}


def test_layers_are_left_alone_by_rule() -> None:
    assert reasons(Model(), "row") == {
        "attention.qkv": None,
        "attention.bias_net": "fewer than 256 features",
        "attention.odd": "features are not a multiple of 16",
        "attention.router": "named like '*router'",
        "double": "weight in torch.float64",
        "tied": "shares its weight with an embedding",
        "head": "last layer of the model",
    }


def test_a_part_of_a_model_has_no_head() -> None:
    block = nn.ModuleDict({"mlp": nn.Sequential(nn.Linear(256, 512), nn.Linear(512, 256))})
    assert reasons(block, "tensor") == {"mlp.0": None, "mlp.1": None}
    assert reasons(nn.Linear(256, 256), "tensor") == {"": None}


def test_blocks_need_whole_blocks() -> None:
    layer = nn.Sequential(nn.Linear(256, 320))
    assert reasons(layer, "row") == {"0": None}
    assert reasons(layer, "block") == {"0": "features are not a multiple of 128"}


def test_users_have_rules() -> None:
    rules = LayerRules(names=("*odd",), accepts=lambda name, _: not name.endswith("qkv"))
    found = reasons(Model(), Recipe(Scaling.ROW, layers=rules))
    assert found["attention.odd"] == "named like '*odd'"
    assert found["attention.qkv"] == "excluded by your rule"
    assert found["attention.router"] is None


def test_a_conversion_prints_itself() -> None:
    made = prepare(Model(), "row")
    assert made.num_converted == 1
    assert made.reasons["last layer of the model"] == 1
    lines = str(made).splitlines()
    assert lines[0] == "fp8-row: 1 of 7 linear layers, the rest in torch.bfloat16"
    assert "  attention.qkv: 256 -> 768, FP8" in lines
    assert "  head: 256 -> 512, last layer of the model" in lines


def test_nothing_of_a_model_changes() -> None:
    model = Model()
    names, kinds = list(model.state_dict()), [type(m) for m in model.modules()]
    parameters = dict(model.named_parameters())
    for name in RECIPES:
        prepare(model, name)
    assert [n for n in model.state_dict() if not n.endswith(STATE)] == names
    assert [type(m) for m in model.modules()] == kinds
    now = dict(model.named_parameters())
    assert now.keys() == parameters.keys()
    assert all(now[name] is parameters[name] for name in now)


def test_names() -> None:
    assert list(RECIPES) == ["tensor", "row", "block", "delayed"]
    names = ["bf16", "fp16", "fp8-tensor", "fp8-row", "fp8-block", "fp8-delayed"]
    assert list(PRECISIONS) == names
    assert recipe_of("row").scaling == Scaling.ROW
    assert precision_of("bf16") == torch.bfloat16


def region(*args: Any, **kwargs: Any) -> Any:
    return perfuse.autocast("cpu", *args, **kwargs)


FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("call", "message", "advice"),
    [
        (lambda: region(FP8, recipe="rows"), "unknown recipe 'rows'", "did you mean 'row'"),
        (lambda: region(FP8), "torch.float8_e4m3fn needs a recipe", "recipe=, one of 'tensor'"),
        (lambda: region(torch.float8_e5m2), "float8_e5m2 needs a recipe", "recipe="),
        (lambda: region(recipe="row"), "a recipe is for torch.float8_e4m3fn", "dtype="),
        (lambda: region(torch.bfloat16, recipe="row"), "not for torch.bfloat16", "no recipe"),
        (lambda: region(FP8, recipe="delayed"), "keeps state", "prepare(model, 'delayed')"),
        (lambda: perfuse.compile(nn.Linear(1, 1), precision="fp8"), "unknown precision", "fp8-row"),
        (lambda: perfuse.compile(precision="int4"), "unknown precision 'int4'", "bf16"),
        (lambda: perfuse.compile(torch.sin, precision="fp8-delayed"), "keeps state", "prepare"),
        (lambda: Recipe(Scaling.ROW, dtype=torch.float32), "use torch.float32", "torch.bfloat16"),
        (lambda: Recipe("line"), "unknown recipe 'line'", "choose one of"),  # type: ignore[arg-type]
        (lambda: Recipe(Scaling.ROW, history_length=0), "less than 1", "16"),
        (lambda: prepare(torch.sin, "row"), "only a module", "perfuse.autocast"),  # type: ignore[arg-type]
    ],
)
def test_mistakes_are_explained(call: Any, message: str, advice: str) -> None:
    with pytest.raises(perfuse.ConfigError) as raised:
        call()
    assert message in str(raised.value) and advice in str(raised.value)


def test_devices_without_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(perfuse.Fp8Unavailable, match="device type 'xpu'"):
        perfuse.autocast("xpu", FP8, recipe="row")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for recipe in ("row", "block"):
        with pytest.raises(perfuse.Fp8Unavailable, match="no CUDA GPU"):
            perfuse.autocast("cuda", FP8, recipe=recipe)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A100")
    with pytest.raises(perfuse.Fp8Unavailable, match=r"A100 \(compute capability 8.0\)") as raised:
        perfuse.autocast("cuda", FP8, recipe="row")
    assert "what to do: NVIDIA GPUs of compute capability 8.9" in str(raised.value)


@pytest.fixture
def trained() -> nn.Module:
    """A model after two steps with delayed scaling."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    layers = prepare(model, DELAYED)
    for _ in range(2):
        with perfuse.autocast("cpu", FP8, recipe=layers):
            result = model(torch.randn(8, 16))
        result.float().square().sum().backward()
    return model


@pytest.fixture
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", perfuse.Fp8StateWarning)
        yield


def fresh(recipe: Recipe | None) -> nn.Module:
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    if recipe is not None:
        prepare(model, recipe)
    return model


def history(model: nn.Module, layer: str = "0") -> Tensor:
    return model.state_dict()[f"{layer}.fp8_amax_history"]


def test_state_is_saved_and_loaded(trained: nn.Module, no_warnings: None) -> None:
    state = trained.state_dict()
    assert [n for n in state if n.startswith("2.")] == [
        *("2.weight", "2.bias", "2.fp8_amax_history", "2.fp8_gradient_amax_history")
    ]
    assert bool((history(trained)[:, :2] > 0).all()) and bool((history(trained)[:, 2:] == 0).all())
    model = fresh(DELAYED)
    model.load_state_dict(state)
    now = model.state_dict()
    assert all(torch.equal(now[name], state[name]) for name in state)


def test_preparing_again_keeps_the_state(trained: nn.Module) -> None:
    before = history(trained)
    prepare(trained, DELAYED)
    assert torch.equal(history(trained), before)
    copied = copy.deepcopy(trained)
    prepare(copied, DELAYED)
    assert torch.equal(history(copied), before)


def test_a_checkpoint_without_state_starts_new(trained: nn.Module) -> None:
    with pytest.warns(perfuse.Fp8StateWarning, match="no FP8 history"):
        trained.load_state_dict(fresh(None).state_dict())
    assert not history(trained).any()
    other = Recipe(Scaling.DELAYED, layers=RULES, history_length=8)
    with pytest.warns(perfuse.Fp8StateWarning, match="of this length for '0'"):
        trained.load_state_dict(fresh(other).state_dict())


def test_state_is_dropped_where_there_is_no_use_for_it(trained: nn.Module) -> None:
    model = fresh(Recipe(Scaling.ROW, layers=RULES))
    with pytest.warns(perfuse.Fp8StateWarning, match="4 FP8 histories of the checkpoint"):
        model.load_state_dict(trained.state_dict())
    assert torch.equal(model[0].weight, trained[0].weight)  # type: ignore[index]


def test_state_can_be_left_out(trained: nn.Module) -> None:
    plain = fresh(None)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*fp8_amax_history"):
        plain.load_state_dict(trained.state_dict())
    plain.load_state_dict(without_fp8_state(trained.state_dict()))
