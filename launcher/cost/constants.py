"""Global constants of the mechanisms, fitted once over all published measurements with ``python -m benchmarks.fit``.

None of them belongs to a source, a model or a cluster: those differences are inputs (``Device``, ``Framework``). Pinned by measurements of single
operations, which outrank whole steps: ``link``, ``network``, ``switch``, ``launch`` (nccl-tests, tests/cost/test_collectives.py), ``skew`` (layer times of arXiv 2205.05198, test_block.py), ``flash1`` and ``flash2`` (arXiv 2307.08691).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Constants:
    """What the mechanisms cost on real machines, as fractions of what the data sheet promises, or in seconds."""

    # matrix products
    ramp_k: float = 76.0  # inner length at which half of a tile's time is start and end
    wave_weight: float = 0.48  # how much of an incomplete last wave is lost (1 = all of it)
    small_tile: float = 0.46  # rate of a tile of half the size in one direction
    grouped: float = 0.74  # rate of the products of several experts / one product of that size
    # memory-bound work
    bandwidth: float = 0.685  # reached fraction of memory bandwidth
    streaming: float = 0.88  # and by kernels that only add one long array to another
    kernel: float = 3.5e-06  # seconds between two kernels of a busy device
    host: float = 1.7e-05  # seconds the host needs to launch one kernel
    blocking: float = 4e-05  # seconds that a kernel costs more when the host waits for it
    # attention kernels: fraction of the matrix peak in forward and backward, before the exponentials
    flash1: tuple[float, float] = (0.455, 0.3)
    flash2: tuple[float, float] = (0.76, 0.365)
    flash_ramp: float = 285.0  # sequence length at which half of a flash kernel's time is edges
    exponentials: float = 1.53e10  # exponentials per second and unit
    cast_bytes: float = 5.4  # bytes moved per element that is brought into 8 bits
    loss_passes: tuple[float, float] = (4.1, 4.1)  # reads and writes of 4-byte logits, forward and backward
    eager_norm: tuple[float, float] = (25.0, 61.0)  # passes of a norm written in tensor operations, in elements of 2 bytes
    # collectives
    link: float = 0.88  # reached fraction of link bandwidth
    network: float = 0.9  # reached fraction of network bandwidth
    ramp: float = 5e-5  # a payload that the links carry in so many seconds travels at two thirds of the full rate
    launch: float = 3.5e-05  # seconds to start a collective
    switch: float = 1.13  # rate of an all-reduce added up in the switch / ring rate
    crowd: float = 0.064  # slow-down of collectives over the network per doubling of nodes beyond one
    skew: float = 1.2  # collectives between layers in training / alone: ranks do not arrive together
    # overlap
    tensor_hidden: float = 0.75  # part of overlappable tensor-parallel communication that is hidden
    sends_hidden: float = 0.8  # part of the transfers between pipeline ranks that is hidden where sends do not block
    jitter: float = 0.01  # slow-down per doubling of the ranks of a replica that work in lock-step: the slowest sets the pace
    data_hidden: float = 0.45  # part of overlappable data-parallel communication that is hidden
    contention: float = 0.12  # slow-down of compute while communication runs beside it
    host_link: float = 3e9  # bytes/s between a device and unpinned host memory while its neighbours copy too
    # step
    step: float = 0.045  # seconds per step: data, logging, scalar reductions
    # memory
    gathered_logits: float = (
        10.0  # further bytes per logit where tensor ranks gather them: pieces and the whole in 16 bits, and the gradients of both
    )
    communicator_gb: float = 0.4  # buffers of one communicator inside a link domain
    far_communicator_gb: float = 1.4  # and of one that crosses the network
    fragmentation: float = 0.06  # memory lost to fragments, relative to what comes and goes within a step
    padding: float = 0.045  # memory lost around what stays, relative to it
    context_gb: float = 1.2  # CUDA context and library workspaces, 1e9 bytes
    oom_spread: float = 0.06  # relative standard error of the memory estimate


FITTED = Constants()
