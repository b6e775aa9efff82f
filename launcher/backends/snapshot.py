"""The code that queued jobs run: a copy of the launcher's own, named by its content, as it was when they were submitted."""

from __future__ import annotations

import compileall
import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import cached_property
from pathlib import Path

from launcher.config.compose import project_dir

_PACKAGES = ("trainer", "launcher")


class Snapshot:
    """The files of a checkout (tracked, and untracked ones that git does not ignore) or of the installed packages."""

    def __init__(self, project: Path | None = None):
        self.project = project or project_dir()

    @cached_property
    def files(self) -> list[Path]:
        """Relative to the project, sorted."""
        command = ["git", "-C", str(self.project), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        done = subprocess.run(command, capture_output=True, text=True) if (self.project / ".git").exists() else None
        if done is not None and done.returncode == 0:
            found = [Path(name) for name in done.stdout.split("\0") if name]
        else:
            folders = [self.project / name for name in _PACKAGES if (self.project / name).is_dir()] or [self.project]
            found = [path.relative_to(self.project) for folder in folders for path in folder.rglob("*") if "__pycache__" not in path.parts]
        return sorted(path for path in found if (self.project / path).is_file())

    @cached_property
    def digest(self) -> str:
        """12 hexadecimal digits of the names and contents of all files."""
        content = hashlib.sha256()
        for path in self.files:
            data = (self.project / path).read_bytes()
            content.update(f"{path}\0{len(data)}\0".encode() + data)
        return content.hexdigest()[:12]

    def folder(self, root: Path) -> Path:
        """Where the copy lies, or will."""
        return root / "code" / self.digest

    def write(self, root: Path) -> Path:
        """Make the copy unless it is there: whole or not at all."""
        target = self.folder(root)
        if target.exists():
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        for path in self.files:
            (partial / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(self.project / path, partial / path)
        compileall.compile_dir(partial / "trainer", quiet=2)  # once here, or every rank of every trial would do it
        partial.chmod(0o755)
        try:
            os.rename(partial, target)
        except OSError:  # another launcher was faster
            shutil.rmtree(partial)
        return target
