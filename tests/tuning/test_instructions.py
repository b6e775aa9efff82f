"""Examples: answers alone are learnt, over their number in the whole batch, and what cannot be learnt is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tuning.examples import EXAMPLES
from tuning.test_tuned_layouts import engine_of

from launcher.cli.main import main
from tests.farm import Farm
from tests.small_runs import ranks, small
from tests.whole_parameters import parameters
from trainer.data.dataset import open_dataset, open_held_out
from trainer.models.transformer import Transformer
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.read import from_dict
from trainer.shared.run.rules import resolve
from trainer.shared.run.schema import TrainConfig
from trainer.validation import Validation

pytestmark = pytest.mark.slow


def run_of(examples: dict[str, Any], **layout: Any) -> dict[str, Any]:
    return small(model={"vocab": 300, "seq": 64}, **layout) | {"data": examples}


def opened(data: dict[str, Any], seq: int = 64) -> Any:
    config = resolve(from_dict(TrainConfig, run_of(data)), 1)
    config.model.seq = seq
    return open_dataset(config.data, config.model, config.run.seed)


def test_every_example_is_seen_once_in_an_epoch_and_its_targets_are_its_answer(data: dict[str, Any]) -> None:
    dataset = opened(data)
    answers = []
    for row in dataset.batch(0, len(EXAMPLES)):
        targets = row[row >= 0].tolist()
        assert targets[-1] == dataset.end
        answers.append(dataset.text.tokenizer.decode(targets[:-1]))
    assert sorted(answers) == sorted(example["answer"] for example in EXAMPLES)
    assert not np.array_equal(dataset.batch(0, 12), dataset.batch(12, 12))


def test_the_loss_is_the_mean_over_the_answer_tokens_of_the_batch(data: dict[str, Any]) -> None:
    engine = engine_of(**run_of(data, micro_batch=2))
    model = Transformer(engine.config.model).double()
    model.load_state_dict(parameters(engine.rank), strict=False)
    if engine.config.model.tied:
        model.head.output.weight = model.embedding.tokens.weight  # type: ignore[union-attr]
    rows = torch.from_numpy(engine.batches.dataset.batch(0, 4)).t()
    inputs, targets = torch.where(rows < 0, ~rows, rows)[:-1], torch.where(rows < 0, -100, rows)[1:]
    expected = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    expected.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    found = engine.step(0)
    assert found.loss == pytest.approx(expected.item(), rel=1e-12) and found.grad_norm == pytest.approx(float(norm), rel=1e-12)


def test_answers_of_different_lengths_weigh_the_same_under_every_layout(farm: Farm, data: dict[str, Any]) -> None:
    """A mean of means over micro-batches or replicas would not."""
    lora = {"tune": {"method": "lora", "rank": 4}}
    layout = {"tensor": 2, "pipeline": 2, "data": 2, "sequence_parallel": True, "recompute": "full"}
    one = farm.train(run_of(data) | lora, 1).checked().result
    many = farm.train(run_of(data, **layout) | lora, ranks(layout)).checked().result
    assert many["losses"] == pytest.approx(one["losses"], rel=1e-10) and many["grad_norms"] == pytest.approx(one["grad_norms"], rel=1e-10)


def test_exact_matches_are_the_held_out_answers_that_greedy_decoding_gives(data: dict[str, Any], tmp_path: Path) -> None:
    """By the plain model's likeliest token at each place; and none of these examples is trained on."""
    lines = [json.dumps(example | {"answer": "no" if i % 4 == 0 else "it is 3"}) for i, example in enumerate(EXAMPLES)]
    (tmp_path / "two.jsonl").write_text("\n".join(lines))
    engine = engine_of(**run_of(data | {"held_out": 0.65, "source": str(tmp_path / "two.jsonl")}, run={"global_batch": 8}, micro_batch=2))
    for step in range(16):
        engine.step(step)
    text = open_held_out(engine.config.data, engine.config.model)
    trained = {tuple(row) for row in engine.batches.dataset.batch(0, 40)}
    rows = text.batch(0, text.windows)
    assert text.windows == 8 and not trained & {tuple(row) for row in rows}
    model = Transformer(engine.config.model).double()
    model.load_state_dict(parameters(engine.rank), strict=False)
    model.head.output.weight = model.embedding.tokens.weight  # type: ignore[union-attr]
    words = torch.from_numpy(rows).t()
    best = model(torch.where(words < 0, ~words, words)[:-1]).argmax(-1)
    right = ((best == words[1:]) | (words[1:] < 0)).all(0)
    sums = Validation(engine.rank, text).first(1)
    assert (sums.rows, sums.exact) == (8, int(right.sum())) and 0 < sums.exact < 8


