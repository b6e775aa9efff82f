"""Constants of inference: data (conf/inference.yaml), described here."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from launcher.config.constants import constant_values


@dataclass(frozen=True)
class InferenceConstants:
    """Costs of the mechanisms on real machines, as fractions of what the data sheet promises, as counts, or in seconds."""

    weights_bandwidth: float  # reached fraction of memory bandwidth while weights are read
    matrix: float  # rate of large products / that sustained in training
    short_rows: float  # rows that a product takes longer than its own: those of incomplete tiles
    kv_bandwidth: float  # reached fraction of memory bandwidth while keys and values are read
    flash: float  # fraction of the matrix peak that attention of prompts reaches
    score_passes: float  # reads and writes of 16-bit scores where attention is not one kernel
    pointwise: float  # reads and writes of activations / those counted
    separate: float  # and those of prompts where biases and transposes are kernels of their own / those of kernels that do more at once
    logit_passes: float  # reads and writes of 4-byte logits until a token is chosen
    kernel_graph: float  # seconds between two kernels of a graph
    kernel_native: float  # seconds to launch a kernel by native code
    kernel_python: float  # seconds to launch a kernel by Python
    step: float  # seconds of the host per pass
    step_hidden: float  # part of it that an asynchronous host hides
    row: float  # seconds of the host per pass for each request that gets a token
    token: float  # seconds per generated token where each request's logits are sorted
    request: float  # seconds per static batch before its first pass
    one_shot: float  # seconds to start a sum in one kernel
    library: float  # seconds to start a sum of a library
    hops: float  # latencies of links and network in a small sum / a tree of them
    staggered: float  # part of other requests' prompts that a running request waits for
    waves: float  # and where prompts go first
    error_spread: float  # relative standard error of a time
    layout_spread: float  # and of that of one layout and batch against others of the same model, device, engine and lengths
    mixture_spread: float  # relative standard error of a time of a mixture of experts
    mixture_layout_spread: float  # and of one layout and batch of it against others
    oom_spread: float  # relative standard error of the memory estimate

    def on(self, own: Mapping[str, float]) -> InferenceConstants:
        """The same with other values of some."""
        return dataclasses.replace(self, **own) if own else self


INFERENCE = InferenceConstants(**constant_values("inference"))
"""Those of conf/inference.yaml."""
LIGHT = {
    **dict.fromkeys(("weights_bandwidth", "kv_bandwidth", "flash", "pointwise", "separate", "matrix", "logit_passes", "step_hidden"), 1.0),
    **dict.fromkeys(("kernel_graph", "kernel_native", "kernel_python", "step", "row", "token", "request"), 0.0),
    **dict.fromkeys(("one_shot", "library", "hops", "short_rows", "score_passes"), 0.0),
}
"""Values at the speed of light: everything at the data sheet's rates, nothing to start or to wait for."""
