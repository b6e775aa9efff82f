"""Matrix products by shape: never faster than the device, slower where tiles and waves are wasted."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.cost.inputs.constants import SHIPPED
from launcher.cost.inputs.device import Device
from launcher.cost.time import matmul
from tests.cost.machines import HARDWARE

A100 = Device.of(HARDWARE["a100_80"], 8)
SIZES = st.integers(1, 20000)


def rate(m: float, n: float, k: float, precision: str = "bf16") -> float:
    return 2 * m * n * k / float(matmul.seconds(A100, precision, SHIPPED, m, n, k))


@given(SIZES, SIZES, SIZES)
def test_no_product_is_faster_than_the_device_or_its_memory(m: int, n: int, k: int) -> None:
    seconds = float(matmul.seconds(A100, "bf16", SHIPPED, m, n, k))
    assert seconds >= 2 * m * n * k / A100.rate("bf16")
    assert seconds >= 2 * (m * k + k * n + m * n) / A100.bandwidth


@given(SIZES, SIZES, SIZES)
def test_more_of_any_dimension_never_takes_less_time(m: int, n: int, k: int) -> None:
    base = float(matmul.seconds(A100, "bf16", SHIPPED, m, n, k))
    for grown in ((2 * m, n, k), (m, 2 * n, k), (m, n, 2 * k)):
        assert float(matmul.seconds(A100, "bf16", SHIPPED, *grown)) >= base


def test_large_products_come_near_the_sustained_rate() -> None:
    assert rate(8192, 8192, 8192) > 0.93 * A100.rate("bf16")


def test_a_last_wave_that_is_nearly_empty_costs_rate() -> None:
    """108 units and tiles of 256 x 128: 108 tiles are one full wave, 112 leave 104 units idle in the second."""
    full, spilled = rate(256 * 12, 128 * 9, 8192), rate(256 * 14, 128 * 8, 8192)
    assert spilled < 0.9 * full


def test_a_short_inner_dimension_and_few_rows_cost_rate() -> None:
    assert rate(4096, 4096, 128) < 0.8 * rate(4096, 4096, 4096)
    assert rate(16, 4096, 4096) < 0.2 * rate(4096, 4096, 4096)


def test_the_best_shape_reaches_what_was_measured_on_each_device() -> None:
    """hardware.csv: best measured bf16 products of 271 (A100), 795 (H100) and 1745 TFLOP/s (B200); a step sustains less."""
    for name, best in (("a100_80", 271.2e12), ("h100", 794.5e12), ("b200", 1745e12)):
        device = Device.of(HARDWARE[name], 8)
        n = 16384
        reached = 2 * n**3 / float(matmul.seconds(device, "bf16", SHIPPED, n, n, n))
        assert 0.55 * best < reached < best


def test_misaligned_inner_lengths_are_slower() -> None:
    assert matmul.aligned(np.array([128, 144, 150, 108])).tolist() == [1.0, 1.0, pytest.approx(1.6), pytest.approx(1.6)]


@given(st.integers(1, 400), st.sampled_from([8, 16, 24, 32, 40, 56]), st.sampled_from(["bf16", "fp16"]))
def test_a_product_is_slower_whose_rows_begin_between_lines(lines: int, beyond: int, precision: str) -> None:
    """14,400 / 8 = 1,800 numbers of two bytes are 28 lines and an eighth; 14,336 / 8 = 1,792 are 28."""
    whole, broken = 64 * lines, 64 * lines + beyond
    slower = 1 / SHIPPED.unaligned
    assert slower > 1
    found = [float(matmul.on_lines(A100, precision, SHIPPED, n, k)) for n, k in ((whole, whole), (broken, whole), (whole, broken))]
    assert found == [1.0, slower, slower]
    assert float(matmul.on_lines(A100, "fp8", SHIPPED, 128 * lines, 256)) == 1.0
    assert float(matmul.on_lines(A100, "fp8", SHIPPED, 128 * lines + 64, 256)) == slower
