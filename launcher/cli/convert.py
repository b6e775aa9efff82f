"""``trireme convert export CHECKPOINT FOLDER`` and ``... import FOLDER CHECKPOINTS``: Hugging Face weights. The trainer does the work."""

from __future__ import annotations

import subprocess
import sys

from launcher.config.packages import need


def main(argv: list[str]) -> int:
    """Exit code 0 done, 2 wrong input."""
    need("train", "converting weights")
    return subprocess.run([sys.executable, "-m", "trainer.convert", *argv]).returncode
