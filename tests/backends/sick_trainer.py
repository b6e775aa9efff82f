"""``trainer.health`` on a cluster whose node n2 has a broken device, which a CPU cannot have."""

from __future__ import annotations

import socket

from trainer import health
from trainer.launch.rank_env import Place


def main(argv: list[str]) -> int:
    check = health.check_device

    def check_device(place: Place) -> str | None:
        return "a broken device" if socket.gethostname() == "n2" else check(place)

    health.check_device = check_device
    return health.main(argv)
