"""``python -m launcher`` is ``trireme``."""

import sys

from launcher.own_python import TROUBLE


def main() -> int:
    """Runs the command line. A Ctrl-C ends it in silence, also while its first modules are read."""
    if TROUBLE:
        print(f"error: {TROUBLE}", file=sys.stderr)
        return 2
    try:
        from launcher.cli.main import main as run

        return run()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
