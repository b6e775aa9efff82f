"""Seconds of one forward pass through all layers, by part.

A layer of ``T`` tokens takes the longer of reading its weights (n w / t bytes) and computing its products (2 n T / t operations), its
attention (of prompts: computed; of running requests: keys and values read), reads and writes of activations, two sums over the tensor
ranks, and the launching of its kernels. A product of few rows computes on a whole tile: its rows count ``short_rows`` more. In a layer
with experts the same holds of the ``A`` that any token visits (``visited``), each of ``m`` parameters: A m w / t bytes, and
2 m (k T + A short_rows) / t operations for the k that each token visits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from launcher.cost.inference.case import InferenceCase, visited
from launcher.cost.inputs.device import BYTES
from launcher.cost.inputs.groups import PlacedGroup
from launcher.cost.inputs.shape import Array
from launcher.cost.parts import ATTENTION, HOST, MATRICES, POINTWISE, TENSOR, Parts, scale
from launcher.cost.time import collectives, matmul
from trainer.shared.families import block
from trainer.shared.parallel.boundary import boundary_elements
from trainer.shared.run import flops

CASTS = 4
"""Kernels of a layer that bring the inputs of products into 8 or 4 bits."""
ROUTING = 5
"""Kernels of a layer that route tokens to experts: scores, choice, sorting of the tokens by expert (two), sum of what comes back (vLLM,
model_executor/layers/fused_moe/fused_moe.py)."""
SHARED = 4
"""And those of experts that every token visits: two products, the operation between them, an addition."""
HEAD, SAMPLING, TRANSFERS = "head", "sampling", "pipeline transfers"


class Load(NamedTuple):
    """The tokens of a pass: ``prompts`` of ``length`` tokens each, and ``running`` requests with ``context`` tokens behind them; numbers,
    or (layouts,)."""

    prompts: Array = 0.0
    length: Array = 0.0
    running: Array = 0.0
    context: Array = 0.0

    @property
    def tokens(self) -> Array:
        return self.prompts * self.length + self.running


def forward(case: InferenceCase, load: Load) -> Parts:
    """Seconds of a pass through all stages in turn, the head left out."""
    one = {
        MATRICES: products(case, load.tokens),
        ATTENTION: prompt_attention(case, load) + cached_attention(case, load),
        POINTWISE: pointwise(case, load) + casting(case, load.tokens),
        TENSOR: np.where(load.tokens > 0, 2 * all_reduce(case, load.tokens), 0.0),
        HOST: np.where(load.tokens > 0, launching(case), 0.0),
    }
    parts = scale(one, case.shape.layers) | {TRANSFERS: transfers(case, load.tokens)}
    if case.engine.own:  # rows of the embedding are those of all ranks (trainer/tensor)
        parts[TENSOR] = parts[TENSOR] + one[TENSOR] / 2
    return parts


def products(case: InferenceCase, tokens: Array) -> np.ndarray:
    """Seconds of a layer's weight products."""
    e = case.shape.experts
    if case.device.host:
        whole = _on_host(case, tokens)
    else:
        whole = _multiplied(case, case.rank_parameters, 1.0, tokens)
        if e is not None:
            whole = whole + case.sparse * _multiplied(case, case.expert_parameters, visited(case, tokens), tokens * e.active)
    return np.where(tokens > 0, whole, 0.0)


def _multiplied(case: InferenceCase, parameters: Array, copies: Array, rows: Array) -> np.ndarray:
    """Seconds of products of ``rows`` in all with ``copies`` matrices of ``parameters`` each: weights read, or operations, if longer."""
    c, device = case.constants, case.device
    read = copies * parameters * case.weight_bytes / (device.bandwidth * c.weights_bandwidth)
    return np.maximum(read, 2 * parameters * (rows + copies * c.short_rows) / (device.rate(case.weights) * c.matrix))


