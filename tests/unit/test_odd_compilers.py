"""Compilers that lie, disks that are full, users without a home: a compile goes on, or says why."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from perfuse import environment
from perfuse.build import LIBRARY
from perfuse.build.compiler import build_shared_library
from perfuse.build.loader import load_library
from perfuse.cache.access import open_store
from perfuse.config import Settings
from perfuse.context import Context
from perfuse.counters import Counters
from perfuse.errors import PerfuseError
from perfuse.target import find_compiler, host_target
from tests.harness.processes import in_child

pytestmark = pytest.mark.skipif(not find_compiler("g++"), reason="no C++ compiler")

UNIT = ("answer", 'extern "C" int answer() { return 42; }\n')
# Does to the file after -o what `{body}` says, as often as there are files named in `left`.
ODD = """#!/bin/sh
if [ "$1" = --version ]; then printf 'odd++ \\377 1\\n'; exit; fi
[ "$(ls {left})" ] || exec g++ "$@"
first=$(ls {left} | head -n 1); rm {left}/$first
g++ "$@" || exit 1
for word in "$@"; do out=$word; done
{body}
exit 0
"""
LIES = {
    "nothing": "rm $out",
    "empty": ": > $out",
    "text": "echo success > $out",
    "truncated": "truncate -s 4000 $out",
    "half a header": "truncate -s 40 $out",
    "another machine": "printf '\\001' | dd of=$out bs=1 seek=18 conv=notrunc 2>/dev/null",
    "another function": "echo 'int other;' | g++ -shared -fPIC -x c++ - -o $out",
    "a program": "echo 'int main() {}' | g++ -no-pie -x c++ - -o $out",
    "a folder": "rm $out; mkdir $out",
}


def odd_compiler(folder: Path, body: str, times: int) -> str:
    left, path = folder / "left", folder / "odd++"
    left.mkdir()
    for number in range(times):
        (left / str(number)).touch()
    path.write_text(ODD.format(left=left, body=body))
    path.chmod(0o755)
    return str(path)


def context(cache: Path | None, **changes: object) -> Context:
    given = {} if cache is None else {"cache.dir": str(cache)}
    settings = Settings().with_overrides({**given, **changes})
    return Context(host_target(settings), settings, Counters())


def answer(ctx: Context) -> int:
    entry = build_shared_library([UNIT], ctx)
    return int(load_library(entry.read_bytes(LIBRARY)).answer())


@pytest.mark.parametrize("lie", LIES)
def test_a_compiler_that_lies_once(tmp_path: Path, lie: str) -> None:
    named = {"cpu.compiler": odd_compiler(tmp_path, LIES[lie], times=1)}
    assert answer(context(tmp_path / "cache", **named)) == 42
    later = context(tmp_path / "cache", **named)
    assert answer(later) == 42
    assert later.counters["build.cache_hit"] == 1 and later.counters["cache.damaged"] == 0


@pytest.mark.parametrize("lie", ["nothing", "text", "truncated"])
def test_a_compiler_that_always_lies(tmp_path: Path, lie: str) -> None:
    named = {"cpu.compiler": odd_compiler(tmp_path, LIES[lie], times=99)}
    with pytest.raises(PerfuseError, match="what to do"):
        answer(context(tmp_path / "cache", **named))
    shutil.rmtree(tmp_path / "left")
    (tmp_path / "left").mkdir()
    assert answer(context(tmp_path / "cache", **named)) == 42  # nothing of it was kept


@pytest.mark.parametrize("message", ["No space left on device", "Disk quota exceeded"])
def test_a_disk_that_fills_while_compiling(tmp_path: Path, message: str) -> None:
    """The cache's own disk; another folder does."""
    script = tmp_path / "full++"
    cache = tmp_path / "cache"
    script.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && echo full++ 1 && exit\n'
        f'case $(pwd) in {cache}*) echo "ld: {message}"; exit 1;; esac\nexec g++ "$@"\n'
    )
    script.chmod(0o755)
    ctx = context(cache, **{"cpu.compiler": str(script)})
    assert answer(ctx) == 42 and ctx.counters["build.moved_elsewhere"] == 1
    assert not list(cache.rglob("*.o")) and not list((cache / "perfuse-v1" / "failed").glob("*"))


def test_a_compiler_ended_by_a_signal(tmp_path: Path) -> None:
    script = tmp_path / "killed++"
    script.write_text('#!/bin/sh\n[ "$1" = --version ] && echo killed++ 1 && exit\nkill -9 $$\n')
    script.chmod(0o755)
    with pytest.raises(PerfuseError, match="signal 9"):
        answer(context(tmp_path / "cache", **{"cpu.compiler": str(script)}))


