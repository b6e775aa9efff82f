"""The front door: a ``CostModel`` predicts one layout, or a table of layouts at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from launcher.config.schema import ClusterConfig
from launcher.config.trainer import TrainerProfile
from launcher.config.trainers import OWN, profile
from launcher.config.uncertainty import Widths
from launcher.cost.calibration import measured
from launcher.cost.inputs.case import Case
from launcher.cost.inputs.constants import SHIPPED, Constants
from launcher.cost.inputs.device import Device, check_network
from launcher.cost.inputs.layouts import to_table
from launcher.cost.inputs.shape import Shape
from launcher.cost.known import asked_cells, widths_at
from launcher.cost.memory.peak import ACTIVATIONS, GRADIENTS, LOGITS, OPTIMIZER, WEIGHTS
from launcher.cost.model import Estimate, estimate
from launcher.cost.phases import mean_step, shares, sized
from launcher.cost.uncertainty import TimeSurrogate, Traits, columns, coordinates
from trainer.shared.run.optimizer import OptimizerConfig
from trainer.shared.run.schema import LOSS_CHUNK_MB, LayoutConfig, ModelConfig, RunConfig, TuneConfig


@dataclass(frozen=True)
class Prediction:
    """Expected time and memory of one layout. Every second and every byte belongs to a named part."""

    time: dict[str, float]  # seconds of a step by part
    memory: dict[str, float]  # bytes of the fullest rank by part
    fits: float  # probability that the memory suffices
    capacity: float  # bytes of a device
    flops: float  # model FLOPs of a step (nothing recomputed), all ranks
    ranks: int
    peak: float  # FLOP/s of one device at this precision
    interval_s: tuple[float, float]  # 80 % of step times lie between
    host: dict[str, float]  # bytes of a rank in host memory by part

    @property
    def step_time_s(self) -> float:
        return sum(self.time.values())

    @property
    def memory_bytes(self) -> float:
        return sum(self.memory.values())

    @property
    def host_bytes(self) -> float:
        return sum(self.host.values())

    @property
    def counted(self) -> dict[str, float]:
        """Bytes by the parts that the trainer counts and reports under these names."""
        parts = {"weights": (WEIGHTS,), "gradients": (GRADIENTS,), "optimizer": (OPTIMIZER,), "activations": (ACTIVATIONS, LOGITS)}
        return {name: sum(self.memory[part] for part in group) for name, group in parts.items()}

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation: useful work over what the devices could do."""
        return self.flops / (self.step_time_s * self.ranks * self.peak)

    @property
    def why(self) -> str:
        """One line: what the time and the memory mostly are, and whether they fit."""
        time = _largest(self.time, self.step_time_s)
        memory = _largest(self.memory, self.memory_bytes)
        verdict = f"fits with probability {100 * self.fits:.0f} %" if np.isfinite(self.capacity) else "no memory limit known"
        need = f"{self.memory_bytes / 1e9:.1f} GB" + (f" of {self.capacity / 1e9:.0f} GB" if np.isfinite(self.capacity) else "")
        return f"{self.step_time_s:.3g} s a step ({time}); {need} ({memory}); {verdict}"


def _largest(parts: dict[str, float], whole: float, count: int = 3) -> str:
    largest = sorted(parts.items(), key=lambda item: -item[1])[:count]
    return ", ".join(f"{name} {100 * value / whole:.0f} %" for name, value in largest if value > 0)


class CostModel:
    """Predicts runs on one cluster with one trainer: this project's own, unless another profile is given. The constants are those of
    conf/constants.yaml, with the values that the hardware file replaces, unless others are given.

    Rules are not checked here (``trainer.shared.run.rules``). ``ConfigError`` for hardware without rates, or without the
    bandwidth between its nodes where there are several, and for unknown constants.
    """

    def __init__(self, cluster: ClusterConfig, trainer: TrainerProfile | None = None, constants: Constants | None = None):
        hardware = cluster.hardware
        self.trainer = trainer or profile(OWN)
        self.hardware = hardware
        self.constants = constants or SHIPPED.on(hardware.constants)
        self.device = Device.of(hardware, cluster.gpus_per_node)
        check_network(cluster)
        if hardware.calibration:
            self.device = replace(self.device, measured=measured(hardware, self.device, self.constants))

    def predict(
        self,
        model: ModelConfig,
        layout: LayoutConfig,
        run: RunConfig,
        tune: TuneConfig | None = None,
        optimizer: OptimizerConfig | None = None,
    ) -> Prediction:
        """Step time and memory of one layout whose ``data`` degree is known."""
        table = to_table([layout])
        case = self.case(model, table, run, tune, optimizer)
        return explain(self.estimate(model, table, run, tune, optimizer, layout.stage_layers), 0, case, self.widths(case))

    def predict_table(self, model: ModelConfig, table: np.ndarray, run: RunConfig) -> Estimate:
        """All layouts of ``table`` (``launcher.cost.inputs.layouts``) at once."""
        return self.estimate(model, table, run)

    def estimate(
        self,
        model: ModelConfig,
        table: np.ndarray,
        run: RunConfig,
        tune: TuneConfig | None = None,
        optimizer: OptimizerConfig | None = None,
        split: Sequence[int] | None = None,
    ) -> Estimate:
        """All layouts of ``table`` at once; of a run with phases, the mean step. ``split``: as of ``launcher.cost.model.estimate``."""
        phases = [(share, sized(phase, model, run)) for share, phase in shares(model, run)]
        return mean_step([(share, estimate(self.case(m, table, r, tune, optimizer), split)) for share, (m, r) in phases])

    def widths(self, case: Case) -> Widths:
        """How far predictions of ``case`` may be off (``launcher.cost.known``)."""
        return widths_at(self.hardware, [asked_cells(case, 0)])[0]

    def case(
        self,
        model: ModelConfig,
        table: np.ndarray,
        run: RunConfig,
        tune: TuneConfig | None = None,
        optimizer: OptimizerConfig | None = None,
    ) -> Case:
        """The question behind a prediction: ``model`` under each layout of ``table``, trained as the others say, in the last phase of the
        run."""
        trainer = as_run(self.trainer, run, self.device, optimizer)
        budget = np.inf if run.memory_gb is None else run.memory_gb * 1e9
        return Case(Shape.of(model, tune), table, run.global_batch, self.device, trainer, run.precision, self.constants, budget)


