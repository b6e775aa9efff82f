"""The text of a model is the same under every layout and in every batch: tensor, pipeline and replicated ranks."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.convert.test_logits import MODELS, checkpoint, ours
from tests.farm import Farm
from trainer.convert import export_weights
from trainer.generate.generate import PromptRequest, generate
from trainer.generate.ranks import world_of
from trainer.generate.sampling import Sampling
from trainer.generate.session import Session
from trainer.generate.weights import open_weights
from trainer.launch.rank_env import RankEnv
from trainer.shared.run.derived import resolve_model
from trainer.shared.run.rules import resolve
from trainer.shared.run.schema import DataConfig, LayoutConfig, RunConfig, TrainConfig

pytestmark = pytest.mark.slow

PROMPTS = [[5, 9, 2], [7], [1, 2, 3, 4, 5, 6, 7, 8], [60, 0, 60], [3, 3]]
SAMPLINGS = {"greedy": {}, "sampled": {"temperature": 0.9, "top_k": 30, "top_p": 0.9, "repetition_penalty": 1.2, "seed": 11}}
LAYOUTS = list(itertools.product((1, 2, 4), repeat=2))
Alone = Callable[[str, str, str], dict[str, Any]]


def speak(
    env: RankEnv,
    out: Path,
    models: dict[str, str],
    samplings: dict[str, list[str]],
    layouts: list[list[int]],
    batches: list[int],
    precision: str,
) -> None:
    """Texts of all models under their samplings and all batches, by layout (tensor, pipeline), with the scores of every other prompt; ranks that
    a layout leaves free make replicas."""
    answers: dict[str, Any] = {}
    run = RunConfig(task="generate", steps=1, warmup_steps=0, global_batch=16, precision=precision)
    first = TrainConfig(run=run, data=DataConfig(kind="synthetic"), layout=LayoutConfig(data=env.world_size))
    with world_of(resolve(first, env.world_size), env) as world:
        for name, (tensor, pipeline) in itertools.product(models, layouts):
            weights = open_weights(Path(models[name]))
            layout = LayoutConfig(tensor=tensor, pipeline=pipeline, data=env.world_size // (tensor * pipeline))
            layout.expert = tensor if weights.model.experts.count else 1
            config = resolve(TrainConfig(model=weights.model, run=run, layout=layout, data=first.data), env.world_size)
            session = Session(config, world, weights.load)
            for kind, slots in itertools.product(samplings[name], batches):
                sampling = Sampling(**SAMPLINGS[kind])
                requests = [PromptRequest(n, prompt, 6, sampling, frozenset([3]), n, scored=n % 2 == 0) for n, prompt in enumerate(PROMPTS)]
                made = generate(session, requests, slots)
                answers[f"{name} {kind} {tensor} {pipeline} {slots}"] = [
                    (c.tokens, c.log_probabilities + [share for share, _ in c.read], c.ended) for c in made
                ]
                assert [len(c.read) for c in made] in ([], [2, 0, 7, 0, 1])  # of every other prompt; known to rank 0
    if env.rank == 0:
        (out / "answers.json").write_text(json.dumps(answers))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Checkpoints of models of four blocks, and one Hugging Face folder."""
    root, found = tmp_path_factory.mktemp("models"), {}
    for name in ("gpt", "llama", "bloom odd heads", "glm4_moe", "deepseek_v3"):
        heads = {"heads": 4, "hidden": 32} if name == "bloom odd heads" else {}
        model = resolve_model(MODELS[name].__class__(**(vars(MODELS[name]) | {"layers": 4} | heads)))
        found[name] = str(checkpoint(ours(model, seed=4), model, root / name))
    export_weights(Path(found["llama"]), root / "hf")
    return found | {"llama from a folder": str(root / "hf")}


def answers_of(
    farm: Farm,
    ranks: int,
    precision: str,
    folders: dict[str, str],
    layouts: list[tuple[int, int]],
    batches: list[int],
    kinds: dict[str, list[str]] | None = None,
) -> dict[str, Any]:
    """Of the ``kinds`` of sampling, by default all."""
    kinds = kinds or {name: list(SAMPLINGS) for name in folders}
    done = farm.call(speak, ranks, models=folders, samplings=kinds, layouts=layouts, batches=batches, precision=precision)
    return dict(json.loads((done.directory / "answers.json").read_text()))


@pytest.fixture(scope="module")
def alone(farm: Farm, folders: dict[str, str]) -> Alone:
    """What one process says that completes the prompts one by one, of a precision, a model and a sampling."""

    def of(precision: str, name: str, kind: str) -> dict[str, Any]:
        return answers_of(farm, 1, precision, {name: folders[name]}, [(1, 1)], [1], {name: [kind]})

    return functools.cache(of)


WITHIN = {"fp64": 1e-10, "fp32": 1e-5}


def check(alone: Alone, precision: str, answers: dict[str, Any]) -> int:
    """Tokens are those of one process, log-probabilities nearly; how many texts there were."""
    for key, made in answers.items():
        model, kind = key.rsplit(" ", 4)[:2]
        expected = alone(precision, model, kind)[f"{model} {kind} 1 1 1"]
        assert [(tokens, ended) for tokens, _, ended in made] == [(tokens, ended) for tokens, _, ended in expected], key
        for (_, mine, _), (_, theirs, _) in zip(made, expected):
            assert mine == pytest.approx(theirs, abs=WITHIN[precision]), key
    return sum(map(len, answers.values()))


def test_text_does_not_depend_on_the_layout_exactly(farm: Farm, folders: dict[str, str], alone: Alone) -> None:
    in_turn = {name: [kind] for name, kind in zip(folders, itertools.cycle(SAMPLINGS))}
    assert check(alone, "fp64", answers_of(farm, 4, "fp64", folders, [(2, 2)], [3], in_turn))


def test_text_of_tensor_and_pipeline_ranks_in_fp32(farm: Farm, folders: dict[str, str], alone: Alone) -> None:
    assert check(alone, "fp32", answers_of(farm, 2, "fp32", {"llama": folders["llama"]}, [(2, 1), (1, 2)], [2]))


CASES = [(t, p, replicas) for t, p in LAYOUTS for replicas in (1, 2) if t * p * replicas <= 16]


@pytest.mark.campaign("generate")
@pytest.mark.parametrize("precision", WITHIN)
@pytest.mark.parametrize(("tensor", "pipeline", "replicas"), CASES)
def test_text_under_every_layout_and_batch(
    tensor: int,
    pipeline: int,
    replicas: int,
    precision: str,
    farm: Farm,
    folders: dict[str, str],
    alone: Alone,
) -> None:
    """Each kind of model, batches of 1, 3 and 8. Ranks are started for each: a process makes its groups once (``World.make_group``)."""
    can = {name: folder for name, folder in folders.items() if not open_weights(Path(folder)).model.kv_heads % tensor}
    assert len(can) >= 4
    for name, folder in can.items():
        answers = answers_of(farm, tensor * pipeline * replicas, precision, {name: folder}, [(tensor, pipeline)], [1, 3, 8])
        assert check(alone, precision, answers) == len(SAMPLINGS) * 3 * len(PROMPTS)
