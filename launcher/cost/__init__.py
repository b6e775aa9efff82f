"""The cost model: step time and memory of a model under a layout on a cluster. Pure, vectorised over layouts, without torch.

    cost = CostModel(cluster, trainer)
    cost.predict(model, layout, run) -> Prediction            one layout, explained part by part
    cost.predict_table(model, table, run) -> Estimate         a table of layouts (launcher.cost.inputs.layouts) as arrays
    Estimate: .step_time (s), .memory_total (bytes), .fits (probability), .time and .memory: dict part -> array

``trainer`` describes another trainer than this project's own (``launcher.config.trainers.profile``). Below the front door a question is
a ``Case`` (a ``Shape``, a table, a ``Device``, a ``TrainerProfile``); ``time`` and ``memory`` answer its parts and ``model`` adds them
up.
"""

from __future__ import annotations

from launcher.cost.inputs.shape import Shape
from launcher.cost.model import Estimate
from launcher.cost.prediction import CostModel, Prediction, predict

__all__ = ["CostModel", "Estimate", "Prediction", "Shape", "predict"]
