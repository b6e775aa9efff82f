"""``trireme generate MODEL --prompt TEXT ...``: text from a checkpoint or a Hugging Face folder. The trainer does the work."""

from __future__ import annotations

import subprocess
import sys


def main(argv: list[str]) -> int:
    """Exit code 0 done, 2 wrong input."""
    return subprocess.run([sys.executable, "-m", "trainer.generate", *argv]).returncode
