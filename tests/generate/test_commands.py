"""What is typed: overrides among words, tasks that are not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.cli import evaluate
from launcher.cli.generate import for_generation, parsed, split, told
from launcher.stages.tasks import check_tasks
from tests.convert.test_logits import MODELS, checkpoint, ours
from trainer.generate.generate import check_texts
from trainer.shared.run.command_lines import GenerateCommand, asked, generate_parser, texts_of
from trainer.shared.run.derived import resolve_model
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.read import to_dict

pytestmark = pytest.mark.slow


def test_overrides_are_told_from_texts_that_look_like_them() -> None:
    words, overrides, own = split(
        [
            "m",
            "--prompt",
            "a=1",
            "layout.tensor=2",
            "--json",
            "cluster=local",
            "--stop=b=2",
            "run.seed=1",
            "--stop",
            "c=3",
            "--config-dir",
            "d",
        ]
    )
    assert overrides == ["layout.tensor=2", "cluster=local", "run.seed=1"]
    assert own == Path("d")
    assert words == ["m", "--prompt", "a=1", "--json", "--stop=b=2", "--stop", "c=3"]


def test_paths_are_those_of_where_they_were_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = parsed(generate_parser(), ["m", "--prompt", "a/b", "--tokenizer=t", "--prompts", "p.txt"])
    stage = told("generate", asked(GenerateCommand, words))
    files = {"model": f"{tmp_path}/m", "tokenizer": f"{tmp_path}/t", "prompts_file": f"{tmp_path}/p.txt"}
    assert stage.settings == to_dict(GenerateCommand(prompts=["a/b"])) | files
    assert stage.sources == {name.replace("_", "-"): path for name, path in files.items()} and not stage.folder


def test_a_job_takes_the_model_of_the_weights_and_one_replica(tmp_path: Path) -> None:
    model = resolve_model(MODELS["llama grouped tied"])
    folder = checkpoint(ours(model, seed=1), model, tmp_path / "c")
    config = for_generation(str(folder), ["layout.tensor=2"])
    assert (config.model.kv_heads, config.layout.data, config.run.task) == (2, 1, "generate")
    for overrides, message in (
        (["layout.tensor=4"], "layout.tensor=4 does not divide model.kv_heads=2; use 1 or 2"),
        (["model.layers=2"], "model.layers=2: the model is that of the weights; leave it out"),
    ):
        with pytest.raises(ConfigError) as error:
            for_generation(str(folder), overrides)
        assert message in str(error.value)
    with pytest.raises(ConfigError, match="holds nothing that is known; give a checkpoint"):
        for_generation(str(tmp_path), [])


def test_a_task_or_a_file_that_is_missing_is_named_first(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(f"task: mine\ndataset_kwargs: {{data_files: {{test: {tmp_path}/mine.jsonl}}}}\nx: !function a.b\n")
    (tmp_path / "tasks.json").write_text('{"tasks": ["piqa"]}')
    check_tasks(["addition", "piqa"], tmp_path)
    for names, message in (
        ("adition", "'adition' is not there; did you mean"),
        ("mine", f"mine.yaml) reads {tmp_path}/mine.jsonl, which is not"),
    ):
        with pytest.raises(ConfigError) as error:
            check_tasks([names], tmp_path)
        assert message in str(error.value)
    (tmp_path / "mine.jsonl").touch()
    check_tasks(["mine"], tmp_path)


@pytest.mark.parametrize("words", [["--limit", "5"], ["--task", "0"], ["--tokenizer", "corpus"], ["--tasks-folder", "more"]])
def test_what_is_for_tasks_is_refused_where_none_is_named(words: list[str]) -> None:
    with pytest.raises(ConfigError, match=f"{' '.join(words)} is for tasks; name some with --tasks, or leave it out"):
        evaluate.main(["checkpoints", "data.path=corpus", *words])


@pytest.mark.parametrize(("option", "key"), [("--dtype=bfloat16", "run.precision"), ("--threads", "run.threads")])
def test_what_is_of_one_process_is_refused_where_keys_start_ranks(option: str, key: str) -> None:
    with pytest.raises(ConfigError, match=f"applies to single-process runs only; with overrides use {key}="):
        parsed(generate_parser(), ["m", option, "2"])


def test_words_that_are_no_text_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        parsed(generate_parser(), ["m", "--prompt", "\udcff"])
    with pytest.raises(ConfigError, match="is not UTF-8"):
        check_texts(["fine", "\udcff"])
    (tmp_path / "prompts").write_bytes(b"\xef\xbb\xbfone\r\n\r\ntwo\r\n")
    assert texts_of(GenerateCommand(prompts_file=str(tmp_path / "prompts"))) == ["one", "two"]
