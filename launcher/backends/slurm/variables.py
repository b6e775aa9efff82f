"""The environment variables of a job's ranks: those that the configuration gives, those of a file, and those that the job takes along."""

from __future__ import annotations

import re
from pathlib import Path

from launcher.backends.slurm.client import reaches_a_job
from launcher.backends.slurm.cluster import SlurmCluster
from launcher.backends.variables import RANKS, check_names
from trainer.shared.run.errors import ConfigError

MEETING = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE")
"""Variables that the script itself works out, by which the ranks meet."""
OWN = {
    *RANKS,
    *(f"trireme_{name}" for name in (
        "trial", "attempt", "log", "snapshot", "code", "line", "nodes", "name", "as_rank", "as_node", "rest", "warned", "ended", "ranks",
        "interrupted", "pause", "options", "number",
    )),
    "IFS", "SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_RESTART_COUNT", "SLURM_NODEID", "SLURM_PROCID", "SLURM_LOCALID",
    "UID", "EUID", "PPID", "BASHOPTS", "SHELLOPTS", "BASH_VERSINFO",  # bash lets nobody set them
}  # fmt: skip
"""Variables that the script sets and reads itself. Those of its own have a prefix: lines of ``cluster.setup`` run in the same shell."""
_LINE = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=.*")


def environment(cluster: SlurmCluster) -> dict[str, str]:
    """Variables that the script sets to values of the configuration."""
    check_names("cluster.env", cluster.env, OWN)
    defaults = {} if "OMP_NUM_THREADS" in cluster.env_inherit else {"OMP_NUM_THREADS": "1"}
    return {**defaults, **cluster.env}


def variable_names(cluster: SlurmCluster) -> list[str]:
    """Names of all variables that the job sets for its ranks."""
    of_file = names_in(cluster.env_from) if cluster.env_from else []
    check_names("cluster.env_from", of_file, OWN)
    check_inherited(cluster)
    for key, names in (("env", list(cluster.env)), ("env_inherit", cluster.env_inherit)):
        for name in set(of_file) & set(names):
            raise ConfigError(f"cluster.env_from has {name}, and cluster.{key} too; leave one of them out")
    return list(dict.fromkeys([*environment(cluster), *of_file, *cluster.env_inherit, *MEETING]))


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


def names_in(file: str) -> list[str]:
    """Returns names of NAME=value lines in ``file``. Raises ``ConfigError`` if it is unreadable, public or malformed; never repeats a
    value."""
    path = Path(file).expanduser()
    try:
        shared, lines = path.stat().st_mode & 0o077, path.read_bytes().decode().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        words = error.strerror or type(error).__name__ if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"cluster.env_from={file} cannot be read ({words}); give a text file of lines NAME=value") from None
    if shared:
        raise ConfigError(f"cluster.env_from={file} may be read or changed by others; run: chmod 600 {file}")
    return [_name(file, number, line) for number, line in enumerate(lines, 1) if line and not line.startswith("#")]


def _name(file: str, number: int, line: str) -> str:
    match = _LINE.fullmatch(line)
    if match is None or "\r" in line or "\0" in line:
        raise ConfigError(f"cluster.env_from={file}: line {number} is not NAME=value; correct it")
    return match[1]
