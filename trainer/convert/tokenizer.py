"""The tokenizer that accompanies weights: as Hugging Face files and as GGUF fields, in both directions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.data.text import TextTokens
from trainer.shared.corpora.index import TOKENIZER
from trainer.shared.records.named_tokens import DECODER_START, GENERATION, NAMED, SETTINGS, decoder_start, named_tokens
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.files import write_json
from trainer.shared.run.resolved import ResolvedModelConfig

TEMPLATE = "chat_template.jinja"
SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
"""Special tokens that a tokenizer's settings name, and a chat template may use."""
NORMAL, CONTROL, ADDED = 1, 3, 4
"""Token types in GGUF: normal, special, and added but not special (llama.cpp: normal, control, user defined)."""
SPLITS = {"gpt-2": [], "smollm": [{"type": "Digits", "individual_digits": True}]}
"""Pre-tokenizers that precede GPT-2's byte-level split, by GGUF's name of the sequence (llama.cpp, ``llama-vocab.cpp``)."""
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def find_tokenizer(weights: Path) -> Path | None:
    """Finds the tokenizer.json next to a checkpoint, in a folder of checkpoints, or in a Hugging Face folder."""
    return next((file for place in (weights, weights.parent) if (file := place / TOKENIZER).is_file()), None)


def write_files(folder: Path, tokenizer: Path | None, model: ResolvedModelConfig, weights: Sequence[Path]) -> None:
    """Writes tokenizer and generation settings, so that ``AutoTokenizer`` and ``generate`` accept ``folder``. The BOS, EOS and padding
    tokens come from files next to the ``weights`` or the tokenizer; a missing one is replaced by EOS."""
    text = None if tokenizer is None else TextTokens(tokenizer, model.vocab, weights)
    named = _whole(text, weights)
    places = [*weights, *([] if tokenizer is None else [tokenizer.parent])]
    begin = {DECODER_START: named["pad_token_id"] if (said := decoder_start(places)) is None else said} if model.encoder_layers else {}
    write_json(folder / GENERATION, {"do_sample": False} | generation_of(weights) | named | begin)
    template = next((found for place in weights if (found := chat_template(place)) is not None), None)
    if template is not None:
        (folder / TEMPLATE).write_text(template, encoding="utf-8")
    if tokenizer is None:
        return
    known = _read(tokenizer)
    write_json(folder / TOKENIZER, known)
    words = {token["id"]: token["content"] for token in known.get("added_tokens", ())}
    settings: dict[str, Any] = {} if template is None else {"chat_template": template}  # older readers expect it there
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": model.seq, "clean_up_tokenization_spaces": False}
    special = {name.removesuffix("_id"): words[token] for name, token in _first(named).items() if token in words}
    if "eos_token" in special:
        special["unk_token"] = known["model"].get("unk_token") or special["eos_token"]
    write_json(folder / SETTINGS, settings | special)


def chat_template(folder: Path) -> str | None:
    """Reads a folder's chat template from its own file or from the tokenizer's settings: the default if there are several."""
    if (file := folder / TEMPLATE).is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(f"{file} cannot be read: {error}; put a whole one there, or remove it") from None
    said = _read(folder / SETTINGS).get("chat_template") if (folder / SETTINGS).is_file() else None
    if isinstance(said, list):
        said = next((each.get("template") for each in said if isinstance(each, dict) and each.get("name") == "default"), None)
    return said if isinstance(said, str) else None


def special_words(folders: Sequence[Path], text: TextTokens) -> dict[str, str]:
    """Returns the words of special tokens by their names in tokenizers' settings (``bos_token`` and others)."""
    words = {name.removesuffix("_id"): text.tokenizer.id_to_token(token) for name, token in _first(text.named).items()}
    said = next((_read(file) for folder in folders if (file := folder / SETTINGS).is_file()), {})
    own = {name: said[name] for name in (*words, *SPECIAL) if name in said}
    found = words | {name: word.get("content") if isinstance(word, dict) else word for name, word in own.items()}
    return {name: word for name, word in found.items() if isinstance(word, str)}


def generation_of(places: Sequence[Path]) -> dict[str, Any]:
    """Reads the generation settings of the first folder that has any, without their metadata."""
    file = next((file for place in places if (file := place / GENERATION).is_file()), None)
    said = {} if file is None else _read(file)
    return {name: value for name, value in said.items() if not name.startswith("_") and name != "transformers_version"}


def _whole(text: TextTokens | None, weights: Sequence[Path]) -> dict[str, Any]:
    """Returns all tokens of ``NAMED``. The token that the tokenizer puts before every text overrides a named BOS token."""
    named = named_tokens(weights) if text is None else text.named or {"eos_token_id": next(iter(text.ends), None)}
    begin = {"bos_token_id": text.begin[0]} if text is not None and text.begin else {}
    return {**dict.fromkeys(NAMED, _first(named).get("eos_token_id")), **named, **begin}


