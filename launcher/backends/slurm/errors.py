"""Turns errors of Slurm, a job's script and the ranks' Python into one line: cause, configuration key, remedy. Pure.

A *refusal* changes only with the configuration; *silence* passes: the controller or munge is down, slow, or takes no more jobs for now.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from launcher.backends.slurm.cluster import SlurmCluster


class SubmissionRejected(RuntimeError):
    """Slurm says no. ``str(error)`` is one plain line. ``may_pass``: with words that it also has for nodes that are only down or busy."""

    def __init__(self, words: str, may_pass: bool = False):
        super().__init__(words)
        self.may_pass = may_pass


class SchedulerUnavailable(RuntimeError):
    """Slurm cannot be asked just now, or takes no job just now. ``str(error)`` is one plain line."""


class NoArray(SubmissionRejected):
    """Slurm takes no array of so many jobs; it may take fewer, or jobs that are in none."""


class QueueFull(SchedulerUnavailable):
    """Slurm plainly took no job, and takes one when there are fewer."""


SILENCE = (
    # what Slurm says, the cause; the first that fits
    ("Problem talking to the database", "the accounting daemon (slurmdbd) does not answer"),
    ("Unable to contact slurm controller", "the controller (slurmctld) does not answer"),
    ("Did you start munged", "munge is not running on this machine"),
    ("Munge encode failed", "munge does not answer on this machine"),
    ("Protocol authentication error", "munge does not answer on this machine or on the controller's, or the two have different keys"),
    ("Expired credential", "the clocks of this machine and of the controller differ, or munge is overloaded"),
    ("Rewound credential", "the clocks of this machine and of the controller differ"),
    ("Connection refused", "the controller (slurmctld) does not answer"),
    ("in standby mode", "the backup controller has not taken over yet"),
    ("Socket timed out", "the controller (slurmctld) is overloaded"),
    ("Zero Bytes were transmitted", "the controller ended the connection (it is restarting, or this machine has another munge key)"),
    ("Transport endpoint is not connected", "the controller ended the connection"),
    ("Communication connection failure", "the controller (slurmctld) does not answer"),
)

FULL = (
    # what Slurm says, the cause: it passes as other jobs end, or as room is made
    (r"temporarily una", "the controller is full of jobs (MaxJobCount)"),
    (
        r"\b(QOS|Assoc)(Max|Grp)(Submit)?Jobs?(Per(User|Account))?Limit\b",
        "this user, account or quality of service has as many as a limit allows, trials of an array counted singly",
    ),
    (r"I/O error writing script", "the controller cannot store the job's script, its disk may be full"),
)
"""Limits on how many jobs there are. What a job alone exceeds (``QOSMaxCpuPerJobLimit``) passes never."""

REFUSALS = (
    # what Slurm says, the cause with the values of keys, the remedy
    (r"[Ii]nvalid partition", "cluster.partition={partition} does not exist", "`sinfo -s` lists the partitions"),
    (
        r"account or account/partition",
        "cluster.account={account} may not be charged by this user, or not in cluster.partition={partition}",
        "`sacctmgr show associations user=$USER` lists what may",
    ),
    (r"Invalid qos", "cluster.qos={qos} does not exist, or may not be used by this account", "`sacctmgr show qos` lists names"),
    (r"QOS[A-Z]", "the job exceeds a limit of cluster.qos={qos} ({words})", "`sacctmgr show qos` lists names and limits"),
    (
        r"violates accounting",
        "the job exceeds a limit of the account ({words})",
        "ask for fewer nodes or less time, or use another cluster.account",
    ),
    (
        r"time limit is invalid",
        "cluster.time={time} is more than cluster.partition={partition} allows",
        "`sinfo -o '%P %l'` shows the limits",
    ),
    (r"Memory specification", "no node has cluster.mem_gb={mem_gb}", "`sinfo -o '%n %m'` shows the memory of the nodes in MB"),
    (
        r"generic resource",
        "GPUs cannot be asked for like this here (cluster.gpu_request={gpu_request}, cluster.gpu_type={gpu_type})",
        "`sinfo -o '%n %G'` shows what nodes have; sites without GPU accounting need cluster.gpu_request=none",
    ),
    (
        r"More processors requested|Node count specification",
        "cluster.nodes={nodes} with cluster.gpus_per_node={gpus_per_node} is more than cluster.partition={partition} allows",
        "use fewer nodes, or another partition",
    ),
    (
        r"node configuration is not available",
        "no nodes satisfy the request: cluster.nodes={nodes}, gpus_per_node={gpus_per_node}, gpu_type={gpu_type}, cpus={cpus}, "
        "mem_gb={mem_gb}, constraint={constraint}, nodelist={nodelist}, exclude={exclude}",
        "`sinfo -o '%P %D %c %m %G %f'` lists the nodes",
    ),
    (r"feature spec", "cluster.constraint={constraint} names a feature that no node has", "`sinfo -o '%n %f'` lists the features"),
    (
        r"Invalid node name",
        "cluster.nodelist={nodelist} or cluster.exclude={exclude} names a node that does not exist",
        "`sinfo -N` lists the nodes",
    ),
    (r"dependency problem", "cluster.dependency={dependency} is not a dependency that Slurm knows", "write it as afterok:JOB"),
    (r"reservation", "cluster.reservation={reservation} does not exist or may not be used", "`scontrol show reservation` lists them"),
    (r"partition not available", "cluster.partition={partition} is drained or inactive", "use another partition, or ask the site's staff"),
    (
        r"unrecognized option|invalid option",
        "cluster.extra or cluster.srun_args holds an option that this Slurm does not have ({words})",
        "`sbatch --help` and `srun --help` list the options",
    ),
    (
        r"Unable to open file|look like a batch script|script is empty",
        "the script of the jobs was moved or emptied before sbatch read it ({words})",
        "see that the folder of trials (sweep.dir) is left alone and its disk is not full, then start the same command again",
    ),
    (r"DOS line breaks", "the job script has DOS line ends", "remove carriage returns from cluster.setup"),
    (
        r"cannot stat file|Unable to process configuration|unrecognized key|establish a configuration",
        "this machine's Slurm is not configured ({words})",
        "set SLURM_CONF to the cluster's slurm.conf, or run this on a login node",
    ),
    (
        r"Invalid --?\w+|Invalid \w+ spec",
        "an option has a value that Slurm cannot read ({words})",
        "correct the key of that name under cluster",
    ),
)


_SITES_QOS = "the quality of service that this site gives a job without cluster.qos"
_MAY_PASS = r"node configuration is not available|Requested nodes are busy|Required node not available"


def explain(words: str, cluster: SlurmCluster) -> SubmissionRejected | SchedulerUnavailable:
    """Explains Slurm's error output in terms of ``cluster``."""
    text = plain(words)
    for pattern, cause in SILENCE:
        if pattern in words:
            said = plain(next(line for line in words.splitlines() if pattern in line))
            return SchedulerUnavailable(f"Slurm cannot be reached: {cause} ({said})")
    for pattern, cause in FULL:
        if full := next((line for line in words.splitlines() if re.search(pattern, line)), None):
            return QueueFull(f"Slurm takes no more jobs for now: {cause} ({plain(full)})")
    if "job array spec" in words:
        return NoArray(f"Slurm refused the array of jobs ({text}); `scontrol show config` shows its MaxArraySize")
    for pattern, cause, remedy in REFUSALS:
        if re.search(pattern, words):
            values = {name: "null" if value is None else value for name, value in vars(cluster).items()}
            may_pass = re.search(_MAY_PASS, words) is not None
            told = cause.format(**values, words=text).replace("cluster.qos=null", _SITES_QOS)
            return SubmissionRejected(f"Slurm refused the job: {told}; {remedy}", may_pass)
    if not text:  # a no has words; without any, the command was ended, and what came of it is not known
        return SchedulerUnavailable("Slurm cannot be reached: its command ended without a word")
    return SubmissionRejected(f"Slurm refused the job, saying: {text}; correct what it names under cluster")


