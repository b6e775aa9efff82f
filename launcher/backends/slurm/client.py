"""Slurm's commands as functions: run without a shell, in an environment of their own, with their errors explained."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import TypeVar

from launcher.backends.contract import BackendError
from launcher.backends.slurm.cluster import SlurmCluster
from launcher.backends.slurm.errors import QueueFull, SchedulerUnavailable, SubmissionRejected, explain
from launcher.backends.slurm.login import Login
from launcher.backends.waiting import pause_unless
from trainer.shared.run.errors import ConfigError

PROGRAMS = ("sbatch", "squeue", "sacct", "scancel", "scontrol", "srun")
_USUAL_ARRAY_SIZE = 1001
_MOST_TASKS = re.compile(r"\bmax_array_tasks=(\d+)")
_NO_ACCOUNTING = ("accounting_storage/none", "(null)")
_WORDS_OF_ONE_COMMAND = 100
_INDICES_OF_ONE_WORD = 1000
ANSWER_SECONDS = 60.0
_PATIENCE_SECONDS = 3600.0
_LONGEST_PAUSE_SECONDS = 60.0
T = TypeVar("T")
_OF_AN_OUTER_JOB = re.compile(
    r"(?!SLURM_(?:CONF|JWT)$)(SLURM|SLURMD|SBATCH|SRUN|SQUEUE|SACCT|SCANCEL|PMI|PMIX)_|(RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT)$"
)


def clean_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns ``environment`` without variables of an outer job or the user's defaults, but with the server's (SLURM_CONF, SLURM_JWT)."""
    return {name: value for name, value in environment.items() if reaches_a_job(name)}


def reaches_a_job(name: str) -> bool:
    """Returns whether ``clean_environment`` keeps a variable of that name."""
    return not _OF_AN_OUTER_JOB.match(name)


_DEFAULTS = {
    f"SBATCH_{option.upper().replace('-', '_')}": option
    for option in (
        "account", "partition", "qos", "reservation", "constraint", "mem-per-cpu", "mem-per-gpu", "acctg-freq", "core-spec", "cpus-per-gpu",
        "delay-boot", "gpu-bind", "gpu-freq", "gres-flags", "hint", "mem-bind", "network", "power", "profile", "spread-job", "thread-spec",
        "threads-per-core", "use-min-nodes", "wait-all-nodes", "wckey",
    )
} | {
    "SBATCH_TIMELIMIT": "time", "SBATCH_MEM_PER_NODE": "mem", "SBATCH_REQ_SWITCH": "switches", "SBATCH_WAIT4SWITCH": "switches",
}  # fmt: skip
"""Maps variables by which a site or user sets sbatch options that do not define a job to these options."""


def submission_environment(environment: Mapping[str, str], chosen: Mapping[str, str | None]) -> dict[str, str]:
    """``clean_environment``, and defaults of the site for options that ``chosen`` leaves open: for sbatch a variable is above a script."""
    kept = {
        name: environment[name]
        for name, option in _DEFAULTS.items()
        if name in environment and ("mem" if option.startswith("mem-per") else option) not in chosen
    }
    return clean_environment(environment) | kept


