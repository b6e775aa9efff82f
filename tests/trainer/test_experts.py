"""Experts: which of them a token visits, what balances them, and what their exchange sends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.farm import Farm
from tests.small_runs import ranks, small
from trainer.models.experts import MixtureOfExperts, choose
from trainer.shared.run.derived import resolve_model
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.read import from_dict
from trainer.shared.run.rules import resolve
from trainer.shared.run.schema import ExpertsConfig, ModelConfig, TrainConfig
from trainer.tensor import experts as parallel

pytestmark = pytest.mark.slow

EXPERTS = {"count": 4, "active": 2, "ffn": 24}
MODEL = {"family": "llama", "layers": 2, "experts": EXPERTS}


def test_of_equal_scores_the_first_experts_are_chosen() -> None:
    chosen = choose(torch.zeros(3, 8), None, ExpertsConfig(count=8, active=3)).experts
    assert chosen.tolist() == [[0, 1, 2]] * 3
    tied = torch.tensor([[1.0, 2.0, 2.0, 0.0, 2.0]])
    assert choose(tied, None, ExpertsConfig(count=5, active=2)).experts.tolist() == [[1, 2]]


def test_a_correction_moves_the_choice_and_not_the_weights() -> None:
    logits, c = torch.tensor([[2.0, 1.0, 0.0]]), ExpertsConfig(count=3, active=1, router="sigmoid", normalized=False, correction=0.0)
    found = choose(logits, torch.tensor([-1.0, 0.0, 0.5]), c)
    assert found.experts.tolist() == [[2]] and found.weights.item() == 0.5


def test_a_group_without_corrections_is_as_good_as_its_best_expert() -> None:
    logits = torch.tensor([[3.0, -3.0, 2.0, 2.0]])
    plain = ExpertsConfig(count=4, active=2, groups=2, active_groups=1)
    assert choose(logits, None, plain).experts.tolist() == [[0, 1]]
    corrected = ExpertsConfig(count=4, active=2, groups=2, active_groups=1, correction=0.0, router="sigmoid")
    assert choose(logits, torch.zeros(4), corrected).experts.tolist() == [[2, 3]], "as its best two"


def test_experts_that_take_turns_have_equal_loads() -> None:
    forced = ExpertsConfig(count=4, active=2, forced=True)
    assert choose(torch.randn(10, 4), None, forced).experts.flatten().bincount().tolist() == [5, 5, 5, 5]


def test_a_correction_moves_towards_equal_load_unless_the_step_is_skipped() -> None:
    model = resolve_model(
        from_dict(ModelConfig, {"family": "llama", "layers": 1, "experts": {"count": 3, "active": 1, "correction": 0.25}})
    )
    balance = parallel.ExpertBalance(model, torch.float64, torch.device("cpu"), saves=True)
    busiest = balance.end(torch.tensor([6.0, 2.0, 1.0], dtype=torch.float64), torch.zeros(()))
    assert balance.corrections.tolist() == [[-0.25, 0.25, 0.25]] and busiest == 2
    balance.end(torch.tensor([3.0, 3.0, 3.0], dtype=torch.float64), torch.zeros(()))
    balance.end(torch.tensor([0.0, 9.0, 0.0], dtype=torch.float64), torch.ones(()))
    assert balance.corrections.tolist() == [[-0.25, 0.25, 0.25]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [[3, 0, 5], [0, 0, 8], [8, 0, 0]])
def test_one_kernel_for_all_experts_gives_what_a_product_for_each_gives(
    dtype: torch.dtype, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, matrices = torch.randn(8, 16).to(dtype), torch.randn(3, 16, 24).to(dtype)
    each = parallel.grouped(rows, matrices, sizes)
    monkeypatch.setattr(parallel, "in_one_kernel", lambda rows: True)
    torch.testing.assert_close(parallel.grouped(rows, matrices, sizes), each)


def test_no_token_is_dropped_and_each_has_the_weighed_sum_of_its_experts() -> None:
    model = resolve_model(from_dict(ModelConfig, {"hidden": 8, "heads": 2, "family": "llama", "experts": EXPERTS | {"active": 3}}))
    mixture = MixtureOfExperts(model, 0.1).double()
    for parameter in mixture.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(5, 2, 8, dtype=torch.float64)
    choice = mixture.router(x.flatten(0, 1))
    expected = torch.zeros(10, 8, dtype=torch.float64)
    for token, row in enumerate(x.flatten(0, 1)):
        for expert, weight in zip(choice.experts[token], choice.weights[token]):
            up, down = mixture.up.weight[expert], mixture.down.weight[expert]
            expected[token] += weight * (down @ (torch.nn.functional.silu(up[0] @ row) * (up[1] @ row)))
    torch.testing.assert_close(mixture(x), expected.view(5, 2, 8))


CUT = {"tensor": 2, "data": 2, "expert": 2, "expert_tensor": 2, "sequence_parallel": True}


@pytest.mark.parametrize("layout", [{"data": 2, "expert": 2}, CUT], ids=str)
def test_an_exchange_sends_what_the_formula_says(layout: dict[str, Any], farm: Farm) -> None:
    """Of the T K copies of the tokens of a rank, or of all with parts of its experts, those for other ranks: dispatch and return, forward
    and backward, each step and block. Over ranks with parts, tokens are gathered, with numbers and weights of K experts, and sums
    scattered; backward gathers the gradient of the sum, and scatters those of tokens and weights."""
    steps, rows, seq, hidden = 2, 4, 16, 32
    model = MODEL | {"experts": EXPERTS | {"forced": True}}
    found = farm.train(small(steps=steps, model=model, **layout), layout.get("tensor", 1) * layout["data"]).checked()
    counted = found.result["communication"]
    sent = counted["all_to_all over expert"]
    tokens = rows * seq // (layout.get("tensor", 1) * layout["data"]) * layout.get("expert_tensor", 1)
    micro_batches = rows // layout["data"]
    degree, experts = layout["expert"], EXPERTS["count"]
    copies = tokens * EXPERTS["active"] * (degree - 1) // degree
    counts = experts * (degree - 1) // degree * 8 * micro_batches
    assert sent["calls"] == steps * 2 * micro_batches * 5
    assert sent["payload_bytes"] == steps * 2 * (4 * copies * hidden * 8 + counts)
    over = {way: counted.get(f"{way} over expert tensor") for way in ("all_gather", "reduce_scatter")}
    if "expert_tensor" not in layout:
        assert over == {"all_gather": None, "reduce_scatter": None}
        return
    chosen = tokens * EXPERTS["active"] * 8
    for way, calls, elements in (
        ("all_gather", 4, 2 * tokens * hidden * 8 + 2 * chosen),
        ("reduce_scatter", 3, 2 * tokens * hidden * 8 + chosen),
    ):
        assert over[way]["calls"] == steps * 2 * micro_batches * calls
        assert over[way]["payload_bytes"] == steps * 2 * elements


def test_a_run_continues_under_another_expert_degree_as_if_never_stopped(farm: Farm, tmp_path: Path) -> None:
    model = MODEL | {"experts": EXPERTS | {"correction": 0.02, "balance_loss": 0.1}}

    def train(steps: int, place: str, ranks: int, **layout: Any) -> list[float]:
        saving = {"checkpoint": {"every": 2, "dir": str(tmp_path / place)}}
        optimizer = {"decay_steps": 6}
        run = small(steps=steps, model=model, run=saving, optimizer=optimizer, **layout)
        return list(farm.train(run, ranks).checked().result["losses"])

    whole = train(6, "whole", 1)
    train(2, "parts", 4, **CUT)
    train(4, "parts", 2, data=2, expert=2, sharding={"params": 2, "grads": 2, "optimizer": 2})
    continued = train(6, "parts", 2, pipeline=2)
    assert continued[-2:] == pytest.approx(whole[-2:], rel=1e-10)


@pytest.mark.parametrize(
    ("model", "layout", "words"),
    [
        ({"experts": {"count": 6, "groups": 4}}, {}, "model.experts.groups=4 does not divide model.experts.count=6; use 1, 2, 3 or 6"),
        ({"experts": {"count": 8, "groups": 2, "active_groups": 3}}, {}, "model.experts.active_groups=3 is more than"),
        ({"experts": {"count": 8, "groups": 4, "active_groups": 1, "active": 3}}, {}, "model.experts.active=3 is more than the 2 experts"),
        ({"experts": {"count": 4, "groups": 4, "active": 1, "correction": 0.0}}, {}, "leaves one expert in each group"),
        ({"experts": EXPERTS, "biases": ["up"]}, {}, "model.biases=['up'] with model.experts.count=4 can be planned but not trained"),
        ({"experts": EXPERTS | {"count": 6}, "heads": 3, "hidden": 24}, {"tensor": 3, "data": 2, "expert": 2}, "neither divides layout.tensor=3"),
        ({"experts": EXPERTS}, {"data": 2, "expert": 3}, "layout.expert=3 does not divide model.experts.count=4"),
        ({"experts": EXPERTS}, {"data": 5, "expert_tensor": 5}, "layout.expert_tensor=5 does not divide model.experts.ffn=24; use 1, 2, 3"),
        ({}, {"data": 2, "expert_tensor": 2}, "layout.expert_tensor=2 cuts the experts of a block, and the model has none"),
        ({"experts": EXPERTS}, {"data": 3, "expert": 2, "expert_tensor": 3}, "layout.expert_tensor x layout.expert=6 does not divide the 3 ranks"),
        ({"experts": EXPERTS, "heads": 3, "hidden": 24}, {"tensor": 3, "data": 2, "expert_tensor": 2}, "neither divides layout.tensor=3 nor"),
        ({"experts": EXPERTS | {"count": 6}, "seq": 24}, {"context": 2, "data": 3, "expert": 3, "order": "tensor-pipeline-data"},
         "layout.expert=3 neither divides layout.tensor x layout.context=2 nor is a multiple of it"),
    ],
)  # fmt: skip
def test_experts_that_cannot_be_are_refused_in_one_line(model: dict[str, Any], layout: dict[str, Any], words: str) -> None:
    data = small(model={"family": "llama", "ffn": 24} | model, run={"global_batch": 24}, **layout)
    with pytest.raises(ConfigError) as error:
        resolve(from_dict(TrainConfig, data), ranks(layout))
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("tune", [{"method": "lora"}, {"method": "ia3"}], ids=str)
def test_tuning_inside_experts_is_refused_by_name(tune: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="the model has experts there"):
        resolve(from_dict(TrainConfig, small(model=MODEL) | {"tune": tune}), 1)
