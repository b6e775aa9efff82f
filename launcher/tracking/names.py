"""Names and values of a sweep and its trials in MLflow, as plain data. Pure.

A sweep is a parent run, each of its trials a child run. ``train/...`` are metrics by step, as rank 0 wrote them; the plain names
(``step_time_s``, ...) are the trial's summary once it is done, so that sorting runs by ``step_time_s`` gives the ranking.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import TypeVar

from launcher import labels
from launcher.results import arms, front
from launcher.results.ranking import Measurement, costs, leaders
from launcher.results.rows import configuration
from launcher.trials.labels import trial_labels
from launcher.trials.spent import gpu_hours
from launcher.trials.store import Record, Sweep
from trainer.shared.records.outcome import Status
from trainer.shared.records.stage_run import StageRun, stage_in, trains
from trainer.shared.records.trial_files import number, positive, summary_metrics

V = TypeVar("V")
LONGEST_NAME = 240
"""Letters of the name of a parameter or metric; MLflow takes 250."""
RUN_STATUS = {
    Status.PLANNED: "SCHEDULED", Status.SUBMITTED: "SCHEDULED", Status.RUNNING: "RUNNING", Status.DONE: "FINISHED",
    Status.FAILED: "FAILED", Status.PRUNED: "KILLED", Status.STOPPED: "KILLED",
}  # fmt: skip


def params(record: Record) -> dict[str, str]:
    """The resolved configuration, flattened: ``layout.tensor`` -> ``2``. Values as YAML would write them."""
    return accepted({name: value if isinstance(value, str) else json.dumps(value) for name, value in configuration(record).items()})


def accepted(values: Mapping[str, V]) -> dict[str, V]:
    """Renames keys for MLflow: other characters (``exact_match,strict-match``) become ``_``, and equal names are numbered."""
    found = {name: value for name, value in values.items() if _accepted(name) == name}
    for name, value in values.items():
        new = base = _accepted(name)
        for n in itertools.count(2) if name != base else ():
            if new not in found:
                break
            new = f"{base}_{n}"
        found[new] = value
    return found


def _accepted(name: str) -> str:
    """Letters of any alphabet, digits and some marks, in parts as of a path, with room for a number."""
    parts = re.sub(r"[^\w./ :-]", "_", name).split("/")
    return "/".join(f"_{part}" if part in ("", ".") or part.startswith("..") else part for part in parts)[:LONGEST_NAME].rstrip("/")


def tags(record: Record, sweep: str) -> dict[str, str]:
    """Returns tags for finding and filtering runs. MLflow shows ``mlflow.source.*`` as their origin."""
    return {
        "trial": record.id,
        "sweep": sweep,
        "layout": labels.layout_label(record.config.get("layout") or {}),
        "status": record.status.value,
        "reason": record.reason.value if record.reason else "",
        "detail": record.detail[:2000],
        "attempt": str(record.attempt),
        "git_commit": record.commit or "",
        "mlflow.source.git.commit": (record.commit or "").rstrip("+"),
        "mlflow.source.name": _command(record, sweep)[:2000],
        "mlflow.source.type": "LOCAL",
        **({"pipeline": sweep, "stage": record.stage} if record.stage else {}),
    }


def _command(record: Record, sweep: str) -> str:
    return f"trireme run pipeline={sweep} --only {record.stage}" if record.stage else shlex.join(["trireme", "train", *record.overrides])


def run_name(record: Record, label: str) -> str:
    """Returns a trial's name in MLflow from its ``label`` in the sweep."""
    return f"{label} {record.id[:6]}"


def trial_metrics(record: Record) -> dict[str, float]:
    """Returns the trial's finite figures, measured (once it is done) and predicted."""
    predicted = {f"predicted_{name}": number((record.predicted or {}).get(name)) for name in ("step_time_s", "memory_bytes")}
    known = {name: value for name, value in predicted.items() if value is not None and math.isfinite(value)}
    if record.status is not Status.DONE:
        return known
    result = record.read_result() or {}
    took = costs(record, gpu_hours(record), positive(result.get("tokens_per_s"))) if trains(record.config) else {}
    return known | summary_metrics(result) | {name: value for name, value in took.items() if value}


