"""The coordinate check: constant for muP, told for wrong factors; powers of the width, and what a wider model is."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from launcher.cli.main import main
from launcher.planning.coordinates import Growth, exponent, growths, widened
from tests.small_runs import small
from trainer.coordinates import measure
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.read import from_dict
from trainer.shared.run.rules import resolve
from trainer.shared.run.schema import ExpertsConfig, ModelConfig, TrainConfig
from trainer.shared.run.transfer import TransferredOptimizerConfig

WIDTHS = (64, 128, 256)
MODEL: dict[str, Any] = {"family": "llama", "layers": 2, "hidden": 64, "heads": 4, "vocab": 64, "seq": 16}
MUP = {"transfer": {"kind": "mup", "hidden": 64}}


@pytest.mark.slow
def test_the_command_passes_for_mup_and_refuses_what_no_width_can_be(capfd: pytest.CaptureFixture[str]) -> None:
    words = [f"model.{name}={value}" for name, value in MODEL.items()] + ["data.kind=synthetic", "optimizer.lr=0.005"]
    mup = ["model.transfer.kind=mup", "model.transfer.hidden=64"]
    assert main(["coordinates", *words, *mup, "--widths=256,64,128", "--json"]) == 0
    told = json.loads(capfd.readouterr().out)
    assert told["widths"] == [*WIDTHS] and {layer["kind"] for layer in told["layers"]} > {"embedding", "attention", "MLP", "logits"}
    assert all(layer["sizes"][0] > 0 and layer["changes"][0] > 0 and not layer["fault"] for layer in told["layers"])
    for wrong, message in {"64": "two, such as", "64,x": "two, such as", "64,72": "72 would have 4 x 72 / 64 for model.heads"}.items():
        assert main(["coordinates", *words, f"--widths={wrong}"]) == 2
        assert message in capfd.readouterr().err
    assert main(["coordinates", "model=t5_tiny", "data.kind=synthetic"]) == 2
    assert "model.family=t5 has an encoder" in capfd.readouterr().err


def test_latents_and_mixtures_are_measured_without_what_they_have_no_one_matrix_of() -> None:
    latent = MODEL | {"latent": {"kv_rank": 16, "rotary": 4}, "experts": {"count": 4, "active": 2, "ffn": 32}}
    found = measure(resolve(from_dict(TrainConfig, small(steps=2, precision="fp32", model=latent)), 1))
    assert {"embedding", "attention", "MLP", "residual stream", "logits"} == {*found}


def faults(model: dict[str, Any]) -> dict[str, str]:
    measured = []
    for width in WIDTHS:
        wide = small(
            steps=3,
            precision="fp32",
            model=MODEL | {"hidden": width, "heads": width // 16} | model,
            optimizer={"lr": 0.005, "warmup_steps": 0},
            run={"global_batch": 8},
            micro_batch=8,
        )
        measured.append(measure(resolve(from_dict(TrainConfig, wide), 1)))
    return {growth.kind: growth.fault for growth in growths(WIDTHS, measured) if growth.fault}


@pytest.mark.slow
def test_a_wrong_factor_of_logits_or_of_the_rate_of_matrices_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(faults(MUP | {"logit_scale": 1.0})) >= {"logits"}
    monkeypatch.setattr(TransferredOptimizerConfig, "_matrix", lambda self, group: 1.0)
    found = faults(MUP)
    assert {"inside the MLP", "queries, keys, values"} <= {kind for kind, fault in found.items() if fault == "the change grows"}


def test_exponents_are_powers_and_faults_name_what_grows() -> None:
    for power in (-1.0, 0.0, 0.5):
        assert exponent(WIDTHS, [3 * width**power for width in WIDTHS]) == pytest.approx(power, abs=1e-12)
    assert math.isnan(exponent(WIDTHS, [1.0, 0.0, 1.0])) and math.isnan(exponent(WIDTHS, [1.0, math.inf, 1.0]))

    def fault(kind: str, size: float, change: float) -> str:
        return Growth(kind, (), (), size, change).fault

    assert [fault("MLP", *powers) for powers in ((0.2, -0.2), (0.5, 0.0), (-0.5, 0.0), (0.0, 0.5), (0.0, -0.5), (0.0, math.nan))] == [
        "", "the size grows", "the size shrinks", "the change grows", "the change shrinks", "the change is 0 or not finite",
    ]  # fmt: skip
    assert [fault("logits", *powers) for powers in ((-0.5, -0.5), (-1.0, -0.5), (0.0, 0.5))] == ["", "the size shrinks", "the change grows"]


def test_a_wider_model_has_more_heads_and_inner_widths_in_proportion() -> None:
    model = ModelConfig(hidden=64, heads=4, kv_heads=2, ffn=96, experts=ExpertsConfig(count=4, ffn=32, shared_ffn=16))
    wide = widened(model, 128)
    assert (wide.hidden, wide.heads, wide.kv_heads, wide.ffn, wide.experts.ffn, wide.experts.shared_ffn) == (128, 8, 4, 192, 64, 32)
    assert widened(wide, 64) == model and widened(ModelConfig(), 256).ffn is None
    with pytest.raises(ConfigError, match=r"width 80 would have 2 x 80 / 64 for model.kv_heads, which is not whole; use multiples of 32"):
        widened(ModelConfig(hidden=64, heads=4, kv_heads=2), 80)