class Client:
    """Asks one Slurm, for jobs of one cluster configuration."""

    def __init__(self, cluster: SlurmCluster):
        self.cluster = cluster
        self.login = Login(cluster.submit)
        self.hurried = False  # every question is asked once; a plain flag, which a signal handler may set

    def output(self, *command: str, text: str = "", environment: Mapping[str, str] | None = None) -> str:
        """Standard output, with ``text`` as standard input. ``SchedulerUnavailable`` when Slurm cannot be asked now, ``SubmissionRejected``
        when it says no."""
        return self._run(command, text, environment).stdout

    def test(self, script: str, environment: Mapping[str, str]) -> str:
        """Returns the answer of ``sbatch --test-only``, from standard error. Raises as ``output`` does."""
        return self._run(("sbatch", "--test-only"), script, environment).stderr.strip()

    def _run(self, command: Sequence[str], text: str, environment: Mapping[str, str] | None) -> subprocess.CompletedProcess[str]:
        try:
            done = subprocess.run(
                self.login.command(command), env=self.login.environment(dict(environment or clean_environment(os.environ))),
                capture_output=True, text=True, errors="replace", input=text, timeout=ANSWER_SECONDS,
                start_new_session=True,  # a Ctrl-C is for us: the answer is still wanted
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise SchedulerUnavailable(f"Slurm cannot be reached: {command[0]} did not answer within {ANSWER_SECONDS:g} s") from None
        if failure := self.login.failure(done.returncode, done.stderr):
            raise SchedulerUnavailable(failure)
        if done.returncode:
            raise explain(done.stderr, self.cluster)
        return done

    def answer(self, *command: str) -> str:
        """Standard output of a question. There is nothing to refuse about one: ``SchedulerUnavailable`` whatever is wrong."""
        try:
            return self.output(*command)
        except SubmissionRejected as error:
            raise SchedulerUnavailable(str(error).replace("refused the job", "cannot be asked", 1)) from None

    @cached_property
    def configuration(self) -> dict[str, str]:
        pairs = (line.partition(" = ") for line in self.answer("scontrol", "show", "config").splitlines())
        return {name.strip(): value.strip() for name, _, value in pairs}

    @property
    def max_array_size(self) -> int:
        """Returns how many jobs one array may hold: Slurm's limit is on the index, which starts at 0. 1 if the site has no arrays."""
        limits = [self.configuration.get("MaxArraySize", ""), *_MOST_TASKS.findall(self.configuration.get("SchedulerParameters", ""))]
        return max(1, min((int(limit) for limit in limits if limit.isdecimal()), default=_USUAL_ARRAY_SIZE))

    @property
    def accounts(self) -> bool:
        return self.configuration.get("AccountingStorageType", "") not in _NO_ACCOUNTING

    def configuration_folder(self) -> Path:
        return Path(self.configuration.get("SLURM_CONF", "/etc/slurm/slurm.conf")).parent

    def cancel(self, ids: Sequence[str]) -> None:
        """Ends jobs, or takes them back from the queue; unknown and ended ones are ignored."""
        words = together(ids)
        for start in range(0, len(words), _WORDS_OF_ONE_COMMAND):
            with suppress(SubmissionRejected):
                self.patiently(partial(self.output, "scancel", *words[start : start + _WORDS_OF_ONE_COMMAND]))

    def patiently(self, ask: Callable[[], T]) -> T:
        """Repeats ``ask()`` while Slurm is silent. Raises ``BackendError`` if that lasts or nobody waits any more, ``QueueFull`` at
        once."""
        pause, begin = 1.0, time.monotonic()
        while True:
            try:
                return ask()
            except QueueFull:
                raise
            except SchedulerUnavailable as error:
                if self.hurried:
                    raise BackendError(str(error)) from None
                if time.monotonic() > begin + _PATIENCE_SECONDS:
                    raise BackendError(f"{error}; this has lasted for {_PATIENCE_SECONDS / 60:g} minutes") from None
                print(f"{error}; trying again in {pause:g} s", file=sys.stderr)
            pause_unless(lambda: self.hurried, pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def check(self) -> None:
        """Raises ``ConfigError`` if Slurm is not installed or does not answer."""
        missing, host = self.login.lacking(PROGRAMS), self.login.host
        if missing:
            raise ConfigError(
                f"cluster.backend=slurm, but this machine has no {missing[0]}; run this on a login node of the cluster, name one with "
                "cluster.submit.ssh=HOST, or use cluster=local"
            )
        if missing is None:
            self._check_login()
        named = os.environ.get("SLURM_CONF")
        if host is None and named and not Path(named).exists():  # every command of Slurm would wait a minute for it
            raise ConfigError(f"SLURM_CONF={named} does not exist; correct or unset it")
        try:
            self.max_array_size  # noqa: B018 - asks the controller
        except SchedulerUnavailable as error:
            raise ConfigError(f"{error}; once it answers, start the same command again") from None

    def _check_login(self) -> None:
        """Raises ``ConfigError`` if the login node cannot be reached, or lacks a program."""
        named = f"cluster.submit.ssh={self.login.host}"
        if self.cluster.python is None and not self.cluster.in_container:
            raise ConfigError(f"{named}: the ranks cannot take this machine's Python; name the cluster's with cluster.python=PATH")
        if self.cluster.env_inherit:
            raise ConfigError(
                f"{named}: variables of this machine do not reach the jobs (cluster.env_inherit={self.cluster.env_inherit}); use "
                "cluster.env_from"
            )
        names = (*PROGRAMS, "flock")
        try:
            found = self.output(
                "sh", "-c", 'for name in "$@"; do command -v "$name" >/dev/null && echo "has $name"; done; true', "sh", *names
            )
        except (SchedulerUnavailable, SubmissionRejected) as error:
            raise ConfigError(str(error)) from None
        for name in names:
            if f"has {name}" not in found.splitlines():
                raise ConfigError(f"{named}: commands over ssh find no {name} there; put it on the PATH of a shell that is not interactive")


_INDEX = re.compile(r"_\d+$")
_JOB_ID = re.compile(r"(?:Submitted batch job )?(\d+)(?:_\S+|;\S+| on cluster \S+)?")


def job_ids(answer: str) -> list[str]:
    """Ids of jobs, or of their arrays, in lines of ``answer`` that hold nothing else: sites print notices around them."""
    found = (_JOB_ID.fullmatch(line.strip()) for line in answer.splitlines())
    return list(dict.fromkeys(match[1] for match in found if match))


def together(ids: Sequence[str]) -> list[str]:
    """Ids of jobs as scancel takes many at once: ``12_0`` and ``12_3`` are ``12_[0,3]``. No word is longer than an argument may be."""
    words = [identifier for identifier in ids if not _INDEX.search(identifier)]
    arrays: dict[str, set[int]] = {}
    for array, index in (identifier.split("_") for identifier in ids if _INDEX.search(identifier)):
        arrays.setdefault(array, set()).add(int(index))
    for array, indices in arrays.items():
        ordered = [str(index) for index in sorted(indices)]
        parts = range(0, len(ordered), _INDICES_OF_ONE_WORD)
        words += [f"{array}_[{','.join(ordered[start : start + _INDICES_OF_ONE_WORD])}]" for start in parts]
    return words
