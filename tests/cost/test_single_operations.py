"""What single operations took on a GPU (benchmarks/single_operations.csv), and the defaults of constants that rest on it."""

from pathlib import Path

import pytest

from benchmarks.single_operations import Table, memory_bound, of_products
from launcher.config.constants import constant_entries

pytestmark = pytest.mark.slow  # imports torch

TABLE = Path(__file__).parents[2] / "benchmarks" / "single_operations.csv"
RESTING = {name: entry for name, entry in constant_entries().items() if TABLE.name in entry["source"]}


@pytest.mark.parametrize("name", RESTING)
def test_a_default_said_to_be_measured_is_what_the_table_says(name: str) -> None:
    assert RESTING[name]["evidence"] == "measured"
    assert RESTING[name]["default"] == pytest.approx(memory_bound(Table(TABLE))[name], rel=0.01)


def test_no_measured_constant_is_far_from_the_one_in_use() -> None:
    """A tenth is what a measured default may be off."""
    found = memory_bound(Table(TABLE))
    apart = {name: constant_entries()[name]["value"] / found[name] for name in RESTING}
    assert len(apart) == 6 and all(0.9 < each < 1.1 for each in apart.values()), apart


def test_products_alone_are_told_by_few_constants() -> None:
    """Of least squares over three layouts, two precisions and sizes of many models: rates below the peak, and no tile better than its half."""
    found, _ = of_products(Table(TABLE))
    assert 0.6 < found["rate bf16"] / 989e12 < 0.85 and 0.6 < found["rate fp8"] / 1979e12 < 0.85
    assert found["small_tile"] <= 1 and found["unaligned"] <= 1
