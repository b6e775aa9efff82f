"""``trireme VERB ...``: find the verb, run it, and turn wrong input into one plain error and exit code 2."""

from __future__ import annotations

import errno
import os
import sys
from importlib import import_module

from launcher.interrupt import Interrupted, asked, leave
from launcher.labels import shown
from trainer.shared.run.errors import ConfigError, nearest

VERBS = {
    "prepare": "make a tokenizer and a token file from text",
    "train": "train one layout, or a sweep of them with -m",
    "run": "a pipeline of stages: prepare, train, evaluate, convert, generate",
    "evaluate": "loss, perplexity and bits per byte of a checkpoint on held-out text",
    "generate": "text from a checkpoint or a Hugging Face folder",
    "serve": "completions of a model over HTTP",
    "convert": "a checkpoint to a Hugging Face folder or a GGUF file, and back",
    "rank": "order a sweep's trials by measured step time",
    "status": "how a sweep's trials stand",
    "logs": "print or follow a trial's logs",
    "cancel": "stop a sweep or a trial",
    "report": "write a sweep's HTML report",
    "ui": "open the MLflow page on this machine",
    "plan": "predict every layout of a model on a cluster",
    "size": "choose a model size and its hyper-parameters from GPUs, days and tokens",
    "search": "find the fastest layout with few measured trials",
    "validate": "check the cost model against a table of measurements",
    "trainers": "list trainer profiles and their options; 'check' runs two steps of one",
    "calibrate": "correct the cost model's constants by your own runs",
    "doctor": "measure this machine, or the nodes of a cluster, into a hardware file",
}

LATE = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EFBIG)
"""File system errors that carry no file name: an earlier write could not be completed."""

USAGE = """\
Trireme finds, launches and proves the fastest way to train a GPT on the cluster you have.

usage: trireme VERB [ARGUMENTS]        (trireme VERB --help explains one)

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
    try:
        return int(module.main(argv))
    except RuntimeError as error:
        from launcher.backends.contract import BackendError

        if not isinstance(error, BackendError):
            raise
        print(f"error: {shown(error)}", file=sys.stderr)
        return error.exit_code


def usage() -> str:
    return USAGE.format(verbs="\n".join(f"  {verb:<10}{text}" for verb, text in VERBS.items()))


if __name__ == "__main__":
    sys.exit(main())
