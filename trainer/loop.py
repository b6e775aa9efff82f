"""The run of one rank from its configuration to its result: steps, metrics, timeline, checkpoints, stopping."""

from __future__ import annotations

import gc
import hashlib
import importlib.metadata
import json
import math
import os
import signal
import socket
import time
from collections import deque
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trainer.checkpoint import Checkpoints, DataOrder
from trainer.checkpoint.tuned import read_base
from trainer.comm.collectives import World
from trainer.data import open_dataset
from trainer.data.dataset import open_held_out
from trainer.launch.failure import NonFinite, record_failure
from trainer.launch.rank_env import RankEnv, device_index, prepare_repeatable
from trainer.measure.gpu import GpuMonitor, of_all_gpus
from trainer.measure.meter import mean_split, stragglers
from trainer.measure.timeline import align, write_timeline
from trainer.pipeline.recompute import recomputed_of
from trainer.shared.records.environment import environment
from trainer.shared.records.outcome import Status
from trainer.shared.records.resume import base_identity, positions, section
from trainer.shared.records.stage_run import Finish
from trainer.shared.records.summary import result_of
from trainer.shared.records.trial_files import METRICS, RESULT, read_steps, write_outcome
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.files import finite
from trainer.shared.run.read import to_dict
from trainer.shared.run.resolved import ResolvedTrainConfig
from trainer.shared.run.tuning import text_model
from trainer.step import Engine, QueuedStep, StepResult
from trainer.validation import Validation, whole_batches

MEASURED_EVERY = 10
"""On a GPU the parts of every so many steps are measured: marks and an early wait cost time there."""

GARBAGE_STEPS = 50
"""Steps between garbage collections, which all ranks run at the same time."""


def train(config: ResolvedTrainConfig, env: RankEnv, out: Path, attempt: int, finish: Finish = lambda result: None) -> Status:
    """Train a resolved run. Done or stopped; anything else is raised. Rank 0 calls ``finish`` before it writes its result."""
    stop_flag = StopFlag()
    device = choose_device(config.run.device, env.local_rank)
    torch.set_num_threads(config.run.threads)
    if config.run.deterministic:
        compute_repeatably(config.run.seed)
    text = text_model(config.model, config.tune)
    dataset = open_dataset(config.data, text, config.run.seed)
    if (held_out := open_held_out(config.data, text) if config.run.eval_every else None) is not None:
        whole_batches(config, held_out)
    record = partial(record_failure, env=env, out=out, attempt=attempt)
    world = World(env.rank, env.world_size, device, env.address, env.port, config.run.timeout_s, record)
    world.group.together(dataset.check if env.local_rank == 0 else lambda: None, (ConfigError,))
    check_same(dataset.name, world)
    longest: int = world.group.gather_objects(positions(config, saved_in(config, out)))[0]
    run = TrainingRun(config, Engine(config, world, dataset, draws=False, positions=longest), out, attempt, stop_flag, finish)
    run.held_out = None if held_out is None else Validation(run.rank, held_out)
    status = run.run()
    world.close()  # after a failure the exit closes it: peers look for the reason as soon as they lose this rank
    return status


def compute_repeatably(seed: int) -> None:
    """Operations in one order only: one that has no such form ends the run by its name. Before the device is used."""
    from torch._inductor import config as compiler  # takes a second to import

    prepare_repeatable(os.environ)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # nothing reads what it has not written
    compiler.deterministic = True  # no kernel is chosen by its time
    torch.manual_seed(seed)


def check_same(name: str, world: World) -> None:
    """``ConfigError`` unless all ranks read the same data: files are read on every node."""
    if len(names := set(world.group.gather_objects(name))) > 1:
        raise ConfigError(f"data differs between the nodes: there are {len(names)} versions of it; give all of them the same files")


