"""The cost of inference: time of requests and memory of a model that an engine serves under a layout. Pure, vectorised, without torch.

    case = InferenceCase(shape, table, input, output, device, engine)
    static(case) | closed(case) | opened(case, rate) -> InferenceEstimate

``table`` is a structured array (layouts,) of ``SERVING_DTYPE``. Devices, rates of large products and the network are those of training
(``launcher.cost.inputs``, ``launcher.cost.time.collectives``); what differs is that products are short, so that weights are read for a
few tokens only, and that sums over tensor ranks are small.
"""

from __future__ import annotations

from launcher.cost.inference.case import SERVING_DTYPE, HostCosts, InferenceCase
from launcher.cost.inference.requests import InferenceEstimate, closed, opened, static

__all__ = ["SERVING_DTYPE", "HostCosts", "InferenceCase", "InferenceEstimate", "closed", "opened", "static"]
