"""One process of the parallel runtime is the plain model under torch's own autograd, loss, clipping and AdamW."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.small_runs import small
from tests.whole_parameters import parameters
from trainer.comm.collectives import World
from trainer.data import open_dataset
from trainer.models.experts import Choice, Router
from trainer.models.layers import ParameterModule
from trainer.models.transformer import Transformer
from trainer.shared.run.read import from_dict
from trainer.shared.run.rules import resolve
from trainer.shared.run.schema import TrainConfig
from trainer.state.optimizer import learning_rate
from trainer.state.parameters import ParameterRecord, initial_value
from trainer.step import Engine

pytestmark = pytest.mark.slow

STEPS = 6


def run_of(**model: Any) -> TrainConfig:
    data = small(steps=STEPS, model=model, run={"global_batch": 4}, optimizer={"clip": 0.5, "eps": 1e-5}, micro_batch=2)
    return resolve(from_dict(TrainConfig, data), 1)


def plain_model(config: TrainConfig) -> tuple[Transformer, list[nn.Parameter], list[nn.Parameter]]:
    """The plain network with the runtime's initial weights; the parameters that decay, and the others."""
    model = Transformer(config.model).double()
    decayed, others = [], []
    names = {parameter: name for name, parameter in model.named_parameters()}
    for part in (m for m in model.modules() if isinstance(m, ParameterModule)):
        for key, spec in part.specs.items():
            parameter = getattr(part, key)
            shape = tuple(parameter.shape)
            record = ParameterRecord(names[parameter], shape, tuple((0, n) for n in shape), shape, spec.init, spec.group)
            parameter.data.copy_(initial_value(record, config.run.seed))
            chosen = others if record.group == "vectors" else decayed
            if not any(parameter is known for known in chosen):
                chosen.append(parameter)
    return model, decayed, others


def losses_of_router(config: TrainConfig, choice: Choice) -> torch.Tensor:
    """Those of all sequences at once: E sum_e f_e P_e of each, of which the mean counts, and the mean of squared logsumexps."""
    e = config.model.experts
    experts, scores, logits = (one.unflatten(0, (-1, config.run.global_batch)) for one in (choice.experts, choice.scores, choice.logits))
    load = F.one_hot(experts, e.count).sum((0, 2)) / (config.model.seq * e.active)
    shares = (scores / scores.sum(-1, keepdim=True)).mean(0)
    return e.balance_loss * e.count * (load * shares).sum(-1).mean() + e.z_loss * logits.logsumexp(-1).square().mean()


def train_plainly(config: TrainConfig) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    model, decayed, others = plain_model(config)
    o = config.optimizer
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": o.weight_decay}, {"params": others, "weight_decay": 0.0}], betas=(o.beta1, o.beta2), eps=o.eps
    )
    dataset = open_dataset(config.data, config.model, config.run.seed)
    losses, norms, beside = [], [], list[torch.Tensor]()
    for router in (part for part in model.modules() if isinstance(part, Router)):
        router.register_forward_hook(lambda _, given, choice: beside.append(losses_of_router(config, choice)))
    for step in range(STEPS):
        rows = torch.from_numpy(dataset.batch(step * config.run.global_batch, config.run.global_batch)).t()
        loss = F.cross_entropy(model(rows[:-1]).flatten(0, 1), rows[1:].flatten())
        optimizer.zero_grad()
        sum(beside, loss).backward()
        beside.clear()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), o.clip)))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(o, step)
        optimizer.step()
        losses.append(loss.item())
    return losses, norms, {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    "model",
    [
        {},
        {"tied": False},
        {"family": "llama"},
        {"family": "llama", "kv_heads": 2, "tied": True},
        {"family": "bloom"},
        {"activation": "squared_relu"},
        {"attention": "unfused"},
        {"family": "bloom", "attention": "unfused"},
        {"score_cap": 0.3, "window": 5, "full_every": 2, "logit_cap": 0.7},
        {"tied": False, "biases": ["head"], "qk_norm": "width", "norm_at": "both", "logit_scale": 0.5, "residual_scale": 0.5},
        {"family": "mixtral", "experts": {"count": 4, "ffn": 24}},
        {"family": "qwen2_moe", "experts": {"count": 4, "ffn": 8, "shared_ffn": 16, "shared_gate": True, "dense_layers": 1, "every": 2}},
        {"family": "llama", "experts": {"count": 4, "router": "sigmoid", "groups": 2, "normalized": False, "scale": 2.5}},
        {"family": "llama", "experts": {"count": 4, "ffn": 24, "router": "sigmoid", "balance_loss": 0.3, "z_loss": 0.02}},
    ],
    ids=str,
)
def test_the_runtime_trains_what_plain_torch_trains(model: dict[str, Any]) -> None:
    config = run_of(**model)
    losses, norms, weights = train_plainly(config)
    dataset = open_dataset(config.data, config.model, config.run.seed)
    engine = Engine(config, World(0, 1, torch.device("cpu"), "", 0, 10.0), dataset)
    results = [engine.step(step) for step in range(STEPS)]
    assert [r.loss for r in results] == pytest.approx(losses, rel=1e-12)
    assert [r.grad_norm for r in results] == pytest.approx(norms, rel=1e-12)
    assert max(norms) > 0.5, "clipping was never put to the test"
    found = parameters(engine.rank)
    assert found.keys() == weights.keys()
    for name, expected in weights.items():
        torch.testing.assert_close(found[name], expected, rtol=0, atol=1e-10 * float(expected.abs().max()))


@pytest.mark.parametrize("family", ["gpt", "llama", "bloom"])
def test_fused_and_unfused_attention_are_one_function(family: str) -> None:
    config = run_of(family=family, kv_heads=2)
    model, *_ = plain_model(config)
    tokens = torch.randint(config.model.vocab, (config.model.seq, 2), generator=torch.Generator().manual_seed(0))
    fused = model(tokens)
    for block in model.blocks.values():
        block.get_submodule("attention.core").fused = False  # type: ignore[assignment]
    torch.testing.assert_close(model(tokens), fused, rtol=1e-12, atol=1e-12)


def test_no_token_sees_a_later_one() -> None:
    for family in ("gpt", "llama", "bloom"):
        model, *_ = plain_model(run_of(family=family))
        tokens = torch.zeros(16, 1, dtype=torch.int64)
        changed = tokens.clone()
        changed[10] = 7
        before, after = model(tokens), model(changed)
        assert torch.equal(before[:10], after[:10]) and not torch.equal(before[10:], after[10:])
