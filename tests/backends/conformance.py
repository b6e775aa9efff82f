"""What every backend owes the sweep loop, tried on the real thing with the real trainer.

Most tests look at the same few jobs (``Shown``), which run once, side by side. A backend's test module subclasses ``Conformance`` and has a ``ground`` fixture:

    @pytest.fixture(scope="module")
    def ground(tmp_path_factory):
        yield from closing(Ground(make_backend, cluster, folder, unknown=handle_of_no_job))

    class TestSlurm(Conformance):
        ...  # and what only this backend promises

    class TestSearchOnSlurm(SearchConformance): ...
"""

from __future__ import annotations

import dataclasses
import json
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.backends.contract import Backend, BackendError
from launcher.backends.pool import Backends
from launcher.config import Config
from launcher.config.hardware import hardware_files
from launcher.config.inference import ServingConfig, WorkloadConfig
from launcher.config.schema import ClusterConfig, SweepConfig
from launcher.config.search import SearchConfig
from launcher.config.trainers import engine
from launcher.planning.serving.plan import plan_inference
from launcher.search.serving import serving_problem
from launcher.sweep.search import search
from launcher.trials.job import Handle, Job, JobState
from launcher.trials.outcome import Verdict, decide
from tests.clusters.slurm.process import rest
from trainer.shared.records.outcome import Reason, Status
from trainer.shared.records.trial_files import PERCENTILES, failures_in
from trainer.shared.run.files import read_json
from trainer.shared.run.read import save
from trainer.shared.run.rules import resolve
from trainer.shared.run.schema import DataConfig, LayoutConfig, ModelConfig, RunConfig, TrainConfig

MODEL = ModelConfig(layers=1, hidden=16, heads=2, vocab=64, seq=8)
SHORT = RunConfig(steps=3, warmup_steps=1, global_batch=2, timeline=False, device="cpu")
LONG = RunConfig(steps=10_000_000, warmup_steps=1, global_batch=2, timeline=False, device="cpu")
TOO_LARGE = RunConfig(steps=3, warmup_steps=1, global_batch=2, memory_gb=1e-6, device="cpu")


@dataclass
class Ground:
    """Where the suite runs: how to make the backend, as every new launcher would, and what its jobs need."""

    make: Callable[[], Backend]
    cluster: ClusterConfig
    folder: Path  # of the trials; shared with the ranks where the backend shares a file system
    patience: float = 300.0  # seconds in which anything that is bound to happen happens
    unknown: Handle = field(default_factory=dict)  # the handle of a job that never was
    backend: Backend = field(init=False)
    _shown: Shown | BaseException | None = None

    def __post_init__(self) -> None:
        self.backend = self.make()

    def job(self, run: RunConfig = SHORT, *, ranks: int = 2, attempt: int = 0, name: str = "", **cluster: Any) -> Job:
        """A new trial on ``ranks`` ranks, with its directory and configuration."""
        identifier = uuid.uuid4().hex[:12]
        directory = self.folder / name / identifier
        directory.mkdir(parents=True)
        layout = LayoutConfig(tensor=ranks, data=1)
        config = resolve(TrainConfig(model=MODEL, layout=layout, data=DataConfig(kind="synthetic"), run=run), ranks)
        save(config, directory / "config.yaml")
        place = type(self.cluster)(**{**vars(self.cluster), **cluster})
        return Job(identifier, "conformance", attempt, directory, place, ranks)

    def submit(self, *jobs: Job) -> list[Handle]:
        return self.backend.submit([self.backend.render(job) for job in jobs])

    def until(self, job: Job, handle: Handle, wanted: Callable[[JobState], bool], backend: Backend | None = None) -> JobState:
        begin = time.monotonic()
        while not wanted(state := (backend or self.backend).poll([handle])[0]):
            assert time.monotonic() < begin + self.patience, f"still {state}\n{self.log(job, handle)}"
            rest(begin)
        return state

    def end(self, job: Job, handle: Handle) -> JobState:
        """Wait for the end of a job and bring home what it left."""
        state = self.until(job, handle, lambda state: state.status.final)
        begin = time.monotonic()
        while not self.collected(job, handle):
            assert time.monotonic() < begin + self.patience, "what it left cannot be brought home"
            rest(begin)
        return state

    def collected(self, job: Job, handle: Handle) -> bool:
        """Whether what a job left has been brought home; it may be out of reach at first."""
        try:
            self.backend.collect(job, handle)
        except BackendError:
            return False
        return True

    def running(self, job: Job, handle: Handle) -> None:
        """Wait until the ranks of a job make steps."""
        self.until(job, handle, lambda state: state.status is Status.RUNNING and "step 1" in self.log(job, handle))

    def log(self, job: Job, handle: Handle) -> str:
        return "\n".join(self.backend.logs(job, handle))

    @property
    def shown(self) -> Shown:
        """What became of the suite's jobs, which run when the first test asks. A failure is raised anew for each test."""
        if self._shown is None:
            try:
                self._shown = show(self)
            except BaseException as error:
                self._shown = error
        if isinstance(self._shown, BaseException):
            raise self._shown
        return self._shown


