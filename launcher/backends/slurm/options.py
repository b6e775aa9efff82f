"""Derives sbatch options as data, and quotes values in ``#SBATCH`` lines. Pure."""

from __future__ import annotations

import math
import re

from launcher.backends.slurm.cluster import SlurmCluster, seconds_of
from launcher.backends.slurm.owned import check_extra
from launcher.backends.slurm.plan import SlurmJobPlan
from launcher.trials.job import Job
from trainer.shared.run.errors import ConfigError

_PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./\[\]-]+")


def options(plan: SlurmJobPlan) -> dict[str, str | None]:
    """Options of sbatch without their dashes, None for those that take no value. Jobs with equal options can be one array."""
    job, cluster = plan.job, plan.cluster
    named = f"trireme pipeline {job.sweep} stage {job.stage}" if job.stage else f"trireme sweep {job.sweep}"
    wanted: dict[str, str | int | None] = {
        "partition": cluster.partition,
        "account": cluster.account,
        "qos": cluster.qos,
        "reservation": cluster.reservation,
        "time": _time(cluster),
        "nodes": plan.nodes,
        "ntasks": job.world_size,  # without --ntasks-per-node Slurm would fill one node after the other with them
        "ntasks-per-node": plan.per_node,
        **_gpus(plan.per_node, cluster),
        "cpus-per-task": cluster.cpus,
        "mem": f"{math.ceil(cluster.mem_gb * 1024)}M" if cluster.mem_gb else None if cluster.mem_gb is None else 0,
        "constraint": cluster.constraint,
        "nodelist": cluster.nodelist,
        "exclude": ",".join(filter(None, [cluster.exclude, *job.avoid])) or None,
        "switches": _switches(cluster),
        "segment": _segment(plan),
        "dependency": _dependency(job, cluster),
        "kill-on-invalid-dep": "yes" if job.after else None,  # else a job behind a failed one is never started nor removed
        "comment": cluster.comment if cluster.comment is not None else named,
        "mail-type": cluster.mail_type,
        "mail-user": cluster.mail_user,
        "signal": f"B:USR1@{_notice(cluster)}" if plan.saves else None,
    }
    chosen: dict[str, str | None] = {name: str(value) for name, value in wanted.items() if value is not None}
    flags = ["exclusive"] if plan.exclusive else []
    return chosen | dict.fromkeys([*flags, "requeue" if cluster.requeues else "no-requeue"])


def directives(chosen: dict[str, str | None], cluster: SlurmCluster) -> list[str]:
    """``#SBATCH`` lines: options of ours, then those of ``cluster.extra``, as a person writes them."""
    keys = {"comment": "sweep.name"} if cluster.comment is None else {}
    given = ((name, value, keys.get(name, f"cluster.{name.replace('-', '_')}")) for name, value in chosen.items())
    lines = [f"#SBATCH --{name}" + ("" if value is None else f"={quote(value, key)}") for name, value, key in given]
    for text in cluster.extra:
        if not text.startswith("-") or not text.isprintable():
            raise ConfigError(f"cluster.extra holds {text!r}, which is not one option of sbatch on one line; write it as '--name=value'")
        check_extra(text, gres="gres" in chosen)
        lines.append(f"#SBATCH {text}")
    return lines


def quote(value: str, key: str) -> str:
    """Quotes ``value`` of ``key`` for an ``#SBATCH`` line. Not shell quoting: backslashes count inside quotes of either kind."""
    if not value.isprintable():
        raise ConfigError(f"{key}={value!r} holds a line break or control character, which no option of sbatch may")
    if _PLAIN.fullmatch(value):
        return value
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _dependency(job: Job, cluster: SlurmCluster) -> str | None:
    ids = [handle["job_id"] for handle in job.after]
    return (
        ",".join(filter(None, [cluster.dependency, ":".join(["afterany" if job.after_any else "afterok", *ids]) if ids else None])) or None
    )


def _gpus(per_node: int, cluster: SlurmCluster) -> dict[str, str]:
    kind = f"{cluster.gpu_type}:" if cluster.gpu_type else ""
    if cluster.gpu_request == "gres":
        return {"gres": f"gpu:{kind}{per_node}"}
    return {"gpus-per-node": f"{kind}{per_node}"} if cluster.gpu_request == "gpus_per_node" else {}


def _switches(cluster: SlurmCluster) -> str | None:
    if cluster.switches is None:
        return None
    wait = cluster.switches_wait
    return str(cluster.switches) if wait is None else f"{cluster.switches}@{wait}"


def _segment(plan: SlurmJobPlan) -> int | None:
    """Returns the nodes of each segment of a job; sbatch wants all segments equal, and a job no smaller than one."""
    wanted = plan.cluster.segment
    if wanted is None or plan.nodes == 1:
        return None
    if plan.nodes % (size := min(wanted, plan.nodes)):
        divisors = [n for n in range(1, plan.nodes + 1) if plan.nodes % n == 0]
        raise ConfigError(
            f"cluster.segment={wanted} does not divide the {plan.nodes} nodes of a trial; use {', '.join(map(str, divisors[:-1]))} or "
            f"{plan.nodes}, or another number of nodes"
        )
    return size


def _notice(cluster: SlurmCluster) -> int:
    """Seconds of notice before the end; never more than half of a short time limit, or it would come at the start."""
    return cluster.stop_signal if cluster.time is None else max(1, int(min(cluster.stop_signal, seconds_of(cluster.time) / 2)))


def _time(cluster: SlurmCluster) -> str | None:
    """The time limit, if sbatch would read it as one."""
    if cluster.time is not None:
        seconds_of(cluster.time)
    return cluster.time
