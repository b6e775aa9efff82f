"""Bytes of one rank of a served model by part, and how many requests they leave room for.

Weights: a stage's layers and, on the first and the last (in some engines on all), the vocabulary. Keys and values: one entry per token of a
request and layer. Buffers: activations of the largest pass, and logits. What an engine adds and how much it takes are facts of its profile.
"""

from __future__ import annotations

import numpy as np

from launcher.cost.inference.case import InferenceCase, group
from launcher.cost.inputs.shape import Array
from launcher.cost.parts import Parts, total

WEIGHTS, EMBEDDING, KV, BUFFERS, RUNTIME = "weights", "embedding and head", "keys and values", "activation buffers", "runtime"


def needed(case: InferenceCase, sequences: Array) -> Parts:
    """Bytes of the fullest rank with ``sequences`` requests in flight."""
    return fixed(case, sequences) | {KV: sequences * per_sequence(case)}


def fixed(case: InferenceCase, sequences: Array) -> Parts:
    """Bytes that requests do not add to one by one."""
    s, m = case.shape, case.engine.memory
    whole = max(m.embedding_copies, 1 if s.tied else 2)
    copies = np.where((case.pipeline > 1) & (not m.embedding_everywhere), 1, whole)
    shards = case.tensor if m.embedding_sharded else 1.0
    return {
        WEIGHTS: matrices(case) * case.weight_bytes + layers(case) * (s.small_parameters + s.expert_biases) * 2,
        EMBEDDING: copies * s.vocab * s.hidden * case.width / shards + np.zeros_like(case.tensor),
        BUFFERS: buffers(case, sequences),
        RUNTIME: np.full_like(case.tensor, 0.0 if case.device.host else m.runtime_gb * 1e9),
    }


def layers(case: InferenceCase) -> np.ndarray:
    """Layers of the fullest stage."""
    return np.ceil(case.shape.layers / case.pipeline)


def matrices(case: InferenceCase) -> np.ndarray:
    """Matrix parameters of the fullest stage on one rank, all experts of its layers counted."""
    s, held = case.shape, layers(case)
    if s.experts is None:
        return held * case.rank_parameters
    sparse = np.minimum(np.ceil(held / s.experts.every), s.expert_layers)  # a stage behind the leading dense layers has no others
    dense = (held - sparse) * s.mlp_parameters / case.tensor
    attention = case.rank_parameters - (1 - case.sparse) * s.mlp_parameters / case.tensor - case.sparse * case.shared_parameters
    return held * attention + dense + sparse * (case.shared_parameters + s.experts.count * case.expert_parameters)


def per_sequence(case: InferenceCase) -> np.ndarray:
    """Bytes of keys and values of one request, in whole blocks."""
    block = case.engine.memory.kv_block
    return np.ceil((case.input + case.output) / block) * block * layers(case) * case.kv_per_token


def buffers(case: InferenceCase, sequences: Array) -> np.ndarray:
    """Bytes of buffers: those of prompts, as many as one pass takes; inside a layer of a pipeline's group; and of the vocabulary.

    Of ``T`` tokens in a pass and ``G`` in a group: ``w h (T full + G split / t)``; ``4 V`` for each request and buffer of logits. Where
    attention is not one kernel a mask ``w T i``, and scores ``G i heads / t`` of ``w`` bytes, or of ``w + 4`` in an engine that keeps both.
    """
    s, m = case.shape, case.engine.memory
    sequences = np.maximum(sequences, 1)
    tokens = np.minimum(sequences * case.input, np.maximum(case.engine.prefill_tokens, case.input))
    together = np.minimum(tokens, np.maximum(group(case, case.input, sequences) * case.input, case.input))
    made = case.width * s.hidden * (tokens * m.full_buffers + together * m.split_buffers / case.tensor)
    if case.engine.attention == "unfused":
        made = made + case.input * (tokens * case.width + together * s.heads / case.tensor * (case.width + 4 * m.float_scores))
    return made + sequences * m.logit_buffers * s.vocab * 4


def room(case: InferenceCase) -> np.ndarray:
    """Requests whose keys and values fit beside the rest, and beside the buffers of as many; 0 where not even the weights do."""
    low = np.zeros_like(case.tensor)
    high = np.floor(_free(case, low) / per_sequence(case))
    if np.isinf(high).any():
        return high
    while np.any(low < high):  # the most that fit: buffers grow with the requests
        middle = np.ceil((low + high) / 2)
        fit = _free(case, middle) >= middle * per_sequence(case)
        low, high = np.where(fit, middle, low), np.where(fit, high, middle - 1)
    return low


def _free(case: InferenceCase, sequences: Array) -> np.ndarray:
    """Bytes for keys and values beside what ``sequences`` requests need otherwise."""
    m = case.engine.memory
    free = np.maximum(case.device.memory * (1.0 if m.of_free else m.share) - total(fixed(case, sequences)), 0.0)
    return free * (m.share if m.of_free else 1.0)


def fits(case: InferenceCase, sequences: Array) -> np.ndarray:
    """Probability that ``sequences`` requests fit: a logistic curve in need over capacity, as wide as the estimate is uncertain."""
    m = case.engine.memory
    capacity = case.device.memory * (1.0 if m.of_free else m.share)
    need = total(fixed(case, sequences)) + sequences * per_sequence(case) / (m.share if m.of_free else 1.0)
    distance = (np.log(capacity) - np.log(need)) / case.constants.oom_spread
    return 1 / (1 + np.exp(-1.7 * np.clip(distance, -50, 50)))
