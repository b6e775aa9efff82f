"""Floating-point operations of a transformer: the one count behind MFU, measured and predicted.

2 per multiply-add. Counted are the matrices of the blocks, the head, and q k^T and weights times v; norms, activations and the
embedding lookup are not. The attention core counts the whole s x s square unless ``causal`` discounts the half above the
diagonal. This is the convention of Narayanan et al. 2021, equation 3, for any MLP and for grouped queries.

Sizes may be numpy arrays: the cost model counts many models at once.
"""

from __future__ import annotations

from typing import Any

from trainer.shared.families.block import Matrix, attention, branches, crossing, mlp, routed, router, shared, visited_weights
from trainer.shared.run.resolved import ResolvedModelConfig
from trainer.shared.run.schema import LayoutConfig


def matrices_of(model: ResolvedModelConfig, block: int) -> list[Matrix]:
    """Returns the matrices of one block of a model."""
    latent, experts = model.latent if model.latent.kv_rank else None, model.experts
    crossed = crossing(model) if model.writes(block) else []
    if not model.mixes(block):
        return [*attention(model, latent), *crossed, *mlp(model)]
    return [
        *attention(model, latent),
        *crossed,
        *routed(model, experts, model.expert_ffn),
        *shared(model, experts),
        router(model, experts),
    ]


def matrix_flops(tokens: Any, weights: Any) -> Any:
    """Returns the forward FLOPs of ``tokens`` through matrices of ``weights`` elements."""
    return 2 * tokens * weights


def attention_core_flops(seq: Any, width: Any, causal: bool = False) -> Any:
    """Returns the forward FLOPs of q k^T and weights times v for one sequence: 4 s^2 per query width, half of it below the diagonal."""
    return 4 * seq**2 * width / (2 if causal else 1)


def training_flops(forward: Any) -> Any:
    """Returns the FLOPs of forward and backward without recomputation: backward is twice forward."""
    return 3 * forward


def seen_keys(seq: Any, window: Any) -> Any:
    """Returns the keys that a query sees on average, counted as the whole square is: seq, or fewer with a window."""
    if window is None:
        return seq
    beyond = (seq - window + abs(seq - window)) / 2
    return seq - beyond**2 / seq


def seen_pairs(positions: int, window: int | None) -> int:
    """Returns the keys that the first so many queries of a sequence see, up to their own, summed over the queries."""
    near = positions if window is None else min(positions, window)
    return near * (near + 1) // 2 + (positions - near) * near


def work_up_to(model: ResolvedModelConfig, positions: int) -> float:
    """Returns the FLOPs of forward and backward of all blocks on the first positions of a sequence, each query with the keys that it sees.
    Backward of the attention core has 5 products where forward has 2, as its kernels compute the scores again (Dao 2023, arXiv 2307.08691,
    section 3.1.2)."""
    matrices = sum(visited_weights(matrices_of(model, block)) for block in range(model.layers))
    pairs = sum(seen_pairs(positions, model.window_of(block)) for block in range(model.layers))
    return float(training_flops(matrix_flops(positions, matrices)) + 3.5 * 4 * pairs * model.query_width)


def core_flops(model: ResolvedModelConfig, block: int) -> float:
    """Returns the forward FLOPs of the attention core of one block on one sequence; of a decoder that sees an encoder, of both cores."""
    if model.writes(block):
        return float(4 * model.decoder_seq * (model.decoder_seq + model.seq) * model.query_width)
    width = (model.query_width + model.heads * model.latent.rotary * bool(model.latent.kv_rank) + model.value_width) / 2  # of both products
    return float(attention_core_flops(model.seq, width) * seen_keys(model.seq, model.window_of(block)) / model.seq)


def block_flops(model: ResolvedModelConfig, block: int) -> float:
    """Returns the forward FLOPs of one block on one sequence."""
    own = model.decoder_seq if model.writes(block) else model.seq
    products = sum(
        matrix_flops(model.seq if matrix.encoded else own, matrix.visited * matrix.elements) for matrix in matrices_of(model, block)
    )
    return float(products) + core_flops(model, block)


def head_flops(model: ResolvedModelConfig) -> float:
    """Returns the forward FLOPs of the head on one sequence."""
    return float(matrix_flops(model.target_seq, model.hidden * model.vocab))


def model_flops(model: ResolvedModelConfig, sequences: int) -> float:
    """Returns the FLOPs of forward and backward of ``sequences`` without recomputation."""
    blocks = sum(block_flops(model, block) for block in range(model.layers))
    return sequences * float(training_flops(blocks + head_flops(model)))


def recomputed_flops(model: ResolvedModelConfig, layout: LayoutConfig, recomputed_blocks: int, sequences: int) -> float:
    """Returns the FLOPs that recomputation adds: a forward of each attention core, or of each block except the product that ends an MLP,
    unless a norm reads its output."""
    match layout.recompute:
        case "selective":
            again = sum(core_flops(model, block) for block in range(model.layers)) / model.layers
        case "full":
            each = sum(block_flops(model, block) for block in range(model.layers)) / model.layers
            normed = branches(model.norm_at, model.residual)[-1].after
            skipping = 0 if normed else 1 - len(model.mixtures) / model.layers
            tokens = sum(model.decoder_seq if model.writes(block) else model.seq for block in range(model.layers)) / model.layers
            again = each - skipping * matrix_flops(tokens, model.hidden * model.ffn)
        case _:
            again = 0.0
    return sequences * recomputed_blocks * again
