"""Bytes kept for backward: of one block, of the model's two ends, for one micro-batch on one rank.

Korthikanti et al. 2022 (arXiv 2205.05198), section 4, with their terms for what the model, the kernels and the trainer really keep: norms
and residuals are spread over the tensor ranks by sequence parallelism, heads and the MLP's inner width always.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from launcher.cost.inputs.case import Case
from launcher.cost.inputs.shape import Array
from launcher.cost.time.attention import FLASH, across, in_blocks, kernel, score_count
from launcher.cost.time.pointwise import drops_inside, inner_width

COLUMNS = 8
"""By which queries and keys are wider where they carry ALiBi (``trainer.models.attention.Alibi``)."""


@dataclass(frozen=True)
class SavedActivations:
    """Bytes of one block, micro-batch and rank, (layouts,)."""

    everything: Array  # nothing recomputed
    chosen: Array  # as the layout recomputes, averaged over the blocks
    again: Array  # further bytes that live while one recomputed block runs backward


def block(case: Case) -> SavedActivations:
    """Activations that a block keeps."""
    hidden, heads, core, inner = norms(case), projections(case) + crossing(case), attention_core(case) + crossing_core(case), mlp(case)
    everything = hidden + heads + core + inner + dispatched(case) + dropped(case)
    full, selective = case.recomputed_blocks, case.recomputes("selective")
    repeated = {
        "attention": lambda: core,
        "norms": lambda: hidden / 2 + inner / 3,
        "per_op": lambda: everything - _every_second_product(case),
        "products": lambda: everything - _every_product(case),
        "but_weights": lambda: everything - _every_product(case) + rows(case) * case.width,
        "but_queries": lambda: everything - _queries(case),
        "but_projections": lambda: everything - _queries(case) - rows(case) * case.width,
    }
    kept = np.where(selective, everything - repeated[case.trainer.recompute.selective](), everything)
    stored = stored_input(case)
    # what ran backward before is gone when the recomputed part is whole
    input_kept = 0.0 if _copies_norm_inputs(case) else stored
    block_again = everything - input_kept - case.blocks_behind * everything
    core_again = (
        everything - kept - (inner + hidden / 2 + dropped(case) + case.tokens * case.shape.value_width / case.tensor * narrow(case))
    )
    again = np.maximum(np.where(full > 0, block_again + lent(case), core_again), 0.0)
    return SavedActivations(everything, full * stored + (1 - full) * kept, again)


def stored_input(case: Case) -> Array:
    """Activations that stay of a block that is recomputed whole."""
    split = np.maximum(case.sequence_split, case.tensor if case.trainer.recompute.sharded_inputs else 1)
    attended = case.tokens * (case.shape.value_width * case.width + case.shape.heads * 4) / case.tensor
    return case.tokens * case.shape.hidden * case.width / split + attended * case.trainer.recompute.keeps_attention


def rows(case: Case) -> Array:
    """Elements of the hidden state on one rank."""
    return case.tokens * case.shape.hidden / case.sequence_split


def input_bytes(case: Case, product: str) -> float:
    """Bytes of an element that is kept for a weight gradient of ``product`` alone: nothing where it is frozen, and 16 bits where a low-rank
    product beside it needs its input."""
    if not case.shape.frozen:
        return narrow(case)
    return case.width if product in case.shape.adapted else 0


def narrow(case: Case) -> float:
    """Bytes of an element of a product's saved input."""
    return 1 if case.trainer.numbers.saves_low_precision and case.precision in ("fp8", "fp4") else case.width


def one_norm(case: Case) -> Array:
    """A norm's input and output, and its statistics."""
    s, f, w = case.shape, case.trainer, case.width
    each = w + narrow(case)
    if not f.kernels.fused_norm:
        each = each + 8
    elif _composed_norm(case):  # input and normalised input in 4 bytes
        each = 2 * max(w, 4) + w
    statistics = 4 * case.tokens / case.sequence_split * (1 if s.scale_only_norm else 2)
    return rows(case) * each + statistics


