"""A cluster that is a file, for the tests of how clusters are shared."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def held() -> Iterator[dict[str, Any]]:
    """For the holder. The file counts how often the cluster has been started."""
    path = Path(os.environ["TRIREME_TEST_PLAYED"])
    path.write_text(str(int(path.read_text()) + 1 if path.exists() else 1))
    try:
        yield {"cluster": str(path)}
    finally:
        path.unlink()
