"""What Tab writes: words that can follow, and nothing else."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from launcher.cli.candidates import candidates
from launcher.cli.completion import SCRIPTS
from launcher.cli.main import VERBS, main
from launcher.config.compose import MODEL_FROM, config_groups, known_keys
from launcher.trials.store import Record, Store
from trainer.shared.records.outcome import Reason, Status

HEAVY = ("torch", "hydra", "numpy", "mlflow", "scipy")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two sweeps, one of a pipeline, and a config group of its owner's."""
    monkeypatch.chdir(tmp_path)
    store = Store("runs")
    for identifier in ("aa11bb22cc33", "aa99bb22cc33"):
        (record := Record(identifier, store.trials / identifier)).directory.mkdir(parents=True)
        store.save(record)
    pruned = Record("0" * 12, store.trials / "none", Status.PRUNED, Reason.CONFIGURATION)
    store.write_sweep("first", [store.load("aa11bb22cc33"), pruned], "")
    store.write_sweep("second", [store.load("aa99bb22cc33")], "")
    Path("mine/model").mkdir(parents=True)
    Path("mine/model/house.yaml").write_text("layers: 2\n")
    return tmp_path


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("trireme sta", ["status"]),
        ("trireme --v", ["--version"]),
        ("trireme plan --expl", ["--explain"]),
        ("trireme plan model=gpt_t", ["model=gpt_tiny"]),
        ("trireme plan +model=gpt_t", ["+model=gpt_tiny"]),
        ("trireme train -m model=gpt_mini,gpt_t", ["model=gpt_mini,gpt_tiny"]),
        ("trireme train layout.ten", ["layout.tensor="]),
        ("trireme train layout.shard", ["layout.sharding."]),
        ("trireme train layout.sharding.p", ["layout.sharding.params="]),
        ("trireme train 'layout.sharding.p", ["layout.sharding.params="]),
        ("trireme train cluster=slurm cluster.partit", ["cluster.partition="]),
        ("trireme train cluster.partit", []),
        ("trireme train sweep.follow=", ["sweep.follow=true", "sweep.follow=false"]),
        ("trireme train run.precision=fp1", ["run.precision=fp16"]),
        ("trireme train --cfg=j", ["--cfg=job"]),
        ("trireme train --cfg j", ["job"]),
        ("trireme train --set sweep.na", ["sweep.name"]),
        ("trireme train --config-dir mine model=hou", ["model=house"]),
        ("trireme train --config-dir ", []),
        ("trireme train data.path=", []),
        ("trireme run pipeline=tune", ["pipeline=tune_tiny"]),
        ("trireme trainers megatron_c", ["megatron_core"]),
        ("trireme trainers ch", ["check"]),
        ("trireme convert exp", ["export"]),
        ("trireme completion z", ["zsh"]),
        ("trireme rank ", ["second", "first"]),
        ("trireme rank first ", []),
        ("trireme rank --dir nowhere ", []),
        ("trireme compare first se", ["second"]),
        ("trireme logs aa1", ["aa11bb22cc33"]),
        ("trireme cancel aa", ["aa11bb22cc33", "aa99bb22cc33"]),
        ("trireme frobnicate ", []),
    ],
)
def test_what_can_follow(line: str, found: list[str], folder: Path) -> None:
    assert candidates(line) == found


def test_every_verb_group_and_key_can_be_reached_by_tab(folder: Path) -> None:
    assert candidates("trireme ") == [*VERBS]
    shown = candidates("trireme train ")
    assert {f"{group}=" for group in config_groups()} < {*shown}
    keys = [*known_keys(), MODEL_FROM]
    sections = {key.rpartition(".")[0] for key in keys} - {""}
    assert {"model", "layout.sharding", "run.checkpoint"} < sections
    for section in sections:
        below = {f"{key}." if key in sections else f"{key}=" for key in keys if key.rpartition(".")[0] == section}
        assert {*candidates(f"trireme train {section}.")} == below