def _composed_norm(case: Case) -> bool:
    """On a CPU torch makes a scale-only norm of simple operations."""
    return case.shape.scale_only_norm and case.device.host


def _copies_norm_inputs(case: Case) -> bool:
    return _composed_norm(case) and case.width < 4


def norms(case: Case) -> Array:
    """Returns the bytes of all norms of the hidden state, and of queries and keys. Each is counted with an input and a result: an input of
    several norms is one, and a result that is added to the residual stream is not kept, unless the products of another branch read it. The
    norm before the MLP feeds one product alone."""
    s = case.shape
    once = s.shared_norm_inputs * (0 if _copies_norm_inputs(case) else case.width)
    unfed = narrow(case) - input_bytes(case, "up") + s.unread_norms * narrow(case)
    return s.block_norms * one_norm(case) - rows(case) * (unfed + once) + head_norms(case)


def head_norms(case: Case) -> Array:
    """Returns the bytes of the norms of queries and keys.

    The normalised ones, and the input where the product gave another tensor: in 4 bytes, or queries of several to a group, which are cut
    out of it. The norm over all heads together is made of simple operations on every device (trainer/models/layers.py, ``WidthNorm``).
    """
    s, w = case.shape, case.width
    if s.qk_norm == "none":
        return np.zeros_like(case.tokens)
    statistics = 8 if s.qk_norm == "width" else 4 * (s.heads + s.kv_heads)
    both = s.query_width + s.kv_width
    if s.qk_norm == "width" and w < 4:
        kept = both * (4 + w)
    elif _copies_norm_inputs(case):
        kept = both * 8
    else:
        cut = np.where(np.asarray(s.kv_heads) != s.heads, s.query_width, 0) * case.trainer.memory.copied_heads
        kept = (both + cut) * w
    return case.tokens * (kept + statistics) / case.tensor


def projections(case: Case) -> Array:
    """Queries, keys and values, and the attention's output, which feeds the next product."""
    s, w = case.shape, case.width
    elements = (s.turned_width + s.key_width + s.read_width) * w + s.value_width * narrow(case)
    if not case.trainer.memory.copied_heads:
        return case.tokens * elements / case.tensor + latents(case)
    if s.latent is not None:  # values are cut out of the product that makes keys, too, unless ranks exchange copies
        cut = np.where(case.context > 1, np.where(_widened(case), 0, s.value_width), s.query_width + s.value_width - s.read_width)
        cut = np.where(passed_around(case), s.key_width - np.asarray(s.heads) * s.latent.rotary, cut)  # keys beside the values
        return case.tokens * (elements + cut * w) / case.tensor + latents(case) + masks(case)
    grouped = np.asarray(s.kv_heads) != s.heads
    copied = s.query_width + s.kv_width if s.rotary else np.where(grouped, s.query_width, 0)
    # context ranks exchange copies, and join or exchange outputs, which a flash kernel keeps as they were
    exchanged = s.value_width if kernel(case) in FLASH else np.where(grouped, s.query_width, 0)
    copied = np.where((case.context > 1) & np.logical_not(passed_around(case)), exchanged, copied)
    sliced = np.where(s.rotary | grouped, -(s.key_width + s.read_width), 0)  # in ``kept_keys``; else queries keep all three, once more
    copied = np.where(case.slices > 1, sliced, copied)
    return case.tokens * (elements + copied * w) / case.tensor + masks(case)


def latents(case: Case) -> Array:
    """Latents before and after their norms, whole on every tensor rank, and the key that heads share."""
    s, w = case.shape, case.width
    if s.latent is None:
        return np.zeros_like(case.tokens)
    ranks = s.latent.query_rank + s.latent.kv_rank
    each = w + narrow(case) + (0 if case.trainer.kernels.fused_norm else 8)
    if _composed_norm(case):
        each = 2 * max(w, 4) + w
    shared = 0 if _copies_norm_inputs(case) else s.latent.rotary * w
    statistics = 4 * (1 + (np.asarray(s.latent.query_rank) > 0))
    return case.tokens / case.sequence_split * (ranks * each + shared + statistics)


