"""Hyper-parameters carried over from a base: initial weights, updates, the function of an exported model, wrong settings."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from launcher.config import compose
from launcher.config import resolve as resolve_config
from launcher.trials.identity import trial_id
from tests.small_runs import small
from tests.whole_parameters import parameters
from trainer.checkpoint.folder import Folder
from trainer.checkpoint.pieces import whole
from trainer.checkpoint.shards import PieceSnapshot, Reader, write_rank
from trainer.comm.collectives import World
from trainer.convert.folding import FoldedReader, folded
from trainer.data import open_dataset
from trainer.models.transformer import Transformer
from trainer.shared.records.manifest import FoundCheckpoint, read_manifest
from trainer.shared.run.derived import resolve_model
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.read import from_dict
from trainer.shared.run.resolved import ResolvedModelConfig, ResolvedTrainConfig
from trainer.shared.run.rules import resolve
from trainer.shared.run.schema import (
    ExpertsConfig,
    ModelConfig,
    RopeConfig,
    TrainConfig,
    TransferConfig,
)
from trainer.step import Engine

WIDTH, DEPTH = 32, 2
"""Of the base. The model that its hyper-parameters go to is four times as wide and twice as deep."""
WIDER, DEEPER = 4, 2
EXPERTS = {"count": 3, "dense_layers": 1, "ffn": 256}


def run_of(kind: str, optimizer: dict[str, Any] | None = None, **model: Any) -> ResolvedTrainConfig:
    transfer = {"kind": kind, "hidden": WIDTH, "layers": DEPTH if kind == "completep" else None} if kind != "none" else {}
    usual = {"family": "llama", "layers": DEPTH * DEEPER, "hidden": WIDTH * WIDER, "heads": 8, "tied": False, "experts": EXPERTS}
    given = {"clip": 0.0, "warmup_steps": 0, "lr": 0.02, "weight_decay": 0.3, "eps": 1e-4} | (optimizer or {})
    data = small(steps=2, model=usual | {"transfer": transfer} | model, run={"global_batch": 4}, optimizer=given, micro_batch=4)
    return resolve(from_dict(TrainConfig, data), 1)


def engine_of(config: ResolvedTrainConfig) -> Engine:
    return Engine(config, World(0, 1, torch.device("cpu"), "", 0, 10.0), open_dataset(config.data, config.model, config.run.seed))


GROUPS = {
    "embedding.tokens.weight": "embedding",
    "head.output.weight": "head",
    "blocks.0.attention.qkv.weight": "matrices",
    "blocks.0.mlp.down.weight": "matrices",
    "blocks.2.mlp.router.weight": "matrices",
    "blocks.2.mlp.up.weight": "matrices",
    "blocks.1.mlp_norm.weight": "vectors",
}


@pytest.mark.parametrize("kind", ["mup", "completep"])
def test_an_update_of_adamw_has_the_rate_the_decay_and_the_epsilon_of_the_table(kind: str) -> None:
    """The reference in fp64: g / (|g| + eps) in the first step, by the table of ``trainer.shared.run.transfer``."""
    engine = engine_of(run_of(kind))
    pieces = {piece.record.name: piece for piece in engine.rank.shards}
    before = {name: value.clone() for name, value in parameters(engine.rank).items()}
    engine.step(0)
    after, m, deep = parameters(engine.rank), WIDER, DEEPER if kind == "completep" else 1
    for name, group in GROUPS.items():
        gradient = pieces[name].gradient.view(pieces[name].record.shape)
        rate, eps = 0.02 / (m if group == "matrices" else 1), 1e-4 / (m * (deep if group in ("matrices", "vectors") else 1))
        decay = {"matrices": 0.3 * m, "vectors": 0.0}.get(group, 0.3)
        expected = before[name] * (1 - rate * decay) - rate * gradient / (gradient.abs() + eps)
        torch.testing.assert_close(after[name], expected, rtol=0, atol=1e-12)


def test_muons_matrices_keep_rate_and_decay_and_their_update_goes_with_the_root_of_rows_over_columns() -> None:
    muon = {"kind": "muon", "muon": {"scale": "aspect"}}
    ours, plain = engine_of(run_of("mup", muon)), engine_of(run_of("mup", muon | {"lr": 0.0, "weight_decay": 0.0}))
    for engine in (ours, plain):
        engine.step(0)
    before, after = parameters(plain.rank), parameters(ours.rank)
    for name in ("blocks.0.attention.output.weight", "blocks.0.mlp.down.weight"):
        update = (before[name] * (1 - 0.02 * 0.3) - after[name]) / 0.02
        rows, columns = update.shape
        values = torch.linalg.svdvals(update) / math.sqrt(rows / columns)
        assert 0.9 < float(values.max()) < 1.21


def test_initial_weights_are_those_of_the_base_but_for_the_inputs_that_matrices_add_up() -> None:
    """Same seed and name, so that of two models of one shape every weight has the ratio of standard deviations."""
    plain, deep = (parameters(engine_of(run_of(kind)).rank) for kind in ("none", "completep"))
    base = 0.64 / math.sqrt(WIDTH)
    matrix, last = base / math.sqrt(WIDER), base / math.sqrt(WIDER) / math.sqrt(2 * DEPTH)
    expected = {
        "embedding.tokens.weight": base,
        "head.output.weight": base,
        "blocks.0.attention.qkv.weight": matrix,
        "blocks.1.attention.output.weight": last,
        "blocks.0.mlp.down.weight": last,
        "blocks.3.mlp.down.weight": last,
        "blocks.3.mlp.up.weight": matrix,
        "blocks.3.mlp.router.weight": base / WIDER,
    }
    for name, std in expected.items():
        usual = 0.64 / math.sqrt(WIDTH * WIDER) / (math.sqrt(2 * DEPTH * DEEPER) if name.endswith(("output.weight", "down.weight")) else 1)
        usual = 0.64 / math.sqrt(WIDTH * WIDER) if name == "head.output.weight" else usual
        torch.testing.assert_close(deep[name], plain[name] * (std / usual), rtol=1e-6, atol=0)


SMALL = {"layers": 4, "hidden": 32, "heads": 4, "vocab": 61, "seq": 12}
COMPLETE = TransferConfig("completep", hidden=8, layers=3, head_width=2)
MODELS = {
    "tied": {"family": "llama", "tied": True},
    "biases": {"family": "gptj", "rope": RopeConfig(share=0.5)},
    "linear biases": {"family": "bloom"},
    "offsets and norms after": {"family": "gemma3_text", "kv_heads": 2, "window": 5},
    "norms of all heads": {"family": "olmo2", "norm": "rms"},
    "experts": {"family": "glm4_moe", "experts": ExpertsConfig(count=4, ffn=12, shared_ffn=12, dense_layers=1)},
}


def model_of(**keys: Any) -> ResolvedModelConfig:
    return resolve_model(ModelConfig(**SMALL | {"transfer": COMPLETE} | keys))


@pytest.mark.parametrize("keys", MODELS.values(), ids=MODELS)
def test_the_exported_weights_are_the_same_function_in_a_model_of_usual_factors(keys: dict[str, Any], tmp_path: Path) -> None:
    model = model_of(**keys)
    assert (model.logit_scale, model.residual_scale) == (1 / 4, 3 / 4) and folded(model).attention_scale > model.attention_scale
    torch.manual_seed(1)
    ours, theirs = (Transformer(each).double().eval() for each in (model, folded(model)))
    for parameter in ours.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    tokens = torch.randint(61, (12, 2))
    read = FoldedReader(stored(ours, model, tmp_path), model)
    for name, parameter in theirs.named_parameters():
        read.read(whole(name, parameter.shape), {"weight": parameter.data.view(-1)})
    logits = ours(tokens)
    torch.testing.assert_close(theirs(tokens), logits, rtol=0, atol=1e-9)
    assert float(logits.detach().std()) > 0.05
    assert folded(model).transfer.kind == "none" and folded(replace(model, transfer=TransferConfig())).logit_scale == model.logit_scale


def stored(network: Transformer, model: ResolvedModelConfig, path: Path) -> Reader:
    folder = Folder(path / "checkpoints", run="test", attempt=0, token="1")
    folder.enter()
    pieces = [PieceSnapshot(whole(name, p.shape), {"weight": p.detach().flatten()}) for name, p in network.named_parameters()]
    write_rank(folder.workspace(0), 0, pieces)
    folder.commit(0, 1, {"model": asdict(model), "data": None, "extra": {"samples": 0, "updates": 0}}, timeout_s=60)
    found = next((path / "checkpoints").glob("step-*"))
    return Reader(found, read_manifest(FoundCheckpoint(0, 0, found)))


def test_resolving_twice_changes_nothing_and_a_given_factor_stays() -> None:
    once = model_of()
    assert resolve_model(once) == once
    assert model_of(logit_scale=0.7, attention_scale=0.3).logit_scale == 0.7
    assert model_of(transfer=TransferConfig()) == resolve_model(ModelConfig(**SMALL))  # type: ignore[arg-type]


def test_a_transfer_is_part_of_a_trials_identity_and_none_is_not() -> None:
    def identity(*words: str) -> str:
        return trial_id(resolve_config(compose(["model=gpt_tiny", "data.kind=synthetic", *words])))

    carried = ["model.transfer.kind=mup", "model.transfer.hidden=64"]
    known = {identity(), identity(*carried), identity(*carried[:1], "model.transfer.hidden=32")}
    assert len(known) == 3 and identity("model.transfer.kind=none") in known


WRONG = [
    ({"transfer": {"kind": "mup"}}, "model.transfer.kind=mup carries hyper-parameters over from a base; say with model.transfer.hidden"),
    ({"transfer": {"kind": "completep", "hidden": 8}}, "say with model.transfer.layers which model.layers they were found with"),
    ({"transfer": {"hidden": 8}}, "model.transfer.hidden=8 is for model.transfer.kind=mup or completep, not none; leave one"),
    (
        {"transfer": {"kind": "mup", "hidden": 8, "layers": 2}},
        "model.transfer.layers=2 is for model.transfer.kind=completep, not mup",
    ),
    ({"family": "t5", "transfer": {"kind": "mup", "hidden": 8}}, "has no rule for model.family=t5, which has an encoder"),
    ({"latent": {"kv_rank": 4}, "transfer": {"kind": "mup", "hidden": 8}}, "has no rule for model.latent.kv_rank=4; use"),
]


@pytest.mark.parametrize(("model", "message"), WRONG)
def test_a_transfer_without_its_base_or_its_rule_is_refused(model: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        resolve(from_dict(TrainConfig, small(model=model)), 1)
    assert message in str(refused.value)


def test_a_transfer_of_tuned_weights_and_of_updates_that_grow_is_refused() -> None:
    data = small(model={"transfer": {"kind": "mup", "hidden": 8}})
    with pytest.raises(ConfigError, match=r"optimizer.muon.scale=rms makes updates of another size in each width"):
        resolve(from_dict(TrainConfig, data | {"optimizer": {"kind": "muon"}}), 1)
    with pytest.raises(ConfigError, match=r"has no rule for what tune.method=lora adds"):
        resolve(from_dict(TrainConfig, data | {"tune": {"method": "lora"}}), 1)
