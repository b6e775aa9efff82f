"""Text and tokens: spelling behind a prompt, stops that may have begun, ends that a model's files name, files that remember their use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from trainer.generate.command import parser, texts_of
from trainer.generate.telling import Telling, end_tokens, read_tokenizer

WORDS = ["<unk>", "<s>", "</s>", "\u2581the", "\u2581answer", "\u2581is", "s", "\u2581", "d"]


@pytest.fixture
def spaced() -> Tokenizer:
    """Of the kind that spells a space as a part of the word behind it, and leaves it out where a text begins."""
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    made.add_special_tokens([AddedToken(word, special=True) for word in WORDS[:3]])
    return made


def test_pieces_behind_a_prompt_are_its_continuation_space_and_all(spaced: Tokenizer) -> None:
    prompt, made = spaced.encode("the answer").ids, [5, 3, 6]
    telling = Telling(spaced, (), prompt)
    pieces = [telling.hear(made[:count], count == len(made)) for count in range(1, len(made) + 1)]
    assert pieces == [" is", " the", "s"] and telling.text == " is thes"
    assert spaced.decode(prompt + made) == "the answer" + "".join(pieces)


@pytest.mark.parametrize("stop", ["ab", "aab", "abab", "s", "is the", "a" * 1000])
@pytest.mark.parametrize("text", ["aabaababab", "this is the", "a" * 1500, "b", ""])
def test_held_back_is_the_longest_end_that_may_become_a_stop(stop: str, text: str) -> None:
    telling = Telling(None, [stop])  # type: ignore[arg-type]
    telling.text = text
    assert telling._held() == max((n for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)


@pytest.mark.parametrize(
    ("files", "ends"),
    [
        ({"generation_config.json": {"eos_token_id": [2, 5]}, "config.json": {"eos_token_id": 1}}, {2, 5}),
        ({"config.json": {"eos_token_id": 2}}, {2}),
        ({"generation_config.json": {"eos_token_id": None}, "config.json": {"eos_token_id": 2}}, {2}),
        ({"config.json": {"eos_token_id": True}}, {0}),
        ({}, {0}),
    ],
)
def test_a_text_ends_where_the_models_files_say(spaced: Tokenizer, files: dict[str, Any], ends: set[int], tmp_path: Path) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert end_tokens(tmp_path, spaced) == ends


def test_prompts_are_whole_though_the_tokenizer_was_saved_to_cut_and_fill(spaced: Tokenizer, tmp_path: Path) -> None:
    spaced.enable_truncation(2)
    spaced.enable_padding(length=8)
    spaced.save(str(tmp_path / "tokenizer.json"))
    assert read_tokenizer(None, tmp_path, 16).encode("the answer is the").ids == [3, 4, 5, 3]


def test_a_prompt_is_a_line_whatever_other_characters_end_lines_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_bytes("one\u2028still one\r\nform\x0cfeed\n\nlast".encode())
    assert texts_of(parser().parse_args(["m", "--prompts", str(tmp_path / "p.txt")])) == ["one\u2028still one", "form\x0cfeed", "last"]