def _widened(case: Case) -> Array:
    """Tells whether our own trainer gives its kernel values as wide as keys (trainer/models/attention.py, ``_fused``)."""
    s = case.shape
    own = s.latent is not None and case.trainer.memory.copied_heads and kernel(case) in FLASH
    return own & (np.asarray(s.key_width) > s.read_width)


def widened(case: Case) -> Array:
    """Values as wide as keys, in place of those that were cut out, and outputs likewise. Each of a context rank's two pieces of a sequence
    has its own copy of all values up to its end."""
    s, w = case.shape, case.width
    gathered = (case.context > 1) & (case.trainer.overlap.context == "all_gather")
    copies = np.where(gathered, case.context + 0.5, 1) + 1
    more = copies * s.key_width - np.where(case.context > 1, 0, s.query_width + s.value_width)
    return np.where(_widened(case), case.tokens * more / case.tensor * w, 0.0)


def kept_keys(case: Case, micro_batches: Array, summed: Array) -> Array:
    """Returns bytes of keys and values of whole sequences, kept for so many micro-batches whose sequences are sliced, and of the sums of
    their gradients, in at least 4 bytes, for ``summed`` of them (trainer/tensor/slices.py)."""
    every = case.tokens * case.slices * (case.shape.key_width + case.shape.read_width) / case.tensor
    return every * (micro_batches * case.width + summed * max(case.width, 4))


def masks(case: Case) -> Array:
    """Returns bytes of masks of the keys that each of a context rank's two pieces of a sequence sees, or each slice but the first, of as
    many bytes as a score, on a CPU: kernels of GPUs need none (trainer/models/attention.py, ``_fused``)."""
    if not case.device.host or kernel(case) not in FLASH:
        return np.zeros_like(case.tokens)
    seq, slices, gathers = case.shape.seq, case.slices, case.trainer.overlap.context == "all_gather"
    piece = seq / (2 * case.context)
    later = seq**2 * ((slices + 1) / 2 - 1 / slices) / slices**2  # the mean of equal slices
    pieces = np.where((case.context > 1) & gathers, piece * (seq + piece), 0.0)
    return (pieces + np.where(slices > 1, later * case.shape.full_attention, 0.0)) * case.width


def lent(case: Case) -> Array:
    """Returns bytes of keys and values of whole sequences, while a block that was recomputed runs backward; others gather them again when
    they need them (trainer/tensor/context.py)."""
    every = case.tokens * case.context * (case.shape.key_width + case.shape.read_width) / case.tensor * case.width
    return np.where((case.context > 1) & (case.trainer.overlap.context == "all_gather"), every, 0.0)


def passed_around(case: Case) -> Array:
    """Tells where our own trainer passes keys and values around a ring (trainer/tensor/ring.py). It keeps a number per row, and neither
    copies nor scores."""
    return (case.context > 1) & case.trainer.memory.copied_heads & (case.trainer.overlap.context == "ring")


def travelling(case: Case) -> Array:
    """Returns bytes of a ring's buffers in backward: the keys and values of one rank and of the next, their gradients as computed, as sent,
    as received and at home, and the gradient of queries."""
    s, w, sums = case.shape, case.width, max(case.width, 4)
    each = (s.key_width + s.read_width) * (4 * w + 2 * sums) + s.turned_width * sums
    return np.where(passed_around(case), case.tokens / case.tensor * each, 0.0)


def crossing(case: Case) -> Array:
    """Returns bytes of the queries of an encoder's output, its keys and values, and the attention's output."""
    s = case.shape
    own = case.tokens * (s.query_width * case.width + s.value_width * narrow(case))
    return s.crossed * (own + case.micro_batch * s.crossing * 2 * s.kv_width * case.width) / case.tensor


def crossing_core(case: Case) -> Array:
    """Returns what ``attention_core`` counts, of scores for the tokens of an encoder's output."""
    if not np.any(case.shape.crossed):
        return np.zeros_like(case.tokens)
    whole = across(case)
    return attention_core(whole) * case.tokens / whole.tokens


