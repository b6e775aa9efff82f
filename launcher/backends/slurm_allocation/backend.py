"""The backend of trials in one allocation: asks for it, hands trials over, and reads how they stand."""

from __future__ import annotations

import os
import subprocess
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from launcher.backends.contract import BackendError, NoRoom, Request
from launcher.backends.slurm.backend import SlurmBackend
from launcher.backends.slurm.client import clean_environment, submission_environment
from launcher.backends.slurm.errors import QueueFull, SchedulerUnavailable, SubmissionRejected
from launcher.backends.slurm.options import options
from launcher.backends.slurm.states import QueueEntry, expand, judge
from launcher.backends.slurm_allocation.allocation import Allocation, allocation_of, allocations, entry_of, found
from launcher.backends.slurm_allocation.cluster import SlurmAllocationCluster
from launcher.backends.slurm_allocation.steps import StepPlan, held, steward_script, without_end
from launcher.backends.snapshot import CodeSnapshot
from launcher.config.schema import ClusterConfig
from launcher.trials.job import Handle, Job, JobState
from trainer.shared.records.outcome import Reason, Status
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.files import read_json, write_json, write_text

_STEWARD_SECONDS = 30.0


class SlurmAllocationBackend(SlurmBackend):
    """Trials as steps of one job: that in which this command runs, or one that it asks for. Its steward, a shell script, starts them in
    their order as nodes become free, whether or not a launcher watches."""

    chains = False
    throttles = False

    def __init__(self, cluster: ClusterConfig, snapshot: CodeSnapshot | None = None):
        assert isinstance(cluster, SlurmAllocationCluster)
        super().__init__(cluster, snapshot)
        self._allocated = cluster
        self._outer = os.environ.get("SLURM_JOB_ID")
        self._used: dict[Path, Allocation] = {}
        self._silent_since: dict[str, float] = {}  # trials without an exit code whose allocation has ended

    # -- before anything is started -------------------------------------------------------------------------------------

    def check(self) -> None:
        super().check()
        step = os.environ.get("SLURM_STEP_ID", "")
        if self._outer is not None and step.isdecimal() and int(step) < 2**31:  # larger ones are salloc's own, which take no processors
            raise ConfigError(
                f"cluster.backend=slurm_allocation: this command is itself a step of Slurm's job {self._outer}, and holds the processors "
                "that its trials need; start it under salloc or in a batch job, without srun"
            )
        if self._outer is not None:
            try:
                self._outer_job()
            except SchedulerUnavailable as error:
                raise ConfigError(f"{error}; leave the shell of that job, or run: unset SLURM_JOB_ID") from None

    def _refusal(self, job: Job) -> str | None:
        try:
            nodes, plan = self._nodes_held(), StepPlan(job)
        except SchedulerUnavailable:
            return None
        where, remedy = "cluster.allocation_nodes", "raise it"
        if self._outer is not None:
            where, remedy = f"the allocation in which this runs (job {self._outer})", "use a larger one"
        if plan.nodes > nodes:
            return f"the trial needs {plan.nodes} nodes, and {where} has {nodes}; {remedy}, or use a smaller layout"
        if plan.slots > self._allocated.gpus_per_node:
            return f"the trial needs {plan.slots} ranks on a node, and the allocation has {self._allocated.gpus_per_node}; use one size"
        return None if self._outer is not None else super()._refusal(job)

    def _nodes_held(self) -> int:
        """Returns how many nodes the allocation has, or will have."""
        if self._outer is None:
            return self._allocated.allocation_nodes or self._allocated.nodes
        return len(expand(self._outer_job()[1]))

    def _outer_job(self) -> tuple[str, str, str]:
        """Returns name, nodes and time of submission of the job in which this command runs."""
        words = self._client.answer("squeue", "--noheader", f"--jobs={self._outer}", "--Format=Name:|,NodeList:|,SubmitTime:|").split("|")
        if len(words) < 3:
            raise SchedulerUnavailable(f"Slurm does not know the job {self._outer}, in which this command runs (SLURM_JOB_ID)")
        name, nodes, submitted = (word.strip() for word in words[:3])
        return name, nodes, submitted

    def _of_outer_job(self) -> list[str]:
        return []

    def shared_request(self, job: Job) -> str:
        name = f"{job.cluster.name_prefix}-{job.sweep}"
        script, where = self._steward(job, name)[0], "submitted once: the job in which all trials run; its name gets 8 more letters"
        if self._outer is not None:
            script = steward_script(self._allocated, {}, name, allocations(job) / name, job.sweep)
            where = f"started once in job {self._outer}, in which this command runs; nothing is submitted"
        return f"# {where}\n{script}\n# then started in it, as steps, when nodes are free:"

    def _submitted(self, job: Job) -> str:
        return self._steward(job, "trireme-allocation")[0]

    def _environment(self, job: Job) -> dict[str, str]:
        return submission_environment(os.environ, held(job, self._allocated))

    def validate(self, request: Request) -> str:
        if refused := self._refusal(request.job):
            raise ConfigError(refused)
        if self._outer is not None:
            return f"it runs in job {self._outer}, in which this command runs"
        return "its allocation: " + super().validate(Request(request.job, self._submitted(request.job)))

    def can_place(self, job: Job) -> bool:
        try:
            return StepPlan(job).nodes <= self._nodes_held() - len(job.avoid)
        except SchedulerUnavailable:
            return True

    def readmit(self, job: Job, handle: Handle) -> bool:
        return False

    def _plan(self, job: Job) -> StepPlan:
        return StepPlan(job, self._code(job))

    def _steward(self, job: Job, name: str) -> tuple[str, dict[str, str | None]]:
        """Returns the script of the allocation ``name``, and the options by which it is asked for."""
        chosen = held(job, self._allocated)
        return steward_script(self._allocated, chosen, name, allocations(job) / name, job.sweep), chosen

    # -- submission -----------------------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[Request]) -> list[Handle]:
        handles = self.find([request.job for request in requests])
        fresh = [request for request in requests if request.job.name not in handles]
        if fresh:
            code = self._write_code(fresh)
            allocation = self._current(fresh[0].job)
            self._used[allocation.folder] = allocation
            for request in fresh:
                handles[request.job.name] = allocation.put(request.job, request.text, self._need(request.job), code)
        return [handles[request.job.name] for request in requests]

    def find(self, jobs: Sequence[Job]) -> dict[str, Handle]:
        return {job.name: handle for job in jobs if (handle := found(job)) is not None}

    def _need(self, job: Job) -> str:
        """Returns the line by which the steward places it: nodes, room on each, names to leave out."""
        plan = StepPlan(job)
        excluded = expand(options(plan).get("exclude") or "")
        return f"{plan.nodes} {plan.slots} {','.join(excluded) or '-'}"

    def _current(self, job: Job) -> Allocation:
        """Returns an allocation that takes trials: the one in which this runs, the sweep's last one if it still does, or a new one."""
        try:
            if self._outer is not None:
                return self._tended(job)
            return self._client.patiently(lambda: self._asked_for(job))
        except QueueFull as full:
            raise NoRoom(str(full)) from None
        except SubmissionRejected as refused:
            raise ConfigError(str(refused)) from None

    def _asked_for(self, job: Job) -> Allocation:
        pointer = allocations(job) / f"{job.sweep}.json"
        chosen, last = held(job, self._allocated), read_json(pointer)
        if last is not None and last["options"] == chosen:
            allocation = Allocation(allocations(job) / last["name"])
            if allocation.place is None:  # a launcher was killed as it asked
                return self._ask(allocation, chosen)
            if allocation.takes_more and not self._watcher.states([allocation.place])[0].status.final:
                return allocation
        name = f"{job.cluster.name_prefix}-{job.sweep}-{uuid.uuid4().hex[:8]}"
        script, _ = self._steward(job, name)
        allocation = Allocation(allocations(job) / name)
        write_text(allocation.folder / "array.sh", script)
        write_json(pointer, {"name": name, "options": chosen})
        return self._ask(allocation, chosen)

    def _ask(self, allocation: Allocation, chosen: Mapping[str, str | None]) -> Allocation:
        """Submits the steward, unless an earlier launcher has."""
        submission = self._submission
        identifier = submission.known(allocation.folder) or submission.sbatch(allocation.folder, chosen)
        allocation.settle(identifier, allocation.folder.name, inside=False)
        return allocation

    def _tended(self, job: Job) -> Allocation:
        """Returns the allocation in which this command runs, with a steward."""
        name, _, submitted = self._client.patiently(self._outer_job)
        digits = "".join(filter(str.isdecimal, submitted))  # ids begin again when a controller loses its state
        allocation = Allocation(allocations(job) / f"job-{self._outer}-{digits}")
        if allocation.tended and allocation.takes_more:
            return allocation
        self._wait(allocation, lambda: not allocation.tended, "that of an earlier command has not ended")
        allocation.folder.mkdir(parents=True, exist_ok=True)
        for word in ("leave", "left"):
            (allocation.folder / word).unlink(missing_ok=True)
        allocation.settle(str(self._outer), name, inside=True)
        script = steward_script(self._allocated, {}, name, allocation.folder, job.sweep)
        write_text(allocation.folder / "array.sh", script)
        process = subprocess.Popen(
            ["bash", str(allocation.folder / "array.sh")], env=clean_environment(os.environ) | {"SLURM_JOB_ID": str(self._outer)},
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        self._wait(allocation, lambda: allocation.tended or process.poll() is not None, "it does not begin")
        if process.poll() is not None:
            raise BackendError(f"the script that runs the steps ended at once; see {allocation.folder}/steward.log")
        return allocation

    def _wait(self, allocation: Allocation, wanted: Callable[[], bool], otherwise: str) -> None:
        begin = time.monotonic()
        while not wanted():
            if time.monotonic() - begin > _STEWARD_SECONDS or self._client.hurried:
                raise BackendError(f"the script that runs the steps cannot be started: {otherwise}; see {allocation.folder}/steward.log")
            time.sleep(0.05)

    # -- afterwards -----------------------------------------------------------------------------------------------------

    def poll(self, handles: Sequence[Handle]) -> list[JobState]:
        open_ones = [handle for handle in handles if entry_of(handle).code is None and entry_of(handle).exists]
        places = {allocation_of(handle).folder: allocation_of(handle).place for handle in open_ones}
        asked = [(folder, place) for folder, place in places.items() if place is not None]
        states = dict(zip((folder for folder, _ in asked), self._watcher.states([place for _, place in asked]), strict=True))
        return [self._explained(handle, self._state(handle, states)) for handle in handles]

    def _state(self, handle: Handle, states: Mapping[Path, JobState]) -> JobState:
        entry, allocation = entry_of(handle), allocation_of(handle)
        if not entry.exists:
            return JobState(Status.FAILED, Reason.NODE, f"nothing is known of the allocation {handle['allocation']} any more")
        started, code = entry.started, entry.code
        since, nodes = started or (None, "")
        if code is not None and entry.cancelled and code != 0:
            return JobState(Status.STOPPED, Reason.CANCELLED, "cancelled", since, tuple(expand(nodes)))
        if code is not None:
            row = QueueEntry(handle["entry"], "FAILED" if code else "COMPLETED", started=since, nodes=nodes, exit_code=code)
            return judge(row, handle["attempt"])
        state = states.get(allocation.folder, JobState(Status.FAILED, Reason.NODE, "it never came to be"))
        place = allocation.place
        if place is not None and place["inside"] and not state.status.final and not allocation.tended:
            state = JobState(Status.FAILED, Reason.NODE, "the script that ran its steps was ended")
        if state.status.final:
            return self._without_end(handle, state)
        self._silent_since.pop(handle["entry"], None)
        if started is not None:
            return JobState(Status.RUNNING, None, "", since, tuple(expand(nodes)))
        if entry.cancelled and state.status is Status.SUBMITTED:  # nobody is there yet who could start it
            return JobState(Status.STOPPED, Reason.CANCELLED, "cancelled")
        waits = state.detail if state.status is Status.SUBMITTED else "waits: for nodes of its allocation"
        return JobState(Status.SUBMITTED, None, waits, expected=state.expected)

    def _without_end(self, handle: Handle, state: JobState) -> JobState:
        """The state of a trial whose allocation has ended, and of whose end no file tells; one may still be on its way."""
        entry = entry_of(handle)
        since = self._silent_since.setdefault(handle["entry"], time.monotonic())
        started = entry.started
        at, nodes = started or (None, "")
        if time.monotonic() - since < self.visibility_s:
            return JobState(Status.RUNNING if started else Status.SUBMITTED, None, "its allocation has ended", at, tuple(expand(nodes)))
        if entry.cancelled:
            return JobState(Status.STOPPED, Reason.CANCELLED, "cancelled", at, tuple(expand(nodes)))
        return JobState(*without_end(state, started is not None), at, tuple(expand(nodes)))

    def cancel(self, handles: Sequence[Handle]) -> None:
        for handle in handles:
            entry_of(handle).cancel()

    def collect(self, job: Job, handle: Handle, remove: bool = True) -> None:
        super().collect(job, handle, remove)
        if remove:  # of the command that runs the sweep, which may have found an allocation that an earlier one asked for
            self._used[allocation_of(handle).folder] = allocation_of(handle)

    def close(self) -> None:
        """Gives allocations back in which nothing is left to do; with ``sweep.follow=false`` others end by themselves."""
        for allocation in self._used.values():
            if allocation.folder.exists() and not allocation.busy:
                allocation.release()
        super().close()
