"""Tests of the completion in shells, run by the shells themselves."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.patience import patience

from distkeras.commands.main import main
from distkeras.ps.errors import ConfigurationError

#: A program that completes the words of its arguments as bash does after the Tab key.
ASK = 'source "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}; '
ASK += '_shtab_distkeras; printf "%s\\n" "${COMPREPLY[@]}"'


def script(shell: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    assert main(["completion", shell]) == 0
    path = folder / f"completion.{shell}"
    path.write_text(capsys.readouterr().out)
    return path


def completed(path: Path, *words: str) -> set[str]:
    command = ["bash", "-c", ASK, "bash", str(path), "distkeras", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patience(20), cwd=path.parent)
    assert done.stderr == ""
    return set(done.stdout.split())


def test_bash_completes_commands_flags_and_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = script("bash", tmp_path, capsys)
    (tmp_path / "mine.keras").touch()
    assert completed(path, "") >= {"serve", "jobs", "completion"}
    assert completed(path, "jobs", "c") == {"cancel"}
    assert completed(path, "jobs", "") >= {"submit", "predict", "list", "watch", "cancel", "fetch", "token"}
    assert {"--rule", "--workers", "--data"} <= completed(path, "jobs", "submit", "--")
    assert "easgd" in completed(path, "jobs", "submit", "--rule", "ea")
    assert "mine.keras" in completed(path, "jobs", "submit", "--model", "mi")
    assert completed(path, "completion", "z") == {"zsh"}


@pytest.mark.skipif(shutil.which("zsh") is None, reason="no zsh is installed")
def test_zsh_accepts_its_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script("zsh", tmp_path, capsys).rename(tmp_path / "_distkeras")
    ask = f"fpath=({tmp_path} $fpath); autoload -Uz compinit; compinit -u -d {tmp_path}/dump; "
    ask += "print $_comps[distkeras]; autoload +X _distkeras"
    done = subprocess.run(["zsh", "-f", "-c", ask], capture_output=True, text=True, timeout=patience(60))
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "_distkeras\n")


def test_without_the_library_the_error_names_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 2
    assert ConfigurationError.__name__ in (message := capsys.readouterr().err)
    assert "distkeras[completion]" in message