def streams(case: Case, first: bool, blocks: Sequence[Array], begins: Array) -> Array:
    """Returns bytes of the residual streams that pass a rank with so many ``blocks`` of each stack: a decoder's blocks keep the encoder's
    output, whole on every tensor rank; an encoder's rank keeps the decoder's stream, which goes on from it."""
    if len(blocks) == 1:
        return 0.0
    read, written = (stack.tokens * case.shape.hidden * case.width for stack in case.stacks)
    alone, split = case.pipeline == 1, case.sequence_split
    kept = read * (1 + np.where((split > 1) & ~alone, 1 / split, 0.0))
    passed = np.where(alone | first, 0.0, written / split)
    ended = np.where(np.asarray(begins) > 0, one_norm(case.stacks[0]) - read / split, 0.0)  # the encoder's last norm
    return case.chunks * np.where(np.asarray(blocks[1]) > 0, kept, passed) + ended


def distances(case: Case) -> Array:
    """Returns bytes of the bucket of each query and key, which all layers of a stack share (trainer/models/encoder_decoder.py)."""
    return sum(8 * stack.shape.seq**2 for stack in case.stacks) if np.any(case.shape.buckets) and len(case.stacks) > 1 else 0.0


def rotary_tables(case: Case) -> Array:
    """Sines and cosines of the positions, which all layers of a rank share (trainer/models/attention.py)."""
    s = case.shape
    turning = s.head_width if s.latent is None else s.latent.rotary
    return s.seq * turning * case.width if s.rotary and case.trainer.memory.copied_heads else 0.0


def attention_core(case: Case) -> Array:
    """Between the projections: a number per row with a flash kernel, nothing where scores are computed again, else copies of them."""
    row = case.tokens * case.shape.heads / case.tensor * 4
    return np.where(passed_around(case), row, _core(case, kernel(case), row))


def _core(case: Case, name: str, row: Array) -> Array:
    """Returns the bytes that a kernel keeps where keys are not passed around a ring."""
    s, w = case.shape, case.width
    if name in FLASH:
        return row + bias_columns(case) + windows(case) + widened(case)
    if in_blocks(case):
        return bias_columns(case)
    copies = 1 if name == "fused_softmax" else case.trainer.memory.score_copies + s.capped
    dropped = w + 1 if s.dropout else 0  # dropped weights and the mask
    return score_count(case) * (copies * w + dropped) + bias_columns(case) + scaled(case)


def scaled(case: Case) -> Array:
    """Returns bytes of the scaled queries and keys that torch's own composition of a fused kernel copies, on a CPU and for scores with
    learnt biases (ATen/native/transformers/attention.cpp: ``_scaled_dot_product_attention_math``)."""
    s = case.shape
    if not (np.any(s.buckets) and s.fused_attention and case.device.host and not s.dropout):
        return 0.0
    return case.tokens * (s.query_width + s.kv_width) / case.tensor * max(case.width, 4)


def windows(case: Case) -> Array:
    """Where our own trainer gives a kernel the queries of one window after the other, with a mask for the keys that they see: the parts of
    the output, which are joined, and the masks, of as many bytes as a score (trainer/models/attention.py, ``_fused``)."""
    s = case.shape
    if not (case.trainer.memory.copied_heads and np.any(s.window)):
        return np.zeros_like(case.tokens)
    window = np.where(np.asarray(s.window) > 0, np.minimum(s.window, s.seq), s.seq)
    masks = (s.seq * (2 * window - 1) - window * (window - 1)) / case.slices
    return np.where(window < s.seq, (1 - s.full_attention) * (case.tokens * s.query_width / case.tensor + masks) * case.width, 0.0)