def _on_host(case: InferenceCase, tokens: Array) -> Array:
    """Seconds of a layer's weight products by the rates of the host; one expert after the other."""
    s, e = case.shape, case.shape.experts
    seconds = sum(product(case, tokens, *size) for size in sizes(case, s.attention))
    ordinary = sum(product(case, tokens, *size) for size in sizes(case, block.mlp(s)))
    if e is None:
        return seconds + ordinary
    called = np.maximum(visited(case, tokens), 1.0)
    routed = called * sum(product(case, tokens * e.active / called, *size) for size in sizes(case, s.routed))
    beside = sum(product(case, tokens, *size) for size in sizes(case, [*block.shared(s, e), block.router(s, e)]))
    return seconds + (1 - case.sparse) * ordinary + case.sparse * (routed + beside)


def sizes(case: InferenceCase, matrices: Iterable[block.Matrix]) -> list[tuple[Array, Array]]:
    """Outer and inner size of the products with ``matrices`` on one rank."""
    t = case.tensor
    every = [each for each in matrices if np.any(each.inputs)]
    return [(m.outputs, m.inputs / t) if m.reduces else (m.outputs / t + m.whole, m.inputs) for m in every]


def product(case: InferenceCase, rows: Array, outer: Array, inner: Array) -> Array:
    """Seconds of a product on the host, as in training: by shape, with this machine's measured rates."""
    return matmul.seconds(case.device, case.vectors, case.network, rows, outer, inner)


def prompt_attention(case: InferenceCase, load: Load) -> Array:
    """Seconds of a layer's attention over prompts: half of the scores in one kernel, all of them written to memory without."""
    c, s = case.constants, case.shape
    keys = seen(case, load.length, flops.seen_keys(np.maximum(load.length, 1.0), s.window))
    scores = load.prompts * load.length * keys * s.heads / case.tensor
    width = (s.turned_width + s.value_width) / 2 / s.heads
    if s.latent is not None and case.engine.own:  # queries meet latents, which are the values, too (trainer/generate/cache.py)
        width = s.latent.kv_rank + s.latent.rotary / 2
    work = 4 * scores * width
    if case.engine.attention == "flash":
        return work / 2 / (case.device.peak(case.vectors) * c.flash)
    moved = c.score_passes * scores * case.width / (case.device.bandwidth * case.network.bandwidth)
    return work / (case.device.rate(case.vectors) * c.flash) + moved


def cached_attention(case: InferenceCase, load: Load) -> Array:
    """Seconds to read the keys and values of running requests: once for all query heads that share them, or for each of those."""
    s = case.shape
    entries = load.running * seen(case, load.context, np.minimum(load.context, s.window))
    times = 1.0 if case.engine.shared_keys else s.heads / np.maximum(s.cached_heads, case.tensor)
    read = times * entries * case.kv_per_token / (case.device.bandwidth * case.constants.kv_bandwidth)
    if s.latent is None:
        return read
    # all queries share a latent, so that there is more to compute than to read
    work = 2 * entries * s.heads / case.tensor * (2 * s.latent.kv_rank + s.latent.rotary)
    return np.maximum(read, work / (case.device.peak(case.vectors) * case.constants.flash))


def seen(case: InferenceCase, all_keys: Array, near: Array) -> Array:
    """Keys that a layer's queries see, the mean of all layers, of which those with a window see ``near``."""
    s = case.shape
    return all_keys if not np.any(s.window) else s.full_attention * all_keys + (1 - s.full_attention) * near


class Traffic(NamedTuple):
    """Reads and writes of a layer's memory-bound operations: of rows of ``hidden``, which every tensor rank has whole, of queries, and of
    keys and values."""

    hidden: float
    queries: float
    keys: float


