"""The loop of a sweep: claims, adoption, retries, settlement."""

from __future__ import annotations

from tests.planted.defect import Defect

SUBMITTER, SETTLEMENT, POLLER = "launcher/sweep/submitter.py", "launcher/sweep/settlement.py", "launcher/sweep/poller.py"
LOOP = "tests/sweep/test_stop_requests.py tests/sweep/test_adoption.py tests/sweep/test_silence.py tests/sweep/test_preempted.py tests/sweep/test_loop.py tests/sweep/test_loop_faults.py"

DEFECTS = [
    Defect(
        "a job that an earlier launcher left is submitted again",
        SUBMITTER,
        "trial.record.handle = trial.record.handle or found.get(self._state.job(trial).name)",
        "trial.record.handle = trial.record.handle",
        LOOP,
    ),
    Defect(
        "an orphan is adopted twice",
        SUBMITTER,
        "self._state.start_tracking([trial for trial in trials if trial.record.handle is not None])\n        return missing",
        "self._state.start_tracking([trial for trial in trials if trial.record.handle is not None])\n        return [*trials]",
        LOOP,
    ),
    Defect(
        "the intent is written after the job is submitted",
        SUBMITTER,
        "        self._state.store.save_intended([trial.record for trial, _ in ready])\n        try:\n",
        "        try:\n",
        LOOP,
    ),
    Defect(
        "one trial more than sweep.max_parallel runs",
        SUBMITTER,
        "if limit and len(others) >= limit:",
        "if limit and len(others) > limit:",
        LOOP,
    ),
    Defect(
        "files of an attempt are taken for those of the next",
        SUBMITTER,
        "record.attempt += 1 if record.status.final else 0",
        "record.attempt += 0",
        LOOP,
    ),
    Defect(
        "a retry is one attempt too many",
        SETTLEMENT,
        "return trial.tries <= self._state.settings.retries",
        "return trial.tries <= self._state.settings.retries + 1",
        LOOP,
    ),
    Defect(
        "an attempt that made progress uses up a retry",
        SETTLEMENT,
        "if trial.inherited or (verdict.resumable and trial.read_last_step() > trial.first_step):",
        "if trial.inherited:",
        LOOP,
    ),
    Defect(
        "a retry runs as the attempt that failed",
        SETTLEMENT,
        "record.attempt = verdict.attempt + 1",
        "record.attempt = verdict.attempt",
        LOOP,
    ),
    Defect(
        "a trial that cannot start was stopped by somebody",
        SETTLEMENT,
        "status = Status.FAILED if reason in (Reason.CANNOT_START, Reason.UPSTREAM) else Status.STOPPED",
        "status = Status.STOPPED",
        LOOP,
    ),
    Defect(
        "a place that does not answer ends its trials",
        POLLER,
        "            self._state.note_silence(trials, error)\n            return False\n        ended",
        "            self._state.note_silence(trials, error)\n            states = [JobState(Status.FAILED, Reason.NODE)] * len(trials)\n        ended",
        LOOP,
    ),
    Defect(
        "a job that goes on after its result is left to run",
        POLLER,
        "return job.clearing_up or self._stopper.cancel([trial])",
        "return True",
        LOOP,
    ),
    Defect(
        "a stop request ends only what runs",
        "launcher/sweep/stopping.py",
        "state.waiting = [trial for trial in state.waiting if trial not in claimed]\n            self.end(claimed, *request)",
        "state.waiting = [trial for trial in state.waiting if trial not in claimed]",
        LOOP,
    ),
    Defect(
        "trials that were measured before are billed again",
        "launcher/sweep/bill.py",
        "if point.config and starts(point, store.load(point.trial), settings)]",
        "if point.config]",
        "tests/sweep/test_bill.py",
    ),
    Defect(
        "a cost without the attempts that came to nothing",
        "launcher/trials/spent.py",
        "return record.world_size * (held_s(record) + lost_s(record)) / 3600",
        "return record.world_size * held_s(record) / 3600",
        "tests/sweep/test_bill.py",
    ),
    Defect(
        "every job of a sweeper starts a fork server of its own",
        "launcher/sweep/multirun.py",
        "        records = run_sweep(name, points, settings, self.backends, [self._mirrors[settings.dir, name], command])\n",
        "        with self.backends:\n"
        "            records = run_sweep(name, points, settings, self.backends, [self._mirrors[settings.dir, name], command])\n",
        "tests/sweep/test_multirun.py -k sweeper_is_given",
    ),
    Defect(
        "torch is imported for ranks that watch another trainer's command",
        "trainer/fork_server.py",
        'if "torch" not in sys.modules and load(config).command is None:',
        'if "torch" not in sys.modules:',
        "tests/test_foreign_trainer.py",
    ),
]
