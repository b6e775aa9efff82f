"""Model sizes from budgets, shapes from sizes, hyper-parameters from shapes: against the published values they come from."""

from __future__ import annotations

import itertools
import json
import math
import random
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from launcher.cli.main import main as run_program
from launcher.config import compose
from launcher.planning.baseline import baseline, round_batch
from launcher.planning.layout_names import name_of
from launcher.planning.shapes import FAMILY_DEFAULTS, build_reference, count, log_interpolate, shape_for
from launcher.planning.size import CHEAPEST, DAY, FASTEST, FEWEST, Budget, alternatives, executed_flops, largest, provisions, seconds_at
from tests.draws import draws
from trainer.shared.run.derived import resolve_model
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.read import from_dict
from trainer.shared.run.schema import LayoutConfig, ModelConfig

pytestmark = pytest.mark.slow

SIZES = (5e8, 1e9, 2e9, 4e9, 8e9, 1.5e10, 2.5e10, 6e10, 1e11, 2.4e11, 4e11, 7e11, 1.5e12)


def test_sc21_trains_175b_on_1024_gpus_in_34_days() -> None:
    """Narayanan et al. 2021 (arXiv 2104.04473), section 5: 300 B tokens, 140 TFLOP/s per GPU, full recomputation, 34 days."""
    seconds = seconds_at(1024, 140, "full")
    model = shape_for("gpt", 175e9)
    assert (model.layers, model.hidden) == (96, 12288)
    assert seconds(model, 300e9) / DAY == pytest.approx(34, rel=0.05)
    assert largest("gpt", Budget(1024, 36), 300e9, seconds).model == model


PUBLISHED_T5 = {
    77e6: (8, 512, 6, 64, 1024), 248e6: (12, 768, 12, 64, 2048), 783e6: (24, 1024, 16, 64, 2816), 2.85e9: (24, 2048, 32, 64, 5120),
    11.3e9: (24, 4096, 64, 64, 10240), 23.5e9: (36, 5120, 80, 64, 10880), 41e9: (48, 6144, 96, 64, 10880),
}  # fmt: skip
"""Parameters; blocks of each stack, hidden, heads, their width, ffn."""


def test_an_encoder_and_its_decoder_have_published_shapes_and_any_size_between_them_within_three_in_a_hundred() -> None:
    for parameters, shape in PUBLISHED_T5.items():
        found = shape_for("t5", parameters)
        assert found.layers == 2 * (found.encoder_layers or 0) and (found.seq, found.decoder_seq) == (512, 114)
        assert (found.encoder_layers, found.hidden, found.heads, found.head_width, found.ffn) == shape
    for vocab, least in ((None, 6e7), (250112, 3e8)):
        sizes = [least * 1.23**step for step in range(35)]
        made = [shape_for("t5", parameters, vocab) for parameters in sizes]
        assert all(abs(count(model) / parameters - 1) <= 0.03 for model, parameters in zip(made, sizes))
        assert all(model.layers % 2 == 0 and 1.4 < (model.ffn or 0) / model.hidden < 3.3 for model in made)


@pytest.mark.parametrize("recompute, factor", [("none", 6), ("full", 8)])
def test_work_per_token_is_6n_or_8n_plus_attention_and_head(recompute: str, factor: int) -> None:
    model = shape_for("gpt", 175e9)
    blocks = 12 * model.layers * model.hidden**2
    attention = factor * 2 * model.layers * model.hidden * model.seq
    head = 6 * model.vocab * model.hidden
    assert executed_flops(model, recompute) == pytest.approx(factor * blocks + attention + head, rel=1e-9)


def test_selective_recomputation_repeats_only_the_attention_core() -> None:
    model = shape_for("gpt", 22e9)
    extra = executed_flops(model, "selective") - executed_flops(model, "none")
    assert extra == pytest.approx(4 * model.layers * model.seq * model.hidden)


