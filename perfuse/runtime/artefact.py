"""Artefacts: a program compiled ahead of time, in a folder, run without tracing anything.

    manifest.json      versions, instruction set, size and checksum of every file
    artefact.json      arguments, results, and which tensor goes where
    program.json       the host program        constants.bin   tensors it holds
    parameters.bin     what the model holds    library.so      the kernels
    bundle.json        for a GPU, what a launch must know of each kernel; the code is in code*.bin

Loading an artefact runs the code in it, as loading any library does: load those you trust. The
checksums tell damage, not malice.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from perfuse import config
from perfuse.build.bundle import read_bundle
from perfuse.context import Context
from perfuse.errors import ArtefactError, CacheDamaged
from perfuse.gpu import gpu_of_device
from perfuse.runtime.executable import Call, bind
from perfuse.runtime.gpu import bind_gpu
from perfuse.runtime.launch import launcher_of
from perfuse.runtime.layout import with_strides
from perfuse.runtime.saved import SavedProgram, read_program, unpack_tensors
from perfuse.runtime.tree import collect, rebuild
from perfuse.target import machine_isas
from perfuse.version import VERSION

FORMAT = 1
MANIFEST, ARTEFACT = "manifest.json", "artefact.json"
PARAMETERS, LIBRARY = "parameters.bin", "library.so"


def write_artefact(path: Path, files: Mapping[str, bytes], isa: str, gpu: str = "") -> None:
    """Write the files with their manifest: beside, then renamed, so that it is whole or not."""
    rows = {
        name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for name, data in files.items()
    }
    versions = {"format": FORMAT, "perfuse": VERSION, "torch": _torch_series()}
    manifest = {**versions, "isa": isa, "gpu": gpu}
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    try:
        for name, data in files.items():
            (aside / name).write_bytes(data)
        (aside / MANIFEST).write_text(json.dumps({**manifest, "files": rows}, indent=1) + "\n")
        if (path / MANIFEST).exists():
            shutil.rmtree(path)
        os.rename(aside, path)
    except OSError as error:
        raise ArtefactError(f"cannot write the artefact: {error}", at=str(path)) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _torch_series() -> str:
    return ".".join(torch.__version__.split(".")[:2])


@dataclass(frozen=True, slots=True)
class TensorRow:
    """What one tensor argument must look like."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    device: str
    is_written: bool

    def checked(self, tensor: torch.Tensor, where: str) -> torch.Tensor:
        """The tensor, laid out as the program wants it; ArtefactError where it is another."""
        dtype = str(tensor.dtype).removeprefix("torch.")
        given = (dtype, tuple(tensor.shape), str(tensor.device))
        if given != (self.dtype, self.shape, self.device):
            raise ArtefactError(
                f"{where} is {dtype}{list(tensor.shape)} on {tensor.device}, but the artefact "
                f"was compiled for {self.dtype}{list(self.shape)} on {self.device}",
                hint="give it such a tensor, or compile another artefact for this one.",
            )
        laid = with_strides(tensor, self.strides)
        if laid is not tensor and self.is_written:
            raise ArtefactError(
                f"{where} is written to and has strides {tensor.stride()}, not {self.strides}",
                hint="give it a tensor with these strides.",
            )
        return laid


class Loaded:
    """An artefact that can be called like the function it was compiled from."""

    def __init__(self, call: Call, document: dict[str, Any], held: dict[str, Any]) -> None:
        self._call = call
        self._held = held
        self._arguments = document["arguments"]
        self._results = document["results"]
        self._places: list[list[Any]] = document["inputs"]
        self._rows = [
            TensorRow(
                r["dtype"], tuple(r["shape"]), tuple(r["strides"]), r["device"], r["is_written"]
            )
            for r in document["tensors"]
        ]
        self.name: str = document["name"]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        found: dict[int, torch.Tensor] = {}
        collect(self._arguments, [list(args), kwargs], found, "arguments")
        tensors = [
            row.checked(found[number], f"tensor argument {number}")
            for number, row in enumerate(self._rows)
        ]
        inputs = [
            self._held[where] if kind == "held" else tensors[where] for kind, where in self._places
        ]
        with torch.no_grad():
            results = self._call(inputs)
        return rebuild(self._results, [*results, *tensors])

    def __repr__(self) -> str:
        return f"<artefact of {self.name}, {len(self._rows)} tensor arguments>"


def load(path: str | Path) -> Loaded:
    """Load what `aot_compile` wrote: nothing is traced, generated or compiled."""
    folder = Path(path)
    files = _verified(folder)
    try:
        document = json.loads(files[ARTEFACT])
        saved = read_program(lambda name: files[name])
        held = unpack_tensors(document["held"], files[PARAMETERS])
        return Loaded(_bound(saved, files), document, held)
    except (KeyError, ValueError, TypeError, AttributeError, CacheDamaged) as error:
        raise ArtefactError(f"not an artefact of Perfuse: {error}", at=str(folder)) from error


def _bound(saved: SavedProgram, files: Mapping[str, bytes]) -> Call:
    if saved.host.gpu is None:
        return bind(saved.host, files.get(LIBRARY), saved.constants)
    context = Context.on(torch.device(saved.host.gpu.device), config.snapshot())
    bundle = read_bundle(lambda name: files[name])
    return bind_gpu(saved.host, launcher_of(bundle, context), saved.constants)


def _verified(folder: Path) -> dict[str, bytes]:
    """The files, each as its manifest says; ArtefactError where they are not, or not for here."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        rows = dict(manifest["files"])
        _check_fits(manifest, folder)
        files = {str(name): (folder / _plain_name(name)).read_bytes() for name in rows}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArtefactError(f"not an artefact of Perfuse: {error}", at=str(folder)) from error
    for name, data in files.items():
        if hashlib.sha256(data).hexdigest() != rows[name].get("sha256"):
            raise ArtefactError(
                f"{name} is damaged: it does not have its checksum",
                at=str(folder),
                hint="copy the artefact again, or compile it again.",
            )
    return files


def _plain_name(name: str) -> str:
    if Path(name).name != name:
        raise ValueError(f"{name!r} is no file of an artefact")
    return name


def _check_fits(manifest: dict[str, Any], folder: Path) -> None:
    here = {"format": FORMAT, "perfuse": VERSION, "torch": _torch_series()}
    for what, mine in here.items():
        if manifest.get(what) != mine:
            raise ArtefactError(
                f"compiled with {what} {manifest.get(what)}, this is {what} {mine}", at=str(folder)
            )
    if manifest.get("isa") not in machine_isas():
        raise ArtefactError(
            f"compiled for {manifest.get('isa')}, which this CPU does not have "
            f"(it has {', '.join(machine_isas())})",
            at=str(folder),
            hint="compile it again here, or there with cpu.simd set to what both CPUs have.",
        )
    wanted = manifest.get("gpu", "")
    here_gpus = {gpu_of_device(k).arch for k in range(torch.cuda.device_count())}
    if wanted and wanted not in here_gpus:
        found = ", ".join(sorted(here_gpus)) or "no GPU"
        raise ArtefactError(
            f"compiled for the GPU {wanted}; this machine has {found}",
            at=str(folder),
            hint="compile it again here.",
        )