@dataclass
class Shown:
    """What launchers saw of one trial that is done, twice, one that does not fit, and one that is cancelled while it runs."""

    done: Job
    handles: list[Handle]  # of the one that is done, the one that does not fit, and the long one
    adopted: Handle  # what a second submission of the same job gave
    found: dict[str, Handle]  # of the long one and one that never was, while the long one ran
    followed: list[str]  # lines of the one that is done, followed to their end
    status_when_followed: Status
    logs: list[str]
    ends: list[JobState]  # of the first two
    in_order: list[JobState]
    backwards: list[JobState]
    seen_elsewhere: JobState  # the long one while it ran, as another launcher saw it by its handle as JSON
    cancelled: list[JobState]  # the long one when the other launcher had cancelled it, as both saw it
    result: dict[str, Any]  # of the first attempt of the one that is done
    metrics: list[str]
    verdict: Verdict  # on the one that does not fit
    handle_of_second_attempt: Handle
    second_attempt: JobState
    second_result: dict[str, Any]


HOSTILE = ["a b", "$(touch owned)", "`touch owned`", "'; touch owned; '", '"{rank}"', "a\\b&|<>*?#"]


def show(ground: Ground) -> Shown:
    """Run the suite's jobs. They lie in folders of hostile names, and the one that is done has the same strings as variables."""
    name = "/".join(HOSTILE)
    done = ground.job(name=name, env={f"HOSTILE_{n}": text for n, text in enumerate(HOSTILE)})
    large, long, never = ground.job(TOO_LARGE, ranks=1, name=name), ground.job(LONG, name=name), ground.job(name=name)
    jobs, other = (done, large, long), ground.make()
    try:
        handles = ground.submit(*jobs)
        (adopted,) = ground.submit(done)
        followed = sorted(ground.backend.logs(done, handles[0], follow=True))
        status_when_followed = ground.backend.poll(handles[:1])[0].status
        logs = sorted(ground.backend.logs(done, handles[0]))
        ends = [ground.end(job, handle) for job, handle in zip(jobs[:2], handles)]
        result = read_json(done.directory / "result.json") or {}
        kept = done.directory / "metrics.jsonl"
        metrics = kept.read_text().splitlines() if kept.exists() else []
        verdict = decide(large.attempt, ends[1], read_json(large.directory / "result.json"), failures_in(large.directory))
        ground.running(long, handles[2])
        found = ground.backend.find([long, never])
        in_order, backwards = ground.backend.poll(handles), ground.backend.poll(handles[::-1])
        again = dataclasses.replace(done, attempt=1)
        (second,) = ground.submit(again)
        elsewhere = json.loads(json.dumps(handles[2]))
        seen_elsewhere = other.poll([elsewhere])[0]
        other.cancel([elsewhere])
        cancelled = [ground.until(long, elsewhere, lambda state: state.status.final, other), ground.end(long, handles[2])]
        ground.backend.cancel([handles[2], handles[2]])
        ground.backend.cancel([])
        second_attempt = ground.end(again, second)
    finally:
        other.close()
    return Shown(
        done, handles, adopted, found, followed, status_when_followed, logs, ends, in_order, backwards, seen_elsewhere, cancelled,
        result, metrics, verdict, second, second_attempt, read_json(done.directory / "result.json") or {},
    )  # fmt: skip


class PureConformance:
    """What is promised of a backend that starts nothing. ``ground`` is a fixture of the subclass's module."""

    def test_rendering_has_no_effect_and_says_the_same_twice(self, ground: Ground) -> None:
        job = ground.job()
        before = sorted(job.directory.rglob("*"))
        assert ground.backend.render(job) == ground.backend.render(job)
        assert sorted(job.directory.rglob("*")) == before
        assert ground.backend.find([job]) == {}

    def test_what_would_be_submitted_is_text_that_names_the_trial(self, ground: Ground) -> None:
        job = ground.job()
        text = ground.backend.render(job).text
        assert job.trial in text and "trainer" in text


