"""A place where trials run whose step times are known: each poll is one step of every running trial, or all up to its
next validation."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from launcher.backends.contract import Backend, Request
from launcher.config.schema import ClusterConfig, LocalCluster
from launcher.trials.job import Handle, Job, JobState
from trainer.shared.records.outcome import Reason, Status
from trainer.shared.run.files import read_json, write_json
from trainer.shared.run.phases import PhaseTable
from trainer.shared.run.read import load
from trainer.shared.run.schema import TrainConfig

Truth = Callable[[TrainConfig], float | Reason]
"""Seconds of a step, or why a run fails."""


class PlantedBackend(Backend):
    """Writes what a trainer writes. Its state is a folder, so that jobs outlive their launcher."""

    poll_seconds = 0.0

    def __init__(
        self,
        folder: Path,
        truth: Truth,
        dies_after: int | None = None,
        scatter: float = 0.001,
        loss: Callable[[TrainConfig, int], float] | None = None,
    ):
        super().__init__(LocalCluster())
        self.folder, self.truth, self.dies_after, self.scatter, self.loss = folder, truth, dies_after, scatter, loss
        self.submitted: list[str] = []
        self.known: dict[Path, tuple[TrainConfig, float | Reason]] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def __call__(self, cluster: ClusterConfig) -> Backend:
        """So that it can be given where a maker of backends is asked for."""
        return self

    def check(self) -> None:
        """It is always there."""

    def render(self, job: Job) -> Request:
        return Request(job, f"planted {job.name}\n")

    def submit(self, requests: Sequence[Request]) -> list[Handle]:
        for request in requests:
            self.submitted.append(request.job.trial)
            write_json(
                self.folder / f"{request.job.name}.json",
                {"directory": str(request.job.directory), "attempt": request.job.attempt, "step": 0},
            )
            if self.dies_after is not None and len(self.submitted) > self.dies_after:
                raise KeyboardInterrupt
        return [{"name": request.job.name} for request in requests]

    def find(self, jobs: Sequence[Job]) -> dict[str, Handle]:
        return {job.name: {"name": job.name} for job in jobs if (self.folder / f"{job.name}.json").exists()}

    def cancel(self, handles: Sequence[Handle]) -> None:
        for handle in handles:
            self._change(handle, ended="cancelled")

    def poll(self, handles: Sequence[Handle]) -> list[JobState]:
        return [self._step(handle) for handle in handles]

    def _change(self, handle: Handle, **changes: object) -> dict[str, object]:
        """Returns the job, changed."""
        path = self.folder / f"{handle['name']}.json"
        job = (read_json(path) or {}) | changes
        write_json(path, job)
        return job

    def _step(self, handle: Handle) -> JobState:
        job = read_json(self.folder / f"{handle['name']}.json") or {}
        directory = Path(str(job["directory"]))
        if directory not in self.known:
            config = load(directory / "config.yaml")
            self.known[directory] = config, self.truth(config)
        config, seconds = self.known[directory]
        if job.get("ended") == "cancelled":
            return JobState(Status.STOPPED, Reason.CANCELLED)
        if isinstance(seconds, Reason):
            return JobState(Status.FAILED, seconds, "planted")
        first, step = int(str(job["step"])) + 1, int(str(job["step"])) + (config.run.eval_every or 1)
        self._change(handle, step=step)
        with (directory / "metrics.jsonl").open("a") as stream:
            for number in range(first, step + 1):
                line = {"attempt": job["attempt"], "step": number, "step_time_s": seconds * (1 + self.scatter * (number % 3))}
                if self.loss is not None and config.run.eval_every and number % config.run.eval_every == 0:
                    line["validation_loss"] = self.loss(config, number)
                stream.write(json.dumps(line) + "\n")
        if step < config.run.steps:
            return JobState(Status.RUNNING)
        result: dict[str, object] = {"status": "done", "attempt": job["attempt"], "step_time_s": seconds, "world_size": 1}
        if config.run.phases:
            table = PhaseTable.of(config.run, config.model.seq).reached(config.run.steps)
            result["phases"] = [
                {
                    "measured_steps": [phase.first + 1, phase.first + count],
                    "step_time_s": seconds * phase.global_batch / config.run.global_batch,
                }
                for phase, count in table
            ]
        write_json(directory / "result.json", result | (served(seconds) if config.requests else {}))
        return JobState(Status.DONE)


def served(seconds: float) -> dict[str, dict[str, float]]:
    """What an inference that takes so long says of its requests."""
    figures = {"latency_s": seconds, "ttft_s": 0.3 * seconds, "tpot_s": 0.7 * seconds / 19, "requests_per_s": 1 / seconds}
    return {name: dict.fromkeys(("p50", "p90", "p99"), value) for name, value in figures.items()}
