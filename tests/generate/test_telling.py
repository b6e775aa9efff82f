"""Text and tokens: spelling behind a prompt, stops that may have begun, ends that a model's files name, files that remember their use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from trainer.data.text import TextTokens
from trainer.generate.spelling import TokenSpelling
from trainer.generate.telling import TextStream, open_text
from trainer.shared.run.command_lines import GenerateCommand, texts_of
from trainer.shared.run.errors import ConfigError

WORDS = ["<unk>", "<s>", "</s>", "\u2581the", "\u2581answer", "\u2581is", "s", "\u2581", "d"]
GENERATION, CONFIG, SETTINGS = "generation_config.json", "config.json", "tokenizer_config.json"


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
    telling = TextStream(spaced, (), prompt)
    pieces = [telling.hear(made[:count], count == len(made)) for count in range(1, len(made) + 1)]
    assert pieces == [" is", " the", "s"] and telling.text == " is thes"
    assert spaced.decode(prompt + made) == "the answer" + "".join(pieces)


def test_a_token_is_spelt_as_inside_a_text_and_its_bytes_are_those_of_its_part_of_a_character(spaced: Tokenizer) -> None:
    spelling = TokenSpelling(spaced)
    assert [spelling.word(token) for token in range(2, 7)] == ["</s>", " the", " answer", " is", "s"]
    letters = {"\u00c3": 0, "\u013a": 1, "a": 2, "\u0120a": 3}  # the bytes of an umlaut, and a word with its space
    whole = Tokenizer(models.WordLevel(letters, unk_token="a"))
    whole.decoder = decoders.ByteLevel()
    assert [TokenSpelling(whole).bytes(token) for token in range(4)] == [[0xC3], [0x98], [0x61], [0x20, 0x61]]
    fallback = Tokenizer(models.WordLevel({"<0xC3>": 0, "<0x98>": 1, "a": 2}, unk_token="a"))
    fallback.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    assert [TokenSpelling(fallback).bytes(token) for token in range(3)] == [[0xC3], [0x98], [0x61]]


@pytest.mark.parametrize("stop", ["ab", "aab", "abab", "s", "is the", "a" * 1000])
@pytest.mark.parametrize("text", ["aabaababab", "this is the", "a" * 1500, "b", ""])
def test_held_back_is_the_longest_end_that_may_become_a_stop(stop: str, text: str) -> None:
    telling = TextStream(None, [stop])  # type: ignore[arg-type]
    telling.text = text
    assert telling._held() == max((n for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)


@pytest.mark.parametrize(
    ("files", "ends"),
    [
        ({GENERATION: {"eos_token_id": [2, 5]}, CONFIG: {"eos_token_id": 1}}, (2, 5)),
        ({GENERATION: {"eos_token_id": [2, 5]}, SETTINGS: {"eos_token": WORDS[5]}}, (5, 2)),
        ({CONFIG: {"eos_token_id": 2}}, (2,)),
        ({GENERATION: {"eos_token_id": None}, CONFIG: {"eos_token_id": 2}}, (2,)),
        ({SETTINGS: {"eos_token": {"content": "</s>"}}}, (2,)),
        ({CONFIG: {"eos_token_id": True}}, ()),
        ({}, ()),
    ],
)
@pytest.mark.parametrize("beside", ["weights", "tokenizer"])
def test_a_text_ends_where_files_beside_the_weights_or_the_tokenizer_say_and_nowhere_by_a_guess(
    spaced: Tokenizer, files: dict[str, Any], ends: tuple[int, ...], beside: str, tmp_path: Path
) -> None:
    for place in ("weights", "tokenizer"):
        (tmp_path / place).mkdir()
        spaced.save(str(tmp_path / place / "tokenizer.json"))
    for name, content in files.items():
        (tmp_path / beside / name).write_text(json.dumps(content))
    assert open_text(tmp_path / "tokenizer", tmp_path / "weights", 16).ends == ends


def test_what_names_the_end_is_whole_or_refused(spaced: Tokenizer, tmp_path: Path) -> None:
    spaced.save(str(tmp_path / "tokenizer.json"))
    for content in ('{"eos_', "[]"):
        (tmp_path / GENERATION).write_text(content)
        with pytest.raises(ConfigError, match=GENERATION) as error:
            open_text(None, tmp_path, 16)
        assert "\n" not in str(error.value)


BEGINS = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])


@pytest.mark.parametrize(
    ("around", "begin"),
    [
        (None, []),
        (processors.ByteLevel(trim_offsets=False), []),
        (BEGINS, [1]),
        (processors.Sequence([processors.ByteLevel(trim_offsets=False), BEGINS]), [1]),
        (processors.TemplateProcessing(single="<s> <unk> $A </s>", special_tokens=[("<unk>", 0), ("<s>", 1), ("</s>", 2)]), [1, 0]),
        (processors.RobertaProcessing(("</s>", 2), ("<s>", 1)), [1]),
    ],
)
def test_a_prompt_begins_as_its_tokenizer_begins_a_text_once_and_is_not_ended(
    spaced: Tokenizer, around: Any, begin: list[int], tmp_path: Path
) -> None:
    if around is not None:
        spaced.post_processor = around
    spaced.save(str(tmp_path / "tokenizer.json"))
    text = TextTokens(tmp_path / "tokenizer.json", 16)
    assert text.begun("the answer") == [*begin, 3, 4] and text.begun("") == text.begin == begin
    assert text.begun("".join(WORDS[token] for token in begin) + "the answer") == [*begin, 3, 4]
    assert text.plain("the answer") == [3, 4]


def test_prompts_are_whole_though_the_tokenizer_was_saved_to_cut_and_fill(spaced: Tokenizer, tmp_path: Path) -> None:
    spaced.enable_truncation(2)
    spaced.enable_padding(length=8)
    spaced.save(str(tmp_path / "tokenizer.json"))
    assert open_text(None, tmp_path, 16).plain("the answer is the") == [3, 4, 5, 3]


def test_a_prompt_is_a_line_whatever_other_characters_end_lines_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_bytes("one\u2028still one\r\nform\x0cfeed\n\nlast".encode())
    assert texts_of(GenerateCommand(prompts_file=str(tmp_path / "p.txt"))) == ["one\u2028still one", "form\x0cfeed", "last"]