TRAFFIC = {
    # an addition with the norm behind it reads and writes two rows, twice; rotation in place; the cache written; and so on (vLLM, csrc:
    # layernorm_kernels.cu, pos_encoding_kernels.cu, cache_kernels.cu)
    "fused": (Traffic(8, 2, 6), Traffic(8, 2, 6)),
    # two norms (2, 4) and a residual (3); cleared, biased, transposed, cached, transposed back (GptContextAttentionLayer.cc,
    # ParallelGptContextDecoder.cc); in decoding attention itself adds biases and fills the cache (ParallelGptDecoder.cc)
    "separate": (Traffic(9, 5, 10), Traffic(9, 2, 4)),
}
"""By the engine's ``activations``: of prompts, and of running requests."""


def pointwise(case: InferenceCase, load: Load) -> Array:
    """Seconds of norms, biases, residuals and activations. Each matrix of the MLP has its inner width read or written once by the
    operations between them. Kernels that biases and transposes are apart in reach less of the memory rate where prompts are large."""
    c, s, (of_prompts, of_tokens) = case.constants, case.shape, TRAFFIC[case.engine.activations]
    slower = c.separate if case.engine.activations == "separate" else 1.0

    def elements(kind: Traffic) -> Array:
        split = kind.queries * s.query_width + kind.keys * s.kv_width + s.mlp_matrices * inner(case)
        return (kind.hidden + 2 * visits(case)) * s.hidden + split / case.tensor

    moved = load.prompts * load.length * slower * elements(of_prompts) + load.running * elements(of_tokens)
    return moved * case.width * c.pointwise / (case.device.bandwidth * case.network.bandwidth)


def inner(case: InferenceCase) -> Array:
    """Inner widths that a token passes in the MLP of a layer, or in all experts that it visits; the mean of all layers."""
    e, ordinary = case.shape.experts, (1 - case.sparse) * case.shape.ffn
    return ordinary if e is None else ordinary + case.sparse * (e.active * e.ffn + e.shared_ffn)


def visits(case: InferenceCase) -> Array:
    """Results of experts for a token, which are written and then summed up; the mean of all layers."""
    e = case.shape.experts
    return 0.0 if e is None else case.sparse * e.active


def casting(case: InferenceCase, tokens: Array) -> Array:
    """Seconds to bring the inputs of the four products into the format of low-precision weights."""
    s = case.shape
    if BYTES[case.weights] >= 2:
        return 0.0 * tokens
    elements = 2 * s.hidden + (s.query_width + inner(case)) / case.tensor
    return tokens * elements * case.network.cast_bytes / (case.device.bandwidth * case.network.bandwidth)


def all_reduce(case: InferenceCase, tokens: Array) -> np.ndarray:
    """Seconds to sum the activations of ``tokens`` over the tensor ranks. A library's: a start, a tree of hops, and the ring's volume at
    its rate. An engine's own kernel has no tree: all ranks read all others at once (one hop, each payload whole), or each a share of it and
    then the sums (two hops, the ring's volume), whichever is shorter; such kernels end at the node (vLLM, custom_all_reduce.cuh;
    TensorRT-LLM, customAllReduceKernels.cu)."""
    group, device, c = case.tensor_group, case.device, case.constants
    if device.host:
        return exchange(case, "all_reduce", group, tokens * case.shape.hidden * case.width)
    tree = np.log2(np.maximum(group.near, 1)) * device.link_latency + 2 * np.log2(np.maximum(group.far, 1)) * device.network_latency
    payload = tokens * case.shape.hidden * case.width / collectives.bus(device, case.network, group)
    ring = 2 * (group.size - 1) / group.size * payload
    seconds = c.library + c.hops * tree + ring
    if case.engine.all_reduce == "one_shot":
        hop = c.hops * device.link_latency
        own = c.one_shot + np.minimum(hop + (group.size - 1) * payload, 2 * hop + ring)
        seconds = np.where(group.far > 1, seconds, own)
    return np.where(group.size > 1, seconds, 0.0)


