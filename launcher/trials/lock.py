"""Locks names between launchers; the kernel frees them when a launcher dies.

One file holds all locks: a name is locked as one byte at an offset made from its hash, so a sweep of a thousand trials costs one file
descriptor. POSIX record locks belong to the process, are not inherited by the ranks it starts, and work over NFS.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
from pathlib import Path

log = logging.getLogger(__name__)

_UNSUPPORTED = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


class Locks:
    """The locks of one store. At most one ``Locks`` per file and process may be open: closing one frees the other's."""

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)

    def take(self, name: str) -> bool:
        """Locks ``name`` for this process; False when another process holds it. Never waits."""
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _offset(name))
        except (BlockingIOError, PermissionError):
            return False
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            log.warning("this file system has no locks: do not run the same trials from two launchers at once")
        return True

    def held(self, name: str) -> bool:
        """Returns whether another process holds ``name``. Never pass a name that this process has locked: that would free it."""
        if not self.take(name):
            return True
        self.free(name)
        return False

    def free(self, name: str) -> None:
        fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, _offset(name))

    def close(self) -> None:
        os.close(self._descriptor)


def _offset(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big")
