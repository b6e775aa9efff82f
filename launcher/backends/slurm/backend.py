"""The Slurm backend: executes the decisions of the other modules."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from launcher.backends.contract import Backend, BackendError, Request
from launcher.backends.slurm import container
from launcher.backends.slurm.client import Client, submission_environment
from launcher.backends.slurm.cluster import SlurmCluster
from launcher.backends.slurm.errors import SchedulerUnavailable, SubmissionRejected, absent, complaint, own_complaint, unanswered
from launcher.backends.slurm.options import options
from launcher.backends.slurm.plan import SlurmJobPlan
from launcher.backends.slurm.script import check_setup, job_script
from launcher.backends.slurm.submission import Submission, equal
from launcher.backends.slurm.variables import check_inherited
from launcher.backends.slurm.watcher import Watcher
from launcher.backends.snapshot import CodeSnapshot
from launcher.config.schema import ClusterConfig
from launcher.trials.job import Handle, Job, JobState
from trainer.shared.records.outcome import Reason, Status
from trainer.shared.run.errors import ConfigError


class SlurmBackend(Backend):
    """Jobs of one Slurm cluster. A handle holds the job's id in its array, the array's name and the first attempt."""

    chains = True
    throttles = True

    def __init__(self, cluster: ClusterConfig, snapshot: CodeSnapshot | None = None):
        assert isinstance(cluster, SlurmCluster)
        super().__init__(cluster)
        self.poll_seconds, self.visibility_s = cluster.poll_seconds, cluster.visibility_s
        self._slurm = cluster
        self._client = Client(cluster)
        self._submission = Submission(self._client)
        self._watcher = Watcher(self._client)
        self._snapshot = snapshot or CodeSnapshot()

    def check(self) -> None:
        self._client.check()
        check_inherited(self._slurm)
        missing = [name for name in self._slurm.env_inherit if name not in os.environ]
        if missing:
            raise ConfigError(f"cluster.env_inherit names {missing[0]}, which is not set here; export it, or remove the name")
        container.check(self._slurm, self._client)
        if self._slurm.code == "snapshot":
            self._snapshot.check()

    def refusals(self, jobs: Sequence[Job]) -> dict[str, str]:
        found: dict[str, str] = {}
        for group in equal(jobs, lambda job: job):
            words = self._refusal(group[0])
            found |= {job.name: words for job in group if words}
        return found

    def _refusal(self, job: Job) -> str | None:
        """Returns why Slurm refuses the job permanently; None if it accepts it or cannot be asked now."""
        client = Client(SlurmJobPlan(job).cluster)
        try:
            script = self._submitted(job)
            client.test(script, self._environment(job))
        except ConfigError as error:
            return str(error)
        except SchedulerUnavailable:
            return None
        except SubmissionRejected as error:
            return _try_in_vain(client, script, self._environment(job)) if error.may_pass else str(error)
        return None

    def _submitted(self, job: Job) -> str:
        """Returns the script that sbatch gets for ``job``."""
        return self.render(job).text

    def _environment(self, job: Job) -> dict[str, str]:
        """Returns the environment in which sbatch runs for the job."""
        return submission_environment(os.environ, options(SlurmJobPlan(job)))

    def remarks(self, jobs: Sequence[Job]) -> list[str]:
        container, said = self._slurm.container, []
        if container.mounts and container.image is None:
            said.append("cluster.container.mounts do nothing without cluster.container.image")
        said += self._of_outer_job()
        shared = sum(not SlurmJobPlan(job).exclusive for job in jobs)
        if shared and self._slurm.exclusive is None:
            said.append(
                f"{shared} of {len(jobs)} trials may share their nodes with other jobs, which disturbs their timings; "
                "cluster.exclusive=true gives them whole nodes, cluster.exclusive=false says that this is meant"
            )
        return said

    def _of_outer_job(self) -> list[str]:
        """Returns remarks on the job of Slurm's inside of which the command itself runs, if it does."""
        if (outer := os.environ.get("SLURM_JOB_ID")) is None:
            return []
        return [
            f"this command runs inside of Slurm's job {outer}, whose nodes ({os.environ.get('SLURM_JOB_NODELIST', 'unknown')}) its "
            "trials do not use: they are jobs of their own, and may wait for that one to end; cluster=slurm_allocation runs them in it, "
            "or leave it first (exit salloc)"
        ]

    def _plan(self, job: Job) -> SlurmJobPlan:
        return SlurmJobPlan(job, self._code(job))

    def _code(self, job: Job) -> Path | None:
        """Returns the folder of the launcher's snapshot; None where the image brings the code."""
        return self._snapshot.folder(_root(job)) if self._slurm.code == "snapshot" else None

    def render(self, job: Job) -> Request:
        plan = self._plan(job)
        check_setup(tuple(plan.cluster.setup))
        check_setup(tuple(plan.cluster.setup_may_fail), "setup_may_fail")
        return Request(job, job_script(plan))

    def validate(self, request: Request) -> str:
        """Returns the answer of ``sbatch --test-only``: when and where the job would start."""
        try:
            return self._client.test(request.text, self._environment(request.job))
        except SubmissionRejected as error:
            passing = ", which it also says while nodes are down or busy" if error.may_pass else ""
            raise ConfigError(f"{error}{passing}") from None
        except SchedulerUnavailable as error:
            raise BackendError(f"{error}; ask again later") from None

    def submit(self, requests: Sequence[Request]) -> list[Handle]:
        return self._submission.submit(requests, self._write_code(requests))

    def _write_code(self, requests: Sequence[Request]) -> str:
        """Writes the code that the jobs run, where they take the launcher's, and returns its name."""
        if self._slurm.code == "image":
            return "image"
        for root in {_root(request.job) for request in requests}:
            self._snapshot.write(root)
        return self._snapshot.digest

    def find(self, jobs: Sequence[Job]) -> dict[str, Handle]:
        return self._submission.find(jobs)

    def poll(self, handles: Sequence[Handle]) -> list[JobState]:
        return [self._explained(handle, state) for handle, state in zip(handles, self._watcher.states(handles), strict=True)]

    def can_place(self, job: Job) -> bool:
        """Asks Slurm's scheduler, which counts nodes that are down as missing, and those that are busy as there."""
        try:
            self._client.test(self.render(job).text, self._environment(job))
        except SubmissionRejected:
            return False
        except SchedulerUnavailable:
            return True  # the submission will wait for an answer
        return True

    def readmit(self, job: Job, handle: Handle) -> bool:
        nodes = options(SlurmJobPlan(job)).get("exclude") or ""
        try:
            self._client.output("scontrol", "update", f"JobId={handle['job_id']}", f"ExcNodeList={nodes}")
        except (SubmissionRejected, SchedulerUnavailable):
            return False
        return True

    def cancel(self, handles: Sequence[Handle]) -> None:
        self._client.cancel([handle["job_id"] for handle in handles])

    def hurry(self) -> None:
        self._client.hurried = True

    def logs(self, job: Job, handle: Handle | None, follow: bool = False) -> Iterator[str]:
        """Lines of the ranks; where none has come to write any, those of the job's script: a container that cannot be opened, say."""
        silent = True
        for line in super().logs(job, handle, follow):
            silent = False
            yield line
        if silent:
            yield from _text(_script_log(job.directory, job.attempt)).splitlines()

    def _explained(self, handle: Handle, state: JobState) -> JobState:
        """Adds to ``state`` the cause in the files of a failed job, of which Slurm knows only an exit code."""
        if state.status is not Status.FAILED:
            return state
        directory, attempt = Path(handle["directory"]), handle["attempt"] if state.attempt is None else state.attempt
        if state.reason is Reason.NODE:  # the health check of its last attempt may have found which
            names = tuple(_text(directory / "logs" / f"attempt{attempt}.bad-nodes").split())
            return replace(state, bad_nodes=names, detail=f"{state.detail}: {', '.join(names)}" if names else state.detail)
        if state.reason not in (Reason.ERROR, Reason.CONFIGURATION, Reason.CANNOT_START):
            return state
        log = _text(_script_log(directory, attempt))
        lacking = absent([*_last_lines(directory, attempt), *log.splitlines()], self._slurm)
        if lacking or state.reason is not Reason.CONFIGURATION:
            lacking = own_complaint(log) or lacking
        if lacking:
            return replace(state, reason=Reason.CANNOT_START, detail=lacking)
        words = complaint(log) if state.reason is Reason.ERROR else ""  # of srun, or of the container's runtime
        reason = Reason.NODE if unanswered(words) else state.reason
        return replace(state, reason=reason, detail=f"{state.detail}: {words}") if words else state


def _try_in_vain(client: Client, script: str, environment: Mapping[str, str]) -> str | None:
    """Submits an empty job with the script's options for another day, and cancels it by name: unlike ``--test-only``, busy nodes do not
    matter."""
    empty, name = script.partition("\n\n")[0] + "\nexit\n", f"trireme-test-{uuid.uuid4().hex[:8]}"
    try:
        client.output("sbatch", "--begin=now+1day", "--parsable", f"--job-name={name}", text=empty, environment=environment)
    except SubmissionRejected as error:
        return str(error)
    except SchedulerUnavailable:
        pass  # it may have been submitted all the same
    with suppress(SubmissionRejected, SchedulerUnavailable):
        client.output("scancel", f"--name={name}")
    return None


def _root(job: Job) -> Path:
    return job.directory.parent.parent


def _script_log(directory: Path, attempt: int) -> Path:
    return directory / "logs" / f"attempt{attempt}.slurm.log"


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _last_lines(directory: Path, attempt: int) -> Iterator[str]:
    """The last line that each rank of an attempt, and of its health check, has logged."""
    for path in sorted((directory / "logs").glob(f"attempt{attempt}.*rank*.log")):
        yield from [line for line in _text(path).splitlines() if line.strip()][-1:]
