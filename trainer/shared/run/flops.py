"""Floating-point operations of a transformer: the one count behind MFU, measured and predicted.

2 per multiply-add. Counted are the matrices of the blocks, the head, and q k^T and weights times v; norms, activations and the
embedding lookup are not. The attention core counts the whole s x s square unless ``causal`` discounts the half above the
diagonal. This is the convention of Narayanan et al. 2021, equation 3, for any MLP and for grouped queries.

Sizes may be numpy arrays: the cost model counts many models at once.
"""

from __future__ import annotations

from typing import Any

from trainer.shared.run.resolved import ResolvedModelConfig
from trainer.shared.run.schema import LayoutConfig


def attention_weights(hidden: Any, query_width: Any, kv_width: Any) -> Any:
    """Returns the elements of the query, key, value and output matrices."""
    return hidden * (2 * query_width + 2 * kv_width)


def latent_weights(hidden: Any, query_width: Any, value_width: Any, turning: Any, query_rank: Any, kv_rank: Any, rotary: Any) -> Any:
    """Returns the same of latent attention, where all heads together have ``query_width`` numbers of a query without position, ``turning``
    ones with it, and ``value_width`` of values; ``query_rank`` 0: queries are made from the hidden state."""
    queries = (query_width + turning) * ((query_rank == 0) * hidden + query_rank) + query_rank * hidden
    return queries + hidden * (kv_rank + rotary) + kv_rank * (query_width + value_width) + value_width * hidden


def attention_weights_of(model: ResolvedModelConfig) -> int:
    """Returns the elements of the matrices of one attention of a model."""
    latent = model.latent
    if not latent.kv_rank:
        return int(attention_weights(model.hidden, model.query_width, model.kv_width))
    widths = model.query_width, model.value_width, model.heads * latent.rotary
    return int(latent_weights(model.hidden, *widths, latent.query_rank, latent.kv_rank, latent.rotary))


def mlp_weights(hidden: Any, ffn: Any, gated: bool) -> Any:
    """Returns the elements of the MLP's two matrices, or three with a gate."""
    return (3 if gated else 2) * hidden * ffn


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
    matrices = sum(_block_weights(model, block) for block in range(model.layers))
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
    if model.writes(block):
        attention = attention_weights(model.hidden, model.query_width, model.kv_width)
        mlp = mlp_weights(model.hidden, model.ffn, model.gated)
        crossing = 2 * model.hidden * model.query_width
        products = matrix_flops(model.decoder_seq, attention + crossing + mlp) + matrix_flops(model.seq, 2 * model.hidden * model.kv_width)
    else:
        products = matrix_flops(model.seq, _block_weights(model, block))
    return float(products) + core_flops(model, block)


def _block_weights(model: ResolvedModelConfig, block: int) -> int:
    """Returns the elements of the matrices that a token visits in a block of an encoder or a decoder alone."""
    inner = mixture_weights(model) if model.mixes(block) else mlp_weights(model.hidden, model.ffn, model.gated)
    return int(attention_weights_of(model) + inner)


def head_flops(model: ResolvedModelConfig) -> float:
    """Returns the forward FLOPs of the head on one sequence."""
    return float(matrix_flops(model.target_seq, model.hidden * model.vocab))


def mixture_weights(model: ResolvedModelConfig) -> int:
    """Returns the elements of the matrices of experts that a token visits, the shared ones, the router and the gate among them."""
    e = model.experts
    routed = e.active * mlp_weights(model.hidden, model.expert_ffn, model.gated) + model.hidden * (e.count + e.shared_gate)
    return int(routed + mlp_weights(model.hidden, e.shared_ffn, model.gated))


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
            skipping = 1 - len(model.mixtures) / model.layers if model.norm_at == "before" else 0
            tokens = sum(model.decoder_seq if model.writes(block) else model.seq for block in range(model.layers)) / model.layers
            again = each - skipping * matrix_flops(tokens, model.hidden * model.ffn)
        case _:
            again = 0.0
    return sequences * recomputed_blocks * again