def test_more_of_anything_buys_a_larger_model() -> None:
    def size(gpus: int = 512, days: float = 20, tokens: float = 300e9, tflops: float = 150, recompute: str = "none") -> float:
        return largest("gpt", Budget(gpus, days), tokens, seconds_at(gpus, tflops, recompute)).parameters

    base = size()
    assert size(gpus=1024) > 1.8 * base and size(days=40) > 1.8 * base and size(tflops=300) > 1.8 * base
    assert size(tokens=600e9) < 0.6 * base and size(recompute="full") < base


def test_the_size_fills_the_days_and_never_exceeds_them() -> None:
    for days, family in zip(itertools.cycle((1, 10, 34)), FAMILY_DEFAULTS):
        budget, seconds = Budget(256, days), seconds_at(256, 150, "none")
        choice = largest(family, budget, 300e9, seconds)
        assert 0.92 * days < choice.days <= days and choice.limit == "days" and choice.name == "largest"
        assert all(other.days <= days for other in alternatives(choice, budget, seconds))


def test_where_time_does_not_grow_steadily_the_largest_within_the_days_is_found() -> None:
    """Depths that 4 divides are a tenth faster, as where they divide the stages: the larger of two neighbours may be the faster."""
    steady = seconds_at(1024, 140, "none")

    def seconds(model: ModelConfig, tokens: float) -> float:
        return steady(model, tokens) * (1.1 if model.layers % 4 else 1.0)

    choice = largest("gpt", Budget(1024, 24), 300e9, seconds)
    near = [shape_for("gpt", choice.parameters * factor) for factor in (1.02, 1.04, 1.06, 1.08)]
    assert choice.days <= 24
    assert all(seconds(model, 300e9) > 24 * DAY for model in near if count(model) > choice.parameters)


def test_memory_limits_the_size_where_the_days_do_not() -> None:
    def seconds(model: ModelConfig, tokens: float) -> float:
        return DAY if count(model) < 30e9 else math.inf

    budget = Budget(8, 10)
    choice = largest("gpt", budget, 1e9, seconds)
    assert 0.9 * 30e9 < choice.parameters < 30e9 and choice.limit == "memory" and choice.days == 1
    assert all(other.parameters < 30e9 for other in alternatives(choice, budget, seconds))


def test_a_budget_for_no_known_size_is_a_plain_error() -> None:
    steady = seconds_at(8, 100, "none")
    for days, tokens, seconds, words in (
        (1e-4, 1e9, steady, "no gpt is small enough for 0.0001 days on 8 GPUs"),
        (1.0, 1e9, lambda *_: math.inf, "does not fit"),
        (1e9, 1e9, steady, "fills 1e[+]09 days"),
    ):
        with pytest.raises(ConfigError, match=words):
            largest("gpt", Budget(8, days), tokens, seconds)


def test_a_size_that_the_gpus_cannot_share_is_too_small_and_no_error() -> None:
    def seconds(model: ModelConfig, tokens: float) -> float:
        if count(model) < 5e9:
            raise ConfigError("no layout fits so many ranks")
        return steady(model, tokens)

    steady = seconds_at(1024, 100, "none")
    assert largest("gpt", Budget(1024, 5), 300e9, seconds) == largest("gpt", Budget(1024, 5), 300e9, steady)
    with pytest.raises(ConfigError, match="no gpt is small enough"):
        largest("gpt", Budget(1024, 0.5), 300e9, seconds)
    with pytest.raises(ConfigError, match="no layout fits so many ranks"):
        largest("gpt", Budget(1024, 5), 300e9, lambda *_: seconds(shape_for("gpt", 1e9), 1e9))


def test_the_smallest_models_have_no_alternatives_that_are_smaller_still() -> None:
    budget, seconds = Budget(1, 0.02), seconds_at(1, 100, "none")
    choice = largest("gpt", budget, 1e9, seconds)
    assert [other.name for other in alternatives(choice, budget, seconds)] == ["compute-optimal"]


