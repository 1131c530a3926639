"""Practices around a model: whole programs that compile a part of themselves, as people write them.

Training loops, hooks, checkpoints, parametrizations, torch.func, functions of autograd, signal
processing, simulations, sizes that depend on data. Each is a function of `compile_it`, a module
and inputs, and returns all that it computed. The variant "dynamic" asks for dynamic shapes from
the first call on.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.func import grad as gradient_of
from torch.utils.checkpoint import checkpoint

from tests.sweep.subject import Call, Compile, Subject, accepted, noise, numbers, stirred

Program = Callable[..., Any]
DYNAMIC = {"assume_static_by_default": False}
CAPTURED = {"capture_dynamic_output_shape_ops": True, "capture_scalar_outputs": True}


@dataclass(frozen=True, slots=True)
class Practice:
    program: Program  # of compile_it, the module and the inputs
    inputs: tuple[Any, ...]
    model: Callable[[], nn.Module]


PRACTICES: dict[str, Practice] = {}


def practice(*inputs: Any, model: Callable[[], nn.Module] = nn.Identity) -> Any:
    """Register a program with its inputs, for which shapes stand, and its module."""

    def register(program: Program) -> Program:
        made = tuple(
            noise(*x) + 0.01 * k if isinstance(x, tuple) else x for k, x in enumerate(inputs)
        )
        PRACTICES[program.__name__] = Practice(program, made, model)
        return program

    return register


def names() -> list[str]:
    return list(PRACTICES)


def make(name: str, variant: str) -> Subject:
    found = PRACTICES[name]
    torch.manual_seed(0)
    model = stirred(found.model())

    def run(model: nn.Module, call: Call, compile_it: Compile) -> list[Tensor]:
        torch.manual_seed(0)
        model = copy.deepcopy(model)  # programs change it: the next run gets it as it was
        settings = CAPTURED | (DYNAMIC if variant == "dynamic" else {})
        with torch._dynamo.config.patch(settings):
            results = found.program(compile_it, model, *(copied(x) for x in call[0]))
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        return [x.detach() for x in numbers([results, gradients, list(model.buffers())])]

    return accepted(Subject(model, (found.inputs, {}), run=run, counts_graphs=False))


def copied(x: Any) -> Any:
    """A leaf of its own, which the program may change."""
    return x.detach().clone() if isinstance(x, Tensor) else x


def wanting(*tensors: Tensor) -> list[Tensor]:
    return [x.requires_grad_() for x in tensors]


def backward(*results: Tensor) -> None:
    """Gradients with fixed weights: that of the sum of a normalised result is zero."""
    weights = [torch.arange(r.numel(), dtype=r.dtype).cos().view(r.shape) for r in results]
    torch.autograd.backward(results, weights)


# -- training loops ------------------------------------------------------------------------


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 3))


def trained(
    compile_it: Compile, model: nn.Module, batches: Tensor, optimiser: Any, clip: float = 0.0
) -> list[Any]:
    step, kept = compile_it(lambda x: model(x).square().mean() + model(x)[:, 0].mean()), []
    for count, batch in enumerate(batches):
        loss = step(batch[: 8 - count])
        loss.backward()
        kept.append(loss.detach())
        if count % 2:
            kept += [nn.utils.clip_grad_norm_(model.parameters(), clip)] if clip else []
            optimiser.step()
            optimiser.zero_grad(set_to_none=count % 4 == 1)
    return [kept, list(model.parameters())]


@practice((4, 8, 6), model=mlp)
def accumulated_gradients(compile_it: Compile, model: nn.Module, batches: Tensor) -> Any:
    optimiser = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, nesterov=True)
    return trained(compile_it, model, batches, optimiser, clip=1.0)


@practice((4, 8, 6), model=mlp)
def compiled_update_with_schedule(compile_it: Compile, model: nn.Module, batches: Tensor) -> Any:
    optimiser = torch.optim.SGD(model.parameters(), torch.tensor(0.05), momentum=0.9)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimiser, 0.9)
    update, kept = compile_it(lambda: (optimiser.step(), schedule.step())), []
    for batch in batches:
        optimiser.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        update()
        kept.append(loss.detach())
    return [kept, list(model.parameters())]


@practice((4, 8, 6), model=mlp)
def averaged_weights(compile_it: Compile, model: nn.Module, batches: Tensor) -> Any:
    average = copy.deepcopy(model).requires_grad_(False)

    def blend() -> None:
        for mean, weight in zip(average.parameters(), model.parameters(), strict=True):
            mean.lerp_(weight.detach(), 0.1)

    compiled = compile_it(blend)
    for batch in batches:
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(1 + batch.mean())
        compiled()
    return list(average.parameters())


@practice((3, 2, 3, 6, 6), model=lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)))
def switched_modes(compile_it: Compile, model: nn.Module, batches: Tensor) -> Any:
    compiled, kept = compile_it(model), []
    for is_training, batch in zip((True, False, True), batches, strict=True):
        model.train(is_training)
        kept.append(compiled(batch))
    return kept


@practice((5, 4), model=lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
def mutated_module(compile_it: Compile, model: nn.Module, x: Tensor) -> Any:
    assert isinstance(model, nn.Sequential)
    compiled, kept = compile_it(model), []
    kept.append(compiled(x))
    model[0].weight.data.mul_(2)
    kept.append(compiled(x))
    model[0].weight = nn.Parameter(model[0].weight.detach() * 0.5)
    kept.append(compiled(x))
    model[0].bias = None
    kept.append(compiled(x))
    del model[1]
    return [*kept, compiled(x)]


# -- what surrounds modules -----------------------------------------------------------------


def hooked() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    model[0].register_forward_hook(lambda module, inputs, output: output * 2)
    model[2].register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1,))
    return model


@practice((3, 4), model=hooked)
def forward_and_tensor_hooks(compile_it: Compile, model: nn.Module, x: Tensor) -> Any:
    x.requires_grad_().register_hook(lambda gradient: gradient + 1)
    result = compile_it(model)(x)
    backward(result)
    return result, x.grad


@practice((3, 6), model=mlp)
def checkpointed(compile_it: Compile, model: nn.Module, x: Tensor) -> Any:
    wanting(x)
    result = compile_it(lambda x: checkpoint(model, x, use_reentrant=False) * 2)(x)
    backward(result)
    return result, x.grad


@practice((3, 4), model=lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 5)))
def weight_norm(compile_it: Compile, model: nn.Module, x: Tensor) -> Any:
    result = compile_it(model)(x)
    backward(result)
    return result


@practice((3, 3, 4), model=lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 5)))
def spectral_norm(compile_it: Compile, model: nn.Module, batches: Tensor) -> Any:
    compiled, kept = compile_it(model), []
    for batch in batches:
        kept.append(compiled(batch))
        backward(kept[-1])
    model.eval()
    return [*kept, compiled(batches[0])]


@practice((2, 3, 6, 6), model=lambda: nn.utils.spectral_norm(nn.Conv2d(3, 4, 3)))
def spectral_norm_by_hook(compile_it: Compile, model: nn.Module, x: Tensor) -> Any:
    compiled = compile_it(model)
    kept = [compiled(x), compiled(x)]
    backward(*kept)
    return kept


class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, low: float, high: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.low, ctx.high = low, high
        return x.clamp(low, high)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return gradient * ((x > ctx.low) & (x < ctx.high)) * 2, None, None


@practice((4, 5))
def autograd_function(compile_it: Compile, model: nn.Module, x: Tensor) -> Any:
    wanting(x)
    result = compile_it(lambda x: Clipped.apply(x.exp(), 0.5, 1.5).sum(1))(x)
    backward(result)
    return result, x.grad


@practice((3, 4, 5), (3, 4, 5))
def assigned_data(compile_it: Compile, model: nn.Module, weights: Tensor, steps: Tensor) -> Any:
    def update(weight: Tensor, step: Tensor) -> Tensor:
        weight.data = weight.data - 0.1 * step
        return weight.norm()

    compiled, kept = compile_it(update), list(weights.clone())
    return [compiled(w, s) for w, s in zip(kept, steps, strict=True)], kept


@practice((5, 6), model=mlp)
def exported_program(compile_it: Compile, model: nn.Module, x: Tensor) -> Any:
    rows = {0: torch.export.Dim("rows", min=2)}
    program = torch.export.export(model, (x,), dynamic_shapes=(rows,)).module()
    compiled = compile_it(program)
    kept = [compiled(x), compiled(x[:3])]
    backward(*kept)
    return kept, [p.grad for p in program.parameters()]


# -- torch.func and gradients inside ----------------------------------------------------------


@practice((5, 6), (5, 3), model=mlp)
def gradients_of_samples(compile_it: Compile, model: nn.Module, x: Tensor, y: Tensor) -> Any:
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def loss(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        found: Tensor = functional_call(model, weights, (x[None],))
        return (found - y).square().sum()

    return compile_it(lambda w, x, y: vmap(gradient_of(loss), (None, 0, 0))(w, x, y))(weights, x, y)


@practice((4, 4), (4,))
def jacobians(compile_it: Compile, model: nn.Module, w: Tensor, x: Tensor) -> Any:
    def layer(x: Tensor) -> Tensor:
        return torch.tanh(w @ x) * x.sum()

    def each(x: Tensor) -> Any:
        second = hessian(lambda v: layer(v).sum())(x)
        tangent = jvp(lambda v: v.exp().cumsum(0), (x,), (x.cos(),))
        return jacrev(layer)(x), jacfwd(layer)(x), second, tangent, vjp(layer, x)[1](x.sin())

    return compile_it(each)(x)


@practice((3, 4), (4, 4))
def forces(compile_it: Compile, model: nn.Module, x: Tensor, w: Tensor) -> Any:
    def energy_and_force(x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = (x @ w).tanh().sum()
            (slope,) = torch.autograd.grad(energy, x)
        return energy.detach(), -slope

    return compile_it(energy_and_force)(x)


@practice((3, 4), (4,), (4, 1), (6, 3), (6, 1))
def learned_start(compile_it: Compile, model: nn.Module, *tensors: Tensor) -> Any:
    *weights, x, y = tensors

    def loss(weights: list[Tensor]) -> Tensor:
        return (torch.tanh(x @ weights[0] + weights[1]) @ weights[2] - y).square().mean()

    def adapted(weights: list[Tensor]) -> list[Tensor]:
        return [w - 0.1 * g for w, g in zip(weights, gradient_of(loss)(weights), strict=True)]

    return compile_it(gradient_of(lambda w: loss(adapted(adapted(w)))))(weights)


# -- signals and simulations ------------------------------------------------------------------


@practice((3, 640), (33, 12))
def mel_spectrum(compile_it: Compile, model: nn.Module, x: Tensor, bank: Tensor) -> Any:
    def cepstrum(x: Tensor) -> Tensor:
        window = torch.hamming_window(64, dtype=x.dtype)
        power = torch.stft(x, 64, 32, window=window, return_complex=True).abs().square()
        level = (power.transpose(-1, -2) @ bank.abs()).clamp_min(1e-6).log10()
        level = torch.maximum(level, level.amax((-1, -2), keepdim=True) - 8)
        angle = math.pi / 12 * (torch.arange(12) + 0.5)[:, None] * torch.arange(5)
        return level @ angle.cos().to(x.dtype)

    compiled = compile_it(cepstrum)
    return compiled(x), compiled(x[:2]), compiled(x[:, :480])


@practice((2, 800))
def spectrum_and_back(compile_it: Compile, model: nn.Module, x: Tensor) -> Any:
    def shifted(x: Tensor) -> Tensor:
        window = torch.hann_window(64, dtype=x.dtype)
        s = torch.stft(x, 64, 16, window=window, return_complex=True)
        s = s * torch.polar(torch.ones_like(s.real), s.real * 0.1)
        return torch.istft(s, 64, 16, window=window, length=x.shape[-1])

    wanting(x)
    result = compile_it(shifted)(x)
    backward(result)
    return result, x.grad


@practice((2, 24), (3,))
def biquad(compile_it: Compile, model: nn.Module, x: Tensor, b: Tensor) -> Any:
    def filtered(x: Tensor, b: Tensor) -> Tensor:
        first = second = torch.zeros_like(x[..., 0])
        seen = []
        for sample in x.unbind(-1):
            y = b[0] * sample + first
            first, second = b[1] * sample + 0.2 * y + second, b[2] * sample - 0.1 * y
            seen.append(y)
        return torch.stack(seen, -1)

    wanting(x, b)
    result = compile_it(filtered)(x, b)
    backward(result)
    return result, x.grad, b.grad


@practice((4, 3), (4, 3))
def parts_of_conjugates(compile_it: Compile, model: nn.Module, x: Tensor, y: Tensor) -> Any:
    def parts(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        z = torch.complex(x, y)
        cross = (z.mH @ z).imag.cumsum(0)
        return z.conj().imag.exp().sum(0), cross, torch.cat([z.mT.conj().imag, z.mT.real])

    leaves = wanting(x, y)
    results = compile_it(parts)(*leaves)
    backward(*results)
    return results, [leaf.grad for leaf in leaves]


@practice((2, 3, 50), (3, 7))
def convolution_by_fourier(compile_it: Compile, model: nn.Module, x: Tensor, k: Tensor) -> Any:
    def convolved(x: Tensor, k: Tensor) -> Tensor:
        n = x.shape[-1] + k.shape[-1] - 1
        both = torch.fft.rfft(x, n) * torch.fft.rfft(k, n)
        return torch.fft.irfft(both, n)[..., : x.shape[-1]]

    wanting(x, k)
    result = compile_it(convolved)(x, k)
    backward(result)
    return result, x.grad, k.grad


@practice((8, 8), (8, 8))
def wave_equation(compile_it: Compile, model: nn.Module, u: Tensor, v: Tensor) -> Any:
    def advanced(u: Tensor, v: Tensor, steps: int) -> tuple[Tensor, ...]:
        for _ in range(steps):
            sides = [u.roll(s, d) for s in (1, -1) for d in (0, 1)]
            v = v + 0.1 * (functools.reduce(torch.add, sides) - 4 * u)
            u = u + 0.1 * v
        return u, v, u.square().sum() + v.square().sum()

    compiled = compile_it(advanced)
    return compiled(u, v, 3), compiled(u, v, 4), compiled(u[:6], v[:6], 3)


@practice((7, 3), (7, 3), (7,))
def bodies(compile_it: Compile, model: nn.Module, x: Tensor, v: Tensor, mass: Tensor) -> Any:
    def advanced(x: Tensor, v: Tensor, mass: Tensor) -> tuple[Tensor, Tensor]:
        for _ in range(3):
            apart = x[None] - x[:, None]
            pull = (apart.square().sum(-1) + 0.05).rsqrt() ** 3 * mass.abs()
            v = v + 0.01 * (apart * pull[..., None]).sum(1)
            x = x + 0.01 * v
        return x, v

    compiled, kept = compile_it(advanced), []
    for count in (7, 5, 6):
        leaves = wanting(*(t[:count].clone() for t in (x, v, mass)))
        results = compiled(*leaves)
        backward(*results)
        kept += [results, [leaf.grad for leaf in leaves]]
    return kept


# -- sizes that depend on data ---------------------------------------------------------------


@practice((3, 20))
def halves_of_kept(compile_it: Compile, model: nn.Module, x: Tensor) -> Any:
    def halves(x: Tensor) -> tuple[Tensor, Tensor]:
        kept = x[x > 0]
        half = kept.shape[0] // 2
        return torch.cat([kept[:half].exp(), kept[half:].sin()]), kept / math.sqrt(half + 1)

    compiled, found = compile_it(halves), []
    for row in x:
        (leaf,) = wanting(row.clone())
        results = compiled(leaf)
        backward(*results)
        found += [results, leaf.grad]
    return found


@practice((3, 20))
def padded_groups(compile_it: Compile, model: nn.Module, x: Tensor) -> Any:
    def groups(x: Tensor) -> Tensor:
        above, below = x[x > 0], x[x <= 0]
        longest = max(above.shape[0], below.shape[0])
        rows = [F.pad(t, (0, longest - t.shape[0])) for t in (above, below)]
        return torch.stack(rows).softmax(0)

    compiled, found = compile_it(groups), []
    for row in x:
        (leaf,) = wanting(row.clone())
        found += [compiled(leaf)]
        backward(found[-1])
        found += [leaf.grad]
    return found