def bias_columns(case: Case) -> Array:
    """ALiBi as further columns of queries and keys, which are copied for them; a fused kernel wants values and output as wide, and the
    output is copied back (trainer/models/attention.py). Other trainers give their kernels the slopes."""
    s = case.shape
    if not (s.linear_biases and case.trainer.memory.copied_heads):
        return 0.0
    wider = COLUMNS * (s.heads + s.kv_heads)
    if case.trainer.overlap.context == "all_gather":  # to keys and values that were gathered
        wider = wider + (case.context - 1) * (s.kv_width + COLUMNS * s.kv_heads)
    wider = wider + (case.reach * case.slices - 1) * (s.kv_width + COLUMNS * s.kv_heads)  # to those of slices before
    copied = 2 * wider + s.query_width if kernel(case) in FLASH else wider + s.query_width + s.kv_width
    return case.tokens * copied / case.tensor * case.width


def mlp(case: Case) -> Array:
    """Inputs of the non-linearity and its output; written in tensor operations, SwiGLU keeps the gated half too."""
    s, w = case.shape, case.width
    kept = (2 if s.gated else 1) * w + input_bytes(case, "down") + (w if s.gated and case.trainer.kernels.pointwise == "eager" else 0)
    return case.tokens * inner_width(case) / case.tensor * kept


def dispatched(case: Case) -> Array:
    """Tokens as sent to their experts, the input of the experts' first product: the mean over all blocks, of which some may be dense."""
    if case.shape.experts is None:
        return np.zeros_like(case.tokens)
    e, visitors, share = case.shape.experts, case.tokens / case.expert_split, case.shape.expert_layers / case.shape.layers
    sent = visitors * case.shape.hidden * e.active * case.imbalance * narrow(case) * share
    if not case.trainer.memory.keeps_expert_outputs:
        return sent
    # outputs as they come back, order and its inverse, experts and weights of a token; logits, scores and their shares of all experts
    routed = visitors * e.active * (case.shape.hidden * case.width + 24) + case.tokens / case.tensor * 12 * e.count
    return sent + share * (routed + case.tokens * case.shape.hidden * case.width * e.shared_gate)


def dropped(case: Case) -> Array:
    """Masks of the dropouts of branches, and of the MLP's inner width."""
    s = case.shape
    inside = case.tokens * inner_width(case) / case.tensor if drops_inside(case) else np.zeros_like(case.tokens)
    return inside + (s.added_to_residual * rows(case) if s.dropout else 0.0)


def _every_second_product(case: Case) -> Array:
    """Torchtitan's policy keeps the block's input, the attention's output and every second product: queries, values, gate, MLP output."""
    s, w = case.shape, case.width
    inside = case.tokens * (s.turned_width + s.value_width + s.read_width + inner_width(case)) / case.tensor * w
    return inside + 2 * rows(case) * w


def _every_product(case: Case) -> Array:
    """The block's input, what every product of it results in, and attention's output."""
    s, w = case.shape, case.width
    inside = (
        case.tokens
        * (s.turned_width + s.value_width + s.key_width + s.read_width + (2 if s.gated else 1) * inner_width(case))
        / case.tensor
        * w
    )
    return inside + 3 * rows(case) * w


def _queries(case: Case) -> Array:
    """The block's input, and its queries, keys and values."""
    s = case.shape
    return rows(case) * case.width + case.tokens * (s.turned_width + s.key_width + s.read_width) / case.tensor * case.width


def embedding(case: Case) -> Array:
    """The input embedding's dropout mask, or the input of its norm."""
    s = case.shape
    if s.embedding_norm:
        return one_norm(case) - rows(case) * narrow(case)
    return rows(case) * (1 if s.dropout else 0)


def logits(case: Case) -> Array:
    """Logits and the loss's copies of them, of as many tokens as have them at once."""
    s, f = case.shape, case.trainer
    tokens = case.chunk_tokens
    each = f.memory.logit_copies * case.width + f.memory.logit_copies_fp32 * max(case.width, 4)
    if f.memory.sharded_logits:
        return tokens * case.vocabulary * each
    gathered = np.where(case.tensor > 1, case.constants.gathered_logits, 0.0)
    return tokens * s.vocab * (each + gathered)
