"""A sample of the replay: generated code is what the kept hashes say, whatever process asks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from perfuse.codegen.cpp import frame as cpp_frame
from perfuse.codegen.triton import spelling as triton_spelling
from tests.replay.corpus import names
from tests.replay.hashes import Record, changed_parts, comparable, installed, read, write
from tests.replay.record import TARGETS, UNTUNED, Recorder, texts_of, without_folders
from tests.replay.run import difference
from tests.replay.worker import digest

SAMPLE = (
    "headers",
    "kernel/gelu_bias_fb",
    "kernel/ln_fp8",
    "kernel/attn_mask",
    *(f"plain/{seed}" for seed in (0, 5, 9, 23)),
    *(f"training/{seed}" for seed in (1, 3, 4, 12)),
    "model/bert",
)
HINT = "if the change is meant: make replay UPDATE=1, and say why in the commit"


def hashes_of(name: str) -> dict[str, str]:
    return {part: digest(text) for part, text in texts_of(name).items()}


@pytest.mark.parametrize("name", SAMPLE)
def test_generated_code_is_as_kept(name: str) -> None:
    kept = read()
    if not comparable(name, kept):
        pytest.skip(f"hashes are of {kept.packages}, here is {installed()}")
    changed = changed_parts(kept.programs[name], hashes_of(name))
    assert not changed, f"{name} changed: {', '.join(changed)}; {HINT}"


def test_every_program_has_kept_hashes() -> None:
    assert sorted(read().programs) == sorted(names()), HINT


def test_no_folder_of_this_machine_is_recorded() -> None:
    def looks_up(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return table[index] * 2

    recorder = Recorder(UNTUNED)
    compiled = torch.compile(looks_up, backend=recorder.backend, dynamic=False)
    compiled(torch.randn(8, 4), torch.tensor([1, 2]))
    host = recorder.texts["avx2/0_inference.host"]
    assert __file__ in host
    assert str(Path(__file__).parents[2]) not in without_folders(host)


def test_every_target_is_recorded() -> None:
    texts = texts_of("kernel/swish")
    assert {part.split("/")[0] for part in texts} == set(TARGETS)
    assert all(text.strip() for text in texts.values())


def test_a_changed_generator_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    before = hashes_of("kernel/swish")
    monkeypatch.setattr(cpp_frame, "sigmoids_used_once", lambda values: frozenset())
    changed = changed_parts(before, hashes_of("kernel/swish"))
    assert changed == ["avx2/0_inference.kernels", "avx512/0_inference.kernels"]
    monkeypatch.setitem(triton_spelling._EITHER, "mul", "({1} * {0})")
    changed = changed_parts(before, hashes_of("kernel/swish"))
    assert {part.split("/")[0] for part in changed} == set(TARGETS)


def test_hashes_survive_being_written(tmp_path: Path) -> None:
    record = Record({"torch": "2.13.0"}, {"kernel/add": {"avx2/0_inference.host": "0123abcd"}})
    write(record, tmp_path / "hashes.txt")
    assert read(tmp_path / "hashes.txt") == record


def test_a_difference_shows_both_sides(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("a\nb\n")
    (tmp_path / "new").write_text("a\nc\n")
    lines = difference(tmp_path / "old", tmp_path / "new")
    assert "-b" in lines and "+c" in lines
