"""`perfuse artefact`: compile, inspect, verify and sign the output of `aot_compile`."""

import importlib
import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from perfuse.cli_function import ARGUMENTS, FUNCTION, fail, found_call

app = typer.Typer(help="Functions compiled ahead of time.", no_args_is_help=True)
console = Console()


@app.command("compile")
def compile_function(
    function: Annotated[str, FUNCTION],
    out: Annotated[Path, typer.Option(help="Folder to write; an artefact there is replaced.")],
    arguments: Annotated[str, ARGUMENTS] = "example_args",
    dynamic: Annotated[bool, typer.Option(help="Accept arguments of other sizes too.")] = False,
    training: Annotated[bool, typer.Option(help="Compile the backward too.")] = False,
    native: Annotated[bool, typer.Option(help="Add what a C++ program needs to run it.")] = False,
    sign_with: Annotated[Path | None, typer.Option(help="File of an Ed25519 private key.")] = None,
) -> None:
    """Compile a function into a folder that `perfuse.load` runs without tracing or compiling."""
    aot = importlib.import_module("perfuse.api").aot_compile
    fn, given = found_call(function, arguments)
    how = {"dynamic": dynamic, "training": training, "native": native, "sign_with": sign_with}
    made = aot(fn, given, out, **how)
    console.print(f"written: {made}", soft_wrap=True)


@app.command()
def info(
    path: Path,
    trusted_key: Annotated[
        list[Path] | None, typer.Option(help="File of an Ed25519 public key; may be repeated.")
    ] = None,
) -> None:
    """Show what an artefact accepts, without running it; with keys, check its signature."""
    package = importlib.import_module("perfuse.runtime.package")
    artefact = importlib.import_module("perfuse.runtime.artefact")
    read = package.read_package(path, trusted_key or None)
    about = read.about
    size = sum(len(data) for data in read.files.values())
    console.print(f"{path}: {len(read.files)} files, {size / 2**20:.1f} MiB", soft_wrap=True)
    machine = " ".join(filter(None, (str(about.get("isa")), str(about.get("gpu") or ""))))
    console.print(f"perfuse {about.get('perfuse')}, torch {about.get('torch')}, for {machine}")
    for line in artefact.described(read.files):
        console.print(f"  {line}", soft_wrap=True, highlight=False, markup=False)
    signed = "by a trusted key" if trusted_key else "not checked (--trusted-key)"
    console.print(f"signature: {signed}")


@app.command()
def keygen(
    out: Annotated[
        Path, typer.Argument(help="File of the private key; .pub is added for the public one.")
    ],
) -> None:
    """Create a pair of Ed25519 keys to sign artefacts with."""
    signing = importlib.import_module("perfuse.runtime.signing")
    if not out.name:
        fail(f"{out} is a folder: name a file in it")
    private, public = signing.new_key_pair()
    public_file = out.with_name(out.name + signing.PUBLIC)
    for file in (out, public_file):
        if file.exists():
            fail(f"{file} already exists and is not overwritten")
    for file, key, mode in ((out, private, 0o600), (public_file, public, 0o644)):
        try:
            with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as opened:
                opened.write(key.hex() + "\n")
        except OSError as error:
            fail(f"{file} cannot be written: {error.strerror}; choose another path")
    console.print(f"private key: {out} (keep it to yourself)", soft_wrap=True)
    console.print(f"public key:  {public_file}", soft_wrap=True)
