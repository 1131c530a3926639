"""Instances: the shipped table, lines of an installed CK, and the order in which they are tried."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest

from perfuse.build.ck_installation import CkState, inspect_ck, installed_instances
from perfuse.codegen.ck.instance import (
    expanded,
    instance_of,
    preselected_instances,
    shipped_instances,
)
from perfuse.codegen.ck.parse import BATCHED, PLAIN, listed
from perfuse.codegen.ck.rank import ranked, sampled
from perfuse.config import Settings
from perfuse.gpu import gpu_of_name
from tests.ck.stand_in import FOLDER, every_instance, problem

GPU = gpu_of_name("gfx942")
LINE = preselected_instances()[0]
SAMPLED = [
    "ck f16xf16->f16 RCR 128x128x64 v3 intrawave unpadded 6849b3",
    "ck f16xf16->f16 RRR 128x128x64 v3 intrawave unpadded 0b0547",
    "ck f16xf16->f16 RRR 16x128x64 v2 interwave unpadded 4507f2",
    "ck f16xf16->f16 RCR 64x16x128 v1 interwave unpadded 8fec45",
]


def settings(folder: Path) -> Settings:
    return Settings().with_overrides({"rocm.ck_dir": str(folder), "rocm.home": str(folder)})


def test_the_shipped_table() -> None:
    """The counts of the facts: 4672 with 48 duplicates and 56 of 7 commented-out lines."""
    assert len(shipped_instances()) == 4568
    assert len(shipped_instances(is_batched=True)) == 904
    assert len(preselected_instances()) == 19
    assert len(every_instance()) == 4672
    assert len({each.text for each in every_instance()}) == 4624
    texts = [each.text for each in shipped_instances()]
    assert texts == sorted(set(texts))
    assert len({each.name for each in shipped_instances()}) == len(texts)


def test_text_is_read_again() -> None:
    for instance in (*shipped_instances()[::97], *shipped_instances(is_batched=True)[::97]):
        assert instance_of(instance.text) == instance
    with pytest.raises(ValueError, match="template arguments"):
        instance_of("Row, Col")


def test_lines_of_an_installed_ck() -> None:
    own = LINE.text.replace("GemmSpecialization::MNKPadding", "GemmSpec")
    own = own.replace("BlockGemmPipelineScheduler::Intrawave", "BlkGemmPipeSched")
    text = f"""
      // {PLAIN}<{LINE.text.replace("224", "240")}>,
      {PLAIN}<  {own.replace(", ", ",    ")}>,
      {PLAIN}< {own} >
      {PLAIN}< {LINE.text}, I4, I4 >,
    """
    found = listed([text], PLAIN)
    assert len(found.instances) == 16  # two schedulers, eight paddings; once each
    assert LINE in found.instances
    assert len(found.unread) == 1
    assert listed([text, ""], PLAIN) == listed(["", text], PLAIN)
    cells = LINE.text.split(", ")
    of_batch = ", ".join([*cells[:2], "DsLayout", *cells[2:5], "DsDataType", *cells[5:]])
    assert listed([f"{BATCHED}<{of_batch}>"], BATCHED).instances == (LINE,)


def test_a_newer_ck_brings_its_instances(tmp_path: Path) -> None:
    newer = LINE.text.replace("224, 256, 64", "240, 256, 64")
    (tmp_path / "include").symlink_to(FOLDER / "include")
    folder = tmp_path / "library/src/tensor_operation_instance/gpu/gemm_universal/f16"
    folder.mkdir(parents=True)
    (folder / "list.hpp").write_text(f"using a = std::tuple<\n{PLAIN}<{newer}>\n>;")
    (tmp_path / "CMakeLists.txt").write_text("set(version 1.2.0)\n")
    found = inspect_ck(settings(tmp_path))
    assert (found.state, found.num_instances, found.version) == (CkState.COMPLETE, 1, "1.2.0")
    assert found.has_own_instances and "1 instances of its own" in str(found)
    (instance,) = installed_instances(found, is_batched=False).instances
    assert instance.m_per_block == 240
    assert len(installed_instances(found, is_batched=True).instances) == 904  # none of its own


def test_headers_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(FOLDER, tmp_path / "ck")  # not seen before, so that its headers are read
    header = str(tmp_path / "ck/include/ck/ck.hpp")

    def refused(path: Path) -> bytes:
        raise PermissionError(errno.EACCES, "Permission denied", header)

    monkeypatch.setattr(Path, "read_bytes", refused)
    found = inspect_ck(settings(tmp_path / "ck"))
    assert found.state is CkState.INCOMPLETE
    assert header in str(found) and "Permission denied" in str(found)


def test_missing_incomplete_and_complete(tmp_path: Path) -> None:
    missing = inspect_ck(settings(tmp_path / "nowhere"))
    assert missing.state is CkState.MISSING and "nowhere/include/ck" in str(missing)
    assert "rocm.ck_dir" in missing.advice
    (tmp_path / "file").touch()
    assert "file/include/ck" in str(inspect_ck(settings(tmp_path / "file")))
    (tmp_path / "include/ck").mkdir(parents=True)
    (tmp_path / "include/ck/ck.hpp").touch()
    incomplete = inspect_ck(settings(tmp_path))
    assert incomplete.state is CkState.INCOMPLETE
    assert "ck/stream_config.hpp" in str(incomplete) and "ck/ck.hpp" not in str(incomplete)
    complete = inspect_ck(settings(FOLDER))
    assert complete.state is CkState.COMPLETE and not complete.advice
    assert not complete.has_config and not complete.has_own_instances
    assert complete.num_instances == 4568 + 904


def test_a_folder_is_mended_while_the_process_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    chosen = Settings().with_overrides({"rocm.ck_dir": "~/ck"})
    assert str(tmp_path / "ck/include/ck") in str(inspect_ck(chosen))
    (tmp_path / "ck").symlink_to(FOLDER)
    assert inspect_ck(chosen).state is CkState.COMPLETE


def test_samples_are_the_same_everywhere() -> None:
    """Pinned by name: no order of files or of hashes changes them."""
    instances = [e for e in shipped_instances() if e.a_dtype == e.b_dtype == "F16"]
    for each in (instances, instances[::-1]):
        chosen = sampled(ranked(each, problem(2240, 2048, 256), GPU), 4)
        assert [instance.name for instance in chosen] == SAMPLED


def test_the_best_ranked_come_first() -> None:
    every = ranked([e for e in shipped_instances() if e.a_dtype == "F16"], problem(64, 64, 64), GPU)
    assert len(sampled(every, 0)) == len(every)
    seven = sampled(every, 7)
    assert len(seven) == 7 and seven[0] == every[0]
    assert [every.index(e) for e in seven] == sorted(every.index(e) for e in seven)
    assert set(sampled(every, 3)[:2]) <= set(seven)


def test_placeholders_expand() -> None:
    line = instance_of(LINE.text.replace("GemmSpecialization::MNKPadding", "GemmSpec"))
    assert [each.padded for each in expanded(line)] == ["", *"M N K MN MK NK MNK".split()]
