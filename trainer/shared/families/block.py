"""The branches and matrices of a block, declared once: modules, parameters, operations, timed products, kept activations and the ranks of
LoRA are all made or counted from these lists.

A network is anything with these widths: a model of the trainer, whose numbers are integers, or a shape of the cost model, whose numbers may
be numpy arrays, so that the matrices of many networks are listed at once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
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
    def head_width(self) -> Any: ...
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


class ResidualBranch(NamedTuple):
    """A part of a block that reads the residual stream and adds to it."""

    name: str  # modules and their norms are named after it
    before: bool  # a norm of what it reads
    after: bool  # a norm of what it adds
    behind: int = 0  # branches that have added to what it reads
    shares: bool = False  # it reads what the norm before the first branch gives


def branches(norm_at: str, residual: str) -> tuple[ResidualBranch, ...]:
    """Returns attention and MLP, one after the other or in parallel (``model.residual``), with norms where ``model.norm_at`` has them."""
    before, after, one_norm = norm_at != "after", norm_at != "before", residual == "parallel_one_norm"
    attention = ResidualBranch("attention", before, after)
    return attention, ResidualBranch("mlp", before and not one_norm, after, int(residual == "sequential"), before and one_norm)


def norms(parts: Iterable[ResidualBranch]) -> int:
    """Returns the norms of the hidden state."""
    return sum(part.before + part.after for part in parts)


def norm_inputs(parts: Iterable[ResidualBranch]) -> int:
    """Returns the tensors that those read: states of the residual stream, and results of branches."""
    parts = list(parts)
    return len({part.behind for part in parts if part.before}) + sum(part.after for part in parts)


def product_inputs(parts: Iterable[ResidualBranch]) -> int:
    """Returns the tensors that the first products of all branches read: results of norms, or states of the residual stream."""
    parts = list(parts)
    return sum(part.before for part in parts) + len({part.behind for part in parts if not (part.before or part.shares)})


class HeadNorm(NamedTuple):
    """A norm of queries or keys, or of a latent that they are made from."""

    name: str
    weights: Any  # elements of its scale
    normed: Any  # elements of a token
    shifted: bool  # it has a bias where the norms of the residual stream have one
    whole: bool = False  # every tensor rank norms all of a token, not the heads that it has


def head_norms(network: NetworkWidths, kind: str, latent: LatentWidths | None = None) -> list[HeadNorm]:
    """Returns the norms of queries and keys: of each head or of all heads together (``kind``: ``model.qk_norm``), or of the latents."""
    if latent is not None:
        ranks = {"query.norm": latent.query_rank, "latent.norm": latent.kv_rank}
        return [HeadNorm(name, rank, rank, shifted=True, whole=True) for name, rank in ranks.items()]
    widths = {} if kind == "none" else {"query_norm": network.query_width, "key_norm": network.kv_width}
    each = kind == "head"
    return [HeadNorm(name, network.head_width if each else width, width, shifted=each) for name, width in widths.items()]


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
    bias: str = ""  # one of ``model.biases`` says whether it has one; empty: it has none

    @property
    def elements(self) -> Any:
        return self.inputs * (self.outputs + self.whole)


def weights(matrices: Iterable[Matrix]) -> Any:
    """Returns the elements of all of them."""
    return sum(matrix.count * matrix.elements for matrix in matrices)


def visited_weights(matrices: Iterable[Matrix]) -> Any:
    """Returns the elements that a token is multiplied with."""
    return sum(matrix.visited * matrix.elements for matrix in matrices)


def biases(matrices: Iterable[Matrix], named: Collection[str]) -> Any:
    """Returns the elements of the biases of those that have one, where a model has those ``named``."""
    return sum(matrix.count * matrix.outputs for matrix in matrices if matrix.bias in named)


def whole_weights(matrices: Iterable[Matrix]) -> Any:
    """Returns the elements that every tensor rank has."""
    return sum(matrix.inputs * matrix.whole for matrix in matrices)


def attention(network: NetworkWidths, latent: LatentWidths | None = None) -> list[Matrix]:
    """Returns the matrices of self-attention. With latents (DeepSeek-AI 2024, arXiv 2405.04434) the first makes those, and queries where
    these have none; every tensor rank makes all of them (Megatron Core, multi_latent_attention.py: ``linear_q_down_proj`` and
    ``linear_kv_down_proj`` are ``duplicated``)."""
    n, output = network, Matrix("output", network.value_width, network.hidden, reduces=True, bias="output")
    if latent is None:
        return [Matrix("qkv", n.hidden, n.query_width + 2 * n.kv_width, bias="qkv"), output]
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
        Matrix("crossing", n.hidden, n.query_width, bias="qkv"),
        Matrix("crossing", n.hidden, 2 * n.kv_width, encoded=True, bias="qkv"),
        Matrix("crossing", n.value_width, n.hidden, reduces=True, bias="output"),
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
    up = Matrix(names[0], network.hidden, (2 if network.gated else 1) * ffn, bias="up", **number)
    return [up, Matrix(names[1], ffn, network.hidden, reduces=True, bias="down", **number)]
