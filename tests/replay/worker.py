"""A worker process of `tests.replay.run`: one program of the corpus a task."""

from __future__ import annotations

import hashlib
from pathlib import Path

from tests.harness.pool import Result, Task, serve
from tests.replay.record import texts_of

NUM_DIGITS = 12


def handle(task: Task) -> Result:
    """Hashes of all that is generated; the texts themselves where a folder is given for them."""
    try:
        texts = texts_of(task["name"])
    except Exception as error:  # also kept: a program that no longer fails is a change
        texts = {"error/0.text": f"{type(error).__name__}: {error}"}
    if task.get("folder"):
        write(Path(task["folder"]) / task["name"], texts)
    return {"status": "pass", "hashes": {part: digest(text) for part, text in texts.items()}}


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:NUM_DIGITS]


def write(folder: Path, texts: dict[str, str]) -> None:
    for part, text in texts.items():
        path = folder / part
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


if __name__ == "__main__":
    serve(handle)
