"""The search for a front: it needs few measurements where predictions are good, and does not rest on them where they are not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.published.convert import converted
from benchmarks.replay.fronts import behind_front, grids, replay_front
from launcher.config.hardware import shipped_hardware
from launcher.planning.serving.plan import front
from launcher.search.front import FrontSearch
from launcher.tables.canonical import MeasuredRun, write
from launcher.tables.inference import read

RAW = Path(__file__).parents[2] / "benchmarks" / "published" / "inference_data" / "inference.csv"


def grid(seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Logarithms of tensor and batch, seconds, and devices per request in flight, of made-up points."""
    tensor, batch = (each.ravel().astype(float) for each in np.meshgrid(2 ** np.arange(4), 2 ** np.arange(6)))
    seconds = 1 / tensor + 0.02 * tensor + 0.03 * batch / tensor
    return np.log2(np.stack([tensor, batch], axis=1)), seconds * np.random.default_rng(seed).lognormal(0, 0.01, len(tensor)), tensor / batch


def searched(predicted: np.ndarray, most: int = 1000) -> tuple[FrontSearch, list[int], float]:
    place, seconds, per_second = grid()
    search, order = FrontSearch(predicted, per_second, place, spread=0.12, tolerance=0.02), []
    while len(order) < most and (point := search.ask()) is not None:
        order.append(point)
        search.tell(point, float(seconds[point]))
    return search, order, behind_front(search.answer(), seconds, seconds * per_second)


def test_no_point_is_measured_twice_and_the_search_ends() -> None:
    _, order, _ = searched(grid()[1])
    assert len(order) == len(set(order)) < len(grid()[1])


def test_with_no_tolerance_the_search_ends_when_all_is_known() -> None:
    place, seconds, per_second = grid()
    search = FrontSearch(seconds, per_second, place, 0.12, 0.0)
    for _ in seconds:
        if (point := search.ask()) is not None:
            assert point not in search.measured
            search.tell(point, float(seconds[point]))
    assert search.ask() is None


def test_good_predictions_need_few_measurements() -> None:
    _, order, behind = searched(grid()[1])
    assert len(order) <= 6 and behind <= 0.03


def test_an_error_that_all_points_share_changes_nothing() -> None:
    assert searched(0.85 * grid()[1])[2] <= 0.03


def test_a_layout_that_is_worse_than_predicted_leaves_the_front() -> None:
    """Tensor 4 is predicted a quarter too fast, so that it hides the others: less than half of the points tell."""
    place, seconds, per_second = grid()
    predicted = seconds * np.where(place[:, 0] == 2, 0.75, 1.0)
    start = FrontSearch(predicted, per_second, place, 0.12, 0.02)
    _, _, behind = searched(predicted, most=len(seconds) // 2 - 1)
    assert behind_front(start.named(), seconds, seconds * per_second) > 0.1 and behind <= 0.03


def test_everything_measured_is_the_true_front() -> None:
    place, seconds, per_second = grid()
    search = FrontSearch(np.ones_like(seconds), per_second, place, 0.12, 0.02)
    for point, value in enumerate(seconds):
        search.tell(point, float(value))
    assert search.ask() is None
    assert search.named().tolist() == front(seconds, seconds * per_second).tolist()


def test_a_point_that_only_costs_less_counts_as_much_as_one_that_is_only_faster() -> None:
    """Ten times slower than the fast one and a little dearer than predicted possible: it may be the cheapest, so it is tried."""
    place = np.array([[3.0, 0.0], [0.0, 5.0]])
    search = FrontSearch(np.array([1.0, 10.0]), np.array([8.0, 0.85]), place, 0.12, 0.02)
    assert search.named().tolist() == [0] and search.ask() is not None


def test_what_ties_with_a_measured_point_is_not_measured() -> None:
    """Two batches of one layout, alike within the tolerance: whichever is better, the answer holds both."""
    place, predicted = np.array([[0.0, 2.0], [0.0, 3.0], [3.0, 3.0]]), np.array([1.0, 1.99, 40.0])
    search = FrontSearch(predicted, 1 / 2 ** place[:, 1], place, 0.02, 0.05)
    search.tell(0, 1.0)
    assert search.answer().tolist() == [0, 1] and search.ask() is None


def test_errors_that_are_seen_to_be_small_are_expected_to_stay_small() -> None:
    place, _, per_second = grid()
    exact, off = (FrontSearch(np.ones(len(place)), per_second, place, 0.12, 0.02) for _ in range(2))
    for point in (0, 7, 14, 21):
        exact.tell(point, 1.0)
        off.tell(point, 1.3 if point % 2 else 0.8)
    assert (np.diag(exact.corrected()[1]) < np.diag(off.corrected()[1]) / 2).all()


@pytest.mark.parametrize("model", ["GPT-20B", "Megatron-530B"])
def test_published_fronts_are_found_within_five_measurements(tmp_path: Path, model: str) -> None:
    """All eight grids within 3 % of the true front, in time and in cost, with that tolerance. In random order nearly all points are needed."""
    path = tmp_path / "t.csv"
    write(path, *converted(RAW))
    named = {name: rows for name, rows in grids(read(path)).items() if model in name}
    found = [each for name, rows in named.items() if (each := replay_front(name, rows, shipped_hardware(), 0.03, 0.03, 5))]
    assert len(found) >= 3
    for each in found:
        assert each.behind[-1] <= 0.03 and each.random_order > 2 * each.measured, each.name


def test_a_grid_of_which_little_is_said_is_named_or_left_out(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    write(path, *converted(RAW))
    rows = [row for row in read(path) if row["model"] == "GPT-20B"]

    def without(column: str) -> list[str]:
        return [*grids([MeasuredRun(row.number, {**row.cells, column: None}) for row in rows])]

    assert all(name.startswith("(no source): GPT-20B ") for name in without("source")) and without("source")
    assert all(": (no model) " in name for name in without("model")) and without("model")
    assert not without("input") and not without("output")
