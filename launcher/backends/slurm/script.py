"""The scripts that Slurm runs: one for each trial, and one for an array of them. Pure; golden files show them whole."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from launcher.backends.slurm.client import reaches_a_job
from launcher.backends.slurm.container import interpreter, wrapping
from launcher.backends.slurm.options import directives, options, saves, shape
from launcher.backends.slurm.owned import check_srun
from launcher.backends.slurm.states import ExitCode
from launcher.backends.variables import RANKS, check_names
from launcher.config.containers import HostPath, check_container, given_mounts, host_paths, runtime
from launcher.config.env_file import names_in
from launcher.config.slurm import SlurmCluster
from launcher.trials.job import Job
from trainer.shared.run.errors import ConfigError

MEETING = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE")
"""Variables that the script itself works out, by which the ranks meet."""


OWN = {
    *RANKS,
    *(f"trireme_{name}" for name in (
        "trial", "attempt", "log", "snapshot", "code", "line", "nodes", "name", "as_rank", "as_node", "rest", "warned", "ended", "ranks",
        "interrupted", "pause", "options",
    )),
    "IFS", "SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_RESTART_COUNT", "SLURM_NODEID", "SLURM_PROCID", "SLURM_LOCALID",
    "UID", "EUID", "PPID", "BASHOPTS", "SHELLOPTS", "BASH_VERSINFO",  # bash lets nobody set them
}  # fmt: skip
"""Variables that the script sets and reads itself. Those of its own have a prefix: lines of ``cluster.setup`` run in the same shell."""


class Shell(str):
    """Shell text that is meant as such: the script's own variables, never a value from outside."""


def job_script(job: Job, cluster: SlurmCluster, code: Path | None) -> str:
    """The script of one attempt of a trial. ``code`` is the folder of the launcher's snapshot; None: the image brings its own."""
    check_container(cluster.container)
    chosen = {"job-name": job.name, **options(job, cluster), "output": "/dev/null"}
    return _template("job.sh.jinja").render(
        directives="\n".join(directives(chosen, cluster)),
        trial=job.trial, attempt=job.attempt, directory=str(job.directory), world_size=job.world_size, per_node=shape(job)[1],
        environment=_environment(cluster), inherits=cluster.env_inherit, names=_names(cluster),
        code=code and str(code), runtime=runtime(cluster.container),
        folders=[path.source for path in _paths(job, cluster, code) if path.written and path.path != str(job.directory)],
        setup=_lines("setup", cluster.setup), setup_may_fail=_lines("setup_may_fail", cluster.setup_may_fail), cpus=cluster.cpus,
        launch=launch(cluster), ranks=_ranks(job, cluster, code), health=_health(job, cluster, code) if cluster.health_check else "",
        saves=saves(job), requeues=cluster.requeues, codes=ExitCode,
        env_from=cluster.env_from and str(Path(cluster.env_from).expanduser().absolute()),
    )  # fmt: skip


def array_script(name: str, jobs: Sequence[Job], cluster: SlurmCluster, after: str | None = None, as_array: bool = True) -> str:
    """The script of an array of ``jobs``, which have equal options; or of one job that is in none, where a site has no arrays. ``after``: a
    dependency on top of the configured one."""
    chosen = options(jobs[0], cluster)
    limit = jobs[0].max_parallel
    array = f"0-{len(jobs) - 1}" + (f"%{limit}" if 0 < limit < len(jobs) else "")
    chosen |= {"job-name": name, **({"array": array} if as_array else {}), "output": "/dev/null"}
    if after is not None:
        chosen["dependency"] = ",".join(filter(None, [chosen.get("dependency"), after]))
    return _template("array.sh.jinja").render(
        directives="\n".join(directives(chosen, cluster)), scripts=[str(job.request_path) for job in jobs], codes=ExitCode
    )


def launch(cluster: SlurmCluster) -> str:
    """srun or torchrun."""
    return cluster.launch or ("torchrun" if runtime(cluster.container) == "oci" else "srun")


def _environment(cluster: SlurmCluster) -> dict[str, str]:
    """Variables of the ranks."""
    check_names("cluster.env", cluster.env, OWN)
    defaults = {} if "OMP_NUM_THREADS" in cluster.env_inherit else {"OMP_NUM_THREADS": "1"}
    return {**defaults, **cluster.env}


def check_inherited(cluster: SlurmCluster) -> None:
    """``ConfigError`` for the first name in ``cluster.env_inherit`` that would not reach the ranks as it is."""
    check_names("cluster.env_inherit", cluster.env_inherit, OWN)
    for name in cluster.env_inherit:
        if not reaches_a_job(name):
            raise ConfigError(
                f"cluster.env_inherit has {name}, which no job takes along: variables of Slurm's commands and of a job that the launcher "
                "runs in stay here; remove it, or rename it"
            )
        if name in cluster.env:
            raise ConfigError(f"cluster.env_inherit has {name}, and cluster.env too; leave one of them out")


