"""The matrix: any layout, drawn from the whole space, trains what one process trains."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.farm import Farm
from tests.numerics.cases import STEPS, TASKS, VOCAB, Case
from tests.numerics.design import by_ranks, designed, kinds_of_layout, options, traits
from tests.numerics.draws import FAMILY_KINDS, LEVELS, ROPES, WHOLE, draw
from tests.numerics.matrix import TOLERANCE, Matrix
from trainer.data import open_dataset
from trainer.shared.parallel.sequence import zigzag
from trainer.shared.run.read import from_dict
from trainer.shared.run.rules import resolve
from trainer.shared.run.schema import EXCHANGES, METHODS, POSITIONS, RECOMPUTE, ROUTERS, TrainConfig
from trainer.shared.run.spans import SENTINELS
from trainer.shared.run.tuning import text_model

pytestmark = pytest.mark.slow

DESIGNED = {"dense": 42, "experts": 20, "context": 16, "slices": 12, "latent": 8, "pairs": 16, "muon": 14, "phases": 8}
"""Cases of every run, by their kind: as many as have each value of each axis."""
TOGETHER = 12
"""Drawn cases that the same ranks train one after the other."""
RANKS = {1: 1, 2: 1, 3: 1, 4: 6, 5: 1, 6: 1, 8: 3}
"""That a case may take, and how many tests share the designed cases that do."""
SHARDED = {"optimizer": 2, "grads": 2, "params": 1}


@pytest.fixture(scope="module")
def matrix(farm: Farm, pytestconfig: pytest.Config) -> Matrix:
    return Matrix(farm, plainer=not pytestconfig.getoption("--as-drawn"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case_index" in metafunc.fixturenames:
        metafunc.parametrize("case_index", range(0, metafunc.config.getoption("--layouts"), TOGETHER))


@pytest.mark.parametrize(("ranks", "part"), [(ranks, part) for ranks, parts in RANKS.items() for part in range(parts)])
def test_a_designed_layout_has_losses_norms_and_parameters_of_one_process(
    matrix: Matrix, ranks: int, part: int, pytestconfig: pytest.Config
) -> None:
    matrix.check(by_ranks(cases_of(pytestconfig)).get(ranks, [])[part :: RANKS[ranks]])


def cases_of(pytestconfig: pytest.Config) -> list[Case]:
    seed = pytestconfig.getoption("--layout-seed")
    return [case for kind, count in DESIGNED.items() for case in designed(seed, count, kind)]


@pytest.mark.campaign("layouts")
def test_a_drawn_layout_has_losses_norms_and_parameters_of_one_process(
    matrix: Matrix, case_index: int, pytestconfig: pytest.Config
) -> None:
    seed, last = pytestconfig.getoption("--layout-seed"), pytestconfig.getoption("--layouts")
    kinds = itertools.cycle([kind for kind in DESIGNED if kind != "muon"])
    drawn = by_ranks([draw(seed, index, next(kinds)) for index in range(case_index, min(last, case_index + TOGETHER))])
    for cases in drawn.values():
        matrix.check(cases)


@pytest.mark.campaign("layouts")
@pytest.mark.parametrize("first", range(0, 60, TOGETHER))
def test_a_drawn_mixture_in_4_bytes_is_that_of_one_process_where_no_choice_flips(
    matrix: Matrix, first: int, pytestconfig: pytest.Config, record_property: Callable[[str, object], None]
) -> None:
    """Another expert makes another model: tokens whose experts are others are counted, and their cases not compared."""
    matrix.flipped = [0, 0]
    for cases in by_ranks(
        [in_4_bytes(pytestconfig.getoption("--layout-seed"), index) for index in range(first, first + TOGETHER)]
    ).values():
        matrix.check(cases)
    others, every = matrix.flipped
    print(f"{others} of {every} choices of experts are others than in one process")
    record_property("worst share of choices that differ in fp32", others / every)
    assert others < every / 100


FEW_NUMBERS = Case(
    layout={"pipeline": 2, "context": 2, "recompute": "selective", "recompute_layers": 1, "stage_layers": [2, 1], "sharding": SHARDED},
    model={
        **{
            "family": "olmo3",
            "tied": True,
            "attention": "unfused",
            "ffn": 4,
            "layers": 3,
            "activation": "swiglu",
            "seq": 4,
            "norm": "layer",
        },
        **{"qk_norm": "none", "logit_cap": 0.7, "attention_scale": 0.3, "logit_scale": 0.5, "head_width": 12},
        "rope": {"kind": "linear", "factor": 2.0, "skip_every": 2},
        "latent": {"kv_rank": 8, "query_rank": 5, "rotary": 4, "value": 20, "interleaved": True},
    },
    batch=2,
)
"""Of 900 drawn layouts the one whose third norm was off by 1.3e-10."""


@pytest.mark.campaign("layouts")
def test_a_layout_differs_no_more_than_one_process_whose_weights_are_off_by_a_unit_in_the_last_place(matrix: Matrix) -> None:
    assert matrix.fault(FEW_NUMBERS) is None and matrix.rounding(FEW_NUMBERS) > TOLERANCE["fp64"]


@pytest.mark.campaign("layouts")
@pytest.mark.parametrize("first", range(0, 120, TOGETHER))
def test_a_drawn_layout_orthogonalises_the_matrices_of_one_process(matrix: Matrix, first: int, pytestconfig: pytest.Config) -> None:
    seed = pytestconfig.getoption("--layout-seed")
    for cases in by_ranks([draw(seed, index, "muon") for index in range(first, first + TOGETHER)]).values():
        matrix.check(cases)


def test_designed_layouts_reach_what_any_layout_could_have(pytestconfig: pytest.Config) -> None:
    cases = designed(pytestconfig.getoption("--layout-seed"), DESIGNED["dense"])
    assert set(by_ranks(cases)) <= set(RANKS)
    reached = {name: {traits(case)[name] for case in cases if name in traits(case)} for case in cases for name in traits(case)}
    assert reached["levels"] == set(LEVELS)
    assert {*itertools.product(WHOLE, RECOMPUTE)} <= reached["schedule"]
    degrees = {1, 2, 3, 4, 5, 6, 8}
    assert reached["data"] == degrees and reached["tensor"] == degrees and reached["pipeline"] == degrees
    assert reached["virtual"] == {1, 2, 3, 4} and reached["tasks"] == {1, *TASKS}
    assert reached["family"] == {*itertools.product(FAMILY_KINDS, [False, True])} and reached["tuned"] == {*METHODS}
    assert {kind for kind, _ in reached["data kind"]} == {"synthetic", "corpus", "instructions"} and ("instructions", True) in reached[
        "data kind"
    ]
    assert reached["buckets"] == {0.0, 0.03, 25.0} and reached["loss"] == {False, True} and len(reached["keys"]) == 3


def test_designed_layouts_have_every_option_of_a_model_under_every_kind_of_layout(pytestconfig: pytest.Config) -> None:
    cases = designed(pytestconfig.getoption("--layout-seed"), DESIGNED["dense"])
    met = set(itertools.chain.from_iterable(itertools.product(options(case), kinds_of_layout(case)) for case in cases))
    every = {option for option, _ in met}
    assert len(every) >= 23 and {kind for _, kind in met} >= {*WHOLE, "tensor", "low-rank tuning"}
    assert len({*itertools.product(every, {kind for _, kind in met})} - met) <= 2
    assert {case.model["rope"]["kind"] for case in cases if "rope" in case.model} == {*ROPES}


def test_designed_mixtures_reach_what_any_mixture_could_have(pytestconfig: pytest.Config) -> None:
    found = [traits(case) for case in designed(pytestconfig.getoption("--layout-seed"), DESIGNED["experts"], "experts")]
    reached = {name: {one[name] for one in found} for name in found[0]}
    folds = {(expert > 1, tensor > 1, data > 1) for expert, tensor, data in itertools.product((1, 2), repeat=3) if expert <= tensor * data}
    assert {(over, tensor, data) for over, tensor, _, data in reached["experts over"]} >= folds
    assert {sequence for _, _, sequence, _ in reached["experts over"]} == {False, True}
    assert {kind for kind, _, _, _ in reached["router"]} == {*ROUTERS} and {corrected for *_, corrected in reached["router"]} == {
        False,
        True,
    }
    assert {recompute for recompute, _ in reached["experts recomputed"]} == {*RECOMPUTE}
    assert {schedule for _, schedule in reached["experts recomputed"]} == {*WHOLE}
    assert {any(sharded) for _, *sharded in reached["experts alike"]} == {False, True}
    assert {(cut, dealt) for cut, _, dealt, _ in reached["experts cut"]} == {*itertools.product((False, True), repeat=2)}
    assert {case[0] for case in reached["cut experts"] if case} == {False, True}
    assert reached["one expert each"] == {False, True} and {balanced for balanced, *_ in reached["balanced"]} == {False, True}


def test_designed_contexts_reach_what_any_context_could_have(pytestconfig: pytest.Config) -> None:
    found = [traits(case) for case in designed(pytestconfig.getoption("--layout-seed"), DESIGNED["context"], "context")]
    reached = {name: {one[name] for one in found} for name in found[0] if name.startswith("context")}
    assert reached["context"] >= {*itertools.product((2, 4), EXCHANGES), (3, "all_gather")}
    assert {*itertools.product(RECOMPUTE, EXCHANGES)} == reached["context recomputed"]
    assert {*itertools.product(("fused", "unfused"), (False, True), EXCHANGES)} == reached["context attends"]
    assert {*itertools.product((False, True), ("fused", "unfused"))} == reached["context in windows"]
    assert {sequence for _, sequence, *_ in reached["context beside"]} == {False, True}
    assert {any(beside) for beside in reached["context beside"]} == {False, True}
    assert {(params, optimizer) for params, optimizer, _ in reached["context sharded"]} >= {(False, False), (False, True), (True, True)}
    assert reached["context with texts"] == reached["context with experts"] == {False, True}


def test_designed_slices_reach_what_any_slices_could_have(pytestconfig: pytest.Config) -> None:
    found = [traits(case) for case in designed(pytestconfig.getoption("--layout-seed"), DESIGNED["slices"], "slices")]
    reached = {name: {one[name] for one in found} for name in found[0] if name.startswith("slices")}
    assert {count for count, _ in reached["slices"]} >= {2, 3, 4} and {tokens for _, tokens in reached["slices"]} == {None, False, True}
    for beside in range(4):
        assert {values[beside] for values in reached["slices beside"]} == {False, True}
    assert reached["slices sharded"] >= {(False, False), (False, True), (True, True)} and reached["slices recomputed"] == {*RECOMPUTE}
    assert reached["slices attend"] == {*itertools.product(("fused", "unfused"), (False, True))}
    assert reached["slices in windows"] == {*itertools.product((False, True), ("fused", "unfused"))}
    assert reached["slices at"] == {*POSITIONS} - {"relative"}
    for name in ("texts", "experts"):
        assert reached[f"slices with {name}"] == {False, True}
    assert reached["slices of virtual tokens"] == {False, True}


def test_designed_latents_reach_what_any_latents_could_have(pytestconfig: pytest.Config) -> None:
    found = [traits(case) for case in designed(pytestconfig.getoption("--layout-seed"), DESIGNED["latent"], "latent")]
    reached = {name: {one[name] for one in found} for name in found[0] if name.startswith("latent")}
    assert reached["latent of queries"] == {*itertools.product((False, True), repeat=2)}
    assert {wider for wider, *_ in reached["latent values"]} == {dropout for *_, dropout in reached["latent values"]} == {False, True}
    for axis, name in enumerate(("tensor", "sequence parallelism", "pipeline", "data")):
        assert {over[axis] for over in reached["latent over"]} == {False, True}, name
    assert {recompute for recompute, _ in reached["latent recomputed"]} == {*RECOMPUTE}
    assert {params for params, _ in reached["latent sharded"]} == {turned for _, turned in reached["latent turning"]} == {False, True}
    assert reached["latent context"] == {False, *EXCHANGES}
    assert reached["latent experts"] >= {(False, False), (True, True)}


def test_designed_layouts_cut_matrices_in_every_way(pytestconfig: pytest.Config) -> None:
    found = [traits(case) for case in designed(pytestconfig.getoption("--layout-seed"), DESIGNED["muon"], "muon")]
    reached = {name: {one[name] for one in found} for name in found[0] if name.startswith("muon")}
    assert {(states, tensor) for states, tensor, _ in reached["muon shards"]} == {*itertools.product((False, True), repeat=2)}
    assert {(pipeline, replicas) for *_, pipeline, replicas in reached["muon over"]} == {*itertools.product((False, True), repeat=2)}
    assert {tensor for experts, _, tensor, _ in reached["muon with experts"] if experts} == {False, True}
    assert {states for context, states, _ in reached["muon with context"] if context} == {False, True}
    for name, values in {"nesterov": 2, "cautious": 2, "scale": 3, "row_beta": 2}.items():
        assert len(reached[f"muon.{name}"]) == values


def in_4_bytes(seed: int, index: int) -> Case:
    """A drawn mixture in fp32, with a model that makes little of rounding: without the options that are drawn in fp64 alone."""
    case = draw(seed, index, "experts")
    kept = ("family", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq", "dropout", "tied", "attention", "experts")
    plain = {name: value for name, value in case.model.items() if name in kept} | {"family": "llama", "hidden": case.model["heads"] * 8}
    data = {name: value for name, value in case.data.items() if name != "task"}
    return replace(case, model=plain, precision="fp32", tune={}, data=data)


def counted_by_rank(case: Case, folder: Path) -> list[int]:
    """Targets that count in the first step, by context rank."""
    run = resolve(from_dict(TrainConfig, case.config(folder)), case.ranks)
    rows = open_dataset(run.data, text_model(run.model, run.tune), run.run.seed).batch(0, case.batch)
    targets, degree = rows[:, 1:], case.layout["context"]
    pieces = [zigzag(run.model.seq, degree, rank) for rank in range(degree)]
    return [sum(int((targets[:, piece.start : piece.stop] >= 0).sum()) for piece in own) for own in pieces]


def test_designed_phases_reach_what_any_phases_could_have(pytestconfig: pytest.Config) -> None:
    found = [traits(case) for case in designed(pytestconfig.getoption("--layout-seed"), DESIGNED["phases"], "phases")]
    reached = {name: {one[name] for one in found} for name in found[0] if name.startswith("phases")}
    assert reached["phases"] == {*itertools.product((1, 2), (False, True))} and reached["phases of batches"] == {False, True}
    cut = [values[1:] for values in reached["phases over"] | reached["phases beside"] if values[0]]
    for axis in range(3):
        assert {values[axis] for values in cut} == {False, True}
    for name in ("experts", "noise"):
        assert {there for shorter, there in reached[f"phases with {name}" if name == "experts" else f"phases of {name}"] if shorter} == {
            False,
            True,
        }


def sharded(params: int, grads: int, optimizer: int) -> dict[str, int]:
    return {"params": params, "grads": grads, "optimizer": optimizer}


LATENT = {
    "family": "deepseek_v3",
    "layers": 1,
    "head_width": 6,
    "ffn": 16,
    "latent": {"kv_rank": 5, "query_rank": 7, "rotary": 4, "value": 3},
}
NAMED = {
    "latents over tensor ranks": Case({"tensor": 2}, LATENT),
    "latents over tensor ranks and pieces of sequences": Case({"tensor": 2, "sequence_parallel": True}, LATENT),
    "gradients of replicas of shards are summed": Case({"data": 8, "sharding": sharded(1, 2, 4)}),
    "two levels are published from the outer to the inner": Case({"data": 4, "sharding": sharded(1, 2, 4)}),
    "a row has the virtual tokens of its task on any replica": Case(
        {"data": 2}, {"layers": 1}, batch=6, tune={"method": "p_tuning", "virtual_tokens": 3, "encoder": 5, "tasks": 2}
    ),
    "a token of a later chunk has its own weight": Case(
        {"tensor": 2}, {"layers": 1, "vocab": 300, "seq": 24}, run={"loss_chunk_mb": 4 * 300 * 5 / 2**20}, data={"kind": "instructions"}
    ),
    "stages without a block": Case({"pipeline": 4, "stage_layers": [2, 0, 0, 2]}, {"layers": 4}),
    "stages without a block and a tied head": Case(
        {"pipeline": 4, "stage_layers": [0, 4, 0, 0], "schedule": "zero_bubble", "recompute": "full"},
        {"layers": 4, "tied": True, "dropout": 0.1},
    ),
    "experts without a token, for all go to the first": Case(
        {"tensor": 2, "expert": 2},
        {"family": "llama", "layers": 1, "init_std": 0.0, "seq": 5, "experts": {"count": 4, "active": 1, "ffn": 8, "z_loss": 0.1}},
    ),
    "tokens that tensor ranks do not divide": Case(
        {"tensor": 4, "expert": 2, "expert_tensor": 2},
        {"family": "llama", "layers": 1, "seq": 3, "experts": {"count": 4, "ffn": 8, "balance_loss": 0.3}},
    ),
    "orthogonalised matrices of parts of experts": Case(
        {"data": 2, "expert_tensor": 2, "sharding": sharded(1, 1, 2)},
        {"family": "llama", "layers": 1, "experts": {"count": 2, "ffn": 8}},
        optimizer={"kind": "muon"},
    ),
    "targets that only one context rank has": Case({"context": 2}, {"layers": 1, "vocab": 300, "seq": 24}, data={"kind": "instructions"}),
    "gathered weights of experts whose storage another block takes": Case(
        {"data": 2, "expert": 2, "schedule": "zero_bubble", "sharding": sharded(2, 2, 2)},
        {"family": "llama", "layers": 4, "experts": {"count": 4, "ffn": 8}},
    ),
    "packed texts, whose keys go round, over pieces of sequences of tensor ranks": Case(
        {"context": 2, "tensor": 2, "sequence_parallel": True},
        {"layers": 1, "vocab": VOCAB, "seq": 24},
        run={"context_exchange": "ring"},
        data={"kind": "instructions", "pack": True},
    ),
    "more shards than elements": Case(
        {"data": 8, "sharding": sharded(8, 8, 8)}, {"hidden": 4, "ffn": 4, "vocab": 2, "seq": 1, "layers": 1}
    ),
}
"""Cases for what has been wrong, or nearly."""


BESIDE_A_RING = {
    "a context rank no token of which counts": Case(
        {"context": 2}, {"layers": 1, "vocab": VOCAB, "seq": 64}, run={"context_exchange": "ring"}, data={"kind": "instructions"}
    ),
    "experts in 4 bytes": Case(
        {"context": 2, "expert": 2},
        {"family": "llama", "layers": 1, "experts": {"count": 4, "ffn": 8, "balance_loss": 0.3}},
        "fp32",
        run={"context_exchange": "ring"},
    ),
}
"""Likewise, of two ranks, which train one after the other."""


@pytest.mark.parametrize("name", NAMED)
def test_what_a_layout_could_get_wrong_is_right(matrix: Matrix, name: str) -> None:
    assert NAMED[name].steps == STEPS
    matrix.check([NAMED[name]])


def test_a_ring_is_right_where_a_rank_learns_nothing_and_where_experts_are_in_4_bytes(matrix: Matrix) -> None:
    first = next(iter(BESIDE_A_RING.values()))
    assert 0 in counted_by_rank(first, matrix.text)
    matrix.check([*BESIDE_A_RING.values()])


def test_designed_pairs_reach_what_any_encoder_and_decoder_could_have(pytestconfig: pytest.Config) -> None:
    found = [traits(case) for case in designed(pytestconfig.getoption("--layout-seed"), DESIGNED["pairs"], "pairs")]
    reached = {name: {one[name] for one in found} for name in found[0] if name.startswith("pairs")}
    assert {place for places, _ in reached["pairs cut"] for place in places} == {"encoder", "border", "decoder"}
    assert {schedule for places, schedule in reached["pairs cut"] if places} >= {"1f1b", "interleaved", "zero_bubble", "gpipe"}
    assert {(at, tensor) for at, tensor, *_ in reached["pairs at"]} >= {*itertools.product(("relative", "learned", "none"), (False, True))}
    assert {recompute for recompute, *_ in reached["pairs recomputed"]} == {*RECOMPUTE}
    assert {(tied, split) for tied, split, _ in reached["pairs tied"]} == {*itertools.product((False, True), repeat=2)}
    assert reached["pairs without use for a stream"] == {False, True}
    assert reached["pairs of data"] == {"synthetic", "corpus", "instructions"}
    assert {(1, 1)} <= reached["pairs' tokens"] and reached["pairs in training"] >= {"full", "lora"}


def test_streams_are_sent_in_parts_beside_whole_tables_and_come_back_from_a_stage_without_use_for_them(matrix: Matrix) -> None:
    pair = {"family": "t5", "layers": 4, "encoder_layers": 2, "seq": 12, "decoder_seq": 8, "ffn": 24}
    matrix.check([Case({"tensor": 2, "pipeline": 2}, pair)])
    matrix.check([Case({"pipeline": 2, "stage_layers": [4, 0]}, pair)])


def test_padding_behind_a_prompt_changes_nothing(matrix: Matrix) -> None:
    pair = {"family": "t5", "layers": 4, "encoder_layers": 2, "decoder_seq": 20, "ffn": 24, "vocab": VOCAB + SENTINELS}
    less, more = matrix.trained([Case({}, pair | {"seq": seq}, data={"kind": "instructions"}) for seq in (40, 48)])
    torch.testing.assert_close(less["losses"], more["losses"], rtol=1e-10, atol=0)
