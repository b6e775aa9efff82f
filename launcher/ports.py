"""TCP ports of this machine to listen on."""

from __future__ import annotations

import socket
from collections.abc import Iterable

PORTS = range(20_000, 32_000)
"""Below those that the system gives to outgoing connections, which may take one before a server listens on it."""


def free_port(candidates: Iterable[int]) -> int | None:
    """The first of ``candidates`` that nobody listens on; None when all are in use."""
    return next((port for port in candidates if is_free(port)), None)


def is_free(port: int) -> bool:
    """True if a server could listen on it now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
