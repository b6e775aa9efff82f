"""Rows of encoders and their decoders: what recipes say of their sizes, and how their steps and memory are predicted."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import pytest

from benchmarks.history.figures import rows_of
from benchmarks.published.convert import canonical
from benchmarks.published.raw import RawRow
from launcher.cost.inputs.shape import Shape
from launcher.tables.canonical import COLUMNS, MeasuredRun, Unanswerable, written
from launcher.tables.cases import shape_of
from launcher.tables.validation import PredictedRun, judge
from tests.cost.machines import HARDWARE
from trainer.shared.run.schema import ModelConfig

TABLE = Path(__file__).parents[2] / "benchmarks" / "published" / "data" / "t5.csv"
NEMO = "NeMo Framework Launcher CI timings on Selene (NVIDIA/NeMo-Framework-Launcher)"
CELLS = {"source": NEMO, "year": "2022", "arch": "t5", "gpus": "16", "tp": "2", "pp": "2", "gpu": "A100-80GB-SXM"}


def run(**cells: str) -> MeasuredRun:
    """A published row in canonical form."""
    return MeasuredRun(1, {name: COLUMNS[name].read(written(value)) for name, value in canonical(RawRow(1, CELLS | cells)).items()})


@pytest.fixture(scope="module")
def judged() -> list[PredictedRun]:
    return judge(rows_of(TABLE), HARDWARE)


def errors(judged: list[PredictedRun], *sources: str) -> list[float]:
    known = [one for one in judged if one.prediction and one.step_seconds and any(name in one.row["source"] for name in sources)]
    return [abs(one.prediction.step_time_s / one.step_seconds - 1) for one in known if one.prediction and one.step_seconds]


def test_published_steps_of_t5_and_mt5_are_predicted_by_constants_that_no_such_row_has_shaped(judged: list[PredictedRun]) -> None:
    """Layouts of the first are stated, those of the README a recipe's; its rows of whole trainings count what else those did."""
    stated, all_of_them = errors(judged, "Selene"), errors(judged, "Selene", "README")
    assert len(stated) == 14 and median(stated) < 0.1 and max(stated) < 0.17
    assert len(all_of_them) == 41 and median(all_of_them) < 0.09


def test_published_peak_memory_of_a_t5_of_9_billion_parameters(judged: list[PredictedRun]) -> None:
    """Megatron-LM d98e8a64: 45.26 GB allocated at the most, of a run whose deterministic kernels no profile knows."""
    (golden,) = [one for one in judged if "golden" in one.row["source"]]
    assert golden.prediction is not None and golden.step_seconds is None and golden.peak_bytes == 45.2619e9
    assert golden.prediction.reported_bytes == pytest.approx(golden.peak_bytes, rel=0.05)


def test_a_size_of_a_source_is_the_model_of_its_recipe() -> None:
    """Attention is scaled there, which is no question of cost."""
    shape = Shape.of(
        ModelConfig(
            **{"family": "t5", "layers": 16, "encoder_layers": 8, "hidden": 512, "ffn": 1024, "heads": 6, "head_width": 64, "seq": 512},
            **{"vocab": 250112, "decoder_seq": 128, "dropout": 0.1, "positions": "learned", "norm": "layer", "tied": True},
            biases=["qkv", "output", "up", "down"],
        )
    )
    assert shape_of(run(model="mt5 170m", mbs="64", gbs="2048")) == shape


def test_a_variant_has_the_stacks_and_positions_that_it_names() -> None:
    found = run(model="mt5 170m", notes="100 steps; variant RPE_EncLayer2_DecLayer6_SplitRank1")
    assert (found["layers"], found["encoder_layers"], shape_of(found).buckets) == (8, 2, 32)


def test_a_recipe_whose_micro_batches_make_no_batch_of_the_row_is_another_layout() -> None:
    """3B on 160 devices, 2,160 samples: not of 24 each."""
    cells = CELLS | {"gpus": "160", "model": "T5-3B", "gbs": "2160", "tp": "", "pp": ""}
    assert run(**{name: text for name, text in cells.items() if text})["tensor"] == 2  # stated
    assert canonical(RawRow(1, {name: text for name, text in cells.items() if text}))["tensor"] is None
    assert run(model="T5-3B", gpus="160", gbs="1920")["micro_batch"] == 24


def test_a_size_that_no_recipe_has_is_not_known() -> None:
    with pytest.raises(Unanswerable, match="not known"):
        shape_of(run(model="t5 7b", layers="24", hidden="1024"))


@pytest.mark.parametrize(
    ("cells", "why"),
    [
        ({"encoder_layers": 24}, "no block is left"),
        ({"encoder_layers": 0}, "for an encoder and its decoder"),
        ({"decoder_seq": 0}, "for an encoder and its decoder"),
        ({"family": "gpt"}, "for nothing else"),
    ],
)
def test_stacks_that_cannot_be_are_a_reason(cells: dict[str, object], why: str) -> None:
    row = run(model="t5 220m")
    with pytest.raises(Unanswerable, match=why):
        shape_of(MeasuredRun(1, {**row.cells, **cells}))
