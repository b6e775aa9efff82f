"""Hugging Face's libraries, imported where they are first used: every test process collects every test, and they take it seconds.

Their tests share a group, so that one process imports them.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest


class Library:
    """A package that is imported when something of it is asked for."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # pytest looks for them at everything that a module of tests imports
            raise AttributeError(name)
        module = importlib.import_module(self._name)
        if self._name == "transformers":
            logging = importlib.import_module("transformers.utils.logging")
            logging.set_verbosity_error()
            logging.disable_progress_bar()
        return getattr(module, name)


transformers: Any = Library("transformers")
peft: Any = Library("peft")
MARKS = [pytest.mark.slow, pytest.mark.xdist_group("huggingface")]
