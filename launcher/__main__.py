"""``python -m launcher`` is ``trireme``."""

import sys

from launcher.cli.main import main

sys.exit(main())