class Conformance(PureConformance):
    """The suite."""

    def test_a_job_runs_to_its_end_and_leaves_result_and_logs_of_all_ranks(self, ground: Ground) -> None:
        shown = ground.shown
        assert shown.ends[0].status is Status.DONE
        assert (shown.result["status"], shown.result["attempt"], shown.result["world_size"]) == ("done", 0, 2)
        assert len(shown.result["losses"]) == SHORT.steps
        assert all(line.startswith(("[0] ", "[1] ")) for line in shown.logs)
        assert any("step 3" in line for line in shown.logs)

    def test_a_handle_is_plain_json_that_serves_another_launcher(self, ground: Ground) -> None:
        shown = ground.shown
        assert json.loads(json.dumps(shown.handles)) == shown.handles
        assert shown.seen_elsewhere.status is Status.RUNNING
        assert all(state.status.final and state.status is not Status.DONE for state in shown.cancelled)

    def test_a_job_of_the_same_name_is_adopted_not_started_twice(self, ground: Ground) -> None:
        shown = ground.shown
        assert shown.adopted == shown.handles[0]
        assert ground.backend.find([shown.done]).get(shown.done.name, shown.adopted) == shown.adopted
        assert len(shown.metrics) in (0, SHORT.steps), "one run makes each step once"

    def test_another_attempt_is_another_job(self, ground: Ground) -> None:
        shown = ground.shown
        assert shown.handle_of_second_attempt not in shown.handles
        assert (shown.second_attempt.status, shown.second_result["attempt"]) == (Status.DONE, 1)

    def test_only_jobs_that_exist_are_found(self, ground: Ground) -> None:
        assert list(ground.shown.found.values()) == [ground.shown.handles[2]]

    def test_many_jobs_are_submitted_and_polled_in_order(self, ground: Ground) -> None:
        statuses = [Status.DONE, Status.FAILED, Status.RUNNING]
        assert [state.status for state in ground.shown.in_order] == statuses
        assert [state.status for state in ground.shown.backwards] == statuses[::-1]
        assert ground.backend.poll([]) == []

    def test_a_trial_that_does_not_fit_fails_for_that_reason(self, ground: Ground) -> None:
        verdict = ground.shown.verdict
        assert (verdict.status, verdict.reason) == (Status.FAILED, Reason.OUT_OF_MEMORY), ground.shown.ends[1]

    def test_a_cancelled_job_ends_and_cancelling_again_is_no_error(self, ground: Ground) -> None:
        assert all(state.status.final and state.status is not Status.DONE for state in ground.shown.cancelled)
        ground.backend.cancel(ground.shown.handles)

    def test_a_job_that_nobody_knows_is_a_fault_of_the_place(self, ground: Ground) -> None:
        (state,) = ground.backend.poll([ground.unknown])
        assert (state.status, state.reason) == (Status.FAILED, Reason.NODE) and state.detail
        ground.backend.cancel([ground.unknown])

    def test_following_the_logs_ends_with_the_job_and_misses_nothing(self, ground: Ground) -> None:
        assert ground.shown.status_when_followed is Status.DONE
        assert ground.shown.followed == ground.shown.logs
        assert any("step 3" in line for line in ground.shown.followed)

    def test_hostile_strings_reach_the_ranks_as_data(self, ground: Ground) -> None:
        assert ground.shown.ends[0].status is Status.DONE, ground.shown.logs
        assert not list(Path.cwd().glob("owned")) and not list(ground.folder.rglob("owned"))


class SearchConformance:
    """A search on the backend."""

    def test_a_search_of_inference_measures_requests_on_ranks(self, ground: Ground) -> None:
        """Tensor 1 and 2 x batch 1 and 2: what ran has percentiles, and its folder is that of any trial."""
        serving = ServingConfig(weights="fp32", kv="fp32", tensor=[1, 2], pipeline=[1], batch=[1, 2])
        cluster = dataclasses.replace(ground.cluster, gpus_per_node=2, nodes=1, hardware=hardware_files()["cpu"])
        config = Config(
            model=MODEL,
            run=SHORT,
            cluster=cluster,
            sweep=SweepConfig(name=f"serving-{uuid.uuid4().hex[:6]}", dir=str(ground.folder.parent)),
            search=SearchConfig(max_trials=2),
            engine=engine("trireme"),
            workload=WorkloadConfig(input=4, output=4),
            serving=serving,
        )
        problem = serving_problem(config, plan_inference(config))
        with Backends() as backends:
            found = search(str(config.sweep.name), problem, backends)
        assert 1 <= len(found.trials) <= 2 and found.reason, "it may know the front after one"
        for _, record, measured in found.trials:
            result = record.read_result() or {}
            assert record.status is Status.DONE and result["peak_memory_bytes"] > 0, record.detail
            for name in PERCENTILES:
                assert 0 < result[name]["p50"] <= result[name]["p90"] <= result[name]["p99"]
            assert measured.seconds == result["step_time_s"] and len(result["step_times_s"]) == SHORT.steps
            assert result["latency_s"]["p50"] >= result["ttft_s"]["p50"] + 2.9 * result["tpot_s"]["p50"]


def closing(ground: Ground) -> Iterator[Ground]:
    """For the fixture: ``yield from closing(Ground(...))``."""
    yield ground
    ground.backend.close()