def predict(
    model: ModelConfig,
    layout: LayoutConfig,
    run: RunConfig,
    cluster: ClusterConfig,
    trainer: TrainerProfile | None = None,
    tune: TuneConfig | None = None,
    optimizer: OptimizerConfig | None = None,
) -> Prediction:
    """Step time and memory of one layout on ``cluster``; of many, ask one ``CostModel`` instead."""
    return CostModel(cluster, trainer).predict(model, layout, run, tune, optimizer)


def as_run(trainer: TrainerProfile, run: RunConfig, device: Device, optimizer: OptimizerConfig | None = None) -> TrainerProfile:
    """The embedded trainer as ``run`` and ``optimizer`` configure it; any other trainer as it is, or as its profile says for devices that
    the kernels of the generation before do not suit."""
    if not trainer.embedded:
        return profile(trainer.on_newer_devices) if trainer.on_newer_devices and device.legacy_kernel_factor < 1 else trainer
    compiled = not device.host if run.compile is None else run.compile  # as trainer.pipeline.compile decides
    kernels = replace(trainer.kernels, pointwise="compiled" if compiled else "eager", fused_loss=compiled)
    chunk = run.loss_chunk_mb or LOSS_CHUNK_MB["cpu" if device.host else "cuda"]
    memory = replace(trainer.memory, bucket_bytes=run.bucket_mb * 2**20, logit_chunk_bytes=chunk * 2**20)
    muon = optimizer if optimizer is not None and optimizer.kind == "muon" else None
    numbers = replace(
        trainer.numbers,
        optimizer_bytes=trainer.numbers.optimizer_bytes - (4 if run.moments == "bf16" else 0),
        orthogonal_steps=trainer.numbers.orthogonal_steps if muon is None else muon.muon.steps,
        orthogonal_rows=trainer.numbers.orthogonal_rows if muon is None else muon.muon.row_beta > 0,
        averages_weights=optimizer is not None and optimizer.average_from is not None,
    )
    overlap = replace(trainer.overlap, tensor="all" if run.async_tensor else trainer.overlap.tensor, context=run.context_exchange)
    return replace(trainer, numbers=numbers, kernels=kernels, memory=memory, overlap=overlap)


def explain(result: Estimate, row: int, case: Case, widths: Widths) -> Prediction:
    """One row of an estimate as a ``Prediction``."""
    layout = case.table[row]
    ranks = int(layout["tensor"]) * int(layout["pipeline"]) * int(layout["context"]) * int(layout["data"])
    time = {name: float(np.broadcast_to(values, case.table.shape)[row]) for name, values in result.time.items()}
    causes = {name: np.broadcast_to(values, case.table.shape)[row : row + 1] for name, values in result.causes.items()}
    parts = columns(causes, 1)
    traits = Traits(parts / parts.sum(), coordinates(case.table[row : row + 1]))
    low, high = TimeSurrogate(parts.sum(axis=1), traits, widths).posterior().interval
    return Prediction(
        time=time,
        memory={name: float(np.broadcast_to(values, case.table.shape)[row]) for name, values in result.memory.items()},
        fits=float(result.fits[row]),
        capacity=case.device.memory,
        flops=float(np.broadcast_to(result.flops, case.table.shape)[row]),
        ranks=ranks,
        peak=case.device.peak(case.precision),
        interval_s=(float(low[0]), float(high[0])),
        host={name: float(np.broadcast_to(values, case.table.shape)[row]) for name, values in result.host.items()},
    )
