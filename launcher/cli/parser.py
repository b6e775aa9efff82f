"""The parsers of all verbs: help that fits the terminal, and one plain line for a wrong option."""

from __future__ import annotations

import argparse
import difflib
import re
import textwrap
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

from trainer.shared.run.errors import ConfigError


class VerbParser(argparse.ArgumentParser):
    """The parser of ``trireme VERB``. Raises ``ConfigError`` for a wrong command line, naming the nearest option."""

    def __init__(self, prog: str, description: str | None = None, **settings: Any):
        super().__init__(prog, description=description, formatter_class=Wrapped, **settings)

    def error(self, message: str) -> NoReturn:
        known = [option for action in self._actions for option in action.option_strings if option.startswith("--")]
        unknown = message.removeprefix("unrecognized arguments: ").split(" ")[0].partition("=")[0]
        near = difflib.get_close_matches(unknown, known, n=1) if unknown != message.split(" ")[0] else []
        raise ConfigError(f"{message}; " + (f"did you mean {near[0]}?" if near else f"'{self.prog} --help' explains them"))


class Wrapped(argparse.HelpFormatter):
    """Wraps paragraphs, commands and lists of a description at the terminal's width. Commands stay ones that a shell takes."""

    def add_usage(self, usage: str | None, actions: Iterable[argparse.Action], groups: Any, prefix: str | None = None) -> None:
        self._prog += " [OPTIONS]"  # which the list below names
        super().add_usage(usage, [action for action in actions if not action.option_strings], [], prefix)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n".join(line for paragraph in text.strip("\n").split("\n\n") for line in ("", *filled(paragraph, width)))[1:]


def filled(paragraph: str, width: int) -> Iterator[str]:
    """Yields the lines of a paragraph: prose is joined and wrapped; an indented line is a command or a term, and its meaning after three
    blanks."""
    prose: list[str] = []
    for line in re.sub(r"\\\n\s*", "", paragraph).splitlines():
        if not line.startswith("  "):
            prose.append(line)
            continue
        yield from textwrap.wrap(" ".join(prose), width)
        prose = []
        if len(line) <= width:
            yield line
            continue
        term, _, meaning = re.sub(r"\s{3,}", "\0", line.strip()).partition("\0")
        yield from broken(term, width)
        yield from textwrap.wrap(meaning, width, initial_indent=" " * 6, subsequent_indent=" " * 6)
    yield from textwrap.wrap(" ".join(prose), width)


def broken(command: str, width: int) -> Iterator[str]:
    """Yields a command in lines that a shell reads as one."""
    line = "  "
    for word in re.findall(r"(?:'[^']*'|[^\s'])+", command):
        if line.strip() and len(line) + len(word) + 2 > width:
            yield line + "\\"
            line = "      "
        line += f"{word} "
    yield line.rstrip()
