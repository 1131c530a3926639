"""Probes that hang or fail are cut short, and become rows of the report."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import copy_context

from perfuse.diagnosis.report import Finding
from perfuse.errors import PerfuseError


def found_within(limit_s: float, look: Callable[[], Finding]) -> Finding:
    """The finding of a probe, whatever it does: a thread that hangs is left behind."""
    findings: list[Finding] = []
    context = copy_context()  # with the settings that the caller has patched

    def run() -> None:
        findings.append(context.run(_attempted, look))

    thread = threading.Thread(target=run, name="perfuse-doctor", daemon=True)
    thread.start()
    thread.join(limit_s)
    if not findings:
        return Finding("problem", f"no answer within {limit_s:g} s", "see why it hangs.")
    return findings[0]


def _attempted(look: Callable[[], Finding]) -> Finding:
    try:
        return look()
    except PerfuseError as error:
        at = "" if error.at is None else f" ({error.at})"
        return Finding("problem", error.message + at, error.hint or "")
    except Exception as error:  # whatever a broken installation raises is what was found
        return Finding("problem", f"{type(error).__name__}: {error}")
