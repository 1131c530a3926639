"""Errors of the interpreter: each names the kernel and the instruction."""

from __future__ import annotations


class Gfx9Error(Exception):
    """Something that a launch cannot go on from."""


class UnknownInstruction(Gfx9Error):
    """An instruction, or a modifier of one, that the interpreter does not have."""


class BadAddress(Gfx9Error):
    """An access outside the arguments of the launch, or outside the memory of the workgroup."""


class KernelFailed(Gfx9Error):
    """A trap, such as an assertion of the kernel that does not hold, or a loop without an end."""
