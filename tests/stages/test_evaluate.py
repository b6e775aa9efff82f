"""The loss of a checkpoint does not depend on how it is laid out, and is that of the plain network on the tokens that were held out."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small_runs import ranks, small
from tokenizers import Tokenizer

from launcher.cli.evaluate import sentence
from tests.farm import Farm
from trainer.checkpoint.pieces import whole
from trainer.checkpoint.shards import Reader
from trainer.data.prepare import prepare
from trainer.models.transformer import Transformer
from trainer.shared.corpora.index import TOKENIZER, TOKENS, read_index
from trainer.shared.records.artifacts import newest_checkpoint
from trainer.shared.records.manifest import FoundCheckpoint, read_manifest
from trainer.shared.run.derived import resolve_model
from trainer.shared.run.read import from_dict
from trainer.shared.run.schema import DataConfig, ModelConfig

pytestmark = pytest.mark.slow

LAYOUTS: list[dict[str, Any]] = [
    {},
    {"tensor": 2, "pipeline": 2},
    {"pipeline": 2, "virtual_pipeline": 2, "schedule": "interleaved"},
    {"data": 2, "sharding": {"params": 2, "grads": 2, "optimizer": 2}, "recompute": "full"},
    {"pipeline": 2, "schedule": "zero_bubble", "micro_batch": 2},
    {"tensor": 2, "context": 2, "sequence_parallel": True},
]
SHARED = {"tensor": 2, "sequence_parallel": True, "data": 2}
HELD_OUT = 0.25


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "text.txt").write_text("".join(f"{n} times {n} is {n * n}; größer als {n}\n" for n in range(170)))
    data = DataConfig(source=str(folder / "text.txt"), path=str(folder / "prepared"), vocab=300, held_out=HELD_OUT)
    prepare(data)
    return data


def run(corpus: DataConfig, family: str = "gpt", **layout: Any) -> dict[str, Any]:
    config = small(steps=6, model={"family": family, "layers": 4, "vocab": 300, "dropout": 0.1}, run={"global_batch": 8}, **layout)
    return config | {"data": vars(corpus) | {}}


@pytest.fixture(
    scope="module", params=["gpt", *(pytest.param(name, marks=pytest.mark.campaign("generate")) for name in ("llama", "bloom"))]
)
def trained(request: pytest.FixtureRequest, farm: Farm, corpus: DataConfig) -> tuple[str, Path]:
    config = run(corpus, request.param, tensor=2)
    config["run"]["checkpoint"] = {"every": 6}
    return request.param, farm.train(config, 2).checked().directory / "checkpoints"


def evaluated(farm: Farm, corpus: DataConfig, family: str, checkpoints: Path, steps: int = 1000, **layout: Any) -> dict[str, Any]:
    config = run(corpus, family, **layout)
    config["run"] |= {"task": "evaluate", "steps": steps, "checkpoint": {"dir": str(checkpoints)}}
    finished = farm.train(config, ranks(layout)).checked()
    found: dict[str, Any] = finished.result["evaluation"]
    return found


def by_hand(checkpoints: Path, corpus: DataConfig, sequences: int, state: str = "weight") -> tuple[float, int]:
    """Nats of the held-out targets in the network itself, with a ``state`` of the checkpoint as its weights, and the bytes that they spell."""
    path = newest_checkpoint(checkpoints)
    assert path is not None
    manifest = read_manifest(FoundCheckpoint(0, 0, path))
    model = resolve_model(from_dict(ModelConfig, manifest["model"] | {"dropout": 0.0}))
    network, reader = Transformer(model).double(), Reader(path, manifest)
    for name, parameter in network.named_parameters():
        reader.read(whole(name, parameter.shape), {state: parameter.detach().view(-1)})
    tokens = np.fromfile(Path(corpus.path) / TOKENS, dtype=np.uint16).astype(np.int64)
    windows = (len(tokens) - 1) // model.seq
    first = windows - math.ceil(windows * HELD_OUT)
    rows = torch.from_numpy(np.stack([tokens[i * model.seq :][: model.seq + 1] for i in range(first, first + sequences)]))
    with torch.no_grad():
        logits = network(rows[:, :-1].t()).transpose(0, 1)
    index, tokenizer = read_index(corpus), Tokenizer.from_file(str(Path(corpus.path) / TOKENIZER))
    spelled = [token for token in rows[:, 1:].flatten().tolist() if token != index.end_token]
    letters = sum(len(tokenizer.id_to_token(token)) for token in spelled)
    return float(F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())), letters


def test_the_loss_of_every_layout_is_that_of_the_plain_network_on_held_out_text(
    farm: Farm, corpus: DataConfig, trained: tuple[str, Path]
) -> None:
    family, checkpoints = trained
    layouts = LAYOUTS if family == "gpt" else [*LAYOUTS[:2], SHARED]  # families differ in how tensor ranks and stages share them
    figures = [evaluated(farm, corpus, family, checkpoints, **layout) for layout in layouts]
    loss, size = by_hand(checkpoints, corpus, figures[0]["sequences"])
    assert figures[0]["sequences"] > figures[0]["sequences_there"] - 8 > 20
    for layout, found in zip(layouts, figures):
        assert found["loss"] == pytest.approx(loss, rel=1e-10), layout
        assert (found["bytes"], found["tokens"]) == (size, 16 * found["sequences"]), layout
        assert found["perplexity"] == pytest.approx(math.exp(loss), rel=1e-9)
        assert found["bits_per_byte"] == pytest.approx(loss * found["tokens"] / math.log(2) / size, rel=1e-9)
        assert found["read_in_training"] is False


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({}, id="one", marks=pytest.mark.campaign("generate")),
        pytest.param({"tensor": 2, "pipeline": 2}, id="tensor pipeline", marks=pytest.mark.campaign("generate")),
        pytest.param(LAYOUTS[3], id="sharded recomputed"),
    ],
)
def test_validation_during_training_changes_nothing_and_is_that_of_the_checkpoint(
    farm: Farm, corpus: DataConfig, layout: dict[str, Any]
) -> None:
    config = run(corpus, "gpt", **layout)
    config["run"] |= {"checkpoint": {"every": 6}}
    plain = farm.train(config, ranks(layout)).checked()
    config["run"] |= {"eval_every": 4, "eval_batches": 2}
    config["optimizer"]["average_from"] = 3
    validated = farm.train(config, ranks(layout)).checked()
    assert validated.result["losses"] == plain.result["losses"] and validated.result["grad_norms"] == plain.result["grad_norms"]
    lines = [json.loads(line) for line in (validated.directory / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "validation_loss" in line] == [4, 6]
    found = evaluated(farm, corpus, "gpt", plain.directory / "checkpoints", steps=2)
    assert lines[-1]["validation_loss"] == pytest.approx(found["loss"], rel=1e-10)
    assert lines[-1]["validation_bits_per_byte"] == pytest.approx(found["bits_per_byte"], rel=1e-10)
    averaged, _ = by_hand(validated.directory / "checkpoints", corpus, 2 * config["run"]["global_batch"], "average")
    assert lines[-1]["average_validation_loss"] == pytest.approx(averaged, rel=1e-10) != lines[-1]["validation_loss"]
    assert lines[-1]["averaged_steps"] == 3 and "average_validation_loss" not in lines[3]


def test_what_is_held_out_is_not_trained_on(corpus: DataConfig) -> None:
    from trainer.data.dataset import open_dataset, open_held_out

    model = ModelConfig(vocab=300, seq=16)
    training, kept = open_dataset(corpus, model, seed=3), open_held_out(corpus, model)
    seen = {tuple(row) for row in training.batch(0, 3 * training.windows)}  # type: ignore[attr-defined]
    assert len(seen) == training.windows  # type: ignore[attr-defined]
    assert not seen & {tuple(row) for row in kept.batch(0, kept.windows)}
    everything = (read_index(corpus).tokens - 1) // 16
    assert training.windows + kept.windows == everything  # type: ignore[attr-defined]


def test_text_that_was_trained_on_is_said_to_be(farm: Farm, corpus: DataConfig, tmp_path: Path) -> None:
    everything = DataConfig(**vars(corpus) | {"held_out": 0.0})
    config = run(everything)
    config["run"]["checkpoint"] = {"every": 6}
    checkpoints = farm.train(config, 1).checked().directory / "checkpoints"
    assert evaluated(farm, corpus, "gpt", checkpoints, steps=2)["read_in_training"] is True


def test_a_checkpoint_of_another_model_or_none_is_refused_in_one_line(farm: Farm, corpus: DataConfig, trained: tuple[str, Path]) -> None:
    family, checkpoints = trained
    config = run(corpus, family)
    config["model"]["hidden"] = 64
    config["run"] |= {"task": "evaluate", "checkpoint": {"dir": str(checkpoints)}}
    finished = farm.train(config, 1)
    assert finished.codes == {0: 2} and "is of another model: model.hidden=32 there, 64 here" in json.dumps(finished.failure(0))
    config["run"]["checkpoint"]["dir"] = corpus.path
    finished = farm.train(config, 1)
    assert finished.codes == {0: 2} and "is not a checkpoint and holds none" in json.dumps(finished.failure(0))


def test_a_person_reads_how_many_answers_are_right() -> None:
    figures = {"step": 3, "loss": 1.0, "perplexity": 2.7, "bits_per_byte": 2.0, "tokens": 24, "sequences": 12, "read_in_training": False}
    told = "step 3: loss 1.0000, perplexity 2.7, 2.0000 bits per byte over 24 tokens of text that it has not seen"
    assert sentence(figures) == told
    assert sentence(figures | {"exact_match": 0.25}) == f"{told}; 25.0% of 12 exact matches"
