"""A device and its fabric in SI units, as the cost model needs them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from launcher.config.schema import ClusterConfig, HardwareConfig
from launcher.cost.inputs.measured import Measured
from launcher.cost.inputs.shape import Array
from trainer.shared.run.errors import ConfigError

SUSTAINED = 0.7
"""Fraction of its peak that a device sustains in training, where nothing better is known: the best products measured alone reach 0.74 to
0.87 of it on A100, H100 and B200 (stas00/ml-engineering), and training runs warmer and in worse shapes."""
BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "fp4": 0.5}
"""Bytes of a matrix operand."""


@dataclass(frozen=True)
class Device:
    """One kind of accelerator. Rates are per second, sizes in bytes."""

    name: str
    host: bool  # the host's own processor
    peaks: dict[str, float]  # FLOP/s by precision
    sustained: dict[str, float]  # FLOP/s that large products sustain in training, by precision
    legacy_kernel_factor: float  # fraction of the peak open to kernels of the generation before
    exp_throughput: float  # exponentials per unit and second, relative to A100
    units: int  # processors that share out the tiles of a matrix product
    memory: float
    bandwidth: float
    link: float  # per device and direction, inside a link domain
    rings: tuple[tuple[int, float], ...]  # the same of a ring over so many neighbours, fewest first; none where a switch joins all
    link_latency: float
    link_reduction: bool  # the switch adds up (NVLink SHARP)
    domain: int  # devices joined by links
    network: float  # per device and direction, between domains
    network_latency: float
    time_factor: float = 1.0  # measured step times over predicted ones, common to all layouts
    ranks_per_core: float = 0.0  # of a node; 0: the device is not the host CPU, or every rank has a core
    measured: Measured | None = None  # what the mechanisms miss of this machine
    host_sharers: int = 1  # ranks that share what a host can do beside them; its cores where they are the device

    @property
    def oversubscription(self) -> float:
        """Slow-down of a rank while all ranks of its node compute: ranks per core, where there is more than one."""
        return max(self.ranks_per_core, 1.0)

    @property
    def overlaps(self) -> bool:
        """True if communication can overlap with computation. Without a spare core it is computation."""
        return self.ranks_per_core < 1

    @classmethod
    def of(cls, hardware: HardwareConfig, per_node: int) -> Device:
        """The device of a hardware file, on nodes of ``per_node`` devices; missing cells fall back on the known device's."""
        if not hardware.peak_tflops:
            raise ConfigError(
                f"cluster.hardware={hardware.name} has no peak_tflops; choose a file of conf/hardware (hardware=NAME), "
                "or measure this machine with 'trireme doctor'"
            )
        for name, rate in hardware.sustained_tflops.items():
            if not hardware.host and rate > hardware.peak_tflops.get(name, np.inf):
                raise ConfigError(
                    f"cluster.hardware.sustained_tflops.{name}={rate:g} of {hardware.name} is above its peak of "
                    f"{hardware.peak_tflops[name]:g}; give what large "
                    "matrix products reach in training, in TFLOP/s, or leave it out: 70 % of the peak"
                )
        bandwidth = (hardware.memory_bandwidth_gbs or 50.0) * 1e9
        link = (hardware.link_gbs or 5.0) * 1e9
        return cls(
            name=hardware.name,
            host=hardware.host,
            peaks={name: rate * 1e12 for name, rate in hardware.peak_tflops.items()},
            sustained={name: rate * 1e12 for name, rate in hardware.sustained_tflops.items()},
            legacy_kernel_factor=hardware.legacy_kernel_factor,
            exp_throughput=hardware.exp_throughput,
            units=hardware.units or 1,
            memory=(hardware.memory_gb or np.inf) * 1e9,
            bandwidth=bandwidth,
            link=link,
            rings=_rings(hardware, hardware.link_domain or per_node, link),
            link_latency=hardware.link_latency_us * 1e-6,
            link_reduction=hardware.link_reduction,
            domain=hardware.link_domain or per_node,
            network=(hardware.network_gbs or hardware.link_gbs or 5.0) * 1e9,
            network_latency=hardware.network_latency_us * 1e-6,
            time_factor=hardware.time_factor,
            ranks_per_core=per_node / hardware.cores if hardware.host and hardware.cores else 0.0,
            host_sharers=hardware.cores or per_node if hardware.host else per_node,
        )

    def link_of(self, near: Array) -> Array:
        """Bytes/s of a ring over ``near`` devices of a domain. Without a switch the links that lead out of the ring are idle."""
        if not self.rings:
            return self.link
        sizes, rates = np.array(self.rings).T
        return np.interp(np.asarray(near, dtype=float), sizes, rates)

    def peak(self, precision: str) -> float:
        """Matrix peak in FLOP/s."""
        return self.peaks[self._nearest(precision, self.peaks)]

    def rate(self, precision: str) -> float:
        """FLOP/s that large matrix products sustain in training."""
        name = self._nearest(precision, self.peaks)
        return self.sustained.get(name, SUSTAINED * self.peaks[name])

    def _nearest(self, precision: str, rates: dict[str, float]) -> str:
        """A precision without a rate of its own runs at the next one that holds its numbers, else at the widest: fp16 has not the range of
        bf16, which a device without it (Volta) computes in fp32."""
        order = ("fp4", "fp8", "bf16", "fp16", "fp32", "fp64")
        wider = [name for name in order[order.index(precision) :] if not (precision == "bf16" and name == "fp16")]
        return next(name for name in (*wider, *order[::-1]) if name in rates)


def _rings(hardware: HardwareConfig, domain: int, link: float) -> tuple[tuple[int, float], ...]:
    """Rates of rings over fewer devices than a domain of so many has."""
    known: dict[int, float] = {}
    for name, rate in hardware.link_ring_gbs.items():
        devices, _, node = name.partition(" of ")
        if not (devices.isdecimal() and node.isdecimal() and 1 < int(devices) < int(node)):
            raise ConfigError(
                f"cluster.hardware.link_ring_gbs has {name!r}: name a ring by its devices and those of the larger node, as in '2 of 8'"
            )
        if int(node) == domain:
            known[int(devices)] = rate * 1e9
    return tuple(sorted({**known, domain: link}.items())) if known else ()


def check_network(cluster: ClusterConfig) -> None:
    """``ConfigError`` where ranks are joined by a network of which nobody knows how fast it is."""
    if cluster.network_unknown:
        raise ConfigError(
            f"cluster.hardware={cluster.hardware.name} has no network_gbs, and its links do not join {cluster.world_size} ranks; give "
            "cluster.hardware.network_gbs, a device's share of its node's ports in 1e9 bytes/s, or measure it with 'trireme doctor'"
        )
