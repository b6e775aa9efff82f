"""The soonest loss: the arm that reaches a validation loss first on a cluster."""

from __future__ import annotations

import dataclasses

from launcher.goals.loss import arms, search
from launcher.goals.training.goal import GOAL as SPEED

OF_SPEED = ("search.tolerance", "search.doubt", "search.nodes", "search.verify", "search.start_s", "search.enough")

GOAL = dataclasses.replace(
    SPEED,
    foreign={
        **dict.fromkeys(("engine", "workload", "sla", "serving", *OF_SPEED), "leave it out"),
        "run.checkpoint.dir": "leave it out, or each trial would continue from another's checkpoint",
    },
    plan=arms.refuse_plan,
    check=arms.check,
    search=search.search_loss,
    shown=search.shown,
)