_COMPLAINT = re.compile(r"\berror: |\bfatal: |level=(error|fatal)", re.IGNORECASE)
_CONSEQUENCE = re.compile(
    r"Exited with exit code|task \d+: (Killed|Terminated)|Terminating StepId|\*\*\* |Job step aborted|spank: required plugin|"
    r"pyxis: (child \d+ |container start failed|container was not started|couldn't create enroot start|printing enroot log file)|"
    r"pyxis: +(\[INFO\]|Parallel unsquashfs|\d+ inodes|created \d+ |$)"  # what enroot says as it goes
)


def unanswered(words: str) -> bool:
    """Returns whether srun gave up on ranks that it had told to end: their node is silent long before Slurm says so (``SlurmdTimeout``)."""
    return "Timed out waiting for job step to complete" in words


def own_complaint(log: str) -> str:
    """Returns why the job's script ended before the ranks began; empty if it did not."""
    return next((line.removeprefix("error: ") for line in log.splitlines() if line.startswith("error: cluster.")), "")


def complaint(log: str) -> str:
    """Returns the first error line of srun, slurmstepd or a container runtime in a job's log; empty if none."""
    return next((plain(line) for line in log.splitlines() if _COMPLAINT.search(line) and not _CONSEQUENCE.search(line)), "")


_ABSENT = (
    # what the log says, what that means, what to do: in a container, outside; the first that fits
    (
        r"No module named '?trainer\b",
        "has no trainer",
        "set cluster.code=snapshot, or install Trireme in the image",
        "set cluster.code=snapshot, or install Trireme there",
    ),
    (
        r"ModuleNotFoundError: No module named '(?P<name>[\w.]+)'|: No module named (?P<program>[\w.]+)$",
        "has no package {name}",
        "use an image that has it, or name the interpreter in the image that does with cluster.python",
        "install it there, or name another interpreter with cluster.python",
    ),
    (
        r"^Unknown option: -P",
        "is older than 3.11",
        "use an image with a newer Python, or name one in it with cluster.python",
        "name a newer one with cluster.python",
    ),
    (
        r"exec: \S+: not found|exec: \S+: No such file|cannot execute: required file not found",
        "does not exist there",
        "name one that the image has with cluster.python",
        "name one that the nodes have with cluster.python",
    ),
    (
        r"exec: \S+: Permission denied|cannot execute: Permission denied",
        "cannot be executed there",
        "name another one with cluster.python",
        "name another one with cluster.python",
    ),
)


def absent(lines: Iterable[str], cluster: SlurmCluster) -> str | None:
    """Returns why Python could not begin, from the first of the logs' last ``lines`` that tells, or None; earlier lines may be warnings."""
    inside = cluster.in_container
    python = f"{cluster.interpreter} " + (f"of the image {cluster.container.image}" if inside else "of the nodes")
    for line in lines:
        for pattern, meaning, in_image, on_node in _ABSENT:
            if found := re.search(pattern, line.strip()):
                name = next(filter(None, found.groups()), "")
                return f"{python}, in which the ranks run, {meaning.format(name=name)} ({line.strip()}); {in_image if inside else on_node}"
    return None


def plain(words: str) -> str:
    """Slurm's own words on one line, without the names of its programs and functions."""
    lines = (re.sub(r"^([\w-]+: )?((error|fatal): )?", "", line.strip()).strip() for line in words.splitlines())
    return "; ".join(dict.fromkeys(line for line in lines if line))
