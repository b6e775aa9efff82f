"""The fastest training."""

from __future__ import annotations

from launcher.config import check_launchable
from launcher.goals.goal import Goal
from launcher.goals.training import search, table
from launcher.goals.training.plan import plan_training

GOAL = Goal(
    foreign=("engine", "workload", "sla", "serving"),
    remedy="add task=inference",
    plan=plan_training,
    check=check_launchable,
    search=search.search_training,
    shown=search.shown,
    recipes={"": ""},
    measured="runs",
    columns=table.COLUMNS,
    table=table.training_table,
)
