"""The matrix: any layout, drawn from the whole space, trains what one process trains."""

from __future__ import annotations

import pytest
from farm import Farm
from numerics.matrix import TOLERANCE, Matrix, draw


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
