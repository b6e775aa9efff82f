"""The matrix: any layout, drawn from the whole space, trains what one process trains."""

from __future__ import annotations

import pytest
from numerics.matrix import TOLERANCE, Case, Matrix, draw

from trainer.testing import Farm


@pytest.fixture(scope="module")
def matrix(farm: Farm) -> Matrix:
    return Matrix(farm)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case_index" in metafunc.fixturenames:
        metafunc.parametrize("case_index", range(metafunc.config.getoption("--layouts")))


def test_a_drawn_layout_has_losses_norms_and_parameters_of_one_process(
    matrix: Matrix, case_index: int, pytestconfig: pytest.Config
) -> None:
    case = draw(pytestconfig.getoption("--layout-seed"), case_index)
    name, difference = matrix.worst(case)
    if difference > TOLERANCE[case.precision]:
        pytest.fail(f"{name} differs by {difference:.1e}; smallest failing case:\npython tests/numerics/matrix.py '{matrix.shrunk(case)}'")


SPREAD = {"data": 8, "sharding": {"params": 8, "grads": 8, "optimizer": 8}}
OWN_NOTHING = [
    Case({"pipeline": 4, "stage_layers": [2, 0, 0, 2]}),
    Case({"pipeline": 4, "stage_layers": [0, 4, 0, 0], "schedule": "zero_bubble", "recompute": "full"}, {"tied": True, "dropout": 0.1}),
    Case(SPREAD, {"hidden": 4, "ffn": 4, "vocab": 2, "seq": 1, "layers": 1}),
]
"""Stages without a block, and more shards than a small model has elements for."""


@pytest.mark.parametrize("case", OWN_NOTHING, ids=str)
def test_ranks_that_own_no_parameter_train_along(matrix: Matrix, case: Case) -> None:
    name, difference = matrix.worst(case)
    assert difference <= TOLERANCE[case.precision], name
