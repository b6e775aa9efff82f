"""Text of a tuned model whose weights cannot be merged is what the plain model with what was added says, token by token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tuning.test_checkpoints import opened, weights

from launcher.cli import evaluate
from tests.farm import Farm
from tests.generate.test_serve import Server
from tests.small_runs import small
from trainer.data.prepare import prepare
from trainer.generate.generate import PromptRequest, generate
from trainer.generate.ranks import alone, world_of
from trainer.generate.session import Session
from trainer.generate.weights import open_weights
from trainer.launch.rank_env import RankEnv
from trainer.models.transformer import Transformer
from trainer.models.tuned import add_tuning
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.read import from_dict
from trainer.shared.run.rules import resolve
from trainer.shared.run.schema import DataConfig, LayoutConfig, RunConfig, TrainConfig

pytestmark = pytest.mark.slow

VIRTUAL = {"virtual_tokens": 3, "tasks": 2}
TUNES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "lora": ({"family": "llama", "kv_heads": 2}, {"method": "lora", "rank": 4}),
    "adapter": ({"family": "llama", "kv_heads": 2}, {"method": "adapter", "rank": 4}),
    "prompt": ({}, {"method": "prompt"} | VIRTUAL),
    "p_tuning": ({"family": "llama", "kv_heads": 2}, {"method": "p_tuning", "encoder": 8} | VIRTUAL),
}
PROMPTS = [[5, 9, 2], [7], [1, 2, 3, 4, 5, 6]]


def tuned(farm: Farm, folder: Path, method: str, **shape: int) -> dict[str, Any]:
    """A run, trained for a few steps from a base of its own."""
    model, tune = TUNES[method]
    model = model | shape
    saved: dict[str, Any] = {"model": model, "optimizer": {"lr": 0.05}}
    farm.train(small(run={"checkpoint": {"every": 3, "dir": str(folder / "base")}}, **saved), 1).checked()
    config = small(run={"checkpoint": {"every": 3, "dir": str(folder / "tuned")}}, **saved) | {
        "tune": tune | {"base": str(folder / "base")}
    }
    farm.train(config, 1).checked()
    return config


def told(env: RankEnv, out: Path, folder: str, layouts: list[dict[str, int]]) -> None:
    """What a tuned model says under each layout, of its last task."""
    run = RunConfig(task="generate", steps=1, warmup_steps=0, global_batch=4, precision="fp64")
    found, answers = open_weights(Path(folder)), []
    first = TrainConfig(run=run, data=DataConfig(kind="synthetic"), layout=LayoutConfig(data=env.world_size))
    with world_of(resolve(first, env.world_size), env) as world:
        for layout in layouts:
            config = resolve(TrainConfig(model=found.model, run=run, layout=LayoutConfig(**layout), data=first.data), env.world_size)
            session = Session(config, world, found.load, found.tune, found.tune.tasks - 1)
            made = generate(session, [PromptRequest(n, prompt, 5) for n, prompt in enumerate(PROMPTS)])
            answers.append([(completion.tokens, completion.log_probabilities) for completion in made])
    if env.rank == 0:
        (out / "answers.json").write_text(json.dumps(answers))


@pytest.mark.parametrize("method", ["lora", pytest.param("p_tuning", marks=pytest.mark.campaign("generate"))])
def test_tuned_text_is_the_same_under_every_layout(farm: Farm, tmp_path: Path, method: str) -> None:
    """Of one that is merged, and of one that is not."""
    tuned(farm, tmp_path, method)
    folder, layouts = str(tmp_path / "tuned"), [{"tensor": 2}, {"pipeline": 2}, {"data": 2}]
    alone, spread = (farm.call(told, ranks, folder=folder, layouts=asked) for ranks, asked in ((1, [{}]), (2, layouts)))
    ((expected,), answers) = (json.loads((done.directory / "answers.json").read_text()) for done in (alone, spread))
    for made in answers:
        for (tokens, likelihoods), (same, close) in zip(made, expected, strict=True):
            assert tokens == same and likelihoods == pytest.approx(close, abs=1e-9)


@pytest.mark.parametrize("method", [name for name in TUNES if name != "lora"])
def test_tuned_text_is_that_of_the_whole_forward_token_by_token(farm: Farm, tmp_path: Path, method: str) -> None:
    config = resolve(from_dict(TrainConfig, tuned(farm, tmp_path, method)), 1)
    plain, task = Transformer(config.model).double(), config.tune.tasks - 1
    add_tuning(plain, config.model, config.tune)
    plain.double().load_state_dict(weights(opened(tmp_path / "tuned", merge=False)), strict=False)
    if config.model.tied:
        plain.head.output.weight = plain.embedding.tokens.weight  # type: ignore[union-attr]
    virtual = [task] * config.tune.virtual_tokens if method != "adapter" else []
    with alone(tmp_path / "tuned", "fp64") as (own, world):
        found = open_weights(tmp_path / "tuned")
        session = Session(own, world, found.load, found.tune, task)
        assert found.lengths == (config.model.seq - len(virtual), None)
        made = generate(session, [PromptRequest(n, prompt, 5) for n, prompt in enumerate(PROMPTS)])
        every = session.read_all([prompt + [0] * (6 - len(prompt)) for prompt in PROMPTS])
    for row, (prompt, completion) in enumerate(zip(PROMPTS, made)):
        for known, token, likelihood in zip(range(5), completion.tokens, completion.log_probabilities):
            with torch.no_grad():
                text = torch.tensor(virtual + prompt + completion.tokens[:known])
                shares = plain(text[:, None])[-1, 0].log_softmax(-1)
            assert int(shares.argmax()) == token and float(shares.max()) == pytest.approx(likelihood, abs=1e-9)
        with torch.no_grad():
            whole = plain(torch.tensor(virtual + prompt)[:, None])[len(virtual) :, 0]
        assert every is not None
        torch.testing.assert_close(every[: len(prompt), row], whole, rtol=0, atol=1e-9)


def test_texts_of_several_tasks_are_continued_side_by_side_each_behind_its_own_virtual_tokens(farm: Farm, tmp_path: Path) -> None:
    tuned(farm, tmp_path, "p_tuning")
    with alone(tmp_path / "tuned", "fp64") as (own, world):
        found = open_weights(tmp_path / "tuned")
        by_task = []
        for task in (0, 1):
            session = Session(own, world, found.load, found.tune, task)
            by_task.append(generate(session, [PromptRequest(n, prompt, 5) for n, prompt in enumerate(PROMPTS)]))
        mixed = [PromptRequest(n, prompt, 5, task=(1, None, 0)[n]) for n, prompt in enumerate(PROMPTS)]
        made = generate(session, mixed, slots=2)
    for text, expected in zip(made, (by_task[1][0], by_task[1][1], by_task[0][2])):
        assert text.tokens == expected.tokens and text.log_probabilities == pytest.approx(expected.log_probabilities, abs=1e-9)
    assert by_task[0][0].log_probabilities != pytest.approx(by_task[1][0].log_probabilities, abs=1e-3), "the tasks must differ"


def test_a_server_answers_for_its_own_task_or_that_of_a_request(farm: Farm, tmp_path: Path) -> None:
    tuned(farm, tmp_path, "p_tuning", vocab=300)
    (tmp_path / "a.txt").write_text("the quick brown fox jumps over the lazy dog; über größe\n" * 100)
    prepare(DataConfig(source=str(tmp_path / "a.txt"), path=str(tmp_path / "corpus"), vocab=300), False)
    words = ["--tokenizer", str(tmp_path / "corpus")]
    asked = {"prompt": "the", "max_tokens": 4, "temperature": 0, "logprobs": 1}

    def heard(server: Server, **more: Any) -> list[float]:
        status, answer = server.ask(asked | more)
        assert status == 200, answer
        return [round(value, 6) for value in answer["choices"][0]["logprobs"]["token_logprobs"]]

    server = Server(tmp_path / "tuned", *words, "--task=1")
    assert heard(server, task=0) != heard(server, task=1) == heard(server)
    status, answer = server.ask(asked | {"task": 2})
    assert (status, answer["error"]["message"]) == (400, "task=2: the model was tuned for 2 tasks, numbered from 0; use 0 to 1")
    assert server.end() == 0


def test_an_evaluation_by_tasks_puts_the_virtual_tokens_of_the_asked_task_before_each_item(
    farm: Farm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("lm_eval", reason="tasks are not evaluated: pip install -e '.[eval]'")
    tuned(farm, tmp_path, "p_tuning", vocab=300)
    (tmp_path / "a.txt").write_text("the quick brown fox jumps over the lazy dog; über größe\n" * 100)
    prepare(DataConfig(source=str(tmp_path / "a.txt"), path=str(tmp_path / "corpus"), vocab=300), False)

    def bits(*words: str) -> float:
        asked = [str(tmp_path / "tuned"), "--tasks=prose", "--limit=3", f"--tokenizer={tmp_path / 'corpus'}", "--json", *words]
        assert evaluate.main([*asked, f"sweep.dir={tmp_path / 'runs'}"]) == 0
        return float(json.loads(capsys.readouterr().out)["tasks"]["prose"]["bits_per_byte"])

    own = [bits(), bits("--task=0"), bits("--task=1")]
    assert own[0] == own[1] != own[2]
    assert evaluate.main([str(tmp_path / "tuned"), "--tasks=prose", "--task=2", f"--tokenizer={tmp_path / 'corpus'}"]) == 2
    assert "--task=2: the model was tuned for 2 tasks, numbered from 0; use 0 to 1" in capsys.readouterr().err


def test_a_task_that_was_not_trained_is_refused_in_one_line(farm: Farm, tmp_path: Path) -> None:
    tuned(farm, tmp_path, "prompt")
    with alone(tmp_path / "tuned", "fp64") as (own, world):
        found = open_weights(tmp_path / "tuned")
        for task in (2, -1):
            with pytest.raises(ConfigError, match=f"--task={task}: the model was tuned for 2 tasks, numbered from 0; use 0 to 1"):
                Session(own, world, found.load, found.tune, task)
        with pytest.raises(ConfigError, match="--task=1: the model was not tuned for several tasks; leave it out"):
            Session(own, world, found.load, None, 1)
