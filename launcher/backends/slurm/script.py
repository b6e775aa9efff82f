"""The scripts that Slurm runs: one for each trial, and one for an array of them. Golden files show them whole."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from launcher.backends.slurm.container import check_container
from launcher.backends.slurm.options import directives, options
from launcher.backends.slurm.owned import check_srun
from launcher.backends.slurm.plan import SlurmJobPlan
from launcher.backends.slurm.states import ExitCode
from launcher.trials.job import Job
from trainer.shared.run.errors import ConfigError


class Shell(str):
    """Shell text that is meant as such: the script's own variables, never a value from outside."""


def job_script(plan: SlurmJobPlan) -> str:
    """The script of one attempt of a trial."""
    job, cluster, code = plan.job, plan.cluster, plan.code
    check_container(cluster.container)
    lines = directives({"job-name": job.name, **options(plan), "output": "/dev/null"}, cluster)
    return template(Path(__file__).parent / "job.sh.jinja").render(
        directives="\n".join(lines if plan.alone else []), alone=plan.alone,
        trial=job.trial, attempt=job.attempt, directory=str(job.directory), world_size=job.world_size, per_node=plan.per_node,
        environment=plan.environment, inherits=cluster.env_inherit, names=plan.names,
        code=code and str(code), runtime=cluster.container_runtime,
        folders=[path.source for path in plan.paths if path.written and path.path != str(job.directory)],
        setup=_lines("setup", cluster.setup), setup_may_fail=_lines("setup_may_fail", cluster.setup_may_fail), cpus=cluster.cpus,
        launch=cluster.starter, ranks=_ranks(plan), health=_health(plan) if cluster.health_check else "",
        saves=plan.saves, requeues=plan.requeues, number=plan.number, codes=ExitCode,
        env_from=cluster.env_from and str(Path(cluster.env_from).expanduser().absolute()),
    )  # fmt: skip


def array_script(name: str, jobs: Sequence[Job], after: str | None = None, as_array: bool = True) -> str:
    """Returns the script of an array of ``jobs`` with equal options, or of a single job. ``after``: a further dependency."""
    plan = SlurmJobPlan(jobs[0])
    chosen, limit = options(plan), jobs[0].max_parallel
    array = f"0-{len(jobs) - 1}" + (f"%{limit}" if 0 < limit < len(jobs) else "")
    chosen |= {"job-name": name, **({"array": array} if as_array else {}), "output": "/dev/null"}
    if after is not None:
        chosen["dependency"] = ",".join(filter(None, [chosen.get("dependency"), after]))
    return template(Path(__file__).parent / "array.sh.jinja").render(
        directives="\n".join(directives(chosen, plan.cluster)), scripts=[str(job.request_path) for job in jobs], codes=ExitCode
    )


# ---------------------------------------------------------------- commands


def _ranks(plan: SlurmJobPlan) -> str:
    trial = Shell('"$trireme_trial/config.yaml" --out "$trireme_trial" --attempt "$trireme_attempt"')
    trainer = _rank(plan, "", "trainer", trial)
    if plan.cluster.starter == "srun":
        return _srun(plan, plan.per_node, [trainer])
    return _srun(plan, 1, [["sh", "-c", Shell('"$trireme_as_node"'), "node", *_torchrun(plan)], trainer])


def _health(plan: SlurmJobPlan) -> str:
    """The command of the health check, which writes the names of bad nodes to a file."""
    if plan.cluster.starter != "srun":
        raise ConfigError(
            "cluster.health_check needs one task per rank, which cluster.launch=torchrun has not; set cluster.health_check=false"
        )
    names = Shell(f'"$trireme_log.bad-nodes" {plan.per_node} $trireme_nodes')
    return _srun(plan, plan.per_node, [_rank(plan, ".health", "trainer.health", names)], wait=0)  # it has a patience of its own