def test_a_row_is_answered_where_all_context_ranks_have_it_right(farm: Farm, data: dict[str, Any], tmp_path: Path) -> None:
    """Answers lie on both ranks; those of two words are learnt, the others not."""
    lines = [json.dumps(example | {"answer": "no" if i % 4 == 0 else "it is 3"}) for i, example in enumerate(EXAMPLES)]
    (tmp_path / "two.jsonl").write_text("\n".join(lines))
    config = run_of(data | {"held_out": 0.65, "source": str(tmp_path / "two.jsonl")}, run={"global_batch": 8}, micro_batch=2)
    config["run"] |= {"steps": 16, "checkpoint": {"dir": str(tmp_path / "saved"), "every": 16}}
    farm.train(config, 1).checked()
    found = []
    for layout in ({}, {"context": 2}):
        config = config | {"layout": config["layout"] | layout, "run": config["run"] | {"task": "evaluate"}}
        found.append(farm.train(config, ranks(layout)).checked().result["evaluation"])
    one, two = found
    assert 0 < one["exact_match"] < 1 and two["exact_match"] == one["exact_match"]
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-10) and two["tokens"] == one["tokens"]


def test_the_named_field_gives_way_before_the_answer(data: dict[str, Any]) -> None:
    wide, narrow = opened(data), opened(data, seq=40)
    assert [len(row[row >= 0]) for row in narrow.rows] == [len(row[row >= 0]) for row in wide.rows]
    assert (narrow.rows[3] != wide.rows[3][: narrow.rows.shape[1]]).any()


@pytest.mark.parametrize(
    ("change", "line", "words"),
    [
        ({"template": "{context} {who} {answer}"}, None, "line 1 has no text in field 'who' of data.template"),
        ({"template": "{answer} {question}"}, None, "does not end with {answer}"),
        ({"template": "{answer"}, None, "cannot be read"),
        ({"template": "{question!r} {answer}"}, None, "asks for a form of field 'question', and texts are taken as they are"),
        ({"template": "{question} {answer:>9}"}, None, "asks for a form of field 'answer', and texts are taken as they are"),
        (
            {"truncate": None, "template": "{context}{answer}"},
            {"context": "the mat " * 90, "answer": "no"},
            "line 1: of the answer nothing is left",
        ),
        ({"truncate": None, "template": "{answer}"}, None, "line 1: nothing is left to stand before the answer of"),
        ({}, "[]", "line 1 is not a JSON object"),
        ({}, '{"context": "a", "question": "b \\ud800", "answer": "c"}', "line 1 has half a character in field 'question'"),
        ({}, "", "holds no example"),
        ({"source": "nowhere.jsonl"}, None, "data.source=nowhere.jsonl cannot be read"),
    ],
)
def test_examples_that_cannot_be_learnt_are_refused_in_one_line(
    data: dict[str, Any], tmp_path: Path, change: dict[str, Any], line: Any, words: str
) -> None:
    if line is not None:
        (tmp_path / "bad.jsonl").write_text(line if isinstance(line, str) else json.dumps(line))
        change = change | {"source": str(tmp_path / "bad.jsonl")}
    with pytest.raises(ConfigError) as error:
        opened(data | change)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_an_answer_that_is_all_cut_away_is_refused_before_a_rank_starts(
    data: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """NVIDIA's launcher: dialogues longer than the sequence mask everything out, and the loss is NaN. Virtual tokens leave less room."""
    asked = {**data, "truncate": "null", "template": "'{context}{answer}'", "source": tmp_path / "long.jsonl"}
    words = ["train", f"sweep.dir={tmp_path}/runs", "model.seq=64", "model.vocab=300", "tune.method=prompt", "cluster.gpus_per_node=1"]
    command = [*words, *(f"data.{key}={value}" for key, value in asked.items())]
    (tmp_path / "long.jsonl").write_text(json.dumps({"context": "z" * 60, "answer": "no"}))
    assert main([*command, "tune.virtual_tokens=10"]) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said.startswith("error: ") and "long.jsonl line 1: of the answer nothing is left" in said and "raise model.seq" in said
    assert "prompt of 60 tokens in the 54 that model.seq leaves" in said and not list(tmp_path.glob("runs/trials/*/logs"))
    assert main([*command, "tune.virtual_tokens=2", "--dry-run"]) == 0
