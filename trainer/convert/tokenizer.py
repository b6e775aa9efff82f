"""The tokenizer beside the weights: the files that Hugging Face reads, the fields of GGUF, and back from these."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.spec import ConfigError
from trainer.spec.corpus import TOKENIZER
from trainer.spec.files import write_json

SETTINGS, GENERATION = "tokenizer_config.json", "generation_config.json"
NORMAL, CONTROL = 1, 3
"""Types of a token in GGUF: as others, and special."""
SPLITS = {"gpt-2": [], "smollm": [{"type": "Digits", "individual_digits": True}]}
"""What comes before GPT-2's byte-level split, by GGUF's name of the whole (llama.cpp, ``llama-vocab.cpp``)."""
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def find_tokenizer(weights: Path) -> Path | None:
    """The tokenizer.json next to a checkpoint, in a folder of them, or in a Hugging Face folder."""
    return next((file for place in (weights, weights.parent) if (file := place / TOKENIZER).is_file()), None)


def write_files(folder: Path, tokenizer: Path | None, seq: int, ends: int | list[int] | None) -> None:
    """Tokenizer and generation settings, so that ``AutoTokenizer`` and ``generate`` take ``folder`` as it is."""
    ends = end_of(tokenizer) if ends is None and tokenizer is not None else ends
    first = ends[0] if isinstance(ends, list) else ends
    write_json(folder / GENERATION, {"eos_token_id": ends, "bos_token_id": first, "pad_token_id": first, "do_sample": False})
    if tokenizer is None:
        return
    known = _read(tokenizer)
    write_json(folder / TOKENIZER, known)
    words = {token["id"]: token["content"] for token in known.get("added_tokens", ())}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": seq, "clean_up_tokenization_spaces": False}
    special = {} if first not in words else dict.fromkeys(("bos_token", "eos_token", "unk_token"), words[first])
    write_json(folder / SETTINGS, settings | special)


def ends_beside(weights: Path) -> int | list[int] | None:
    """The end tokens that an imported folder's generation settings name."""
    for place in (weights, weights.parent):
        if (place / GENERATION).is_file():
            ends: int | list[int] | None = _read(place / GENERATION).get("eos_token_id")
            return ends
    return None


def end_of(tokenizer: Path) -> int | None:
    """The token at which a text ends: the first special one, which prepared corpora have alone."""
    return min((token["id"] for token in _read(tokenizer).get("added_tokens", ()) if token["special"]), default=None)


def gguf_fields(tokenizer: Path, vocab: int) -> list[tuple[str, Any]]:
    """Calls of a ``GGUFWriter`` and their values. ``ConfigError`` for a tokenizer that GGUF has no name for."""
    known = _read(tokenizer)
    model, end = known["model"], end_of(tokenizer)
    split = known.get("pre_tokenizer") or {}
    parts = split.get("pretokenizers", [split])
    name = next((name for name, before in SPLITS.items() if [*before, BYTES] == [_plain(part) for part in parts]), None)
    if model["type"] != "BPE" or name is None:
        raise ConfigError(
            f"{tokenizer} splits text in a way that GGUF has no name for; it has names for byte-level BPE as 'prepare' trains it"
        )
    special = {token["id"]: token["content"] for token in known.get("added_tokens", ())}
    words = {number: word for word, number in model["vocab"].items()} | special
    tokens = [words.get(number, f"[UNUSED{number}]") for number in range(vocab)]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    fields = [("add_tokenizer_model", "gpt2"), ("add_tokenizer_pre", name), ("add_token_list", tokens), ("add_token_merges", merges)]
    types = [CONTROL if number in special else NORMAL for number in range(vocab)]
    ends = [("add_bos_token_id", end), ("add_eos_token_id", end)] if end is not None else []
    return [*fields, ("add_token_types", types), *ends, ("add_add_bos_token", False)]


def from_gguf(fields: Mapping[str, Any]) -> dict[str, Any] | None:
    """The tokenizer.json that a GGUF file's fields describe; None if it is of a kind that is not read here."""
    name = fields.get("tokenizer.ggml.pre", "gpt-2")
    if fields.get("tokenizer.ggml.model") != "gpt2" or name not in SPLITS:
        return None
    words = fields["tokenizer.ggml.tokens"]
    types = fields.get("tokenizer.ggml.token_type", [NORMAL] * len(words))
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = [{"id": number, "content": word, **plain} for number, (word, kind) in enumerate(zip(words, types)) if kind == CONTROL]
    merges = [merge.split(" ") for merge in fields["tokenizer.ggml.merges"]]
    model = {"type": "BPE", "vocab": {word: number for number, word in enumerate(words)}, "merges": merges, "dropout": None}
    parts = [*SPLITS[name], BYTES]
    split = parts[0] if len(parts) == 1 else {"type": "Sequence", "pretokenizers": parts}
    empty = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor"))
    return {"version": "1.0", **empty, "added_tokens": added, "pre_tokenizer": split, "decoder": BYTES, "model": model}


def _plain(part: Mapping[str, Any]) -> dict[str, Any]:
    return {"trim_offsets": True, **part} if part.get("type") == "ByteLevel" else dict(part)


def _read(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; give a whole one with --tokenizer") from None
