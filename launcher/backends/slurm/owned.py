"""Refuses options of sbatch and srun that Trireme sets itself, naming the key to use instead. Pure.

Slurm obeys the last duplicate: a renamed job cannot be found again, extra ranks never meet, a shorter job ends before its trial.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping

from trainer.shared.run.errors import ConfigError

_NAMED = "it is how Trireme finds its jobs again; a sweep is named with sweep.name"
_ARRAY = "trials go out as arrays already; sweep.max_parallel limits how many run at once"
_LOGS = "logs are in the folder of each trial ('trireme logs TRIAL')"
_RANKS = "the layout and cluster.gpus_per_node say how many ranks there are"
_SUBMISSION = "how jobs are submitted is not to be chosen"
_CONTAINER = "use the keys of cluster.container"
_GPUS = "use cluster.gpus_per_node, cluster.gpu_request and cluster.gpu_type"

_OWNER = "jobs are those of whoever starts them"
_LENGTH = "a job that Slurm may end earlier does not end its trial; use cluster.time, and cluster.start_timeout for how long it may wait"
_CROWDED = "ranks that share processors disturb each other's timings; use cluster.cpus"

SBATCH: dict[str, str] = {
    "job-name": _NAMED, "array": _ARRAY, "output": _LOGS, "error": _LOGS, "open-mode": _LOGS,
    "nodes": "use cluster.nodes", "ntasks": _RANKS, "tasks": _RANKS, "ntasks-per-node": _RANKS, "tasks-per-node": _RANKS,
    "ntasks-per-gpu": _RANKS, "ntasks-per-socket": _RANKS, "ntasks-per-core": _RANKS, "cpus-per-task": "use cluster.cpus",
    "gpus": _GPUS, "gpus-per-node": _GPUS, "gpus-per-task": _GPUS, "gpus-per-socket": _GPUS,
    "partition": "use cluster.partition", "account": "use cluster.account", "qos": "use cluster.qos", "time": "use cluster.time",
    "mem": "use cluster.mem_gb", "constraint": "use cluster.constraint", "nodelist": "use cluster.nodelist",
    "nodefile": "use cluster.nodelist", "exclude": "use cluster.exclude", "exclusive": "use cluster.exclusive",
    "oversubscribe": "use cluster.exclusive", "share": "use cluster.exclusive", "reservation": "use cluster.reservation",
    "dependency": "use cluster.dependency", "switches": "use cluster.switches", "segment": "use cluster.segment",
    "comment": "use cluster.comment",
    "mail-type": "use cluster.mail_type", "mail-user": "use cluster.mail_user", "signal": "use cluster.stop_signal",
    "requeue": "use cluster.requeues", "no-requeue": "use cluster.requeues=0",
    "no-kill": "a training cannot continue without one of its nodes",
    "chdir": "the ranks' folder is cluster.container.workdir, or the trial's",
    "workdir": "the ranks' folder is cluster.container.workdir, or the trial's", "export": "use cluster.env",
    "export-file": "use cluster.env_from", "parsable": _SUBMISSION, "wrap": _SUBMISSION, "wait": _SUBMISSION, "test-only": _SUBMISSION,
    "kill-on-invalid-dep": "a stage of a pipeline ends when one before it has failed",
    "hold": "the job would never start", "immediate": _SUBMISSION, "clusters": "run the command on a login node of that cluster",
    "cluster": "run the command on a login node of that cluster",
    "cluster-constraint": "run the command on a login node of that cluster", "jobid": _SUBMISSION, "distribution": _RANKS,
    "tres-per-task": f"use cluster.cpus; for GPUs {_GPUS}", "overcommit": _CROWDED, "uid": _OWNER, "gid": _OWNER, "time-min": _LENGTH,
    "deadline": _LENGTH, "help": _SUBMISSION, "usage": _SUBMISSION, "version": _SUBMISSION,
}  # fmt: skip
"""Maps an option's long name to its replacement."""

_SHORT = {"J": "job-name", "a": "array", "o": "output", "e": "error", "N": "nodes", "n": "ntasks", "c": "cpus-per-task", "G": "gpus",
          "p": "partition", "A": "account", "q": "qos", "t": "time", "C": "constraint", "w": "nodelist", "F": "nodefile", "x": "exclude",
          "s": "oversubscribe", "d": "dependency", "k": "no-kill", "D": "chdir", "W": "wait", "H": "hold", "I": "immediate",
          "M": "clusters", "h": "help", "V": "version", "m": "distribution", "O": "overcommit", "u": "usage"}  # fmt: skip
