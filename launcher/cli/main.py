"""``trireme VERB ...``: find the verb, run it, and turn wrong input into one plain error and exit code 2."""

from __future__ import annotations

import errno
import os
import shutil
import sys
import textwrap
from importlib import import_module

from launcher.interrupt import Interrupted, asked, leave
from launcher.labels import shown
from trainer.shared.run.errors import ConfigError, nearest

GROUPS = {
    "predict": {
        "plan": "predict every layout of a model on a cluster",
        "size": "choose a model's size, or the GPUs for it, from days and tokens",
        "coordinates": "check that activations are as large in wider models (muP)",
        "trainers": "list trainer profiles and their options; 'check' runs two steps of one",
    },
    "run": {
        "train": "train one layout, or a sweep of them with -m",
        "search": "find the fastest layout with few measured trials",
        "run": "a pipeline of stages: prepare, train, evaluate, convert, generate",
    },
    "look": {
        "status": "how a sweep's trials stand",
        "attach": "the live table of a sweep that is being run, in the background too",
        "logs": "print or follow a trial's logs",
        "cancel": "stop a sweep or a trial",
        "rank": "order a sweep's trials by measured step time",
        "compare": "two sweeps, trial by trial: ratios, and what changed",
        "report": "write a sweep's HTML report",
        "ui": "open the MLflow page on this machine",
    },
    "a model's life": {
        "prepare": "make a tokenizer and a token file from text",
        "evaluate": "loss, perplexity and bits per byte of a checkpoint on held-out text",
        "convert": "a checkpoint to a Hugging Face folder or a GGUF file, and back",
        "generate": "text from a checkpoint or a Hugging Face folder",
        "serve": "completions of a model over HTTP",
    },
    "machine and cost model": {
        "doctor": "measure this machine, or the nodes of a cluster, into a hardware file",
        "calibrate": "correct the cost model's constants by your own runs",
        "validate": "check the cost model against a table of measurements",
        "completion": "a script with which bash, zsh or fish complete command lines",
    },
}
VERBS = {verb: meaning for verbs in GROUPS.values() for verb, meaning in verbs.items()}

LATE = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EFBIG)
"""File system errors that carry no file name: an earlier write could not be completed."""

SHELL_COMPLETION = ("-sc", "--shell-completion")
"""Hydra's flag, with any verb or without one: ``-sc install=bash``."""

PURPOSE = "Trireme finds, launches and proves the fastest way to train a GPT on the cluster you have."
USAGE = """\
{purpose}

usage: trireme VERB [ARGUMENTS]      (trireme VERB --help explains one)

{verbs}

examples:
  trireme prepare
  trireme train model=gpt_tiny layout.tensor=2 layout.pipeline=2
  trireme train -m model=gpt_tiny layout.tensor=1,2 layout.pipeline=1,2
  trireme rank
"""


def main(argv: list[str] | None = None) -> int:
    """Runs one command line; returns its exit code: 0 done, 1 failed, 2 wrong input; 130, 143, 129 ended by Ctrl-C, SIGTERM, SIGHUP."""
    argv = sys.argv[1:] if argv is None else argv
    open_standard_streams()
    try:
        code = answer(argv)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader went away, as in `trireme logs ... | head`
        forget_output()
        return 0
    except ConfigError as error:
        print(f"error: {shown(error)}", file=sys.stderr)
        return ConfigError.exit_code
    except OSError as error:
        if error.errno not in LATE and not error.filename:
            raise
        forget_output()
        print(f"error: {plain(error)}", file=sys.stderr)
        return ConfigError.exit_code
    except Interrupted as request:
        return request.exit_code
    except KeyboardInterrupt:
        return 130


def answer(argv: list[str]) -> int:
    """Runs a verb, or lists them; returns the exit code."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    if argv[0] in ("-V", "--version"):
        from importlib.metadata import version

        print(f"trireme {version('trireme')}")
        return 0
    if any(word.partition("=")[0] in SHELL_COMPLETION for word in argv[:2]):
        return int(import_module("launcher.cli.completion").as_hydra(argv))
    if argv[0] not in VERBS:
        raise ConfigError(f"unknown verb {argv[0]!r}{nearest(argv[0], VERBS)} (verbs: {', '.join(VERBS)})")
    with asked(leave):
        return run_verb(argv[0], argv[1:])


def plain(error: OSError) -> str:
    """Returns the file system's refusal in one line."""
    where = error.filename or "standard output or a file of the run"
    return f"cannot use {where}: {error.strerror}; free space, fix permissions, or use another path"


def open_standard_streams() -> None:
    """Opens /dev/null for standard streams that a shell closed (``>&-``): else the next opened file would take their place."""
    for descriptor, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != descriptor:
                os.dup2(nowhere, descriptor)
                os.close(nowhere)
            os.set_inheritable(descriptor, True)
            setattr(sys, name, os.fdopen(descriptor, mode, closefd=False))


def forget_output() -> None:
    """Discards unprintable rest of the output, so that the interpreter does not retry at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def run_verb(verb: str, argv: list[str]) -> int:
    """Imports the verb's module and runs it. A backend's silence or refusal is reported in one line."""
    module = import_module(f"launcher.cli.{verb}")
    if "--set" in argv and "--set" in module.parser()._option_string_actions:
        from launcher.cli.overrides import with_texts

        argv = with_texts(argv)
    try:
        return int(module.main(argv))
    except RuntimeError as error:
        from launcher.backends.contract import BackendError

        if not isinstance(error, BackendError):
            raise
        print(f"error: {shown(error)}", file=sys.stderr)
        return error.exit_code


def usage() -> str:
    """Returns the verbs, group by group, wrapped at the terminal's width."""
    width, lines = max(shutil.get_terminal_size().columns - 2, 30), list[str]()
    for group, verbs in GROUPS.items():
        lines.append(f"{group}:")
        for verb, text in verbs.items():
            lines += textwrap.wrap(text, width, initial_indent=f"  {verb:<12}", subsequent_indent=" " * 14)
    return USAGE.format(purpose=textwrap.fill(PURPOSE, width), verbs="\n".join(lines))


if __name__ == "__main__":
    sys.exit(main())
