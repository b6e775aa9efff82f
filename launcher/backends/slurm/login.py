"""Where Slurm's commands run: on this machine, or on a login node over the user's own ssh.

Over ssh nothing is installed on the login node, and no file is copied: the folder of the sweep is on a file system that this machine has
under the same path as the cluster. All commands share one connection (ControlMaster).
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.backends.slurm.cluster import SubmitConfig

_SSH_FAILED = 255
_ALIVE = ("-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4", "-o", "ConnectTimeout=20", "-o", "ControlPersist=300")
_CAUSES = (
    # what ssh says, the cause, what to do; the first that fits
    (r"Could not resolve hostname", "it is not known by that name", "correct cluster.submit.ssh, or name it in ~/.ssh/config"),
    (
        r"Host key verification failed|HOST IDENTIFICATION HAS CHANGED",
        "its host key is not known, or not the known one",
        "run `{ssh}` once",
    ),
    (r"Permission denied", "it does not take your key, and a password cannot be asked for here", "run `{ssh}` until that asks nothing"),
    (r"Connection refused", "nothing listens there for ssh", "correct its name or port"),
    (r"timed out|No route to host|unreachable", "it does not answer", "check the network (VPN?)"),
    (r"", "the connection failed", "run `{ssh}`"),
)


@dataclass(frozen=True)
class Login:
    """The machine on which Slurm's commands run."""

    settings: SubmitConfig

    @property
    def host(self) -> str | None:
        return self.settings.ssh

    def command(self, words: Sequence[str]) -> list[str]:
        """Returns the command of this machine that runs ``words`` there."""
        return list(words) if self.host is None else [*self._ssh(), *_ALIVE, "-T", "--", self.host, shlex.join(words)]

    def environment(self, local: dict[str, str]) -> dict[str, str]:
        """Returns the environment of that command: ssh gets the user's, and Slurm's commands that of the login node."""
        return local if self.host is None else dict(os.environ)

    def failure(self, code: int, said: str) -> str | None:
        """Returns why ssh itself failed, on one line; None if the command ran."""
        if self.host is None or code != _SSH_FAILED:
            return None
        cause, remedy = next((cause, remedy) for pattern, cause, remedy in _CAUSES if re.search(pattern, said))
        by_hand = shlex.join(["ssh", *self.settings.ssh_options, self.host])
        lines = [line.strip() for line in said.splitlines() if line.strip()]
        words = f" ({lines[-1]})" if lines else ""
        return f"cluster.submit.ssh={self.host} cannot be reached: {cause}{words}; {remedy.format(ssh=by_hand)}"

    def lacking(self, programs: Sequence[str]) -> list[str] | None:
        """Returns those of ``programs`` that this machine lacks; None where another machine has to be asked."""
        names = programs if self.host is None else ["ssh"]
        missing = [name for name in names if shutil.which(name) is None]
        return missing if missing or self.host is None else None

    def _ssh(self) -> list[str]:
        folder = Path.home() / ".cache" / "trireme" / "ssh"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        share = ["-o", "ControlMaster=auto", "-o", f"ControlPath={folder}/%C"]
        return ["ssh", "-o", "BatchMode=yes", *self.settings.ssh_options, *share]  # of two values of an option ssh takes the first
