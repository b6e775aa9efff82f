"""The fastest training."""

from __future__ import annotations

from launcher.config import check_launchable
from launcher.goals.goal import OF_LOSS, Goal
from launcher.goals.training import search, table
from launcher.goals.training.plan import plan_training

GOAL = Goal(
    foreign=dict.fromkeys(("engine", "workload", "sla", "serving"), "add task=inference") | dict.fromkeys(OF_LOSS, "add goal=loss"),
    plan=plan_training,
    check=check_launchable,
    search=lambda config, wanted, _: search.search_training(config, wanted),
    shown=search.shown,
    recipes={"": ""},
    measured="runs",
    columns=table.COLUMNS,
    table=table.training_table,
)
