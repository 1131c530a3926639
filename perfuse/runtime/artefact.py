"""Artefacts: functions compiled ahead of time, in a folder, run without tracing or compiling.

    manifest.json, signature.json    see `package.py`
    artefact.json      the variants: arguments, results, which tensor goes where, assumed sizes
    parameters.bin     what the function holds: parameters, buffers, tensors it closes over
    K-program.json     the host program of graph K       K-constants.bin   tensors it holds
    K-library.so       its kernels for a CPU             K-bundle.json, K-code*.bin   for a GPU
    launcher.so        for a GPU, passes launches to the driver
    K-ckN.so           host calls of graph K

Loading an artefact runs the code in it, as loading any library does: load only those you trust.
Checksums detect damage; a signature, checked against `trusted_keys`, identifies the author.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from perfuse import config
from perfuse.build.bundle import read_bundle
from perfuse.codegen.triton.sources import unit_name
from perfuse.context import Context
from perfuse.errors import ArtefactError, CacheDamaged, LibraryDamaged
from perfuse.gpu import gpu_of_device
from perfuse.runtime.bind_cpu import bind
from perfuse.runtime.bind_gpu import bind_gpu, launcher_of
from perfuse.runtime.host_library import HostLibrary
from perfuse.runtime.host_names import Call
from perfuse.runtime.package import not_an_artefact, read_package
from perfuse.runtime.saved import number_functions, read_program, unpack_tensors
from perfuse.runtime.signing import Key
from perfuse.runtime.variant import Variant
from perfuse.runtime.wrapper import facts_from, wrap
from perfuse.target import machine_isas
from perfuse.version import VERSION

FORMAT = 2
ARTEFACT, PARAMETERS = "artefact.json", "parameters.bin"
MOST_GUARDS = 12  # shown for a variant
LIBRARY, LAUNCHER = "library.so", "launcher.so"


def about_here(isa: str, gpu: str) -> dict[str, Any]:
    """The versions and the machine that an artefact is compiled for, as its manifest has them."""
    return {**_versions(), "isa": isa, "gpu": gpu}


def _versions() -> dict[str, Any]:
    series = ".".join(torch.__version__.split(".")[:2])
    return {"format": FORMAT, "perfuse": VERSION, "torch": series}


class Loaded:
    """An artefact that can be called like the function it was compiled from."""

    def __init__(self, name: str, variants: Sequence[Variant], held: Mapping[str, Any]) -> None:
        self.name = name
        self.variants = tuple(variants)
        self._held = dict(held)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        refusals: list[ArtefactError] = []
        for variant in self._in_order():
            try:
                inputs = variant.inputs_of(args, kwargs)
            except ArtefactError as refusal:
                refusals.append(refusal)
            else:
                return variant(inputs)
        raise self._refusal(refusals)

    def _in_order(self) -> Sequence[Variant]:
        """Variants for training first if gradients are enabled, else those for inference."""
        is_wanted = torch.is_grad_enabled()
        return sorted(self.variants, key=lambda variant: variant.is_training != is_wanted)

    def _refusal(self, refusals: Sequence[ArtefactError]) -> ArtefactError:
        if len(refusals) == 1:
            return refusals[0]
        each = zip(self._in_order(), refusals, strict=True)
        refused = "\n".join(f"  {variant}: {refusal.message}" for variant, refusal in each)
        return ArtefactError(
            f"none of the {len(refusals)} variants accepts these arguments\n{refused}",
            hint="call it with arguments that match a variant, or compile a variant for these.",
        )

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The trainable parameters of the compiled module, by name."""
        return ((name, t) for name, t in self._held.items() if t.requires_grad)

    def parameters(self) -> Iterator[torch.Tensor]:
        """The trainable parameters, as an optimizer takes them."""
        return (tensor for _, tensor in self.named_parameters())

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Every tensor that the artefact holds, by name."""
        return {name: tensor.detach() for name, tensor in self._held.items()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Copy values into the tensors that the artefact holds; all of them must be given."""
        if set(state) != set(self._held):
            differing = sorted(set(state) ^ set(self._held))
            raise ArtefactError(
                f"the state does not match the artefact's tensors: {', '.join(differing[:5])}",
                hint="pass a state_dict() of this artefact.",
            )
        with torch.no_grad():
            for name, tensor in state.items():
                self._held[name].copy_(tensor)

    def __repr__(self) -> str:
        rows = "".join(f"\n  {variant}" for variant in self.variants)
        return f"<artefact of {self.name}{rows}>"