def sweep_tags(sweep: Sweep, ranked: Sequence[Measurement]) -> dict[str, str]:
    """The parent run: how many trials stand how, the best layout, where it came from, and the ranking as its description."""
    counts = {status.value: sum(m.status is status for m in ranked) for status in Status}
    names = trial_labels(sweep.records)
    best = next(iter(leaders(ranked)), None)
    commit = next((record.commit for record in sweep.records if record.commit), None) or ""
    named = {
        "sweep": sweep.name,
        "trials": ", ".join(f"{count} {status}" for status, count in counts.items() if count),
        "git_commit": commit,
        "mlflow.source.git.commit": commit.rstrip("+"),
        "mlflow.source.name": sweep_command([record.overrides for record in sweep.records])[:2000],
        "mlflow.source.type": "LOCAL",
    }
    if any(record.stage for record in sweep.records):
        named |= {"pipeline": sweep.name, "mlflow.source.name": f"trireme run pipeline={sweep.name}"}
        return named | {"mlflow.note.content": stages_markdown(sweep.records)}
    if best is not None:
        named |= {"best_trial": best.trial, "best_layout": labels.layout_label(best.layout)}
    if sweep.front:
        named["mlflow.source.name"] = f"trireme search sweep.name={sweep.name}"
        return named | {"mlflow.note.content": front.markdown(sweep.front) or arms.markdown(sweep.front)}
    return named | {"mlflow.note.content": markdown(ranked, names)}


def sweep_metrics(ranked: Sequence[Measurement]) -> dict[str, float]:
    """Returns the parent run's figures, under names of their own so that the page sorts trials alone."""
    counts = {f"trials/{status.value}": float(sum(m.status is status for m in ranked)) for status in Status}
    best = next(iter(leaders(ranked)), None)
    hours, price = (sum(getattr(m, name) or 0.0 for m in ranked) for name in ("gpu_hours", "price"))
    counts |= {name: value for name, value in (("spent/gpu_hours", hours), ("spent/price", price)) if value}
    figures = {f"best_{name}": getattr(best, name) for name in ("step_time_s", "tokens_per_s")} if best else {}
    return {"trials/all": float(len(ranked))} | counts | {name: float(value) for name, value in figures.items() if value is not None}


def sweep_command(points: Sequence[Sequence[str]]) -> str:
    """A command that runs the trials of ``points``, given by their overrides: each key with all its values, in order of appearance."""
    values: dict[str, list[str]] = {}
    for overrides in points:
        for override in overrides:
            name, _, value = override.partition("=")
            known = values.setdefault(name, [])
            if value not in known:
                known.append(value)
    words = [f"{name}={','.join(found)}" for name, found in values.items()]
    return shlex.join(["trireme", "train", *(["-m"] if len(points) > 1 else []), *words])


def stages_markdown(records: Sequence[Record]) -> str:
    """Returns the stages of a pipeline as a Markdown table: inputs and state."""
    head = ["| stage | verb | id | takes | outcome |", "|---|---|---|---|---|"]
    stages = [(record, stage) for record in records if (stage := stage_in(record.config)) is not None]
    return "\n".join([*head, *(f"| {s.name} | {s.verb} | {s.id} | {takes(s)} | {r.status.value} |" for r, s in stages)])


def takes(stage: StageRun) -> str:
    """Returns a stage's inputs, by the name of the stage or folder."""
    return ", ".join(stage.made_by.get(name, folder) for name, folder in stage.sources.items()) or "-"


def view_name(sweep: str, owner: str) -> str:
    """Returns the name of a sweep's view in MLflow; the owner's mark keeps sweeps of one name on one server apart."""
    return f"{sweep}-{owner}"


def view(sweep: str, owner: str) -> tuple[str, str]:
    """An experiment tag by which MLflow's page shows the sweep's trials, fastest first, with the columns that matter."""
    columns = ["metrics.`step_time_s`", "metrics.`tokens_per_s`", "metrics.`peak_memory_bytes`", "tags.`status`", "tags.`reason`"]
    state = {
        "searchFilter": f"tags.sweep = '{sweep}' and tags.owner = '{owner}' and tags.trial != ''",
        "orderByKey": columns[0],
        "orderByAsc": True,
        "startTime": "ALL",
        "lifecycleFilter": "Active",
        "selectedColumns": columns,
    }
    return f"mlflow.sharedViewState.{view_name(sweep, owner)}", json.dumps(state)


def markdown(ranked: Sequence[Measurement], names: Mapping[str, str], rows: int = 30) -> str:
    """The head of the ranking as a Markdown table, short enough for a tag."""
    head = ["| | trial | layout | step time | tokens/s | outcome |", "|---|---|---|---|---|---|"]
    body = [
        f"| {m.place or ''} | {m.trial} | {names[m.trial]} | {labels.seconds(m.step_time_s)} "
        f"| {labels.amount(m.tokens_per_s)} | {m.status.value}{': ' + m.reason.value if m.reason else ''} |"
        for m in ranked[:rows]
    ]
    more = [f"\n... and {len(ranked) - rows} more"] if len(ranked) > rows else []
    return "\n".join([*head, *body, *more])