@pytest.mark.parametrize("words", [["-sc", "query=bash"], ["train", "-sc", "query=bash"], ["plan", "--shell-completion=query=zsh"]])
def test_hydras_flag_asks_the_same(words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COMP_LINE", "trireme plan model=gpt_tiny x")
    monkeypatch.setenv("COMP_POINT", str(len("trireme plan model=gpt_t")))
    assert main(words) == 0
    assert capsys.readouterr().out == "model=gpt_tiny\n"


@pytest.mark.parametrize("shell", SCRIPTS)
def test_hydras_flag_prints_the_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert main(["train", "-sc", f"install={shell}"]) == 0 and capsys.readouterr().out == script
    assert main(["-sc", f"uninstall={shell}"]) == 0 and "trireme" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["completion"], "'trireme completion' needs a shell: bash, zsh or fish"),
        (["completion", "tcsh"], "argument shell: invalid choice: 'tcsh' (choose from 'bash', 'zsh', 'fish'); 'trireme completion --help'"),
        (["train", "-sc", "install=tcsh"], "-sc install=tcsh: give install=SHELL, uninstall=SHELL or query=SHELL, of bash, zsh or fish"),
        (["train", "-sc"], "-sc: give install=SHELL"),
    ],
)
def test_another_shell_is_one_plain_line(words: list[str], answer: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert capsys.readouterr().err.startswith(f"error: {answer}")


def test_a_file_that_cannot_be_read_is_not_mentioned(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    Path("mine/cluster").mkdir()
    Path("mine/cluster/odd.yaml").write_text("defaults: [: }\n")
    main(["completion", "--line", "trireme train --config-dir mine cluster=odd layout.ten"])
    assert capfd.readouterr() == ("", "")


def test_no_tab_waits_for_a_library(folder: Path) -> None:
    lines = ["trireme train layout.ten", "trireme plan model=gp", "trireme logs a", "trireme train run.precision="]
    code = f"import sys; from launcher.cli.candidates import candidates\nfor line in {lines}: assert candidates(line)\n"
    code += f"print(sorted(set({HEAVY!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.stdout == "[]\n", done.stderr


class Terminal:
    """An interactive shell of ``width`` columns, whose ``trireme`` is this tree's."""

    def __init__(self, folder: Path, words: list[str], width: int):
        path = folder / "bin" / "trireme"
        path.parent.mkdir()
        path.write_text(f'#!/bin/sh\nexec {sys.executable} -m launcher "$@"\n')
        path.chmod(0o755)
        paths = {"PATH": f"{path.parent}:/usr/bin:/bin", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._pid, self._fd = pty.fork()
        if self._pid == 0:
            os.execvpe(words[0], words, paths | {"TERM": "xterm", "PS1": "$ ", "HOME": str(folder), "INPUTRC": "/dev/null"})
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))

    def type(self, text: str, until: str, seconds: float = 60) -> str:
        """Types ``text``; returns what the terminal shows until it shows ``until``, and half a second longer."""
        os.write(self._fd, text.encode())
        written, deadline = "", time.monotonic() + seconds
        while time.monotonic() < deadline:
            if select.select([self._fd], [], [], 0.5)[0]:
                written += os.read(self._fd, 65536).decode(errors="replace")
            elif until in (shown := re.sub(r"\x1b\[[?0-9;]*[a-zA-Z]|[\x07\r]", "", re.sub(r"(.)\r\1", r"\1", written))):
                return shown  # where a line goes on below, its next character was written twice
        raise AssertionError(f"{until!r} is not shown: {written!r}")

    def close(self) -> None:
        os.close(self._fd)
        os.waitpid(self._pid, 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "width", [pytest.param(40, marks=pytest.mark.campaign("words")), 80, pytest.param(160, marks=pytest.mark.campaign("words"))]
)
def test_bash_writes_candidates_into_the_line_and_nothing_else(folder: Path, width: int) -> None:
    """At 40 columns the line goes on below."""
    bash = Terminal(folder, ["bash", "--norc", "-i"], width)
    bash.type("", "$ ")
    bash.type('eval "$(trireme train -sc install=bash)"\n', "\n$ ")
    assert bash.type("trireme sea\t", "search ") == "trireme search "
    assert bash.type("layout.tens\t", "tensor=") == "layout.tensor="
    assert bash.type("2 model=gpt_t\t", "gpt_tiny ") == "2 model=gpt_tiny "
    bash.type("\x15", "$ ")
    assert bash.type("trireme frobnicate x\t", "x") == "trireme frobnicate x"
    bash.type("\x15", "$ ")
    shown = bash.type("trireme rank \t\t", "second")  # both begin differently: listed below the line
    assert {"first", "second"} <= {*shown.split()} and "error" not in shown
    bash.close()