def load(path: str | Path, trusted_keys: Sequence[Key] | None = None) -> Loaded:
    """Load what `aot_compile` wrote: nothing is traced, generated or compiled.

    Code in the artefact runs with your privileges: load only what you trust. With `trusted_keys`
    (Ed25519 public keys), only artefacts signed by one of them are loaded.
    """
    folder = Path(path)
    package = read_package(folder, trusted_keys)
    _check_fits(package.about, folder)
    try:
        document = json.loads(package.files[ARTEFACT])
        held = unpack_tensors(document["held"], package.files[PARAMETERS])
        for row in document["held"]:
            held[row["name"]].requires_grad_(row["requires_grad"])
        variants = [_variant(row, held, package.files) for row in document["variants"]]
        return Loaded(str(document["name"]), variants, held)
    except DAMAGE as error:
        raise not_an_artefact(folder, error) from error


def described(files: Mapping[str, bytes]) -> list[str]:
    """Describe variants and held tensors from the files alone, without running any code."""
    try:
        document = json.loads(files[ARTEFACT])
        rows = [line for row in document["variants"] for line in _described(row)]
        return [f"function: {document['name']}, holds {len(document['held'])} tensors", *rows]
    except DAMAGE as error:
        raise ArtefactError(f"not a Perfuse artefact: {error}") from error


def _described(document: Mapping[str, Any]) -> list[str]:
    variant = Variant(_never, document, {})
    guards = variant.assumptions()
    rest = [f"  ... and {len(guards) - MOST_GUARDS} more"] if len(guards) > MOST_GUARDS else []
    return [str(variant), *(f"  where {guard}" for guard in guards[:MOST_GUARDS]), *rest]


def _never(*_: Any) -> Any:
    raise ArtefactError("this artefact was opened for inspection and cannot run")


DAMAGE = (
    *(KeyError, ValueError, TypeError, AttributeError, SyntaxError, RecursionError),
    *(RuntimeError, CacheDamaged, LibraryDamaged),
)


def _variant(
    document: Mapping[str, Any], held: Mapping[str, Any], files: Mapping[str, bytes]
) -> Variant:
    calls = [_bound(int(number), files) for number in document["graphs"]]
    facts = facts_from(document["facts"])
    backward = partial(calls.__getitem__, 1) if facts.is_training else None
    run = wrap(calls[0], backward, facts)
    return Variant(_without_grad(run) if facts.is_training else run, document, held)


def _without_grad(run: Callable[..., Any]) -> Callable[..., Any]:
    """A training graph that is called under no_grad gives plain results."""

    def call(*inputs: Any) -> Any:
        results = run(*inputs)
        if torch.is_grad_enabled():
            return results
        return [r.detach() if isinstance(r, torch.Tensor) else r for r in results]

    return call


def _bound(number: int, files: Mapping[str, bytes]) -> Call:
    def read(name: str) -> bytes:
        return files[f"{number}-{name}"]

    saved = read_program(read)
    constants = {**saved.constants, **number_functions(saved.host.ops)}
    if saved.host.gpu is None:
        library = files.get(f"{number}-{LIBRARY}")
        return bind(saved.host, library, constants)
    context = Context.on(torch.device(saved.host.gpu.device), config.snapshot())
    names = (unit_name(place) for place in itertools.count())
    units = {}
    for name in itertools.takewhile(lambda name: f"{number}-{name}.so" in files, names):
        units[name] = HostLibrary(name, read(f"{name}.so"))
    launcher = launcher_of(read_bundle(read), context, files.get(LAUNCHER), units)
    return bind_gpu(saved.host, launcher, constants)


def _check_fits(about: Mapping[str, Any], folder: Path) -> None:
    for what, mine in _versions().items():
        if about.get(what) != mine:
            message = f"compiled with {what} {about.get(what)}, this is {what} {mine}"
            raise ArtefactError(message, at=str(folder))
    if about.get("isa") not in machine_isas():
        raise ArtefactError(
            f"compiled for {about.get('isa')}, which this CPU does not have "
            f"(it has {', '.join(machine_isas())})",
            at=str(folder),
            hint="recompile it here, or there with cpu.simd set to what both CPUs support.",
        )
    wanted = about.get("gpu", "")
    here_gpus = {gpu_of_device(k).arch for k in range(torch.cuda.device_count())}
    if wanted and wanted not in here_gpus:
        found = ", ".join(sorted(here_gpus)) or "no GPU"
        message = f"compiled for the GPU {wanted}; this machine has {found}"
        raise ArtefactError(message, at=str(folder), hint="recompile it here.")
