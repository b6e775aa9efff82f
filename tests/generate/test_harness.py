"""Scores of lm-evaluation-harness on our ranks are those of its own model class on the exported folder, with no hub to ask."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.convert.test_logits import SMALL, checkpoint, ours
from tests.convert.test_text_borders import tokenizer
from tests.farm import Farm
from trainer.convert import export_weights
from trainer.data.prepare import prepare
from trainer.data.text import TextTokens
from trainer.generate.harness import _model, score
from trainer.generate.ranks import world_of
from trainer.generate.tasks import write_tasks
from trainer.launch.rank_env import RankEnv
from trainer.shared.run.command_lines import ScoreCommand
from trainer.shared.run.derived import resolve_model
from trainer.shared.run.rules import resolve
from trainer.shared.run.schema import DataConfig, LayoutConfig, ModelConfig, RunConfig, TrainConfig
from trainer.shared.run.stages import BUILTIN_TASKS

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
pytest.importorskip("lm_eval", reason="tasks are not evaluated: pip install -e '.[eval]'")
pytestmark = pytest.mark.slow

LIMIT = 12
"""Items of each task."""
MODEL = resolve_model(ModelConfig(family="llama", **(SMALL | {"vocab": 300, "seq": 256, "layers": 2})))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder with a tokenizer."""
    root = tmp_path_factory.mktemp("model")
    (root / "a.txt").write_text("import json\n\njson.dumps(1 + 2) == 'value' for the quick brown fox\n" * 100)
    prepare(DataConfig(source=str(root / "a.txt"), path=str(root / "corpus"), vocab=300), False)
    made = checkpoint(ours(MODEL, seed=4), MODEL, root / "c")
    shutil.copy(root / "corpus" / "tokenizer.json", made)
    export_weights(made, root / "hf")
    return root / "hf"


def scored(env: RankEnv, out: Path, folder: str, tensor: int, pipeline: int, limit: int) -> None:
    run = RunConfig(task="generate", steps=1, warmup_steps=0)
    layout = LayoutConfig(tensor=tensor, pipeline=pipeline)
    config = resolve(TrainConfig(model=MODEL, run=run, layout=layout, data=DataConfig(kind="synthetic")), env.world_size)
    command = ScoreCommand(model=folder, tasks=[*BUILTIN_TASKS], limit=limit)
    with world_of(config, env) as world:
        figures = score(command, config, world)
    if env.rank == 0:
        (out / "figures.json").write_text(json.dumps(figures["evaluation"]["tasks"]))


def of_ranks(farm: Farm, folder: Path, ranks: int, **layout: int) -> dict[str, dict[str, float]]:
    done = farm.call(scored, ranks, folder=str(folder), limit=LIMIT, **layout)
    return dict(json.loads((done.directory / "figures.json").read_text()))


def of_the_library(folder: Path, tasks: Path) -> dict[str, Any]:
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    write_tasks(tasks)
    found = lm_eval.simple_evaluate(
        model=HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=16, max_length=MODEL.seq),
        tasks=list(BUILTIN_TASKS), limit=LIMIT, bootstrap_iters=0, log_samples=False,
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
    )  # fmt: skip
    return dict(found["results"])


@pytest.fixture(scope="module")
def theirs(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return of_the_library(folder, tmp_path_factory.mktemp("tasks"))


@pytest.mark.parametrize(
    ("tensor", "pipeline"),
    [(2, 1), *(pytest.param(*layout, marks=pytest.mark.campaign("generate")) for layout in ((1, 1), (2, 2)))],
)
def test_scores_are_those_of_the_library_on_the_exported_folder_under_any_layout(
    farm: Farm, folder: Path, theirs: dict[str, Any], tensor: int, pipeline: int
) -> None:
    mine = of_ranks(farm, folder, tensor * pipeline, tensor=tensor, pipeline=pipeline)
    assert set(mine) == set(BUILTIN_TASKS)
    for task, figures in mine.items():
        metrics = ("acc", "acc_norm") if "acc" in figures else ("bits_per_byte", "byte_perplexity", "word_perplexity")
        for metric in metrics:
            assert figures[metric] == pytest.approx(theirs[task][f"{metric},none"], rel=1e-4), (task, metric)


def test_an_item_is_read_behind_what_the_tokenizer_puts_before_every_text(tmp_path: Path) -> None:
    """A text that follows nothing too; its likelihood is that of its own tokens alone."""
    tokenizer(begins=True).save(str(tmp_path / "tokenizer.json"))
    words, told = TextTokens(tmp_path / "tokenizer.json", 300), []

    def tell(work: Any) -> Any:
        told.append(work)
        return [(0.0, True) for _ in work[1]]

    model = _model(SimpleNamespace(session=SimpleNamespace(seq=64), tell=tell), words)  # type: ignore[arg-type]
    fox = words.plain(" fox")
    model.loglikelihood([SimpleNamespace(args=args) for args in (("", " fox"), ("the", " fox"))])
    model.loglikelihood_rolling([SimpleNamespace(args=(" fox",))])
    assert told == [("likelihoods", [([1], fox), (words.begun("the"), fox)]), ("likelihoods", [([1], fox)])]
    assert model._request(0, "the", {"max_gen_toks": 8}).prompt == words.begun("the")


def test_items_are_the_same_every_time_and_have_one_right_answer(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_tasks(tmp_path / name)
    for task in BUILTIN_TASKS:
        text = (tmp_path / "a" / f"{task}.jsonl").read_text()
        assert text == (tmp_path / "b" / f"{task}.jsonl").read_text()
        items = [json.loads(line) for line in text.splitlines()]
        assert len(items) >= 50
        for item in items:
            assert "text" in item or len(set(item["choices"])) == len(item["choices"]) > item["answer"]
