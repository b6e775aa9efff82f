"""``trireme --help`` and the help of every verb: what a person reads in a terminal, and what a wrong option answers."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from launcher.cli import main
from launcher.cli.main import GROUPS, VERBS
from launcher.cli.parser import broken, filled

LONGEST = 50
"""Lines of a verb's help in 80 columns."""
HEAVY = ("torch", "hydra", "numpy", "mlflow", "scipy")


def help_of(verb: str, columns: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("COLUMNS", str(columns))
    made: argparse.ArgumentParser = import_module(f"launcher.cli.{verb}").parser()
    return made.format_help().splitlines()


@pytest.mark.parametrize("verb", VERBS)
def test_the_help_of_a_verb_fits_the_terminal(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wide = help_of(verb, 80, monkeypatch)
    assert len(wide) <= LONGEST and max(map(len, wide)) <= 80
    narrow = [line for line in help_of(verb, 40, monkeypatch) if len(line) > 40]
    assert [line for line in narrow if len(line.split()) > 2] == []  # a longer word cannot be wrapped


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("columns", [40, 80, 160])
def test_the_examples_of_a_verb_can_be_pasted(verb: str, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrapped or not, a shell reads the same commands, and the verb's parser takes their options."""

    def examples(width: int) -> list[list[str]]:
        joined = re.sub(r"\\\n\s+", "", "\n".join(help_of(verb, width, monkeypatch)))
        return [shlex.split(re.split(r"\s{3,}", line.strip())[0]) for line in joined.splitlines() if line.startswith("  trireme ")]

    assert examples(columns) == examples(1000)
    made = import_module(f"launcher.cli.{verb}").parser()
    options = {option for action in made._actions for option in action.option_strings}
    used = [word.partition("=")[0] for one in examples(columns) if one[1] == verb for word in one[2:] if word.startswith("-")]
    assert [word for word in used if word not in options] == []


def test_a_wrapped_command_is_the_same_to_a_shell() -> None:
    command = "trireme plan 'data.path=a b' hardware=h100 " + " ".join(f"model.layers={n}" for n in range(30)) + " --explain 'a   b'"
    for width in (20, 40, 80, 500):
        told = subprocess.run(["bash", "-c", f"printf '%s\\n' {chr(10).join(broken(command, width))}"], capture_output=True, text=True)
        assert told.stdout.splitlines() == shlex.split(command)


def test_prose_is_wrapped_anew_and_terms_stay_apart_from_their_meanings() -> None:
    lines = list(filled("one two\nthree four:\n  key=1     what it means, at length\n  k=2   short", 24))
    assert lines == ["one two three four:", "  key=1", "      what it means, at", "      length", "  k=2   short"]


def test_every_verb_has_a_group_a_module_and_a_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main.main(["--help"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert max(map(len, shown)) <= 80
    for group, verbs in GROUPS.items():
        start = shown.index(f"{group}:")
        assert [line.split()[0] for line in shown[start + 1 :] if line[:2] == "  " and line[2] != " "][: len(verbs)] == [*verbs]
    folder = Path(main.__file__).parent
    with_parser = {path.stem for path in folder.glob("*.py") if "def main(argv" in path.read_text() and path.stem != "main"}
    assert with_parser == {*VERBS}


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["plan", "--explian=1"], "unrecognized arguments: --explian=1; did you mean --explain?"),
        (["rank", "--frobnicate"], "unrecognized arguments: --frobnicate; 'trireme rank --help' explains them"),
        (["plan", "--top", "x"], "argument --top: invalid int value: 'x'; 'trireme plan --help' explains them"),
        (["cancel"], "the following arguments are required: SWEEP|TRIAL|STAGE; 'trireme cancel --help' explains them"),
        (["convert"], "the following arguments are required: direction; 'trireme convert --help' explains them"),
        (["convert", "import", "--bsae", "x", "a", "b"], "unrecognized arguments: --bsae b; 'trireme convert --help' explains them"),
    ],
)
def test_a_wrong_option_is_one_plain_line(words: list[str], answer: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(words) == 2
    assert capsys.readouterr().err == f"error: {answer}\n"


def test_no_help_waits_for_a_library() -> None:
    """Help is printed before Hydra, numpy or torch are imported."""
    code = (
        "import sys; from launcher.cli.main import VERBS, main\n"
        "for verb in VERBS:\n"
        "    try: main([verb, '--help'])\n"
        "    except SystemExit: pass\n"
        f"print(sorted(set({HEAVY!r}) & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.stdout.splitlines()[-1] == "[]", done.stdout[-300:] + done.stderr


def test_one_trainer_is_shown_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["trainers", "megatron_core", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [*shown] == ["megatron_core"] and shown["megatron_core"]["profile"]["overlap.tensor"] == "all"
    assert main.main(["trainers", "megatron_cor"]) == 2
    assert capsys.readouterr().err.startswith("error: no trainer is called 'megatron_cor'; did you mean 'megatron_core'?")