def _names(cluster: SlurmCluster) -> list[str]:
    """Names of all variables that the job sets for its ranks."""
    of_file = names_in(cluster.env_from) if cluster.env_from else []
    check_names("cluster.env_from", of_file, OWN)
    check_inherited(cluster)
    for key, names in (("env", list(cluster.env)), ("env_inherit", cluster.env_inherit)):
        for name in set(of_file) & set(names):
            raise ConfigError(f"cluster.env_from has {name}, and cluster.{key} too; leave one of them out")
    return list(dict.fromkeys([*_environment(cluster), *of_file, *cluster.env_inherit, *MEETING]))


def _paths(job: Job, cluster: SlurmCluster, code: Path | None) -> list[HostPath]:
    """Paths of the host that the ranks open; in no container they are all there anyway."""
    return host_paths(job.config, job.directory, code, given_mounts(cluster.container)) if runtime(cluster.container) != "none" else []


# ---------------------------------------------------------------- commands


def _ranks(job: Job, cluster: SlurmCluster, code: Path | None) -> str:
    """The command that runs all ranks."""
    log, trial = _rank_log(code), Shell('"$trireme_trial/config.yaml" --out "$trireme_trial" --attempt "$trireme_attempt"')
    trainer = ["sh", "-c", Shell('"$trireme_as_rank"'), "rank", log, interpreter(cluster), "-u", "-P", "-m", "trainer", trial]
    if launch(cluster) == "srun":
        return _srun(job, cluster, code, shape(job)[1], [trainer])
    return _srun(job, cluster, code, 1, [["sh", "-c", Shell('"$trireme_as_node"'), "node", *_torchrun(job, cluster)], trainer])


def _health(job: Job, cluster: SlurmCluster, code: Path | None) -> str:
    """The command of the health check, which writes the names of bad nodes to a file."""
    if launch(cluster) != "srun":
        raise ConfigError(
            "cluster.health_check needs one task per rank, which cluster.launch=torchrun has not; set cluster.health_check=false"
        )
    log, per_node = _rank_log(code, ".health"), shape(job)[1]
    names = Shell(f'"$trireme_log.bad-nodes" {per_node} $trireme_nodes')
    check = ["sh", "-c", Shell('"$trireme_as_rank"'), "rank", log, interpreter(cluster), "-u", "-P", "-m", "trainer.health", names]
    return _srun(job, cluster, code, per_node, [check], wait=0)  # it has a patience of its own


def _srun(job: Job, cluster: SlurmCluster, code: Path | None, per_node: int, command: Sequence[Sequence[str]], wait: int = 30) -> str:
    """``command``, given in lines, on all nodes; ``per_node`` times on each that is full, or once.

    Tasks are ended ``wait`` seconds after the first one (0: never), and not at once when one fails: peers of a rank that stops or
    fails may still be writing their checkpoint, or why they failed.
    """
    nodes, full = shape(job)
    once = per_node < full
    size = [f"--nodes={nodes}", f"--ntasks={nodes if once else job.world_size}", f"--ntasks-per-node={per_node}"]
    cpus = [f"--cpus-per-task={full * (cluster.cpus or 1)}"] if once else []
    patience = ["--kill-on-bad-exit=0", f"--wait={wait}", "--unbuffered", "--distribution=block"]
    container = wrapping(cluster, _paths(job, cluster, code), _names(cluster))
    lines = [
        ["srun", *size, *cpus, *patience],
        container.srun,
        [_srun_option(text) for text in cluster.srun_args],
        container.command,
        *command,
    ]
    return " \\\n  ".join(_text(line) for line in lines if line)


def _rank_log(code: Path | None, suffix: str = "") -> Shell:
    """What the shell of a rank takes off first: where its log begins and, if it is not the image's, where the code lies."""
    return Shell(f'"$trireme_log{suffix}"' + (' "$trireme_snapshot"' if code is not None else ""))


def _torchrun(job: Job, cluster: SlurmCluster) -> list[str]:
    nodes, per_node = shape(job)
    if nodes * per_node != job.world_size:
        raise ConfigError(
            f"cluster.launch=torchrun runs as many ranks on every node, but {job.world_size} ranks do not fill nodes of "
            f"cluster.gpus_per_node={cluster.gpus_per_node}; use a layout that does, or cluster.launch=srun"
        )
    meeting = Shell('--rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT" --rdzv-id="$SLURM_JOB_ID.$trireme_attempt"')
    size = [f"--nnodes={nodes}", f"--nproc-per-node={per_node}", "--max-restarts=0"]
    return [interpreter(cluster), "-m", "torch.distributed.run", *size, "--rdzv-backend=c10d", meeting, "--no-python"]


def _text(words: Sequence[str]) -> str:
    return " ".join(word if isinstance(word, Shell) else shlex.quote(word) for word in words)


def _srun_option(text: str) -> str:
    check_srun(text)
    return text


def _lines(key: str, lines: Sequence[str]) -> Sequence[str]:
    for line in lines:
        if "\n" in line or "\r" in line:
            raise ConfigError(f"cluster.{key} holds {line!r} with a line break; give one line for each entry")
    return lines


@cache
def _template(name: str) -> Any:
    import jinja2

    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, undefined=jinja2.StrictUndefined, trim_blocks=True, keep_trailing_newline=True)
    environment.filters["sh"] = shlex.quote
    return environment.get_template(name)