def test_compute_optimal_is_twenty_tokens_per_parameter_and_no_alternative_predicts_a_lower_loss_by_much() -> None:
    budget, seconds = Budget(1024, 30), seconds_at(1024, 150, "none")
    best = largest("llama", budget, None, seconds)
    assert best.tokens / best.parameters == pytest.approx(20)
    asked = largest("llama", budget, 300e9, seconds)
    names = {choice.name: choice for choice in alternatives(asked, budget, seconds)}
    assert set(names) == {"compute-optimal", "half the size", "a quarter of the size"}
    assert names["half the size"].tokens == pytest.approx(2 * asked.tokens, rel=0.1)
    assert min(choice.loss for choice in names.values()) < asked.loss


@pytest.mark.parametrize("family", sorted(FAMILY_DEFAULTS))
def test_published_models_keep_their_published_shape(family: str) -> None:
    defaults = FAMILY_DEFAULTS[family]
    for reference in defaults.models:
        published = build_reference(family, reference, defaults.seq)
        assert shape_for(family, count(published)) == published
        assert shape_for(family, 1.02 * count(published)) == published


@pytest.mark.parametrize(
    "family, size, expected",
    [("gpt", 126e6, (12, 768, 12)), ("gpt", 5e9, (24, 4096, 32)), ("gpt", 20e9, (44, 6144, 48)), ("gpt", 175e9, (96, 12288, 96)),
     ("llama", 13e9, (40, 5120, 40)), ("llama", 65e9, (80, 8192, 64)), ("bloom", 176e9, (70, 14336, 112))],
)  # fmt: skip
def test_nominal_sizes_mean_the_published_models(family: str, size: float, expected: tuple[int, int, int]) -> None:
    model = shape_for(family, size)
    assert (model.layers, model.hidden, model.heads) == expected


@pytest.mark.parametrize("family", sorted(FAMILY_DEFAULTS))
def test_shapes_between_the_published_ones_have_the_size_asked_for_and_can_be_split(family: str) -> None:
    before = 0
    for size in SIZES:
        model = shape_for(family, size)
        assert count(model) == pytest.approx(size, rel=0.06)
        assert model.hidden % model.heads == 0 and model.hidden // model.heads % 2 == 0
        assert size < 2e9 or model.heads % 4 == 0
        assert model.hidden >= 0.8 * before, "a larger model is not much narrower"
        stack = model.layers - (model.encoder_layers or 0)
        assert 0.2 < stack / model.hidden * 128 < 4, "neither a needle nor a plate"
        before = model.hidden
    resolve_model(model)


def test_a_llama_of_70b_has_grouped_queries_and_a_small_one_has_not() -> None:
    assert shape_for("llama", 100e9).kv_heads == 8 and shape_for("llama", 30e9).kv_heads == shape_for("llama", 30e9).heads


def test_interpolation_goes_through_its_points_and_stays_between_them() -> None:
    points = [(1.0, 10.0), (100.0, 1000.0), (1000.0, 500.0)]
    assert [log_interpolate(points, x) for x, _ in points] == pytest.approx([y for _, y in points])
    assert log_interpolate(points, 10) == pytest.approx(100)
    assert log_interpolate(points, 0.1) == 10 and log_interpolate(points, 8000, beyond=1 / 3) == pytest.approx(1000)


@pytest.mark.parametrize(
    "family, size, lr, batch",
    [("gpt", 126e6, 6e-4, 256), ("gpt", 1.3e9, 2e-4, 512), ("gpt", 20e9, 1e-4, 2048), ("gpt", 175e9, 0.6e-4, 2048),
     ("llama", 7e9, 3e-4, 2048), ("llama", 65e9, 1.5e-4, 2048), ("bloom", 7.1e9, 1.2e-4, 512), ("bloom", 176e9, 0.6e-4, 2048)],
)  # fmt: skip
def test_hyper_parameters_of_published_sizes_are_the_published_ones(family: str, size: float, lr: float, batch: int) -> None:
    made = baseline(shape_for(family, size), 300e9)
    assert made.optimizer.lr == pytest.approx(lr) and made.optimizer.min_lr == pytest.approx(lr / 10)
    assert made.run.global_batch == batch
    assert made.run.steps == pytest.approx(300e9 / (batch * 2048), abs=1)
    assert made.model.init_std == pytest.approx(0.64 / math.sqrt(made.model.hidden), abs=1e-6)


