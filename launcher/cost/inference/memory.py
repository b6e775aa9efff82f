"""Bytes of one rank of a served model by part, and how many requests they leave room for.

Weights: a stage's layers and, on the first and the last, the vocabulary. Keys and values: one entry per token of a request and layer.
Buffers: activations of the largest pass. What an engine adds and how much it takes are facts of its profile.
"""

from __future__ import annotations

import numpy as np

from launcher.cost.inference.case import InferenceCase, group
from launcher.cost.inputs.device import BYTES
from launcher.cost.inputs.shape import Array
from launcher.cost.parts import Parts, total

WEIGHTS, EMBEDDING, KV, BUFFERS, RUNTIME = "weights", "embedding and head", "keys and values", "activation buffers", "runtime"


def needed(case: InferenceCase, sequences: Array) -> Parts:
    """Bytes of the fullest rank with ``sequences`` requests in flight."""
    return fixed(case, sequences) | {KV: sequences * per_sequence(case)}


def fixed(case: InferenceCase, sequences: Array) -> Parts:
    """Bytes that requests do not add to one by one."""
    s, m = case.shape, case.engine.memory
    copies = np.where(case.pipeline > 1, 1, max(m.embedding_copies, 1 if s.tied else 2))
    shards = case.tensor if m.embedding_sharded else 1.0
    return {
        WEIGHTS: layers(case) * (case.layer_parameters / case.tensor * BYTES[case.weights] + s.small_parameters * 2),
        EMBEDDING: copies * s.vocab * s.hidden * case.width / shards + np.zeros_like(case.tensor),
        BUFFERS: buffers(case, sequences),
        RUNTIME: np.full_like(case.tensor, 0.0 if case.device.host else m.runtime_gb * 1e9),
    }


def layers(case: InferenceCase) -> np.ndarray:
    """Layers of the fullest stage."""
    return np.ceil(case.shape.layers / case.pipeline)


def per_sequence(case: InferenceCase) -> np.ndarray:
    """Bytes of keys and values of one request, in whole blocks."""
    block = case.engine.memory.kv_block
    return np.ceil((case.input + case.output) / block) * block * layers(case) * case.kv_per_token


def buffers(case: InferenceCase, sequences: Array) -> np.ndarray:
    """Bytes of activations of the largest pass: prompts as many as one takes, and inside a layer those of a pipeline's group."""
    s, m = case.shape, case.engine.memory
    tokens = np.minimum(np.maximum(sequences, 1) * case.input, np.maximum(case.engine.prefill_tokens, case.input))
    together = np.minimum(tokens, np.maximum(group(case, case.input) * case.input, case.input))
    scores = together * case.input * s.heads / case.tensor if case.engine.attention == "unfused" else 0.0
    return case.width * (tokens * m.full_buffers * s.hidden + together * m.split_buffers * s.hidden / case.tensor + scores)


def room(case: InferenceCase) -> np.ndarray:
    """Requests whose keys and values fit beside the rest; 0 where not even the weights do."""
    free = case.device.memory * (1.0 if case.engine.memory.of_free else case.engine.memory.share) - total(fixed(case, case.batch))
    free = free * (case.engine.memory.share if case.engine.memory.of_free else 1.0)
    return np.floor(np.maximum(free, 0.0) / per_sequence(case))


def fits(case: InferenceCase, sequences: Array) -> np.ndarray:
    """Probability that ``sequences`` requests fit: a logistic curve in need over capacity, as wide as the estimate is uncertain."""
    capacity = case.device.memory * (1.0 if case.engine.memory.of_free else case.engine.memory.share)
    distance = (np.log(capacity) - np.log(total(needed(case, sequences)))) / case.constants.oom_spread
    return 1 / (1 + np.exp(-1.7 * np.clip(distance, -50, 50)))