def choose_device(device: str, local_rank: int) -> torch.device:
    """``auto`` takes CUDA when there is one. ``ConfigError`` for a CUDA device that does not exist."""
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    index = device_index(local_rank, torch.cuda.device_count(), os.environ)
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def gpu_name(device: torch.device) -> str | None:
    """Returns a device's name in NVML; None for a CPU, and for a GPU of another maker."""
    if device.type != "cuda" or torch.version.hip:
        return None
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def identity(config: ResolvedTrainConfig, out: Path) -> str:
    """A hash that all attempts of a run share, and no other run: of its configuration and its folder of results."""
    content = json.dumps([to_dict(config), str(out.resolve())], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


def saved_in(config: ResolvedTrainConfig, out: Path) -> Path | None:
    """The folder of a run's checkpoints; None if it has none."""
    settings = config.run.checkpoint
    if settings.dir:
        return Path(settings.dir)
    return out / "checkpoints" if settings.every else None


def collect_garbage_by_hand() -> None:
    """Automatic collections would stop one rank at a time, and all others would wait for it."""
    gc.collect()
    gc.freeze()
    gc.disable()


class StopFlag:
    """Set by SIGTERM or SIGUSR2: the scheduler wants the nodes back."""

    def __init__(self) -> None:
        self.set = False
        for number in (signal.SIGTERM, signal.SIGUSR2):
            signal.signal(number, self._on_signal)

    def _on_signal(self, *_: Any) -> None:
        self.set = True


@dataclass
class History:
    """Per completed step, from step 1."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    step_times_s: list[float] = field(default_factory=list)
    splits: list[dict[str, float] | None] = field(default_factory=list)  # of this attempt only; None where parts were not measured

    @classmethod
    def read(cls, folder: Path, steps: int) -> History:
        """The first ``steps`` steps as an earlier attempt recorded them. For a step that was run twice, the later line counts."""
        known = [line for line in read_steps(folder) if 1 <= line["step"] <= steps]
        losses, norms = ([math.nan if r[name] is None else r[name] for r in known] for name in ("loss", "grad_norm"))
        return cls(losses, norms, [r["step_time_s"] for r in known])


class TrainingRun:
    """The loop around an engine."""

    def __init__(self, config: ResolvedTrainConfig, engine: Engine, out: Path, attempt: int, stop_flag: StopFlag, finish: Finish):
        self.config, self.engine, self.out, self.attempt, self.stop_flag = config, engine, out, attempt, stop_flag
        self.finish = finish
        self.rank, self.world = engine.rank, engine.rank.groups.world
        self.leads = self.world.index == 0
        settings, root = config.run.checkpoint, saved_in(config, out)
        self.checkpoints = None
        if root is not None:
            order = DataOrder(config.run.seed, engine.batches.dataset.name, config.run.global_batch, config.model.seq)
            run, model = identity(config, out), replace(config.model, seq=self.rank.positions)
            tune = section(config.tune, base_identity(config.tune, config.run.seed))
            timeout, kind = config.run.timeout_s, config.optimizer.kind
            self.checkpoints = Checkpoints(settings, root, self.world, model, order, run, attempt, timeout, tune, kind)
        self.history = History()
        self.gpu = GpuMonitor(gpu_name(self.rank.device))
        self.held_out: Validation | None = None

    def run(self) -> Status:
        """The remaining steps, checkpoints and the result."""
        run, first = self.config.run, self._resume()
        self.history = History.read(self.out, first)
        clock_offset = align(self.world)
        drawn = min(run.warmup_steps + 1, run.steps - 1)
        status = Status.DONE
        collect_garbage_by_hand()
        unread: deque[tuple[int, QueuedStep]] = deque()
        self.gpu.begin()
        for step in range(first, run.steps):
            if (step + 1) % GARBAGE_STEPS == 0:
                gc.collect()
            measured = self._is_measured(step, drawn)
            self.rank.clock.marking = measured
            unread.append(
                (step, self.engine.queue(step, stop=self.stop_flag.set, watch=step in (first, self.engine.phases.at(step).first)))
            )
            if measured:
                self.gpu.sample()  # it computes now
            late = self.engine.reads_late and not (measured or self._needs_outcome(step + 1))
            while len(unread) > late:
                if self._read(*unread.popleft()) and step + 1 < run.steps:
                    status, late = Status.STOPPED, False
            if run.timeline and step == drawn:
                write_timeline(self.out, step + 1, self.rank, clock_offset)
            if self._checkpoint_is_due(step + 1, status):
                self._save(step + 1)
            if status is Status.STOPPED:
                break
        if self.checkpoints is not None:
            self.checkpoints.finish()
        if status is Status.DONE and self.engine.updates == 0:
            raise NonFinite(
                f"none of the {run.steps} steps changed the weights, for the loss or the gradient was not finite in any (loss scale now "
                f"{self.engine.scale.value:g}); lower optimizer.lr, or use run.precision=bf16 or fp32"
            )
        self._write_result(status)
        return status

    def _is_measured(self, step: int, drawn: int) -> bool:
        """True if a step's parts are measured: all on a CPU, where that costs nothing; some on a GPU, each read before the next one is
        queued."""
        return not self.rank.clock.on_device or step == drawn or step % MEASURED_EVERY == 0

    def _needs_outcome(self, steps: int) -> bool:
        """True if the work after so many steps needs the last one's outcome."""
        run = self.config.run
        validates = self.held_out is not None and steps % run.eval_every == 0
        return steps == run.steps or validates or self._checkpoint_is_due(steps, Status.DONE)

    def _read(self, step: int, queued: QueuedStep) -> bool:
        """Wait for a step and write it down; whether some rank was asked to stop."""
        result = self.engine.read(queued)
        self.gpu.steps += 1
        if step + 1 == self.config.run.warmup_steps < self.config.run.steps:
            self.gpu.begin()
        self._record(step, result, queued.measured)
        return result.stop

    def _resume(self) -> int:
        """Completed steps of the newest checkpoint, loaded; 0 without one, and with weights to begin with. What a checkpoint of tuning
        does not hold is what it began with."""
        resumes = self.checkpoints is not None and self.config.run.checkpoint.resume
        partial = self.config.tune.method != "full"
        if partial:
            self._begin()
        resumed = self.checkpoints.resume(self.engine.saved) if self.checkpoints is not None and resumes else None
        if resumed is None:
            if not partial:
                self._begin()
            return 0
        self.engine.resume(resumed.extra)
        return min(resumed.step, self.config.run.steps)

    def _begin(self) -> None:
        """Weights that are drawn, and those of a base."""
        base = self.config.tune.base
        self.rank.draw_weights()
        self.rank.state.settle()  # what follows writes where gathers read
        if base is not None:
            self.world.together(lambda: read_base(Path(base), self.config.model, self.rank.base_shards), (ConfigError,))
            self.rank.state.publish_updates()
            self.rank.state.settle()

    def _checkpoint_is_due(self, steps: int, status: Status) -> bool:
        every = self.config.run.checkpoint.every
        return every > 0 and (steps % every == 0 or steps == self.config.run.steps or status is Status.STOPPED)

    def _save(self, steps: int) -> None:
        assert self.checkpoints is not None
        self.rank.state.settle()  # states in host memory may still be updated
        self.checkpoints.save(steps, self.engine.saved, self.engine.extra())

    def _record(self, step: int, result: StepResult, measured: bool) -> None:
        history, seconds = self.history, result.seconds
        history.losses.append(result.loss)
        history.grad_norms.append(result.grad_norm)
        history.step_times_s.append(seconds)
        history.splits.append(self.rank.recorder.split() if measured else None)
        validated = self._validated(step + 1)
        if not self.leads:
            return
        phase = self.engine.phases.at(step)
        line = {
            "attempt": self.attempt,
            "step": step + 1,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": result.lr,
            "step_time_s": seconds,
            "tokens_per_s": phase.global_batch * phase.seq / seconds,
            "time": time.time(),
            **({"global_batch": phase.global_batch, "seq": phase.seq} if self.config.run.phases else {}),
            **({} if result.busiest is None else {"busiest_expert": result.busiest}),
            **validated,
        }
        self.out.mkdir(parents=True, exist_ok=True)
        with (self.out / METRICS).open("a") as file:
            file.write(json.dumps(finite(line)) + "\n")
        done = f"step {step + 1}/{self.config.run.steps}"
        print(f"{done}  loss {result.loss:.4f}  grad norm {result.grad_norm:.3f}  {seconds:.3f} s", flush=True)

    def _validated(self, steps: int) -> dict[str, float | None]:
        """Figures on held-out text, where they are due."""
        run = self.config.run
        if self.held_out is None or (steps % run.eval_every and steps != run.steps):
            return {}
        sums = self.held_out.first(run.eval_batches)
        if self.leads:
            print(f"step {steps}/{run.steps}  validation loss {sums.loss:.4f}", flush=True)
        return {"validation_loss": sums.loss, "validation_bits_per_byte": sums.bits_per_byte} | self._validated_average(steps)

    def _validated_average(self, steps: int) -> dict[str, float | None]:
        """The loss of the averaged weights, at the end of a run that has some."""
        average, run, state = self.engine.average, self.config.run, self.rank.state
        if self.held_out is None or not average.count or steps != run.steps:
            return {}

        def publish() -> None:
            state.publish_updates()
            state.settle()

        state.settle()  # a host may still be updating
        with average.in_place(publish):
            loss = self.held_out.first(run.eval_batches).loss
        if self.leads:
            print(f"validation loss {loss:.4f} with the mean of the weights of {average.count} steps", flush=True)
        return {"average_validation_loss": loss, "averaged_steps": average.count}

    def _write_result(self, status: Status) -> None:
        """``result.json``, from what all ranks measured."""
        self.rank.state.settle()
        ranks = self.world.gather_objects(self._own_measurements())
        if not self.leads:
            return
        config, history = self.config, self.history
        times = dict(enumerate(history.step_times_s, 1))
        series = {"losses": history.losses, "grad_norms": history.grad_norms, "step_times_s": history.step_times_s}
        fullest = max(ranks, key=lambda r: sum(r["memory"].values()))  # parts of one rank add up; the largest of each part would not
        result = {
            **result_of(config, status, self.attempt, series, times, self.world.size, recomputed_of),
            "step_split_s": mean_split([r["split"] for r in ranks]),
            "peak_memory_bytes": max(r["peak"] for r in ranks),
            "memory": fullest["memory"],
            "rank_step_times_s": {str(rank): r["worked_s"] for rank, r in enumerate(ranks)},
            "stragglers": stragglers([r["worked_s"] for r in ranks], [r["stage"] for r in ranks]),
            "communication": ranks[0]["communication"],
            "versions": versions(),
            "hosts": sorted({r["host"] for r in ranks}),
            **of_all_gpus([r["gpu"] for r in ranks]),
        }
        if status is Status.DONE:
            self.finish(result)
        write_outcome(self.out / RESULT, result)

    def _own_measurements(self) -> dict[str, Any]:
        splits = self.history.splits
        measured = [s for s in splits[self.config.run.warmup_steps :] if s] or [s for s in splits if s]
        split = mean_split(measured) if measured else {}
        memory = self.rank.memory()
        ledger = self.rank.world.ledger
        return {
            "split": split,
            "worked_s": sum(s for part, s in split.items() if part != "communication"),
            "memory": memory,
            "stage": self.rank.groups.at["pipeline"],
            "peak": self.rank.peak_memory(),
            "host": socket.gethostname(),
            "gpu": self.gpu.figures(),
            "communication": {
                f"{operation} over {group}": {
                    "calls": n,
                    "payload_bytes": ledger.payload[group, operation],
                    "wire_bytes": ledger.wire[group, operation],
                }
                for (group, operation), n in sorted(ledger.calls.items())
            },
        }


def versions() -> dict[str, str]:
    """Returns the versions of the software that the run used, by name."""
    try:
        own = importlib.metadata.version("trireme")
    except importlib.metadata.PackageNotFoundError:
        own = "unknown"
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else None
    built = {"torch": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip, "nccl": nccl}
    return {name: version for name, version in built.items() if version} | environment() | {"trireme": own}
