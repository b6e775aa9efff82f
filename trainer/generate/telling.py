"""Streaming of the text of completions."""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING

from trainer.data.text import TextTokens
from trainer.shared.corpora.index import TOKENIZER, other_words
from trainer.shared.run.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer


SPELLING = 8
"""Last tokens of a prompt that decide the spelling of the first one after it: many tokenizers drop a space at the start of a text."""
HALF = "\ufffd"
"""The decoding of an incomplete character."""


class TextStream:
    """The text of one completion after its prompt, or from its prompt on (``echo``). A piece is released once its characters are complete
    and cannot be part of a stop text; the text ends at one of ``stops``.

    ``offsets`` holds the number of complete characters before each token, ``shown`` the number of tokens that released text begins with.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str], prompt: Sequence[int] = (), echo: bool = False):
        self.tokenizer, self.stops = tokenizer, stops
        self.prompt = list(prompt) if echo else list(prompt[-SPELLING:])
        self.context = 0 if echo else len(self.prompt)  # tokens that are not part of the text
        self.before, self.read = 0, self.context  # tokens before ``read`` are in ``text``; decoded from ``before`` on
        self.text, self.told, self.stopped = "", 0, False
        self.offsets: list[int] = []
        self.shown = 0
        for end in range(1, len(self.prompt) + 1) if echo else ():
            self._grow(self.prompt[:end], False)
        self.start = len(self.text)  # stops before it are the prompt's own

    def hear(self, made: Sequence[int], ended: bool) -> str:
        """Returns the text of the tokens ``made`` so far that can be released and was not yet."""
        self._grow([*self.prompt, *made], ended)
        found = [at for stop in self.stops if (at := self.text.find(stop, self.start)) >= 0]
        if found:
            self.text, self.stopped = self.text[: min(found)], True
        end = len(self.text) if ended or self.stopped else len(self.text) - self._held()
        piece, self.told = self.text[self.told : end], max(end, self.told)
        self.shown = len(self.offsets) if ended and not self.stopped else bisect_left(self.offsets, self.told)
        return piece

    def _grow(self, tokens: list[int], ended: bool) -> None:
        """Adds the characters that the last of ``tokens`` complete."""
        known = self.tokenizer.decode(tokens[self.before : self.read])
        new = self.tokenizer.decode(tokens[self.before :])[len(known) :]
        count = len(tokens) - self.context
        self.offsets += [len(self.text)] * (count - len(self.offsets))  # none if the text only ends
        if ended or not new.endswith(HALF):
            before = self.read if new else self.before  # tokens without text tell nothing of the spelling of the next ones
            self.text, self.before, self.read = self.text + new, before, len(tokens)

    def _held(self) -> int:
        """Counts the characters at the end with which a stop text may begin."""
        return max((_begun(self.text[self.start :], stop) for stop in self.stops), default=0)


def _begun(text: str, stop: str) -> int:
    """Counts the characters at the end of ``text`` that may become ``stop``."""
    at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while at >= 0 and not stop.startswith(text[at:]):
        at = text.find(stop[0], at + 1)
    return len(text) - at if at >= 0 else 0


class Printer:
    """Prints completions as they grow, in the order of their prompts: each one after the previous one has ended."""

    def __init__(self, file: IO[str], prompts: Sequence[str]):
        self.file, self.prompts = file, prompts
        self.texts, self.ended = [""] * len(prompts), [False] * len(prompts)
        self.at = self.printed = 0

    def tell(self, number: int, piece: str, ended: bool) -> None:
        self.texts[number] += piece
        self.ended[number] = ended
        while self.at < len(self.prompts):
            whole = self.prompts[self.at] + self.texts[self.at]
            self.file.write(whole[self.printed :])
            self.printed = len(whole)
            if not self.ended[self.at]:
                break
            self.at, self.printed = self.at + 1, 0
            self.file.write("\n\n" if self.at < len(self.prompts) else "\n")
        self.file.flush()


def open_text(path: Path | str | None, model: Path, vocab: int, pairs: bool = False) -> TextTokens:
    """Opens the tokenizer of the model in ``model``: the one at ``path``, a file or a folder, or next to the weights. ``ConfigError`` if
    none fits."""
    found = Path(path) if path else next((place / TOKENIZER for place in (model, model.parent) if (place / TOKENIZER).is_file()), None)
    if found is None:
        raise ConfigError(f"{model} has no {TOKENIZER} next to its weights; name the corpus that it was trained on with --tokenizer FOLDER")
    file = found / TOKENIZER if found.is_dir() else found
    text = TextTokens(file, vocab, (model, model.parent), pairs)
    if path is not None and (note := other_words(file, model, vocab)):
        print(note, file=sys.stderr)
    return text
