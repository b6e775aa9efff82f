"""A text begins and ends as the imported model's own files say, wherever the model goes: read, tuned, exported, and read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from tests.convert.test_logits import SMALL, checkpoint, ours
from tests.huggingface import MARKS, transformers
from trainer.convert import export_gguf, export_weights, import_weights
from trainer.data.dataset import open_dataset
from trainer.generate.api import ChatForm, CompletionForm, ServedModel
from trainer.generate.broker import RequestBroker
from trainer.generate.chat import ChatTemplate
from trainer.generate.job import complete
from trainer.generate.ranks import alone
from trainer.generate.telling import open_text
from trainer.launch.rank_env import RankEnv
from trainer.shared.records.artifacts import find_artifact
from trainer.shared.records.outcome import Status
from trainer.shared.records.stage_run import Finish, StageRun
from trainer.shared.run.command_lines import GenerateCommand
from trainer.shared.run.derived import resolve_model
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.rules import resolve
from trainer.shared.run.schema import DataConfig, ModelConfig, TrainConfig
from trainer.stages.make import make, work_of

pytestmark = MARKS

TEXT = "the quick brown fox"
MODEL = resolve_model(ModelConfig(family="llama", **(SMALL | {"vocab": 300, "layers": 1})))  # type: ignore[arg-type]
ENDS = {"eos_token_id": 2, "bos_token_id": 1}


def tokenizer(begins: bool = True) -> Tokenizer:
    """In the form of LLaMA: the end is not the special token of the lowest number."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = [AddedToken(word, special=True) for word in ("<unk>", "<s>", "</s>")]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        [TEXT] * 9, trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    )
    if begins:
        made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return made


def imported(folder: Path, made: Tokenizer, named: dict[str, Any]) -> Path:
    """The checkpoint of step 0 of a model that came with a tokenizer."""
    weights = checkpoint(ours(MODEL, seed=1), MODEL, folder / "c")
    export_weights(weights, folder / "hf")
    (folder / "hf" / "generation_config.json").write_text(json.dumps(named))
    config = json.loads((folder / "hf" / "config.json").read_text())
    (folder / "hf" / "config.json").write_text(
        json.dumps({name: value for name, value in config.items() if not name.endswith("_token_id")})
    )
    made.save(str(folder / "hf" / "tokenizer.json"))
    import_weights(folder / "hf", folder / "base")
    return folder / "base"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return imported(tmp_path_factory.mktemp("model"), tokenizer(), ENDS)


def examples(folder: Path, path: Path, prompt: str = TEXT, **more: Any) -> Any:
    (folder / "e.jsonl").write_text(json.dumps({"prompt": prompt, "answer": "fox"}))
    data = DataConfig(kind="instructions", source=str(folder / "e.jsonl"), path=str(path), template="{prompt}{answer}", **more)
    return open_dataset(data, MODEL, 0)


def test_generate_serve_and_tuning_read_a_prompt_as_its_tokenizer_makes_it(base: Path, tmp_path: Path) -> None:
    expected = tokenizer().encode(TEXT).ids
    assert expected[0] == 1
    command = GenerateCommand(model=str(base), prompts=[TEXT], tokens=2)
    with alone(base, "fp32") as (config, world):
        (told,) = complete(command, command.prompts, config, world, None)
    assert told["prompt_tokens"] == expected and not told["text"].startswith(TEXT)
    (asked,) = RequestBroker(ServedModel("m", open_text(None, base, 300), 64), 1, lambda: False).ask(CompletionForm(), {"prompt": TEXT})
    assert (asked.request.prompt, asked.request.stop) == (expected, {2})
    (row,) = examples(tmp_path, base).batch(0, 1)
    answer = tokenizer().encode("fox", add_special_tokens=False).ids
    assert [~token for token in row[: len(expected)]] == expected
    assert row[row >= 0].tolist() == [*answer, 2], "an answer ends as the base ends a text"


def test_a_chat_begins_as_its_template_writes_and_not_once_more(base: Path) -> None:
    template = ChatTemplate("<s>{{ messages[0].content }}", {})
    model = ServedModel("m", open_text(None, base, 300), 64, template=template)
    (asked,) = ChatForm().prompts({"messages": [{"role": "user", "content": TEXT}]}, model, 64)
    assert asked == tokenizer().encode(TEXT).ids and asked.count(1) == 1


