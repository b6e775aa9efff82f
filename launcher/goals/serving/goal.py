"""The best ways to serve: the front of time against cost."""

from __future__ import annotations

from launcher.config.rules import check_installed
from launcher.goals.goal import OF_LOSS, Goal
from launcher.goals.serving import search, table
from launcher.goals.serving.plan import UNMEASURED, plan_serving

GOAL = Goal(
    foreign=dict.fromkeys(
        (
            *("trainer", "optimizer", "data", "search.space", *OF_LOSS),
            *("run.global_batch", "run.eval_every", "run.checkpoint", "run.compile", "run.precision"),
        ),
        "leave it out",
    ),
    plan=plan_serving,
    check=lambda config: check_installed(config, "measuring"),
    search=lambda config, wanted, _: search.search_serving(config, wanted),
    shown=search.shown,
    recipes={"lowest latency": "-latency", "highest throughput": "-throughput", "best under your limits": "-limits"},
    measured="requests",
    columns=table.COLUMNS,
    table=table.serving_table,
    unmeasured=UNMEASURED,
    fixed="a table of inference, whose rows name their engine",
)
