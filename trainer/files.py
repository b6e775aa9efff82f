"""Small files that other programs watch: written whole or not at all."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import Any


def write_json(path: Path, data: Any) -> None:
    """Write ``data`` to ``path`` atomically: a reader sees the old file or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(finite(data), indent=1) + "\n")
    temporary.replace(path)


def finite(data: Any) -> Any:
    """``data`` with null in place of numbers that JSON does not have: infinities and NaN."""
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    if isinstance(data, dict):
        return {key: finite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [finite(value) for value in data]
    return data


def write_outcome(path: Path, data: dict[str, Any]) -> None:
    """``write_json`` of what an attempt came to, unless a newer attempt has written there: a process of the old one may still live."""
    written = read_json(path) or {}
    if isinstance(written.get("attempt"), int) and written["attempt"] > data["attempt"]:
        print(f"{path.name} is that of attempt {written['attempt']}, and attempt {data['attempt']} leaves it alone", file=sys.stderr)
        return
    write_json(path, data)


def read_json(path: Path) -> dict[str, Any] | None:
    """The document in ``path``, or None when there is none or it is not JSON."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None
