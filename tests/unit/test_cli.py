"""The command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import perfuse
from perfuse.cli import app, main
from perfuse.version import VERSION

SCRIPT = """
import torch

def function(x):
    return torch.relu(x).sum(-1)

def example_args():
    return torch.randn(4, 8)
"""


def run(*words: str) -> str:
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == 0, result.output
    return result.output


def test_version() -> None:
    assert VERSION in run("version") and run("version") == run("--version")


def test_the_package_runs_as_the_command() -> None:
    command = [sys.executable, "-m", "perfuse", "--version"]
    assert VERSION in subprocess.run(command, capture_output=True, text=True, check=True).stdout


def assert_narrow(text: str) -> None:
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80, text


def test_config_lists_every_setting_in_80_columns() -> None:
    text = run("config")
    assert_narrow(text)
    assert all(f" {row.name} = " in text for row in perfuse.config.describe())
    assert len(text.splitlines()) < 4 * len(perfuse.config.describe())


def test_config_shows_no_password() -> None:
    with perfuse.config.patch(redis_url="redis://me:secret@example.org:7000/2"):
        text = run("config", "redis_url")
    assert "secret" not in text and "example.org:7000" in text
    with perfuse.config.patch({"cpu.opt_level": 1}):
        assert "* cpu.opt_level = 1" in run("config", "opt_level")
    assert "cpu.simd" not in run("config", "opt_level")


@pytest.mark.parametrize("words", ["--help", "explain --help", "cache info", "doctor", "version"])
def test_commands_fit_80_columns(words: str) -> None:
    with perfuse.testing.fresh_cache():
        assert_narrow(run(*words.split()))


def test_explain_one_stage(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with perfuse.testing.fresh_cache():
        assert_narrow(run("explain", f"{script}:function"))
        plan = run("explain", f"{script}:function", "--stage", "plan")
    assert "k0(" in plan and "ops ->" not in plan


def test_explain_a_script(tmp_path: Path) -> None:
    script, page = tmp_path / "script.py", tmp_path / "page.html"
    script.write_text(SCRIPT)
    with perfuse.testing.fresh_cache():
        found = run("explain", f"{script}:function", "--html", str(page), "--sources")
    assert "relu, sum" in found and "segment0" in found
    assert "1 kernels" in page.read_text()


def test_codegen_for_a_gpu_that_is_not_there(tmp_path: Path) -> None:
    script, out = tmp_path / "script.py", tmp_path / "out"
    script.write_text(SCRIPT)
    with perfuse.testing.fresh_cache():
        found = run("codegen", f"{script}:function", "--target", "hip:gfx942", "--out", str(out))
    assert_narrow(found)
    assert "gfx942" in found and "registers" in found
    assert "@triton.jit" in (out / "0_inference_kernels.py").read_text()


def test_mistakes_are_told() -> None:
    result = CliRunner().invoke(app, ["explain", "function"])
    assert result.exit_code == 1 and "module:function" in result.output


MORE = """
class Layer(torch.nn.Module):
    pass

def two():
    return torch.ones(3), torch.ones(3)
