"""``trireme convert export CHECKPOINT FOLDER`` and ``... import FOLDER CHECKPOINTS``: Hugging Face weights. The trainer does the work."""

from __future__ import annotations

from launcher.own_python import run


def main(argv: list[str]) -> int:
    """Exit code 0 done, 2 wrong input."""
    from launcher.config.packages import need

    need("train", "converting weights")
    return run("trainer.convert", *argv)
