"""Finds the tokens that end, begin and fill a text in the files that come with a model's weights and its tokenizer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trainer.shared.corpora.index import TOKENIZER, words_of
from trainer.shared.records.artifacts import MODEL_CONFIG
from trainer.shared.run.errors import ConfigError

SETTINGS, GENERATION = "tokenizer_config.json", "generation_config.json"
NAMING = (GENERATION, MODEL_CONFIG, SETTINGS)
"""The files that name tokens, in order of precedence; older models have only the second."""
NAMED = ("eos_token_id", "bos_token_id", "pad_token_id")
DECODER_START = "decoder_start_token_id"


def named_tokens(places: Iterable[Path]) -> dict[str, Any]:
    """Returns ``NAMED`` from the first of some folders that names an end; an end may be a list, in which the tokenizer's own comes first.
    Raises ``ConfigError`` for a file that cannot be read."""
    for place in places:
        generation, config, settings = (_read(place / name) for name in NAMING)
        own = _numbers(settings, place / TOKENIZER)
        named = {name: said[name] for said in (own, config, generation) for name in NAMED if _are_tokens(said.get(name))}
        if isinstance(ends := named.get("eos_token_id"), list):
            named["eos_token_id"] = sorted(ends, key=lambda token: token != own.get("eos_token_id"))
        if "eos_token_id" in named:
            return named
    return {}


def decoder_start(places: Iterable[Path]) -> int | None:
    """Returns the token with which a decoder begins behind an encoder: the one that the first of some folders names, or else the one that
    fills texts. Raises ``ConfigError`` for a file that cannot be read."""
    places = list(places)
    said = [_read(place / name).get(DECODER_START) for place in places for name in (GENERATION, MODEL_CONFIG)]
    named = next((token for token in said if type(token) is int), named_tokens(places).get("pad_token_id"))
    return named if type(named) is int else None


def tokenizer_digest(file: Path) -> str:
    """Returns the SHA-256 of a tokenizer.json and of what files beside it name. Raises ``ConfigError`` as ``named_tokens``."""
    named = json.dumps([named_tokens([file.parent]), decoder_start([file.parent])], sort_keys=True)
    return hashlib.sha256(file.read_bytes() + named.encode()).hexdigest()


def _numbers(settings: dict[str, Any], tokenizer: Path) -> dict[str, Any]:
    """Returns the numbers of the tokens that a tokenizer's settings name by their words."""
    said = {name: settings.get(name.removesuffix("_id")) for name in NAMED}
    words = {name: word.get("content") if isinstance(word, dict) else word for name, word in said.items()}
    known = (words_of(tokenizer) or {}) if any(words.values()) else {}
    return {name: known[word] for name, word in words.items() if isinstance(word, str) and word in known}


def _are_tokens(value: object) -> bool:
    tokens = value if isinstance(value, list) else [value]
    return bool(tokens) and all(isinstance(token, int) and not isinstance(token, bool) for token in tokens)


def _read(path: Path) -> dict[str, Any]:
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(said, dict):
            raise ValueError("it is not a JSON object")
        return said
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; put a whole one there") from None
