"""`trireme prepare`: what it makes, that it is whole or not there, and what it says of wrong input."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import signal
import string
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from launcher.cli import prepare as verb
from launcher.cli.evaluate import doubt
from launcher.config.schema import Config
from trainer.data import open_dataset
from trainer.data.prepare import END_OF_TEXT, prepare
from trainer.generate.telling import open_text
from trainer.shared.corpora import sources
from trainer.shared.corpora.index import (
    ARTIFACT,
    DOCUMENTS,
    INDEX,
    TOKENIZER,
    TOKENS,
    CorpusIndex,
    check_corpus,
    other_words,
    prepare_command,
    read_index,
    windows,
)
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.schema import DataConfig, ModelConfig

pytestmark = pytest.mark.slow

TEXTS = {
    "a.txt": "the cat sat on the mat\n" * 30,
    "b.txt": "Größe – 字 \N{ROCKET} \x00 done",
    "d.md": "a third text " * 9,
    "sub/c.txt": "",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in TEXTS.items():
        (tmp_path / "text" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "text" / name).write_text(text, encoding="utf-8")
    return tmp_path


def settings(folder: Path, **changes: object) -> DataConfig:
    return DataConfig(**{"source": str(folder / "text"), "path": str(folder / "out"), "vocab": 300} | changes)  # type: ignore[arg-type]


def lines(folder: Path, *content: str) -> DataConfig:
    (folder / "lines.jsonl").write_text("\n".join(content) + "\n")
    return settings(folder, source=str(folder / "lines.jsonl"))


def in_a_process(folder: Path, first: str = "pass") -> subprocess.Popen[str]:
    """``prepare(settings(folder))`` in a process of its own, which prints whether the folder was reused."""
    source, path = str(folder / "text"), str(folder / "out")
    code = f"""if True:
        import time, trainer.data.prepare as p
        {first}
        print(p.prepare(p.DataConfig(source={source!r}, path={path!r}, vocab=300)).reused)"""
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


def refusal(data: DataConfig) -> str:
    with pytest.raises(ConfigError) as error:
        prepare(data)
    return str(error.value)


def opening(data: DataConfig, **model: int) -> str:
    with pytest.raises(ConfigError) as error:
        open_dataset(data, ModelConfig(**{"vocab": 300, "seq": 8} | model), seed=0)  # type: ignore[arg-type]
    return str(error.value)


def test_every_document_comes_back_whole_from_tokens_and_offsets(folder: Path) -> None:
    done = prepare(settings(folder))
    tokenizer = Tokenizer.from_file(str(folder / "out" / TOKENIZER))
    tokens, starts = np.fromfile(folder / "out" / TOKENS, dtype=np.uint16), np.load(folder / "out" / DOCUMENTS)
    end = tokenizer.token_to_id(END_OF_TEXT)
    documents = [tokens[a:b] for a, b in itertools.pairwise(starts)]
    assert [tokenizer.decode(d[:-1].tolist()) for d in documents] == [TEXTS[name] for name in sorted(TEXTS)]
    assert all(d[-1] == end for d in documents)
    assert (done.tokens, done.documents, done.vocab) == (len(tokens), len(TEXTS), tokenizer.get_vocab_size())


def test_jsonl_documents_are_its_lines_in_the_named_field(folder: Path) -> None:
    data = lines(folder, '{"body": "one", "text": "no"}', "", '{"body": "two"}')
    done = prepare(DataConfig(**{**vars(data), "text_key": "body"}))
    tokenizer = Tokenizer.from_file(str(folder / "out" / TOKENIZER))
    tokens = np.fromfile(folder / "out" / TOKENS, dtype=np.uint16)
    assert done.documents == 2
    assert tokenizer.decode(tokens.tolist(), skip_special_tokens=False) == f"one{END_OF_TEXT}two{END_OF_TEXT}"


def test_the_end_token_in_the_text_stays_text(folder: Path) -> None:
    (folder / "text" / "a.txt").write_text(f"before {END_OF_TEXT} after")
    prepare(settings(folder, pattern="a.txt"))
    tokens = np.fromfile(folder / "out" / TOKENS, dtype=np.uint16)
    tokenizer = Tokenizer.from_file(str(folder / "out" / TOKENIZER))
    assert (tokens == tokenizer.token_to_id(END_OF_TEXT)).sum() == 1


def test_a_large_vocabulary_takes_four_bytes_a_token(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(settings(folder))
    small = np.fromfile(folder / "out" / TOKENS, dtype=np.uint16)
    monkeypatch.setattr("trainer.data.prepare.UINT16_VOCAB", 100)
    prepare(settings(folder), force=True)
    assert (np.fromfile(folder / "out" / TOKENS, dtype=np.uint32) == small).all()
    assert open_dataset(settings(folder), ModelConfig(vocab=300, seq=8), 0).batch(0, 1).max() < 300


def test_the_same_text_and_settings_are_prepared_once_and_reproducibly(folder: Path) -> None:
    first = prepare(settings(folder))
    stamp = (folder / "out" / TOKENS).stat().st_mtime_ns
    again = prepare(settings(folder))
    assert again.reused and (folder / "out" / TOKENS).stat().st_mtime_ns == stamp
    forced = prepare(settings(folder), force=True)
    assert not forced.reused and forced.sha256 == first.sha256


@pytest.mark.parametrize("change", ["vocab", "text", "torn", "index"])
def test_what_does_not_match_is_prepared_again(folder: Path, change: str) -> None:
    prepare(settings(folder))
    if change == "text":
        (folder / "text" / "d.md").write_text("changed")
    if change == "torn":
        os.truncate(folder / "out" / TOKENS, 10)
    if change == "index":
        (folder / "out" / INDEX).write_text("{")
    data = settings(folder, vocab=290 if change == "vocab" else 300)
    assert not prepare(data).reused
    assert check_corpus(data, ModelConfig(vocab=300, seq=8)) is not None


def test_a_killed_preparation_leaves_nothing_and_can_be_repeated(folder: Path) -> None:
    pause = "p._move_into_place = lambda *_: (print('ready', flush=True), time.sleep(1000))"
    with in_a_process(folder, pause) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGKILL)
    assert not (folder / "out").exists()
    assert not prepare(settings(folder)).reused
    assert sorted(p.name for p in folder.iterdir()) == [".out.lock", "out", "text"]


def test_of_two_preparations_at_once_the_second_reuses_the_first(folder: Path) -> None:
    (folder / "text" / "a.txt").write_text("the cat sat on the mat\n" * 20_000)
    both = [in_a_process(folder) for _ in range(2)]
    assert sorted(process.communicate()[0].strip() for process in both) == ["False", "True"]


def test_files_that_are_not_text_are_left_out_and_named(folder: Path) -> None:
    (folder / "text" / "image.png").write_bytes(b"\x89PNG\xff\xfe")
    done = prepare(settings(folder))
    assert done.skipped == (str(folder / "text" / "image.png"),) and done.documents == len(TEXTS)


def test_wrong_sources_are_refused_plainly(folder: Path) -> None:
    assert "data.source=/no/such is neither 'stdlib' nor a file or folder" in refusal(settings(folder, source="/no/such"))
    assert "no file that matches data.pattern=*.xyz" in refusal(settings(folder, pattern="*.xyz"))
    assert "cannot be searched" in refusal(settings(folder, pattern=""))
    assert "data.kind=synthetic needs no preparation" in refusal(settings(folder, kind="synthetic"))
    (folder / "latin.txt").write_bytes("Größe".encode("latin-1"))
    assert "is not UTF-8 text" in refusal(settings(folder, source=str(folder / "latin.txt")))


def test_wrong_jsonl_lines_are_named_with_file_line_and_remedy(folder: Path) -> None:
    broken = refusal(lines(folder, '{"text": "ok"}', '{"text": '))
    assert broken == f"{folder}/lines.jsonl line 2 is not valid JSON; fix or remove that line"
    missing = refusal(lines(folder, '{"body": "x", "n": 3}'))
    assert "line 1 has no text in field 'text' (fields with text: body); set data.text_key" in missing
    assert "line 1 is not a JSON object" in refusal(lines(folder, "[1]"))
    assert "line 1 has no text in field 'text'" in refusal(lines(folder, '{"text": 7}'))
    assert "line 1 is not valid JSON" in refusal(lines(folder, "[" * 100_000))
    assert not (folder / "out").exists()


def test_a_target_that_holds_other_files_is_never_replaced(folder: Path) -> None:
    data = settings(folder, path=str(folder / "text"), source="stdlib")
    assert "holds something else (a.txt); choose another data.path" in refusal(data)
    with pytest.raises(ConfigError):
        prepare(data, force=True)
    assert (folder / "text" / "a.txt").read_text() == TEXTS["a.txt"]
    assert "holds something else" in refusal(settings(folder, path=str(folder / "text" / "a.txt")))


def test_a_corpus_that_cannot_be_trained_on_is_refused_plainly(folder: Path) -> None:
    data = settings(folder)
    assert opening(data) == f"data.path={folder}/out does not exist or is not a folder; run `{prepare_command(data)}`"
    prepare(data)
    assert "fewer than one sequence of model.seq=9999 and its next token" in opening(data, seq=9999)
    assert "model.vocab=64 is smaller than the" in opening(data, vocab=64)
    (folder / "out" / TOKENIZER).rename(folder / "gone")
    assert "is not a whole prepared corpus (no tokenizer.json in it)" in opening(data)
    (folder / "gone").rename(folder / "out" / TOKENIZER)
    size = (folder / "out" / TOKENS).stat().st_size
    os.truncate(folder / "out" / TOKENS, size - 2)
    assert f"tokens.bin has {size - 2} bytes, but {size} were written" in opening(data) and "--force" in opening(data)
    record = json.loads((folder / "out" / INDEX).read_text())
    (folder / "out" / INDEX).write_text(json.dumps(record | {"format": 99}))
    assert "index.json is damaged or of another version" in opening(data)
    for wrong in (
        "[]",
        "[" * 100_000,
        *(json.dumps(record | {name: "q"}) for name in ("vocab", "tokens", "dtype", "documents", "settings")),
    ):
        (folder / "out" / INDEX).write_text(wrong)
        assert "index.json is damaged or of another version" in opening(data)


@pytest.mark.parametrize("name", [DOCUMENTS, TOKENIZER, ARTIFACT])
def test_a_corpus_that_disagrees_with_its_manifest_is_not_trained_on(folder: Path, name: str) -> None:
    data = settings(folder)
    prepare(data)
    content = (folder / "out" / name).read_bytes()
    (folder / "out" / name).write_bytes(content[:-9])
    said = f"{name} is damaged" if name == ARTIFACT else f"{name} has {len(content) - 9} bytes, but {len(content)} were written"
    assert opening(data) == f"data.path={folder}/out: {said}; run `{prepare_command(data)} --force`"
    assert not prepare(data).reused and (folder / "out" / name).read_bytes() == content


def test_the_remedy_is_a_command_that_a_shell_takes(folder: Path) -> None:
    assert prepare_command(DataConfig()) == "trireme prepare"
    spaced = DataConfig(source="my texts", pattern="*.txt", vocab=512)
    assert prepare_command(spaced) == "trireme prepare 'data.source=my texts' 'data.pattern=*.txt' data.vocab=512"


def test_the_verb_prepares_by_overrides_and_answers_in_json(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = [f"data.source={folder}/text", f"data.path={folder}/out", "data.vocab=300", "--json"]
    assert verb.main(arguments) == 0
    assert json.loads(capfd.readouterr().out)["reused"] is False
    assert verb.main(arguments) == 0
    assert json.loads(capfd.readouterr().out)["reused"] is True
    assert verb.main([*arguments, "--force"]) == 0
    assert json.loads(capfd.readouterr().out)["reused"] is False


def test_the_verb_reports_wrong_input_once_with_exit_code_2(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert verb.main([f"data.source={folder}/none", f"data.path={folder}/out"]) == 2
    output = capfd.readouterr()
    assert output.out == "" and output.err.startswith("error: data.source=") and output.err.count("\n") == 1
    with pytest.raises(ConfigError, match=r"data.vocab=256 is below the smallest allowed value; use 257"):
        verb.main(["data.vocab=256"])
    with pytest.raises(ConfigError, match=r"data.vocab=1000000000 is above the largest allowed value; use 10000000 or less"):
        verb.main(["data.vocab=1e9"])


@pytest.mark.parametrize(("modules", "tokens"), [(100, 100_000), pytest.param(None, 1_000_000, marks=pytest.mark.campaign("docs"))])
def test_the_standard_library_is_a_corpus_of_millions_of_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, modules: int | None, tokens: int
) -> None:
    """A hundred of its modules, of which there are many more, are one of a hundred thousand."""
    library = sources._library
    assert sum(path.stat().st_size for path in library(Path(os.__file__).parent)) > 10_000_000
    monkeypatch.setattr(sources, "_library", lambda root: sorted(library(root))[:modules])
    data = DataConfig(source="stdlib", path=str(tmp_path / "std"), vocab=1024)
    done = prepare(data)
    assert done.tokens > tokens and done.vocab == 1024 and not done.skipped
    rows = open_dataset(data, ModelConfig(vocab=1024, seq=128), 1).batch(0, 64)
    text = Tokenizer.from_file(str(tmp_path / "std" / TOKENIZER)).decode(rows.ravel().tolist())
    assert "import" in text and "def " in text


def test_half_a_character_is_named_with_its_line(folder: Path) -> None:
    said = refusal(lines(folder, '{"text": "ok"}', '{"text": "a\\ud800b"}'))
    assert said == f"{folder}/lines.jsonl line 2 has half a character in field 'text' (a surrogate alone); fix or remove that line"
    assert prepare(lines(folder, '{"text": "a pair \\ud83d\\ude80"}')).documents == 1


def test_names_that_are_no_utf_8_are_said_and_end_nothing(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / os.fsdecode(b"l\xff")).mkdir()
    with pytest.raises(ConfigError, match=r"^data.source=.*is not UTF-8 text; give another name"):
        verb.main([f"data.source='{folder}/{os.fsdecode(bytes([108, 255]))}'", f"data.path={folder}/out", "data.vocab=300"])
    (folder / "text" / os.fsdecode(b"i\xff.txt")).write_bytes(b"\xff\xfe")
    assert verb.main([f"data.source={folder}/text", f"data.path={folder}/out", "data.vocab=300"]) == 0
    assert "left out 1 files that are not UTF-8 text" in capfd.readouterr().out


def test_a_source_of_empty_texts_is_refused_whatever_its_form(folder: Path) -> None:
    (folder / "empty.txt").write_text("")
    for data in (lines(folder), lines(folder, '{"text": ""}', '{"text": ""}'), settings(folder, source=str(folder / "empty.txt"))):
        assert "holds no text in UTF-8; give another source" in refusal(data) and not (folder / "out").exists()


def test_a_corpus_inside_of_its_source_is_not_read_as_text(folder: Path) -> None:
    data = settings(folder, path=str(folder / "text" / "out"), pattern="**/*")
    first = prepare(data)
    assert prepare(data).reused
    again = prepare(data, force=True)
    assert (again.sha256, again.documents) == (first.sha256, first.documents)


def test_a_byte_order_mark_is_no_text(folder: Path) -> None:
    (folder / "marked.txt").write_text(TEXTS["a.txt"], encoding="utf-8-sig")
    (folder / "plain.txt").write_text(TEXTS["a.txt"])
    marked, plain = (prepare(settings(folder, source=str(folder / name)), force=True) for name in ("marked.txt", "plain.txt"))
    assert marked.sha256 == plain.sha256


def test_a_long_line_without_spaces_takes_time_in_proportion_and_comes_back(folder: Path) -> None:
    """400 kB took minutes when pairs were counted in it as in one word."""
    text = "".join(random.Random(3).choices(string.ascii_letters, k=400_000))
    (folder / "long.txt").write_text(text)
    began = time.process_time()  # on any machine, however busy
    prepare(settings(folder, source=str(folder / "long.txt")))
    assert time.process_time() - began < 40
    tokens = np.fromfile(folder / "out" / TOKENS, dtype=np.uint16).tolist()
    tokenizer = Tokenizer.from_file(str(folder / "out" / TOKENIZER))
    assert tokenizer.decode(tokens) == text and tokenizer.encode(text).ids == tokens[:-1]


def test_the_limit_of_a_word_changes_nothing_of_ordinary_text(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "text" / "code.txt").write_text(Path(__file__).read_text() + "-" * 900)
    made = []
    for longest in (1000, 100_000):
        monkeypatch.setattr("trainer.data.prepare.LONGEST_WORD", longest)
        prepare(settings(folder, vocab=600), force=True)
        made.append([(folder / "out" / name).read_bytes() for name in (TOKENIZER, TOKENS)])
    assert made[0] == made[1]
    assert json.loads(made[0][0])["pre_tokenizer"]["type"] == "ByteLevel", "the form that others read, GGUF too"


def test_a_tokenizer_of_other_words_is_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, text in (("own", "a.txt"), ("other", "d.md")):
        prepare(settings(folder, source=str(folder / "text" / text), path=str(folder / name), vocab=280))
    size = len(json.loads((folder / "own" / TOKENIZER).read_text())["model"]["vocab"])
    (folder / "bare").mkdir()
    assert "has other words than" in other_words(folder / "other" / TOKENIZER, folder / "own", size)
    assert f"has {size} tokens, and model.vocab=999" in other_words(folder / "own" / TOKENIZER, folder / "bare", 999)
    assert not other_words(folder / "own" / TOKENIZER, folder / "own", 999), "a vocabulary may be rounded up"
    assert not other_words(folder / "own" / TOKENIZER, folder / "bare", size)
    open_text(folder / "other", folder / "own", 300)
    assert capsys.readouterr().err.startswith("note: ")
    open_text(None, folder / "own", 300)
    assert not capsys.readouterr().err


@pytest.mark.parametrize("sequences", [1, 2, 3, 7])
def test_the_share_of_held_out_text_that_is_proposed_is_taken(sequences: int) -> None:
    index = CorpusIndex(2, "uint16", sequences * 8 + 1, 1, 300, 0, "", "", {})
    with pytest.raises(ConfigError, match="leaves nothing to train on") as error:
        windows(index, 8, DataConfig(held_out=0.99))
    found = re.search(r"use (less than )?([0-9.]+), or", str(error.value))
    assert found is not None
    assert windows(index, 8, DataConfig(held_out=float(found[2]) - (0.01 if found[1] else 0)))[0] >= 1


def test_an_evaluation_says_so_unless_the_model_was_trained_on_the_text(folder: Path) -> None:
    prepare(settings(folder))
    run = Config(data=settings(folder), model=ModelConfig(vocab=999))
    for trained, said in ((read_index(run.data).sha256, False), ("another", True)):
        place = folder / trained / "step-00000001-start-0"
        place.mkdir(parents=True)
        (place / "manifest.json").write_text(json.dumps({"model": {}, "data": {"corpus": f"{trained}-0.1"}}))
        run.run.checkpoint.dir = str(place)
        assert doubt(run).startswith("note: ") == said