_WITHOUT_VALUE = set("hHIkOQsuvVW")
_SIMILAR = {"container": _CONTAINER}
"""Maps prefixes of options to their replacement."""

SRUN: dict[str, str] = {
    name: SBATCH[name]
    for name in (
        "nodes", "ntasks", "tasks", "ntasks-per-node", "tasks-per-node", "ntasks-per-gpu", "ntasks-per-socket", "ntasks-per-core",
        "cpus-per-task", "tres-per-task", "overcommit", "distribution", "output", "error", "open-mode", "chdir", "export", "export-file",
        "jobid", "no-kill", "nodelist", "nodefile", "exclude", "time", "time-min", "deadline", "signal", "uid", "gid", "immediate",
        "test-only", "clusters", "cluster-constraint", "help", "usage", "version",
    )
} | {
    "kill-on-bad-exit": _SUBMISSION, "wait": _SUBMISSION, "multi-prog": _RANKS, "pty": _LOGS, "relative": _RANKS, "het-group": _RANKS,
    "no-allocate": _SUBMISSION,
    **dict.fromkeys(("container", *(f"container-{what}" for what in ("image", "mounts", "workdir", "writable", "env"))), _CONTAINER),
}  # fmt: skip
_SRUN_SHORT = {"N": "nodes", "n": "ntasks", "c": "cpus-per-task", "o": "output", "e": "error", "D": "chdir", "K": "kill-on-bad-exit",
               "W": "wait", "m": "distribution", "k": "no-kill", "O": "overcommit", "t": "time", "w": "nodelist", "x": "exclude",
               "r": "relative", "I": "immediate", "M": "clusters", "Z": "no-allocate", "h": "help", "V": "version"}  # fmt: skip


def check_extra(text: str, gres: bool) -> None:
    """Raises ``ConfigError`` if ``text`` of ``cluster.extra`` sets an option that is Trireme's. ``gres``: it requests the GPUs."""
    for name, value in _options(text, SBATCH, _SHORT):
        if name == "gres" and (gres or re.search(r"(^|,)(gres[:/])?gpu\b", value)):
            _refuse("extra", text, f"--gres for GPUs is Trireme's: {_GPUS}")
        elif name in SBATCH:
            _refuse("extra", text, f"--{name} is Trireme's: {SBATCH[name]}")
        elif name.startswith(tuple(_SIMILAR)):
            _refuse("extra", text, f"--{name} is Trireme's: {_CONTAINER}")


def check_srun(text: str) -> None:
    """Checks ``cluster.srun_args`` likewise, and refuses ``text`` that srun would take for the command of the ranks."""
    if not re.fullmatch(r"-[^-=\s].*|--[^-=\s][^=\s]*(=.*)?", text) or not text.isprintable():
        raise ConfigError(f"cluster.srun_args holds {text!r}, which is not one option of srun on one line; write it as '--name=value'")
    for name, _ in _options(shlex.quote(text), SRUN, _SRUN_SHORT):
        if name in SRUN:
            _refuse("srun_args", text, f"--{name} is Trireme's: {SRUN[name]}")


def _refuse(key: str, text: str, words: str) -> None:
    raise ConfigError(f"cluster.{key} holds {text!r}, and {words}; remove it")


def _options(text: str, owned: Mapping[str, str], short: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """(long name, value) of every option in ``text``; an abbreviation that may mean one of ``owned`` is taken for it, as by sbatch."""
    words = _words(text)
    for word, following in zip(words, [*words[1:], ""]):
        if word.startswith("--"):
            name, is_given, value = word[2:].partition("=")
            full = name if name in owned else next((known for known in owned if len(name) > 1 and known.startswith(name)), name)
            yield full, value if is_given else following
        elif word.startswith("-"):
            yield from _short_options(word[1:], following, short)


def _short_options(letters: str, following: str, short: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """``-kJname``: options without values may stand together before one with a value."""
    for place, letter in enumerate(letters):
        yield short.get(letter, letter), letters[place + 1 :].removeprefix("=") or following
        if letter not in _WITHOUT_VALUE:
            return


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:  # quotes that do not end: sbatch will say so
        return text.split()
