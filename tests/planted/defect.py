"""A small defect, planted in a copy of the sources: a mistake that a person makes, and that nothing but a test would notice."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path


class DoesNotApply(Exception):
    """The text that a defect replaces is not there, or more than once: the sources have moved on, and the list has to follow."""


@dataclass(frozen=True)
class Defect:
    """``old``, which occurs exactly once in ``file``, is replaced by ``new``; one of ``tests`` has to fail."""

    name: str  # what is wrong, in a few words
    file: str  # from the repository's root
    old: str
    new: str
    tests: str  # arguments of pytest: tests of the gate, of the room that the defect is in

    def applied(self, text: str) -> str:
        """``text`` of the file with the defect."""
        if (found := text.count(self.old)) != 1:
            raise DoesNotApply(f"'{self.name}' does not apply: {self.file} has {found} times {self.old!r}, not once")
        return text.replace(self.old, self.new)

    @property
    def paths(self) -> list[Path]:
        """Files and folders of its tests."""
        return [Path(word.partition("::")[0]) for word in shlex.split(self.tests) if word.startswith("tests/")]
