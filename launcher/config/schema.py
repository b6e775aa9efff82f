"""The launcher's part of the configuration: cluster, hardware, sweep, search. The run itself is ``trainer.shared.run.schema.TrainConfig``.

``Config`` holds everything that Hydra composes. A trial is its ``train_config()`` on its ``cluster``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Optional

from launcher.config.engine import EngineProfile
from launcher.config.inference import ServingConfig, SlaConfig, WorkloadConfig
from launcher.config.mounts import Mount
from launcher.config.search import SearchConfig
from launcher.config.trainer import TrainerProfile
from trainer.shared.run.keys import MOST, key
from trainer.shared.run.optimizer import OptimizerConfig
from trainer.shared.run.schema import RATED, DataConfig, LayoutConfig, ModelConfig, RunConfig, TrackingConfig, TrainConfig, TuneConfig


@dataclass
class HardwareConfig:
    """One kind of device, and the links between devices. Rates are peaks unless the name says otherwise; conf/hardware/*.yaml."""

    name: str = key("cpu", "name of the device")
    host: bool = key(False, "CPU device: no kernel launches, no driver context")
    memory_gb: Optional[float] = key(None, "memory of one device in 1e9 bytes; null = the machine's, shared by its ranks", above=0)
    peak_tflops: dict[str, float] = key(dict, "dense matrix peak in TFLOP/s by precision: {bf16: 312, fp16: 312, fp32: 19.5}", above=0, choices=RATED)
    sustained_tflops: dict[str, float] = key(dict, "rate that large matrix products sustain in training, in TFLOP/s by precision; missing = 70 % of the peak", above=0, choices=RATED)
    rates_assumed: bool = key(False, "nobody fitted sustained_tflops to runs of such a chip; 'trireme plan --explain' says so until it is measured")
    legacy_kernel_factor: float = key(1.0, "fraction of the matrix peak open to kernels written for the generation before", above=0)
    exp_throughput: float = key(1.0, "exponentials per unit and second, in those of A100, H100 and B200 (they all do 16 a clock)", above=0)
    units: Optional[int] = key(None, "SMs, CUs or cores (used for wave quantisation); null = one", minimum=1)
    memory_bandwidth_gbs: Optional[float] = key(None, "device memory bandwidth in 1e9 bytes/s", above=0)
    link_gbs: Optional[float] = key(None, "bandwidth inside a node, per device and direction, in 1e9 bytes/s (NVLink)", above=0)
    link_ring_gbs: dict[str, float] = key(dict, "where links join devices without a switch: bandwidth of a ring over some of a node's, per device and direction, in 1e9 bytes/s: {2 of 8: 64}; of more in proportion, up to link_gbs of all", above=0)
    link_latency_us: float = key(5.0, "latency of one message inside a node", minimum=0)
    link_domain: Optional[int] = key(None, "devices joined by links (72 for NVL72); null = the devices of a node", minimum=1)
    link_reduction: bool = key(False, "the link switch itself adds up all-reduces (NVLink SHARP)")
    network_gbs: Optional[float] = key(None, "bandwidth between nodes, per device and direction, in 1e9 bytes/s (NIC share); null = not known: nothing that spans nodes is predicted", above=0)
    network_latency_us: float = key(10.0, "latency of one message between nodes", minimum=0)
    cores: Optional[int] = key(None, "cores of a node that its ranks share, where the device is the host's processor; null = one for each rank", minimum=1)
    constants: dict[str, float] = key(dict, "constants of the cost model on this machine, in place of those of conf/constants.yaml", above=0)
    time_factor: float = key(1.0, "measured step times over predicted ones, common to all layouts on this machine ('trireme calibrate')", above=0)
    learnt: dict[str, Any] = key(dict, "how sure 'trireme calibrate' is of what it learnt: widths, spreads of constants, runs")
    calibration: dict[str, Any] = key(dict, "what 'trireme doctor' measured: matrix products by shape, copies, operations, collectives by size and group")


@dataclass
class ContainerConfig:
    """The container that the ranks run in. Without an image they run in the launcher's own environment."""

    image: Optional[str] = key(None, "image reference, .sqsh or .sif file, or OCI bundle; null = no container")
    runtime: str = key("auto", "how the image is run (Slurm)", choices=("auto", "pyxis", "apptainer", "oci", "none"))
    mounts: list[str] = key(list, "mounts, SRC:DST[:ro]")
    workdir: Optional[str] = key(None, "working directory inside")
    writable: bool = key(False, "a writable root file system")


@dataclass
class ClusterConfig:
    """The cluster that trials run on: keys common to all backends.

    Each backend has a class of its own, which states the abilities of its clusters.
    """

    backend: str = key("local", "local, slurm, slurm_allocation or kubernetes")
    nodes: int = key(1, "nodes of one trial", minimum=1, maximum=1_000_000)
    gpus_per_node: int = key(8, "ranks per node (GPUs, or CPU processes where there is none)", minimum=1, maximum=1000)
    hardware: HardwareConfig = key(HardwareConfig, "the device; conf/hardware")
    container: ContainerConfig = key(ContainerConfig, "what the ranks run in")
    env: dict[str, str] = key(dict, "environment variables of the ranks (secrets: by reference only)")
    start_timeout: float = key(0.0, "seconds a trial may wait to start before it is given up; 0 = no limit", minimum=0)
    price_per_gpu_hour: Optional[float] = key(
        None, "price of one rank's device for an hour, in any currency, in which costs are said before and after runs; null = GPU-hours alone are",
        above=0, maximum=MOST,
    )  # fmt: skip
    name_prefix: str = key(
        "trireme", "beginning of the names of jobs on Slurm and Kubernetes: up to 20 small letters, digits and '-', first a letter, not '-' last"
    )
    avoid_s: float = key(
        3600.0, "seconds for which a trial's attempts leave out a node at whose fault an earlier one failed, if enough others are there", minimum=0
    )

    secrets_go: ClassVar[str] = "export it where the command is run: ranks of this machine inherit it"
    """Remedy for a secret in the configuration; ``{name}`` stands for the name of the variable."""
    linger_s: float = key(15.0, "seconds for which a job may continue after its result, to clear up, before it is ended", minimum=0)

    passing: ClassVar[tuple[str, ...]] = ("start_timeout", "avoid_s", "linger_s", "price_per_gpu_hour", "name_prefix")
    """Keys that cannot change a trial's measurements, and are not part of its identity."""
    found_by: ClassVar[tuple[str, ...]] = ("name_prefix",)
    """Those of ``passing`` that are needed to find a submitted trial again: they keep their values until it has ended."""

    runs_here: ClassVar[bool] = False
    """Ranks are processes of this machine, run by the launcher's own Python."""
    shares_files: ClassVar[bool] = True
    """Nodes have the launcher's files, under the same names."""
    own_network: ClassVar[bool] = False
    """Ranks may reach servers that this machine cannot reach, and nobody reaches a port that one of them opens."""
    takes_launcher: ClassVar[bool] = False
    """The launcher itself can run on the cluster (``trireme run --in-cluster``)."""

    @property
    def in_container(self) -> bool:
        """Returns whether ranks see the files of an image, and of the host only mounted ones."""
        return False

    def mounts(self) -> list[Mount]:
        """Returns the mounts through which ranks in a container see files of the host."""
        return []

    def located(self, config: Config, stage: Mapping[str, Any] | None = None) -> Config:
        """Returns ``config``, a run on this cluster, with its files as the ranks find them. Raises ``ConfigError`` if they could not have
        the files that it and the section ``stage`` name; files that are made by then need not exist yet."""
        return config

    @property
    def world_size(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def network_unknown(self) -> bool:
        """Returns whether there are more ranks than links join, and the bandwidth of the network between them is not known."""
        return self.hardware.network_gbs is None and self.world_size > (self.hardware.link_domain or self.gpus_per_node)


@dataclass
class LocalCluster(ClusterConfig):
    """Processes on this machine."""

    backend: str = key("local", "local, slurm, slurm_allocation or kubernetes", choices=("local",))
    max_processes: Optional[int] = key(None, "ranks alive at once over all trials; null = nodes x gpus_per_node", minimum=1)

    passing: ClassVar[tuple[str, ...]] = (*ClusterConfig.passing, "max_processes")
    runs_here: ClassVar[bool] = True


@dataclass
class SweepConfig:
    """A set of trials, and the way in which they are run."""

    name: Optional[str] = key(None, "name of the sweep; null = derived from its overrides, so that the same command means the same sweep")
    dir: str = key("runs", "folder of all trials, sweeps and the MLflow database")
    max_parallel: Optional[int] = key(
        None, "trials that run at once; 0 = as many as fit; null = 1 on this machine, where timings disturb each other, else 0", minimum=0
    )
    retries: int = key(1, "further attempts after a fault of the place (node, communication, preemption)", minimum=0)
    confirm_gpu_hours: Optional[float] = key(
        None, "predicted GPU-hours above which train, run and search ask before they start, and without a terminal refuse; null = they never ask", minimum=0
    )
    rerun: bool = key(False, "measure trials again that are already finished")
    ignore_memory: bool = key(False, "try layouts that by the cost model's estimate do not fit into memory")
    follow: bool = key(True, "wait for the trials and show progress; false = submit and return")
    mlflow_wait_s: Optional[float] = key(
        None,
        "seconds for which a command that has measured something waits for MLflow to have it; null = 5, after which it is copied in the "
        "background, and in a container, which ends with the command, until it is copied",
        minimum=0,
    )
    notify: Optional[str] = key(
        None,
        "what train, search and run do at their end: a command for the shell, which finds the outcome in TRIREME_SWEEP, TRIREME_OUTCOME, "
        "TRIREME_TEXT and others, or the https:// address of a webhook, which gets the same as JSON",
    )


@dataclass
class Config:
    """Everything that Hydra composes."""

    model: ModelConfig = key(ModelConfig, "the shape of the network; conf/model")
    layout: LayoutConfig = key(LayoutConfig, "how it is laid over the ranks; conf/layout")
    data: DataConfig = key(DataConfig, "the data that it learns from; conf/data")
    optimizer: OptimizerConfig = key(OptimizerConfig, "how weights are updated; conf/optimizer")
    run: RunConfig = key(RunConfig, "how long and how exactly")
    tracking: TrackingConfig = key(TrackingConfig, "MLflow")
    tune: TuneConfig = key(TuneConfig, "what of the model is trained")
    cluster: ClusterConfig = key(LocalCluster, "where it runs; conf/cluster")
    trainer: TrainerProfile = key(TrainerProfile, "the program that trains; conf/trainer")
    sweep: SweepConfig = key(SweepConfig, "the set of trials")
    search: SearchConfig = key(SearchConfig, "how the fastest layout is found; conf/search")
    task: str = key("train", "what trireme plan and search are for", choices=("train", "inference"))
    goal: str = key("speed", "what trireme search is for with task=train: the fastest step, by layout, or the loss search.target_loss soonest, by arm", choices=("speed", "loss"))
    engine: EngineProfile = key(EngineProfile, "inference: the program that serves; conf/engine")
    workload: WorkloadConfig = key(WorkloadConfig, "inference: the requests; conf/workload")
    sla: SlaConfig = key(SlaConfig, "inference: limits")
    serving: ServingConfig = key(ServingConfig, "inference: what may vary, and what a device costs")
    dry_run: Optional[str] = key(None, "print what would be submitted and stop: client, or server to ask the API server as well (--dry-run)", choices=("client", "server"))

    def train_config(self) -> TrainConfig:
        """Returns the part that the embedded trainer reads."""
        return TrainConfig(self.model, self.layout, self.data, self.optimizer, self.run, self.tracking, self.tune)