def _rank(plan: SlurmJobPlan, suffix: str, module: str, words: Shell) -> list[str]:
    """The command of one rank. Its shell takes off first where its log begins and, if it is not the image's, where the code lies."""
    log = Shell(f'"$trireme_log{suffix}"' + (' "$trireme_snapshot"' if plan.code is not None else ""))
    return ["sh", "-c", Shell('"$trireme_as_rank"'), "rank", log, plan.cluster.interpreter, "-u", "-P", "-m", module, words]


def _srun(plan: SlurmJobPlan, per_node: int, command: Sequence[Sequence[str]], wait: int = 30) -> str:
    """Runs ``command`` on all nodes, ``per_node`` times on each full one, or once. Ends tasks ``wait`` seconds after the first (0: never),
    since peers of a failed rank may still write their checkpoint or cause."""
    once, cluster = per_node < plan.per_node, plan.cluster
    size = [f"--nodes={plan.nodes}", f"--ntasks={plan.nodes if once else plan.job.world_size}", f"--ntasks-per-node={per_node}"]
    cpus = [f"--cpus-per-task={plan.per_node * (cluster.cpus or 1)}"] if once else []
    patience = ["--kill-on-bad-exit=0", f"--wait={wait}", "--unbuffered", "--distribution=block"]
    for text in cluster.srun_args:
        check_srun(text)
    where = [Shell(option) for option in plan.step_options]
    lines: list[Sequence[str]] = [["srun", *size, *cpus, *patience], where, plan.container.srun, cluster.srun_args]
    lines += [plan.container.command, *command]
    quoted = [[word if isinstance(word, Shell) else shlex.quote(word) for word in line] for line in lines if line]
    return " \\\n  ".join(map(" ".join, quoted))


def _torchrun(plan: SlurmJobPlan) -> list[str]:
    if not plan.fills_nodes:
        raise ConfigError(
            f"cluster.launch=torchrun runs as many ranks on every node, but {plan.job.world_size} ranks do not fill nodes of "
            f"cluster.gpus_per_node={plan.cluster.gpus_per_node}; use a layout that does, or cluster.launch=srun"
        )
    meeting = Shell('--rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT" --rdzv-id="$SLURM_JOB_ID.$trireme_attempt"')
    size = [f"--nnodes={plan.nodes}", f"--nproc-per-node={plan.per_node}", "--max-restarts=0"]
    return [plan.cluster.interpreter, "-m", "torch.distributed.run", *size, "--rdzv-backend=c10d", meeting, "--no-python"]


def _lines(key: str, lines: Sequence[str]) -> Sequence[str]:
    for line in lines:
        if "\n" in line or "\r" in line:
            raise ConfigError(f"cluster.{key} holds {line!r} with a line break; give one line for each entry")
    return lines


@cache
def template(path: Path) -> Any:
    """Returns a template of a shell script, in which the filter ``sh`` quotes a value."""
    import jinja2

    loader = jinja2.FileSystemLoader(path.parent)
    environment = jinja2.Environment(loader=loader, undefined=jinja2.StrictUndefined, trim_blocks=True, keep_trailing_newline=True)
    environment.filters["sh"] = shlex.quote
    return environment.get_template(path.name)


@cache
def check_setup(lines: tuple[str, ...], key: str = "setup") -> None:
    """Raises ``ConfigError`` with the line of ``cluster.KEY`` at which ``bash -n`` stops: an unclosed construct swallows the rest of the
    script."""
    bash = shutil.which("bash")
    if not lines or bash is None:
        return
    text = "\n".join(lines) + "\n"
    read = subprocess.run(
        [bash, "--norc", "-n"], input=text, capture_output=True, text=True, errors="replace", env={"LC_ALL": "C"}, timeout=60
    )
    if read.stderr:  # a here-document without its end is a warning alone
        words = read.stderr.splitlines()[0]
        number = re.search(r"line (\d+)", words)
        line = lines[min(int(number[1]) if number else 1, len(lines)) - 1]
        raise ConfigError(
            f"cluster.{key} holds {line!r}, where bash cannot read on ({re.sub(r'^.*?line [0-9]+: ', '', words)}); correct it"
        )
