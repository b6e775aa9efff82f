"""run.moments=bf16: half the bytes of AdamW's moments, each rounded once per step."""

from __future__ import annotations

import pytest
import torch

from launcher.config.schema import ClusterConfig
from launcher.cost import predict
from tests.cost.machines import HARDWARE
from tests.farm import Farm
from tests.small_runs import small
from trainer.models.layers import Init
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.optimizer import OptimizerConfig
from trainer.shared.run.read import from_dict
from trainer.shared.run.rules import resolve
from trainer.shared.run.schema import RunConfig, TrainConfig
from trainer.state import optimizer
from trainer.state.optimizer import AdamW
from trainer.state.parameters import OptimizerShard, ParameterRecord

SIZES = (5, 1, 17, 8)


def owned(moments: torch.dtype) -> list[OptimizerShard]:
    """Flat pieces of some sizes, with gradients of their own."""
    torch.manual_seed(1)
    pieces = []
    for n in SIZES:
        record = ParameterRecord("w", (n,), ((0, n),), (n,), Init(1.0), "matrices" if n > 5 else "vectors")
        states = (torch.randn(n), torch.zeros(n, dtype=moments), torch.zeros(n, dtype=moments), torch.randn(n))
        pieces.append(OptimizerShard(record, 0, n, *states, saves=True))
    return pieces


@pytest.mark.parametrize("together", [1, 7, 1000])
def test_each_step_is_that_of_fp32_from_rounded_moments(monkeypatch: pytest.MonkeyPatch, together: int) -> None:
    """However many elements are widened at a time."""
    monkeypatch.setattr(optimizer, "WIDENED", together)
    config = resolve(TrainConfig(run=RunConfig(steps=5)), 1).optimizer
    rounded, wide = (owned(dtype) for dtype in (torch.bfloat16, torch.float32))
    ours, plain = (AdamW(config, [pieces], torch.device("cpu")) for pieces in (rounded, wide))
    for _ in range(3):
        for own, other in zip(rounded, wide):
            other.gradient.copy_(own.gradient)
        for one in (ours, plain):
            one.step(1e-2, torch.tensor([0.5]), torch.tensor(0.0))
        for own, other in zip(rounded, wide):
            assert torch.equal(own.weight, other.weight)
            for name in ("exp_avg", "exp_avg_sq"):
                getattr(other, name).copy_(getattr(other, name).bfloat16())
                assert torch.equal(getattr(own, name).float(), getattr(other, name))


def test_a_checkpoint_has_every_bit_of_them_and_memory_is_as_predicted(farm: Farm) -> None:
    """A run in two parts has the losses of one; four bytes of twelve are gone."""
    model = {"vocab": 1000, "hidden": 64, "layers": 2}
    run = {"moments": "bf16", "warmup_steps": 0}
    whole = farm.train(small(steps=4, precision="bf16", model=model, run=run), 1).checked()
    out = farm.folder()
    saves = run | {"checkpoint": {"every": 2, "dir": str(out)}}
    settings = {"precision": "bf16", "model": model, "run": saves, "optimizer": {"decay_steps": 4}}
    farm.train(small(steps=2, **settings), 1).checked()  # type: ignore[arg-type]
    continued = farm.train(small(steps=4, **settings), 1).checked()  # type: ignore[arg-type]
    assert continued.result["losses"][-2:] == whole.result["losses"][-2:]
    config = resolve(from_dict(TrainConfig, small(steps=4, precision="bf16", model=model, run=run)), 1)
    place = ClusterConfig(gpus_per_node=1, hardware=HARDWARE["cpu"])
    predicted = predict(config.model, config.layout, config.run, place).counted
    assert predicted["optimizer"] == pytest.approx(whole.result["memory"]["optimizer"], rel=0.01)
    wide = predict(config.model, config.layout, RunConfig(precision="bf16", global_batch=8), place).counted
    assert predicted["optimizer"] * 3 == pytest.approx(wide["optimizer"] * 2)


@pytest.mark.parametrize(
    ("run", "adam", "words"),
    [
        (RunConfig(moments="bf16"), OptimizerConfig(), "run.moments=bf16 is for run.precision=bf16, fp16 or fp8, and it is fp32"),
        (RunConfig(moments="bf16", precision="bf16"), OptimizerConfig(beta2=0.999), "optimizer.beta2=0.999 moves a moment by less than"),
    ],
)
def test_where_rounding_would_stop_them_they_are_refused(run: RunConfig, adam: OptimizerConfig, words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace(".", r"\.")):
        resolve(TrainConfig(run=run, optimizer=adam), 1)