def _first(named: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value[0] if isinstance(value, list) else value for name, value in named.items()}


def gguf_fields(tokenizer: Path, vocab: int, weights: Sequence[Path]) -> list[tuple[str, Any]]:
    """Returns method names of ``GGUFWriter`` and their values. ``ConfigError`` for a tokenizer that GGUF has no name for."""
    text, known = TextTokens(tokenizer, vocab, weights), _read(tokenizer)
    model = known["model"]
    split = known.get("pre_tokenizer") or {}
    parts = split.get("pretokenizers", [split])
    name = next((name for name, before in SPLITS.items() if [*before, BYTES] == [_plain(part) for part in parts]), None)
    if model["type"] != "BPE" or name is None:
        raise ConfigError(
            f"{tokenizer} splits text in a way that GGUF has no name for; it has names for byte-level BPE as 'prepare' trains it"
        )
    added = {token["id"]: token for token in known.get("added_tokens", ())}
    words = {number: word for word, number in model["vocab"].items()} | {number: token["content"] for number, token in added.items()}
    tokens = [words.get(number, f"[UNUSED{number}]") for number in range(vocab)]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    fields = [("add_tokenizer_model", "gpt2"), ("add_tokenizer_pre", name), ("add_token_list", tokens), ("add_token_merges", merges)]
    types = [NORMAL if number not in added else CONTROL if added[number]["special"] else ADDED for number in range(vocab)]
    tokens_named = [(f"add_{name}", token) for name, token in _first(_whole(text, weights)).items() if token is not None]
    if len(text.begin) > 1:
        raise ConfigError(f"{tokenizer} begins a text with {len(text.begin)} tokens, and GGUF has one for it; export a Hugging Face folder")
    return [*fields, ("add_token_types", types), *tokens_named, ("add_add_bos_token", bool(text.begin))]


def named_in_gguf(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the named tokens of a GGUF file's fields, as ``named_tokens`` does."""
    keys = ("eos_token_id", "bos_token_id", "padding_token_id")
    return {name: int(fields[at]) for name, key in zip(NAMED, keys) if (at := f"tokenizer.ggml.{key}") in fields}


def from_gguf(fields: Mapping[str, Any]) -> dict[str, Any] | None:
    """Builds the tokenizer.json that a GGUF file's fields describe; None for an unsupported kind."""
    name = fields.get("tokenizer.ggml.pre", "gpt-2")
    if fields.get("tokenizer.ggml.model") != "gpt2" or name not in SPLITS:
        return None
    words = fields["tokenizer.ggml.tokens"]
    types = fields.get("tokenizer.ggml.token_type", [NORMAL] * len(words))
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    kinds = {CONTROL: {"special": True}, ADDED: {"special": False}}
    added = [
        {"id": number, "content": word, **plain, **kinds[kind]} for number, (word, kind) in enumerate(zip(words, types)) if kind in kinds
    ]
    merges = [merge.split(" ") for merge in fields["tokenizer.ggml.merges"]]
    model = {"type": "BPE", "vocab": {word: number for number, word in enumerate(words)}, "merges": merges, "dropout": None}
    parts = [*SPLITS[name], BYTES]
    split = parts[0] if len(parts) == 1 else {"type": "Sequence", "pretokenizers": parts}
    empty = dict.fromkeys(("truncation", "padding", "normalizer"))
    around = {"post_processor": _around(fields, words)}
    return {"version": "1.0", **empty, **around, "added_tokens": added, "pre_tokenizer": split, "decoder": BYTES, "model": model}


def _around(fields: Mapping[str, Any], words: Sequence[str]) -> dict[str, Any] | None:
    """Builds the post-processor that puts tokens before and after every text; None if there are no such tokens."""
    named, sides = named_in_gguf(fields), ("bos_token_id", "eos_token_id")
    asked = [name for name in sides if name in named and fields.get(f"tokenizer.ggml.add_{name.removesuffix('_id')}")]
    if not asked:
        return None
    special = {(word := words[named[name]]): {"id": word, "ids": [named[name]], "tokens": [word]} for name in asked}
    begin, end = ([{"SpecialToken": {"id": words[named[name]], "type_id": 0}}] if name in asked else [] for name in sides)
    texts = [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"]
    return {"type": "TemplateProcessing", "single": [*begin, texts[0], *end], "pair": [*begin, *texts, *end], "special_tokens": special}


def _plain(part: Mapping[str, Any]) -> dict[str, Any]:
    return {"trim_offsets": True, **part} if part.get("type") == "ByteLevel" else dict(part)


def _read(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; give a whole one with --tokenizer") from None