def test_learning_rate_falls_and_batch_grows_with_size() -> None:
    for family in FAMILY_DEFAULTS:
        made = [baseline(shape_for(family, size), 300e9) for size in SIZES]
        rates, batches = [m.optimizer.lr for m in made], [m.run.global_batch for m in made]
        assert rates == sorted(rates, reverse=True) and batches == sorted(batches)


def test_a_longer_sequence_keeps_the_tokens_of_a_step() -> None:
    short, long = (baseline(shape_for("gpt", 20e9, seq=seq), 300e9) for seq in (2048, 8192))
    assert short.run.global_batch == 4 * long.run.global_batch and short.run.steps == long.run.steps


@pytest.mark.parametrize("gpus", [8, 24, 96, 1000, 1024])
def test_the_batch_suits_the_number_of_gpus(gpus: int) -> None:
    batch = round_batch(2048, gpus)
    odd = gpus // (gpus & -gpus)
    assert batch % odd == 0 and 0.7 < batch / 2048 < 1.42


def test_short_runs_have_a_schedule_that_fits_into_them() -> None:
    made = baseline(shape_for("llama", 7e9), 1e8)
    assert made.optimizer.warmup_steps < made.run.steps and made.run.warmup_steps < made.run.steps


def test_impossible_sizes_are_plain_errors() -> None:
    for wrong in (
        lambda: Budget(0, 1),
        lambda: Budget(8, -1),
        lambda: shape_for("gpt", 1e3),
        lambda: shape_for("bloom", 2e6),
        lambda: shape_for("gptt", 1e9),
        lambda: largest("gptt", Budget(8, 1), 1e9, seconds_at(8, 100, "none")),
        lambda: largest("gpt", Budget(8, 1), 0, seconds_at(8, 100, "none")),
        lambda: seconds_at(8, 0, "none"),
        lambda: executed_flops(shape_for("gpt", 1e9), "some"),
        lambda: baseline(shape_for("gpt", 1e9), 10),
    ):
        with pytest.raises(ConfigError):
            wrong()


# -- backwards --------------------------------------------------------------------------------------------------------------


@draws(gate=60, campaign=3000)
@given(
    st.floats(1.0, 3e5),
    st.floats(0.5, 60),
    st.sampled_from([1, 4, 8, 72]),
    st.integers(1, 3000),
    st.floats(0, 0.3),
    st.integers(0, 9),
    st.integers(0, 2**13),
)
@example(100.0, 1.0, 8, 3000, 0.3, 1, 0)
@example(64.0 * 30, 30.0, 1, 3000, 0.0, 0, 0)
def test_one_node_less_than_the_fewest_gpus_misses_the_deadline(
    work: float, deadline: float, node: int, most: int, bumps: float, seed: int, smallest: int
) -> None:
    """Days that fall with GPUs, but for odd numbers (which layouts divide badly), few GPUs (memory) and many (the batch)."""

    def days_at(gpus: int) -> float:
        if gpus < smallest:
            return math.inf
        odd = random.Random(f"{seed} {gpus}").random() if gpus & (gpus - 1) else 0.0
        return work / min(gpus, 2048) * (1 + bumps * odd) + 1e-3

    try:
        found = {each.name: each for each in provisions(days_at, deadline, node, most)}
    except ConfigError as error:
        tried = [2**power * node for power in range(12) if 2**power * node <= most]
        assert all(days_at(gpus) > deadline for gpus in tried) and str(error).startswith(f"no number of GPUs up to {most:,} ends within")
        return
    fewest, cheapest, fastest = (found[name] for name in (FEWEST, CHEAPEST, FASTEST))
    for each in found.values():
        assert each.days == days_at(each.gpus) <= deadline and each.gpus % node == 0 and each.gpus <= most
        assert each.gpu_hours == each.gpus * each.days * 24
    assert fewest.gpus == node or days_at(fewest.gpus - node) > deadline
    assert cheapest.gpu_hours <= min(fewest.gpu_hours, fastest.gpu_hours) and fastest.days <= min(fewest.days, cheapest.days)


