"""The code that queued jobs run: a copy of the launcher's own, named by its content, as it was when they were submitted."""

from __future__ import annotations

import compileall
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from functools import cached_property
from pathlib import Path

from trainer.shared.run.errors import ConfigError

PACKAGES = ("trainer",)
"""Packages that a rank imports."""
LARGEST_BYTES = 64 * 2**20
"""Largest snapshot in bytes. Code is a few MiB; larger files would be copied for every change of the code."""


class CodeSnapshot:
    """The packages of a rank: of a checkout the files that git tracks there, as they are now, and new sources, or all that is installed."""

    def __init__(self, project: Path | None = None):
        """``project``: the folder that holds the packages; by default, that of the running ones."""
        self.project = project or Path(__file__).resolve().parents[2]

    @cached_property
    def files(self) -> list[Path]:
        """Relative to the project, sorted."""
        if self._tracked is None:
            folders = [self.project / name for name in PACKAGES if (self.project / name).is_dir()]
            found = [path.relative_to(self.project) for folder in folders for path in folder.rglob("*") if "__pycache__" not in path.parts]
        else:
            found = [*self._tracked, *(path for path in self._untracked if self._is_source(path))]
        return sorted(path for path in found if (self.project / path).is_file())

    @cached_property
    def left_out(self) -> list[Path]:
        """Lists files of the packages that git neither tracks nor ignores and that do not look like sources."""
        return [path for path in self._untracked if not self._is_source(path)]

    @cached_property
    def digest(self) -> str:
        """12 hexadecimal digits of the names and contents of all files."""
        content = hashlib.sha256()
        for path in self.files:
            data = (self.project / path).read_bytes()
            content.update(f"{path}\0{len(data)}\0".encode() + data)
        return content.hexdigest()[:12]

    def check(self) -> None:
        """``ConfigError`` if this is too large to be code."""
        sizes = {path: self._size(path) for path in self.files}
        total, largest = sum(sizes.values()), max(sizes, key=lambda path: sizes[path], default=None)
        if total > LARGEST_BYTES and largest is not None:
            raise ConfigError(
                f"cluster.code=snapshot: the code in {self.project} has {_mib(total)}, more than {_mib(LARGEST_BYTES)} (its "
                f"largest file is {largest}, "
                f"{_mib(sizes[largest])}); remove data files from git or the packages, or set cluster.code=image"
            )

    def folder(self, root: Path) -> Path:
        return root / "code" / self.digest

    def write(self, root: Path) -> Path:
        """Makes the copy atomically unless it exists. Reports omitted files. Raises ``OSError`` with the unreadable or unwritable path."""
        target = self.folder(root)
        if target.exists():
            return target
        self._say_what_is_left_out()
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        try:
            for path in self.files:
                (partial / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(self.project / path, partial / path)
            compileall.compile_dir(partial / "trainer", quiet=2)  # once here, or every rank of every trial would do it
            partial.chmod(0o755)
            os.rename(partial, target)
        except OSError as error:
            if target.exists():  # another launcher was faster
                return target
            named = Path(error.filename2 or error.filename or target)  # of a copy that has no room, both files
            raise OSError(error.errno, error.strerror, str(target if named.is_relative_to(partial) else named)) from None
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        return target

    @cached_property
    def _tracked(self) -> list[Path] | None:
        """Returns the commit; None outside a checkout, or without git."""
        return self._listed("--cached") if (self.project / ".git").exists() else None

    @cached_property
    def _untracked(self) -> list[Path]:
        return [] if self._tracked is None else self._listed("--others", "--exclude-standard") or []

    def _listed(self, *options: str) -> list[Path] | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(self.project), "ls-files", "-z", *options, "--", *PACKAGES], capture_output=True, check=True
            )
        except (OSError, subprocess.CalledProcessError):
            return None
        return [Path(os.fsdecode(name)) for name in done.stdout.split(b"\0") if name]

    def _is_source(self, path: Path) -> bool:
        """Returns whether a new file looks like part of its package: git tracks its kind there."""
        return path.suffix in {tracked.suffix for tracked in self._tracked or ()}

    def _size(self, path: Path) -> int:
        return (self.project / path).stat().st_size

    def _say_what_is_left_out(self) -> None:
        if self.left_out:
            first = max(self.left_out, key=lambda path: self._size(path) if (self.project / path).exists() else 0)
            others = f" and {len(self.left_out) - 1} more" if len(self.left_out) > 1 else ""
            print(f"the jobs' code is what git tracks of the trainer and its new sources; left out: {first}{others}", file=sys.stderr)


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"
