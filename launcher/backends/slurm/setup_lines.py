"""Whether bash can read the lines of ``cluster.setup`` and ``setup_may_fail``: what they begin and do not end would swallow the rest of
the job's script."""

from __future__ import annotations

import re
import shutil
import subprocess
from functools import cache

from trainer.shared.run.errors import ConfigError


@cache
def check_setup(lines: tuple[str, ...], key: str = "setup") -> None:
    """``ConfigError`` with the line of ``cluster.KEY`` at which ``bash -n`` stops. Nothing is run. Without bash here, the nodes' own will
    say so."""
    bash = shutil.which("bash")
    if not lines or bash is None:
        return
    text = "\n".join(lines) + "\n"
    read = subprocess.run(
        [bash, "--norc", "-n"], input=text, capture_output=True, text=True, errors="replace", env={"LC_ALL": "C"}, timeout=60
    )
    if read.stderr:  # a here-document without its end is a warning alone
        words = read.stderr.splitlines()[0]
        number = re.search(r"line (\d+)", words)
        line = lines[min(int(number[1]) if number else 1, len(lines)) - 1]
        raise ConfigError(
            f"cluster.{key} holds {line!r}, where bash cannot read on ({re.sub(r'^.*?line [0-9]+: ', '', words)}); correct it"
        )
