"""A keyed permutation that is computed, not stored: the order of a corpus in an epoch, at any size and from any point.

A Feistel network permutes the numbers below a power of four; numbers that land at or above ``n`` are sent through again until
they are below ("cycle walking"), which permutes 0 .. n-1 (Black and Rogaway 2002, "Ciphers with arbitrary finite domains").
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

ROUNDS = 4


def mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Scrambles 64-bit numbers; each bit of the result depends on all of ``x`` (finaliser of splitmix64, Steele et al. 2014)."""
    with np.errstate(over="ignore"):
        x = x + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def key_of(*numbers: int) -> NDArray[np.uint64]:
    """One 64-bit key from several numbers; their order matters. Shape [1]."""
    key = np.zeros(1, dtype=np.uint64)
    for number in numbers:
        key = mix(key ^ np.uint64(number % 2**64))
    return key


def permute(positions: NDArray[np.int64], n: int, key: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Returns ``positions`` (each in 0 .. n-1, any shape) under the permutation of ``key``."""
    half = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))
    keys = mix(key ^ np.arange(ROUNDS, dtype=np.uint64))
    result = _feistel(positions.astype(np.uint64), half, keys)
    while (outside := result >= n).any():
        result[outside] = _feistel(result[outside], half, keys)
    return result.astype(np.int64)


def _feistel(x: NDArray[np.uint64], half: np.uint64, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Permutes the numbers of 2 x ``half`` bits, in a round for each of ``keys``."""
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = x >> half, x & mask
    for i in range(ROUNDS):
        left, right = right, left ^ (mix(right ^ keys[i : i + 1]) & mask)
    return (left << half) | right
