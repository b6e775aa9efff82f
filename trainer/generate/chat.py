"""The chat template of a model: messages of a conversation become the text that it was tuned to answer.

A template is Jinja of a fixed dialect (transformers, "Writing a chat template"): blocks are trimmed, loops may break, and it knows the
model's special tokens, ``raise_exception`` and ``strftime_now``. It comes with weights from elsewhere, so it runs in Jinja's sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from trainer.convert.tokenizer import chat_template, special_words
from trainer.data.text import TextTokens
from trainer.shared.run.errors import ConfigError


class AnswerBlock(Extension):
    """``{% generation %}``, which marks answers for trainers: its content, unchanged."""

    tags = {"generation"}  # noqa: RUF012 (the base declares an instance's)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """The template ``text``; ``special`` holds the words of special tokens (``bos_token`` and others). ``ConfigError`` for a text that
    Jinja cannot read."""

    def __init__(self, text: str, special: Mapping[str, str]):
        made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[AnswerBlock, "jinja2.ext.loopcontrols"])
        made.filters["tojson"] = _json
        made.globals |= {"raise_exception": _refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
        try:
            self.template = made.from_string(text)
        except TemplateError as error:
            raise ConfigError(f"the chat template of the model cannot be read: {_line(error)}; correct or remove it") from None
        self.special = special

    def text(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Returns the conversation up to where the model answers. ``ConfigError`` if the template refuses these messages."""
        try:
            return self.template.render(messages=messages, add_generation_prompt=True, tools=None, documents=None, **self.special)
        except Exception as error:  # a template is a program: its errors have no common type
            raise ConfigError(f"messages do not fit the chat template of the model: {_line(error)}") from None


def open_template(places: Sequence[Path], words: TextTokens) -> ChatTemplate | None:
    """Opens the template of the first folder that has one; None if none has."""
    text = next((found for place in places if (found := chat_template(place)) is not None), None)
    return None if text is None else ChatTemplate(text, special_words(places, words))


def _json(value: Any, indent: int | None = None, **how: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent, **how)


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