def test_the_answer_backwards_is_the_one_forwards_to_the_gpu_and_the_cent(capsys: pytest.CaptureFixture[str]) -> None:
    def answer(*words: str) -> dict[str, Any]:
        assert run_program(["size", "--parameters", "7e9", "--tokens", "1e12", "hardware=h100", "--json", *words]) == 0
        return dict(json.loads(capsys.readouterr().out))

    price, deadline = "cluster.price_per_gpu_hour=2.37", 14
    backwards = answer("--days", str(deadline), "--gpus", "256", price)
    fewest, cheapest, fastest = backwards["choices"]
    for choice in backwards["choices"]:
        forwards = answer("--gpus", str(choice["gpus"]), price)["choice"]
        assert forwards["days"] == choice["days"] and round(forwards["price"], 2) == round(choice["price"], 2)
        assert choice["price"] == pytest.approx(choice["days"] * 24 * choice["gpus"] * 2.37, abs=0.005)
    assert fewest["days"] <= deadline < answer("--gpus", str(fewest["gpus"] - 8))["choice"]["days"]
    assert cheapest["price"] <= fewest["price"] and fastest["days"] <= fewest["days"] and fastest["gpus"] <= 256
    cluster = backwards["config"]["cluster"]
    assert cluster["nodes"] * cluster["gpus_per_node"] == cheapest["gpus"]
    recipe = from_dict(LayoutConfig, backwards["config"]["layout"] | {"data": cheapest["layout"]["data"]})
    assert name_of(recipe) == cheapest["layout_name"], "the layout is that of the run which the recipe describes, its dropout included"


def test_a_transfer_tells_its_base_whose_rate_and_initial_weights_the_run_has(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_program(["size", "--parameters", "1.3e9", "--tokens", "30e9", "--transfer", "completep", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    model, base = from_dict(ModelConfig, found["config"]["model"]), found["base"]
    assert (model.transfer.hidden, model.transfer.layers, model.hidden) == (256, 2, 2048)
    small = compose(["model.vocab=51200", "model.seq=2048", *base["overrides"]]).model
    assert (small.hidden, small.layers, small.heads) == (256, 2, 2) and count(small) == base["parameters"]
    alone = baseline(small, 30e9)
    assert found["optimizer"]["lr"] == base["lr"] == alone.optimizer.lr == 6e-4 > baseline(shape_for("gpt", 1.3e9), 30e9).optimizer.lr
    assert found["choice"]["model"]["transfer"]["kind"] == "completep" and found["run"]["global_batch"] == 512
    assert baseline(resolve_model(model), 30e9).model.init_std == alone.model.init_std
    assert run_program(["size", "model=gpt_tiny", "model.transfer.kind=mup", "model.transfer.hidden=64", "--tokens", "30e6"]) == 0
    assert "base of mup: width 64, 4 layers, 4.7e+05 parameters; optimizer.lr=0.0006" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["model=gpt_tiny", "model.transfer.kind=mup", "model.transfer.hidden=64", "--transfer", "mup"],
            "--transfer=mup chooses a base, and",
        ),
        (["--parameters", "3e9", "--family", "t5", "--transfer", "mup"], "model.transfer.kind=mup has no rule for model.family=t5"),
        (["model=gpt_tiny", "model.transfer.kind=mup", "model.transfer.hidden=48"], "model.transfer.hidden=48: width 48 would have 4 x 48"),
    ],
    ids=["two bases", "encoder", "half a head"],
)
def test_a_base_that_cannot_be_is_one_plain_error(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_program(["size", "--tokens", "30e6", *words]) == 2
    assert message in capsys.readouterr().err
