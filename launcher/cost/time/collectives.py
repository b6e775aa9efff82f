"""Time of collectives by payload, group and place: start, hops, ring rate, and the ramp up to it.

A group is its ``size`` and how many of its ranks share a link domain (``near``). Inside a domain the ring runs at link speed; between
domains every near rank brings its own network port (rails), so the ring crosses with ``near`` ports at once, never faster than the links.
``payload`` is the bytes of the whole result of a gather, of the whole input of a reduction, and of what one rank sends otherwise. Sizes and
payloads are numbers or arrays that broadcast.

Volumes: Thakur et al. 2005 (ring); the bus-bandwidth convention is that of nccl-tests.
"""

from __future__ import annotations

import numpy as np

from launcher.cost.inputs.constants import Constants
from launcher.cost.inputs.device import Device
from launcher.cost.inputs.groups import PlacedGroup
from launcher.cost.inputs.shape import Array


def bus(device: Device, constants: Constants, group: PlacedGroup) -> Array:
    """Ring rate in bytes/s per rank."""
    link = device.link_of(group.near) * constants.link
    network = device.network * constants.network * group.rails / (1 + constants.crowd * np.log2(np.maximum(group.far / 2, 1)))
    return np.where(group.far > 1, np.minimum(link, network), link)


def tree_latency(device: Device, constants: Constants, group: PlacedGroup) -> Array:
    """Seconds before the first sum has come down a tree: between domains, and where there are several, along a chain of the ranks of each,
    up and down (NCCL's own estimate, src/graph/tuning.cc)."""
    chain = np.where(group.far > 1, 2 * (group.near - 1), np.log2(np.maximum(group.near, 1)))
    return constants.launch + chain * device.link_latency + 2 * np.log2(np.maximum(group.far, 1)) * device.network_latency


def latency(device: Device, constants: Constants, group: PlacedGroup) -> Array:
    """Seconds before the first byte has come to all."""
    hops = np.log2(np.maximum(group.near, 1)) * device.link_latency + 2 * np.log2(np.maximum(group.far, 1)) * device.network_latency
    return constants.launch + hops


def ring_latency(device: Device, constants: Constants, group: PlacedGroup) -> Array:
    """Seconds of a ring's steps, one for every rank but one: gathers and scatters have nothing that a tree could add up. A step takes the
    latency of its slowest hop; of those between domains there is one for each domain but one (NCCL's own estimate, src/graph/tuning.cc)."""
    between = np.maximum(group.far - 1, 0)
    return constants.launch + (group.size - 1 - between) * device.link_latency + between * device.network_latency


def _run(device: Device, constants: Constants, group: PlacedGroup, share: Array, payload: Array, operation: str) -> Array:
    rate = bus(device, constants, group)
    if operation == "all_reduce" and device.link_reduction:
        # the switch adds: each rank sends and receives its data once (NVLS)
        rate = np.where((group.far == 1) & (group.size > 4), rate * constants.switch, rate)
    volume = share * payload
    ramp_bytes = constants.ramp * np.minimum(device.link, rate / constants.link)
    ramp = 1 + ramp_bytes / (payload + ramp_bytes)
    wait = tree_latency if operation == "all_reduce" else ring_latency
    seconds = (wait(device, constants, group) + volume / rate * ramp) * missed(device, operation, group, payload)
    return np.where((np.asarray(group.size) > 1) & (np.asarray(payload) > 0), seconds, 0.0)


def missed(device: Device, operation: str, group: PlacedGroup, payload: Array) -> Array:
    """Factor by which this machine was measured to differ."""
    return 1.0 if device.measured is None else device.measured.collective(operation, group.size, group.far > 1, payload)


def all_reduce(device: Device, constants: Constants, group: PlacedGroup, payload: Array) -> Array:
    """Seconds to sum ``payload`` bytes over the group: 2 (g-1)/g of them pass each rank."""
    return _run(device, constants, group, 2 * (group.size - 1) / group.size, payload, "all_reduce")


def all_gather(device: Device, constants: Constants, group: PlacedGroup, payload: Array) -> Array:
    """Seconds to gather ``payload`` bytes in total."""
    return _run(device, constants, group, (group.size - 1) / group.size, payload, "all_gather")


def reduce_scatter(device: Device, constants: Constants, group: PlacedGroup, payload: Array) -> Array:
    """Seconds to sum ``payload`` bytes and leave each rank its part: as long as to gather them, unless measured otherwise."""
    return _run(device, constants, group, (group.size - 1) / group.size, payload, "reduce_scatter")


def broadcast(device: Device, constants: Constants, group: PlacedGroup, payload: Array) -> Array:
    """Seconds until all have the ``payload`` bytes of one rank, which pass the ring once."""
    return _run(device, constants, group, 1.0, payload, "broadcast")


def all_to_all(device: Device, constants: Constants, group: PlacedGroup, payload: Array, beyond: Array = 1.0) -> Array:
    """Seconds for every rank to send ``payload`` bytes in equal parts to all: what leaves the domain passes the rank's own port. Of that
    only the fraction ``beyond`` travels where copies for the same domain are made there."""
    near, away = (group.near - 1) / group.size, beyond * (group.size - group.near) / group.size
    slow = np.maximum(near / (device.link_of(group.near) * constants.link), away / (device.network * constants.network))
    seconds = (latency(device, constants, group) + payload * slow) * missed(device, "all_to_all", group, payload)
    return np.where(group.size > 1, seconds, 0.0)


def send(device: Device, constants: Constants, remote: Array, payload: Array) -> Array:
    """Seconds to hand ``payload`` bytes to a neighbour, inside the domain or over the network."""
    rate = np.where(remote, device.network * constants.network, device.link_of(2) * constants.link)
    wait = np.where(remote, device.network_latency, device.link_latency)
    factor = 1.0 if device.measured is None else device.measured.collective("send", 2, remote, payload)
    return (constants.launch / 2 + wait + payload / rate) * factor