def launching(case: InferenceCase) -> Array:
    """Seconds of a layer's launches that the device waits for."""
    if case.costs is not None:
        return case.costs.block
    e, casts = case.shape.experts, 0 if BYTES[case.weights] >= 2 else CASTS
    routing = 0.0 if e is None else case.sparse * (ROUTING + SHARED * (np.asarray(e.shared_ffn) > 0))
    return (case.engine.launches_per_layer + casts + routing) * float(getattr(case.constants, f"kernel_{case.engine.launch}"))


def transfers(case: InferenceCase, tokens: Array) -> np.ndarray:
    """Seconds to hand activations from stage to stage, through all of them."""
    payload = boundary_elements(tokens, 1, case.shape.hidden) * case.width
    one = woken(
        case, "send", 2.0, case.stages_apart, lambda size: collectives.send(case.device, case.network, case.stages_apart, size), payload
    )
    return np.where((case.pipeline > 1) & (np.asarray(tokens) > 0), (case.pipeline - 1) * one, 0.0)


def choosing(case: InferenceCase, sequences: Array) -> Parts:
    """Seconds of the head and of the choice of one token for each of ``sequences``."""
    if case.device.host:
        return _choosing_on_host(case, sequences)
    s, c, size = case.shape, case.constants, max(BYTES[case.weights], 2)  # the head has 16 bits where the others have fewer
    read = s.vocab * s.hidden * size / case.tensor / (case.device.bandwidth * c.weights_bandwidth)
    computed = 2 * s.vocab * s.hidden * sequences / case.tensor / case.device.rate(case.vectors)
    sorting = c.token if case.engine.choosing == "sorted" else 0.0
    chosen = sequences * (s.vocab * 4 * c.logit_passes / case.device.bandwidth + sorting)
    return {HEAD: np.maximum(read, computed), SAMPLING: chosen}


def _choosing_on_host(case: InferenceCase, sequences: Array) -> Parts:
    """The same by the products of the host. The logits of all tensor ranks are gathered."""
    s, k = case.shape, case.costs
    each = (
        case.constants.token + s.vocab * 4 * case.constants.logit_passes / case.device.bandwidth if k is None else k.row + s.vocab * k.logit
    )
    gathered = exchange(case, "all_gather", case.tensor_group, sequences * s.vocab * case.width)
    return {HEAD: product(case, sequences, s.vocab / case.tensor, s.hidden) + gathered, SAMPLING: sequences * each}


SMALL = 4096.0
"""Bytes of a message that holds next to nothing."""


def exchange(case: InferenceCase, operation: str, group: PlacedGroup, payload: Array) -> np.ndarray:
    """Seconds of a collective of the host's ranks between computations."""
    burst = lambda size: getattr(collectives, operation)(case.device, case.network, group, size)  # noqa: E731
    return np.where(np.asarray(group.size) > 1, woken(case, operation, group.size, group.far > 1, burst, payload), 0.0)


def woken(case: InferenceCase, operation: str, size: Array, far: Array, burst: Callable[[Array], Array], payload: Array) -> Array:
    """Seconds of a message, by those that it takes in a ``burst``. Where it was measured, what a small one takes of ranks that computed
    before, and what a larger one takes longer. That holds the turns of a replica's ranks on cores that they share, so they count once."""
    small = None if case.costs is None else case.costs.woken(operation, size, far)
    if small is None:
        return burst(payload)
    return (np.maximum(small, burst(SMALL)) + np.maximum(burst(payload) - burst(SMALL), 0.0)) / case.sharing


def telling(case: InferenceCase, news: Array) -> Array:
    """Seconds of a turn besides its passes, where that was measured: the host's own on every stage, and what all ranks tell each other:
    one sum of the chosen tokens, and where there is news (a share of the turns) two gathers (generate.py, Decoder._turn and _learn)."""
    if case.costs is None:
        return np.zeros_like(case.tensor)
    everyone = PlacedGroup.of(case.device, case.tensor * case.pipeline * case.replicas, 1)
    gather, reduce = (exchange(case, operation, everyone, SMALL) for operation in ("all_gather", "all_reduce"))
    return case.costs.turn * case.pipeline + reduce + 2 * news * gather
