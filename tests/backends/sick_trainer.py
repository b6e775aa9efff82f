"""``trainer.health`` on a cluster whose node n2 has a broken device, which a CPU cannot have."""

from __future__ import annotations

import socket

from trainer import health
from trainer.launch.rank_env import RankEnv


def main(argv: list[str]) -> int:
    check = health.check_device

    def check_device(env: RankEnv) -> str | None:
        return "a broken device" if socket.gethostname() == "n2" else check(env)

    health.check_device = check_device
    return health.main(argv)
