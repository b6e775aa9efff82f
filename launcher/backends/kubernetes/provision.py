"""Prepares a pod for its ranks: the trainer's code and the corpus.

Shipped to the pods with entry.py, so it imports the standard library alone. The launcher's trainer comes as an archive
(``cluster.code=snapshot``), or the image's is compared with it; a missing corpus is prepared here (``cluster.data``).
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import io
import os
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

PACKAGE = "trainer"

Say = Callable[[str], None]


class CannotStart(Exception):
    """Raised if the ranks cannot start; ``str(error)`` says why and what to do."""


def archive(package: Path) -> bytes:
    """The Python files of ``package`` as a tar.gz; the same files give the same bytes."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as files:
        for name, content in sources(package):
            entry = tarfile.TarInfo(f"{PACKAGE}/{name}")
            entry.size, entry.mode = len(content), 0o644
            files.addfile(entry, io.BytesIO(content))
    return gzip.compress(stream.getvalue(), mtime=0)


def digest(package: Path) -> str:
    """12 hexadecimal digits of the names and contents of the Python files of ``package``."""
    found = hashlib.sha256()
    for name, content in sources(package):
        found.update(f"{name}\0{len(content)}\0".encode() + content)
    return found.hexdigest()[:12]


def sources(package: Path) -> Iterator[tuple[str, bytes]]:
    for path in sorted(package.rglob("*.py")):
        yield path.relative_to(package).as_posix(), path.read_bytes()


def provide(say: Say, told_to_end: Callable[[], bool]) -> str:
    """Everything that the environment asks for; a remark for the trial's record, or nothing. ``CannotStart`` if it cannot be had."""
    remark = _ship() if "TRIREME_CODE_DIR" in os.environ else _compare()
    if remark:
        say(remark)
    if os.environ.get("TRIREME_PREPARE"):
        _prepare(say, told_to_end)
    return remark


def _ship() -> str:
    """Unpacks the launcher's trainer where ranks look first, before the image's own and before the folder they start in."""
    folder = os.environ["TRIREME_CODE_DIR"]
    with tarfile.open(Path(__file__).with_name("trainer.tar.gz")) as files:
        files.extractall(folder, filter="data")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
    os.environ["PYTHONSAFEPATH"] = "1"
    return ""


def _compare() -> str:
    """Returns a complaint about the image's trainer; nothing if it is the launcher's."""
    if "TRIREME_CODE" not in os.environ:
        return ""
    if not sys.flags.safe_path:
        sys.path.insert(0, os.getcwd())  # as for the ranks
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise CannotStart(
            f"the image has no Python package '{PACKAGE}' that {sys.executable} finds; use cluster.code=snapshot, which "
            f"ships the launcher's, "
            "or an image of deploy/Dockerfile"
        )
    wanted, here = os.environ["TRIREME_CODE"], digest(Path(next(iter(spec.submodule_search_locations))))
    if here == wanted:
        return ""
    return f"the image's trainer (code {here}) is not the launcher's (code {wanted}); cluster.code=snapshot runs the launcher's"


def _prepare(say: Say, told_to_end: Callable[[], bool]) -> None:
    """Makes the corpus unless it exists. Its output goes to the log; the last line of a failure becomes the trial's reason."""
    command = [sys.executable, "-u", "-m", f"{PACKAGE}.data", os.environ["TRIREME_CONFIG"]]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    lines: list[str] = []
    assert process.stdout is not None
    reader = threading.Thread(target=_listen, args=(process.stdout, say, lines))
    reader.start()
    while process.poll() is None:
        if told_to_end():
            process.terminate()
        time.sleep(0.1)
    reader.join()
    if process.returncode and not told_to_end():
        last = lines[-1] if lines else f"exit code {process.returncode}"
        raise CannotStart(f"the corpus could not be prepared in the pod: {last.removeprefix('error: ')}")


def _listen(stream: IO[bytes], say: Say, lines: list[str]) -> None:
    for line in stream:
        lines.append(line.decode(errors="replace").rstrip())
        say(lines[-1])
