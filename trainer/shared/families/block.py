"""The matrices of a block, declared once: parameters, operations, timed products and the ranks of LoRA are all counted from these lists.

A network is anything with these widths: a model of the trainer, whose numbers are integers, or a shape of the cost model, whose numbers may
be numpy arrays, so that the matrices of many networks are listed at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol


class LatentWidths(Protocol):
    """Widths of the latents that queries, keys and values are made from; ``query_rank`` 0: queries are made from the hidden state."""

    @property
    def kv_rank(self) -> Any: ...
    @property
    def query_rank(self) -> Any: ...
    @property
    def rotary(self) -> Any: ...


class NetworkWidths(Protocol):
    """Widths that the matrices of a block are made of. ``value_width``: what attention gives to its output matrix."""

    @property
    def hidden(self) -> Any: ...
    @property
    def heads(self) -> Any: ...
    @property
    def query_width(self) -> Any: ...
    @property
    def kv_width(self) -> Any: ...
    @property
    def value_width(self) -> Any: ...
    @property
    def ffn(self) -> Any: ...
    @property
    def gated(self) -> bool: ...


class MixtureWidths(Protocol):
    """Numbers of a mixture of experts. ``shared_ffn``: inner width of the experts that every token visits."""

    @property
    def count(self) -> Any: ...
    @property
    def active(self) -> Any: ...
    @property
    def shared_ffn(self) -> Any: ...
    @property
    def shared_gate(self) -> bool: ...


class Matrix(NamedTuple):
    """``count`` matrices alike that map ``inputs`` numbers of a token to ``outputs`` and ``whole``.

    Tensor ranks share out the outputs, or the inputs where a matrix ``reduces``; the ``whole`` ones every rank has.
    """

    name: str  # as in ``tune.targets``, where it is one of those
    inputs: Any
    outputs: Any
    whole: Any = 0
    count: Any = 1
    visited: Any = 1  # of those, by each token
    reduces: bool = False
    encoded: bool = False  # it multiplies the encoder's output, not the block's own tokens

    @property
    def elements(self) -> Any:
        return self.inputs * (self.outputs + self.whole)


def weights(matrices: Iterable[Matrix]) -> Any:
    """Returns the elements of all of them."""
    return sum(matrix.count * matrix.elements for matrix in matrices)


def visited_weights(matrices: Iterable[Matrix]) -> Any:
    """Returns the elements that a token is multiplied with."""
    return sum(matrix.visited * matrix.elements for matrix in matrices)


def whole_weights(matrices: Iterable[Matrix]) -> Any:
    """Returns the elements that every tensor rank has."""
    return sum(matrix.inputs * matrix.whole for matrix in matrices)


def attention(network: NetworkWidths, latent: LatentWidths | None = None) -> list[Matrix]:
    """Returns the matrices of self-attention. With latents (DeepSeek-AI 2024, arXiv 2405.04434) the first makes those, and queries where
    these have none; every tensor rank makes all of them (Megatron Core, multi_latent_attention.py: ``linear_q_down_proj`` and
    ``linear_kv_down_proj`` are ``duplicated``)."""
    n, output = network, Matrix("output", network.value_width, network.hidden, reduces=True)
    if latent is None:
        return [Matrix("qkv", n.hidden, n.query_width + 2 * n.kv_width), output]
    queries, made = n.query_width + n.heads * latent.rotary, latent.query_rank + latent.kv_rank + latent.rotary
    return [
        Matrix("qkv", n.hidden, (latent.query_rank == 0) * queries, whole=made),
        Matrix("qkv", latent.kv_rank, n.query_width + n.value_width),
        Matrix("qkv", latent.query_rank, queries),
        output,
    ]


def crossing(network: NetworkWidths) -> list[Matrix]:
    """Returns the matrices of attention to an encoder's output."""
    n = network
    return [
        Matrix("crossing", n.hidden, n.query_width),
        Matrix("crossing", n.hidden, 2 * n.kv_width, encoded=True),
        Matrix("crossing", n.value_width, n.hidden, reduces=True),
    ]


def mlp(network: NetworkWidths) -> list[Matrix]:
    """Returns the matrices of an MLP; a gate is as wide as what it gates."""
    return _into_and_out(("up", "down"), network, network.ffn)


def routed(network: NetworkWidths, mixture: MixtureWidths, ffn: Any) -> list[Matrix]:
    """Returns the matrices of experts of an inner width of ``ffn``, each of which sees the tokens that are sent to it."""
    return _into_and_out(("experts", "experts"), network, ffn, count=mixture.count, visited=mixture.active)


def shared(network: NetworkWidths, mixture: MixtureWidths) -> list[Matrix]:
    """Returns the matrices of experts that every token visits."""
    return _into_and_out(("experts", "experts"), network, mixture.shared_ffn)


def router(network: NetworkWidths, mixture: MixtureWidths) -> Matrix:
    """Returns the matrix that scores experts, and the vector that weighs the shared ones."""
    return Matrix("router", network.hidden, 0, whole=mixture.count + mixture.shared_gate)


def _into_and_out(names: tuple[str, str], network: NetworkWidths, ffn: Any, **number: Any) -> list[Matrix]:
    up = Matrix(names[0], network.hidden, (2 if network.gated else 1) * ffn, **number)
    return [up, Matrix(names[1], ffn, network.hidden, reduces=True, **number)]