"""


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["explain", "no_such_module:function"], "no module named 'no_such_module'"),
        (["explain", "{script}:functoin"], "no function 'functoin'"),
        (["explain", "{script}:function", "--memory-budget", "much"], "cannot be 'much'"),
        (["codegen", "{script}:function", "--target", "cuda:1"], "unknown GPU"),
        (["explain", "{script}:function", "--stage", "plna"], "did you mean 'plan'?"),
        (["explain", "{script}:Layer"], "'Layer' is a class: name a function"),
        (["explain", "{script}:function", "--args", "two"], "does not take what two() returns"),
        (["explain", "{script}:function", "--args", "function"], "must take no arguments"),
        (["explain", "{script}:function", "--html", "/nowhere/a.html"], "choose another path"),
        (
            ["codegen", "{script}:function", "--target", "cpu", "--out", "{script}"],
            "choose another",
        ),
        (["rank", "--matmul", "64x64x64:bf16:NN", "--target", "cpu"], "cpu is not a GPU"),
        (["artefact", "keygen", "/"], "name a file in it"),
        (["config", "no_such_name"], "no name of a setting contains no_such_name"),
    ],
    ids=str,
)
def test_mistakes_are_lines_not_traces(
    words: list[str],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT + MORE)
    given = [word.format(script=script) for word in words]
    monkeypatch.setattr("sys.argv", ["perfuse", *given])
    monkeypatch.setenv("COLUMNS", "300")
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    shown = "".join(capsys.readouterr())
    assert told in shown.replace("\n", " ") and "Traceback" not in shown
    assert "report it" not in shown


MISTAKES = {
    "in the function": (
        "def function(x):\n    return x @ torch.ones(3, 3)\n",
        "x @ torch.ones(3, 3)",
    ),
    "in the arguments": (
        "def example_args():\n    return torch.zeros(2)[7]\n",
        "torch.zeros(2)[7]",
    ),
    "in the module": ("print(undefined_name)\n", "undefined_name"),
    "in the syntax": ("def broken(:\n", "broken"),
    "without end": ("def example_args():\n    return example_args()\n", "RecursionError"),
    "without message": ("def example_args():\n    raise KeyError\n", "KeyError"),
}
# What an op says of its operands, the line, what to do.
MOST_LINES = {"in the function": 3}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_users_own_mistake_is_a_few_lines(
    mistake: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    script = tmp_path / "mistaken.py"
    text, told = MISTAKES[mistake]
    script.write_text(SCRIPT + text)
    monkeypatch.setattr("sys.argv", ["perfuse", "explain", f"{script}:function"])
    with perfuse.testing.fresh_cache(), pytest.raises(SystemExit) as ended:
        main()
    shown = "".join(capsys.readouterr())
    assert ended.value.code == 1
    assert told in shown and "mistaken.py" in shown and "what to do" in shown
    assert "Traceback" not in shown and len(shown.splitlines()) <= MOST_LINES.get(mistake, 40)
    assert "report it" not in shown


def test_cache_info_counts_entries_only() -> None:
    with perfuse.testing.fresh_cache() as folder:
        run("cache", "info")
        entries = folder / "perfuse-v1" / "entries"
        entries.mkdir(exist_ok=True)
        (entries / "stray.txt").write_text("not yours")
        (entries / "empty").mkdir()
        (entries / "loop").symlink_to("loop")
        assert "0 entries" in run("cache", "info")
        assert "0 entries removed" in run("cache", "clear")
        assert sorted(p.name for p in entries.iterdir()) == ["empty", "loop", "stray.txt"]


def test_cache_info_and_clear() -> None:
    with perfuse.testing.fresh_cache():
        assert "entries" in run("cache", "info")
        assert "removed" in run("cache", "clear")


def test_artefacts_from_the_command_line(tmp_path: Path) -> None:
    script, out, key = tmp_path / "model.py", tmp_path / "model.perfuse", tmp_path / "key"
    script.write_text(SCRIPT)
    run("artefact", "keygen", str(key))
    assert key.stat().st_mode & 0o77 == 0
    place = f"{script}:function"
    run("artefact", "compile", place, "--out", str(out), "--sign-with", str(key), "--dynamic")
    told = run("artefact", "info", str(out), "--trusted-key", f"{key}.pub")
    assert "function" in told and "float32[s0, s1]" in told and "by a trusted key" in told
    assert "where s0 >= 2" in told
    loaded = perfuse.load(out, trusted_keys=[f"{key}.pub"])
    x = torch.randn(5, 7)
    assert torch.allclose(loaded(x), torch.relu(x).sum(-1), atol=1e-5)
    again = CliRunner().invoke(app, ["artefact", "keygen", str(key)])
    assert again.exit_code == 1 and "already exists" in again.output
    nowhere = CliRunner().invoke(app, ["artefact", "keygen", str(tmp_path / "no" / "key")])
    assert nowhere.exit_code == 1 and "cannot be written" in nowhere.output