CRASHES = {
    "g++": "kernels.cpp:7:1: internal compiler error: in extract_insn, at recog.cc:2791",
    "killed": "g++: fatal error: Killed signal terminated program cc1plus",
    "clang": "PLEASE submit a bug report to https://github.com/llvm/llvm-project/issues/",
}


@pytest.mark.parametrize("message", CRASHES.values(), ids=CRASHES)
def test_a_compiler_that_crashes_at_one_level(
    tmp_path: Path, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    script = tmp_path / "crashing++"
    script.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo crashing++ 1 && exit\nlevel=\n'
        "for word; do case $word in -O*) level=$word;; esac; done\n"
        f'case $level in -O3|-O1) echo "{message}"; exit 4;; esac\nexec g++ "$@"\n'
    )
    script.chmod(0o755)
    ctx = context(tmp_path / "cache", **{"cpu.compiler": str(script)})
    with caplog.at_level("WARNING", "perfuse"):
        assert answer(ctx) == 42
    assert ctx.counters["build.compiler_crashed"] == 2
    assert "run again with -O2" in caplog.text and message in caplog.text


def test_a_compiler_that_crashes_at_every_level(tmp_path: Path) -> None:
    script = tmp_path / "crashing++"
    script.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo crashing++ 1 && exit\n'
        'echo "internal compiler error: Segmentation fault"; exit 4\n'
    )
    script.chmod(0o755)
    with pytest.raises(PerfuseError, match="internal compiler error"):
        answer(context(tmp_path / "cache", **{"cpu.compiler": str(script)}))


def test_a_command_with_unbalanced_quotes() -> None:
    with pytest.raises(PerfuseError, match="check the quotes"):
        context(None, **{"cpu.compiler": "g++ '-O2"})


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """A real file system of a few pages; only root can have one."""
    place = tmp_path / "mounted"
    place.mkdir()
    yield place
    subprocess.run(["umount", str(place)], check=False, capture_output=True)


@pytest.mark.parametrize("options", ["size=64k", "nr_inodes=4", "noexec", "ro"])
def test_a_file_system_that_does_not_do(mounted: Path, options: str) -> None:
    command = ["mount", "-t", "tmpfs", "-o", f"{options},mode=700", "tmpfs", str(mounted)]
    if subprocess.run(command, check=False, capture_output=True).returncode != 0:
        pytest.skip("file systems cannot be mounted here")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        ctx = context(mounted)
        (mounted / "ballast").write_bytes(bytes(56 << 10)) if options == "size=64k" else None
        assert answer(ctx) == 42
        assert answer(ctx) == 42
    assert ctx.counters["build.compiler_runs"] <= 2  # the second is a hit, or found in memory
    assert len(seen) == ctx.counters["cache.unusable"] == (0 if options == "noexec" else 1)


def test_a_user_without_home_or_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container started with a uid that /etc/passwd does not know."""
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    target = host_target(Settings())

    def work() -> None:
        ctx = Context(target, Settings(), Counters())
        assert environment.cache_folders() == () or os.geteuid() != 54321
        assert answer(ctx) == 42 and answer(ctx) == 42
        assert ctx.counters["build.compiler_runs"] == 1

    in_child(work, uid=54321)


@pytest.mark.parametrize("home", ["/nonexistent/deep", "/proc", "relative", ""])
def test_a_home_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, home: str) -> None:
    monkeypatch.setenv("HOME", home)
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/self")
    target = host_target(Settings())

    def work() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert answer(Context(target, Settings(), Counters())) == 42

    in_child(work, uid=54321)


def test_the_cache_is_where_xdg_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    store = open_store(Context(host_target(Settings()), Settings(), Counters()))
    assert store.root is not None and store.root.folder == tmp_path / "perfuse"


def test_no_temporary_folder_but_the_last(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    last = Path(tempfile.mkdtemp(dir=tmp_path))
    places = (tmp_path / "missing", Path("/proc"), last)
    monkeypatch.setattr("perfuse.cache.folders.temporary_folders", lambda: places)
    ctx = context(None, **{"cache.enabled": False})
    assert answer(ctx) == 42
    assert [path.name[:8] for path in last.iterdir()] == ["perfuse-"]


def test_no_temporary_folder_at_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("perfuse.cache.folders.temporary_folders", lambda: (Path("/proc"),))
    with pytest.raises(PerfuseError, match="TMPDIR"):
        answer(context(None, **{"cache.enabled": False}))
