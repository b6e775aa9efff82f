"""Constants of the mechanisms: data (conf/constants.yaml), described here; a hardware file may have others for its machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from launcher.config.constants import constant_values
from trainer.shared.run.errors import ConfigError, nearest


@dataclass(frozen=True)
class Constants:
    """Costs of the mechanisms on real machines, as fractions of what the data sheet promises, or in seconds."""

    # matrix products
    ramp_k: float  # inner length at which half of a tile's time is start and end
    wave_weight: float  # how much of an incomplete last wave is lost (1 = all of it)
    small_tile: float  # rate of a tile of half the size in one direction
    grouped: float  # rate of the products of several experts / one product of that size
    unaligned: float  # rate of a product whose rows do not begin at lines of 128 bytes / one whose rows do
    # memory-bound work
    bandwidth: float  # reached fraction of memory bandwidth
    streaming: float  # and by kernels that only add one long array to another
    dropout: float  # the same of dropout as a tensor operation, which draws a number for every element
    kernel: float  # seconds between two kernels of a busy device
    host: float  # seconds the host needs to launch one kernel
    blocking: float  # seconds that a kernel costs more when the host waits for it
    # attention kernels: fraction of the matrix peak in forward and backward, before the exponentials
    tiled_forward: float  # fraction of the matrix peak that the kernel reaches, before the exponentials, forward
    tiled_backward: float  # fraction of the matrix peak that the kernel reaches, before the exponentials, backward
    flash1_forward: float  # fraction of the matrix peak that the kernel reaches, before the exponentials, forward
    flash1_backward: float  # fraction of the matrix peak that the kernel reaches, before the exponentials, backward
    flash2_forward: float  # fraction of the matrix peak that the kernel reaches, before the exponentials, forward
    flash2_backward: float  # fraction of the matrix peak that the kernel reaches, before the exponentials, backward
    flash_ramp: float  # sequence length at which half of a flash kernel's time is edges
    exponentials: float  # exponentials per second and unit
    cast_bytes: float  # bytes moved per element that is brought into 8 bits
    loss_passes_forward: float  # reads and writes of 4-byte logits, forward and backward, forward
    loss_passes_backward: float  # reads and writes of 4-byte logits, forward and backward, backward
    eager_norm_forward: float  # passes of a norm written in tensor operations, in elements of 2 bytes, forward
    eager_norm_backward: float  # passes of a norm written in tensor operations, in elements of 2 bytes, backward
    # collectives
    link: float  # reached fraction of link bandwidth
    network: float  # reached fraction of network bandwidth
    ramp: float  # a payload that the links carry in so many seconds travels at two thirds of the full rate
    launch: float  # seconds to start a collective
    switch: float  # rate of an all-reduce added up in the switch / ring rate
    crowd: float  # slow-down of collectives over the network per doubling of nodes beyond one
    skew: float  # collectives between layers in training / alone: ranks do not arrive together
    # overlap
    tensor_hidden: float  # part of overlappable tensor-parallel communication that is hidden
    sends_hidden: float  # part of the transfers between pipeline ranks that is hidden where sends do not block
    jitter: float  # standard deviation of a stage's pace: stages wait for each other, so the slowest of them sets it
    data_hidden: float  # part of overlappable data-parallel communication that is hidden
    contention: float  # slow-down of compute while communication overlaps with it
    host_link: float  # bytes/s between a device and unpinned host memory while its neighbours copy too
    pinned_link: float  # bytes/s between a device and pinned host memory, each way
    host_update: float  # bytes/s of optimizer states that all cores of a host read and write
    # step
    step: float  # seconds per step: data, logging, scalar reductions
    # memory
    # further bytes per logit where tensor ranks gather them: pieces and the whole in 16 bits, and the gradients of both
    gathered_logits: float
    communicator_gb: float  # buffers of one communicator inside a link domain
    far_communicator_gb: float  # and of one that crosses the network
    fragmentation: float  # memory lost to fragments, relative to what comes and goes within a step
    padding: float  # memory lost around what stays, relative to it
    context_gb: float  # CUDA context and library workspaces, 1e9 bytes
    oom_spread: float  # relative standard error of the memory estimate

    def on(self, own: Mapping[str, float]) -> Constants:
        """The same with a machine's ``own`` values. ``ConfigError`` for a constant that does not exist."""
        names = [field.name for field in dataclasses.fields(self)]
        for name in own:
            if name not in names:
                raise ConfigError(f"unknown key cluster.hardware.constants.{name}{nearest(name, names)} (known: {', '.join(names)})")
        return dataclasses.replace(self, **own) if own else self


SHIPPED = Constants(**constant_values())
"""Those of conf/constants.yaml."""