@pytest.mark.parametrize("prompt", ["the " * 90, "<s>" + "the " * 90], ids=["plain", "spelt out"])
def test_a_prompt_that_is_cut_keeps_its_beginning_once(base: Path, tmp_path: Path, prompt: str) -> None:
    (row,) = examples(tmp_path, base, prompt, truncate="prompt").batch(0, 1)
    assert ~row[0] == 1 and ~row[1] != 1 and 2 in row


def test_a_folder_and_a_file_begin_and_end_a_text_as_what_was_imported(base: Path, tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="GGUF files are not tested: pip install -e '.[gguf]'")
    export_gguf(base, tmp_path / "m.gguf")
    import_weights(tmp_path / "m.gguf", tmp_path / "again")
    for place in (base, tmp_path / "again"):
        export_weights(place, tmp_path / place.name / "hf")
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / place.name / "hf")
        assert theirs(TEXT)["input_ids"] == tokenizer().encode(TEXT).ids
        assert (theirs.bos_token, theirs.eos_token) == ("<s>", "</s>")
        for name in ("generation_config.json", "config.json"):
            assert ENDS.items() <= json.loads((tmp_path / place.name / "hf" / name).read_text()).items()


def test_what_was_tuned_ends_as_the_base_whose_tokenizer_is_given(base: Path, tmp_path: Path) -> None:
    tuned = checkpoint(ours(MODEL, seed=2), MODEL, tmp_path / "run")
    export_weights(tuned, tmp_path / "hf", tokenizer=base / "tokenizer.json")
    assert ENDS.items() <= json.loads((tmp_path / "hf" / "generation_config.json").read_text()).items()
    assert open_text(base, tuned, 300).ends == (2,)


def test_a_stage_hands_on_which_tokens_begin_and_end_a_text(base: Path, tmp_path: Path) -> None:
    given, made = find_artifact(base), tmp_path / "made"
    assert given is not None
    stage = StageRun(
        "t", "tune", "t-1", str(made), "checkpoint", {"model": given.digest}, {"model": str(base)}, work="trainer.stages.kinds:TrainWork"
    )

    def work(finish: Finish) -> Status:
        checkpoint(ours(MODEL, seed=2), MODEL, made / "checkpoints")
        finish({})
        return Status.DONE

    make(work_of(stage, resolve(TrainConfig(), 1)), work, RankEnv(), tmp_path, 1)
    export_weights(made, tmp_path / "hf")
    assert ENDS.items() <= json.loads((tmp_path / "hf" / "generation_config.json").read_text()).items()
    assert open_text(None, made, 300).begun(TEXT) == tokenizer().encode(TEXT).ids


def test_examples_are_refused_where_no_file_says_which_of_several_tokens_ends_an_answer(tmp_path: Path) -> None:
    unnamed = imported(tmp_path, tokenizer(), {})
    with pytest.raises(ConfigError, match=r"which of its special tokens ends an answer; put a generation_config\.json") as error:
        examples(tmp_path, unnamed)
    assert "\n" not in str(error.value)
    (unnamed / "generation_config.json").write_text('{"eos_token_id": 2}')
    assert examples(tmp_path, unnamed).end == 2


@pytest.mark.parametrize("place", ["chat_template.jinja", "tokenizer_config.json"])
def test_chat_template_and_settings_of_generation_come_through(place: str, tmp_path: Path) -> None:
    export_weights(checkpoint(ours(MODEL, seed=1), MODEL, tmp_path / "c"), tmp_path / "hf")
    tokenizer().save(str(tmp_path / "hf" / "tokenizer.json"))
    template = "{% for turn in messages %}<{{ turn.role }}>{{ turn.content }}</s>{% endfor %}"
    said = template if place.endswith("jinja") else json.dumps({"eos_token": "</s>", "chat_template": template})
    (tmp_path / "hf" / place).write_text(said)
    settings = {**ENDS, "do_sample": True, "temperature": 0.6, "top_p": 0.9}
    (tmp_path / "hf" / "generation_config.json").write_text(json.dumps(settings))
    import_weights(tmp_path / "hf", tmp_path / "d")
    export_weights(tmp_path / "d", tmp_path / "again")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "again")
    assert theirs.apply_chat_template([{"role": "user", "content": TEXT}], tokenize=False) == f"<user>{TEXT}</s>"
    assert json.loads((tmp_path / "again" / "tokenizer_config.json").read_text())["chat_template"] == template
    assert settings.items() <= json.loads((tmp_path / "again" / "generation_config.json").read_text()).items()
