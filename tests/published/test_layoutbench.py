"""Predictors side by side: none is told what it is asked, and what it cannot say is not made up."""

from __future__ import annotations

import dataclasses
import math
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from benchmarks.fit import timed_cases
from benchmarks.history.__main__ import SHIPPED
from benchmarks.history.figures import rows_of
from benchmarks.layoutbench.__main__ import asked, fixed_share, main
from benchmarks.layoutbench.peers import Unsaid, dense
from benchmarks.layoutbench.splits import check, freeze, to_others
from benchmarks.layoutbench.tuners import TUNERS, Outcome, tuned
from benchmarks.replay.trials import MeasuredSweep
from benchmarks.spreads import LeftOut
from launcher.cost.inputs.layouts import LAYOUT_DTYPE
from launcher.cost.inputs.shape import Experts
from launcher.cost.known import OTHER
from launcher.cost.parts import WIDTH_OF_PART
from launcher.tables.cases import TableCase
from trainer.shared.run.errors import ConfigError


@cache
def some() -> tuple[list[TableCase], np.ndarray]:
    cases, measured = timed_cases([row for name in ("fsdp", "internevo", "libai") for row in rows_of(SHIPPED / f"{name}.csv")])
    return cases, np.array(measured)


def test_a_fixed_share_does_not_know_the_source_that_it_predicts() -> None:
    cases, measured = some()
    first = np.array([case.row["source"] == cases[0].row["source"] for case in cases])
    changed = fixed_share(cases, np.where(first, 7 * measured, measured))
    assert changed[first] == pytest.approx(fixed_share(cases, measured)[first])
    assert not np.allclose(changed[~first], fixed_share(cases, measured)[~first])


def test_what_a_peer_has_no_input_for_is_not_said() -> None:
    cases, _ = some()
    sliding = dataclasses.replace(cases[1], shape=dataclasses.replace(cases[1].shape, window=128))

    class Halves:
        def seconds(self, case: TableCase) -> float:
            dense(case)
            return 0.5

    found = asked(Halves(), [cases[0], sliding])
    assert found[0] == 0.5 and np.isnan(found[1])
    with pytest.raises(Unsaid, match="a window"):
        dense(sliding)


def test_a_kind_of_which_there_is_one_source_has_misses_too() -> None:
    cases, measured = some()
    one = [i for i, case in enumerate(cases) if case.row["source"] == cases[0].row["source"]]
    seconds = np.tile(measured[one][:, None], (1, len(WIDTH_OF_PART)))
    missed = LeftOut([cases[i] for i in one], seconds, seconds, measured[one], {}).missed()
    assert len(missed) == 1 and np.isinf(missed[0].distance).all() and len(missed[0].ratios) == len(one)


def test_a_run_of_a_kind_that_is_left_out_is_as_far_as_the_nearest_of_another_kind() -> None:
    """Its own kind is near, and nothing of it is known then."""
    cases, _ = some()
    mixture = Experts(8, 2, cases[0].shape.ffn)
    routed = [dataclasses.replace(case, shape=dataclasses.replace(case.shape, experts=mixture)) for case in (cases[0], cases[0])]
    far = to_others([*cases, *routed], np.arange(len(cases) + 2) >= len(cases))
    assert far == pytest.approx([OTHER, OTHER])


def test_splits_stay_as_they_were_frozen(tmp_path: Path) -> None:
    cases, _ = some()
    path = tmp_path / "splits.csv"
    freeze(cases, path)
    check(cases[::-1], path)
    with pytest.raises(ConfigError, match=rf"has other runs \({len([c for c in cases if c.row['source'] == cases[0].row['source']])} then"):
        check(cases[1:], path)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]))
    with pytest.raises(ConfigError, match="is not in it"):
        check(cases, path)


def test_a_peer_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--peer", "somebody=nowhere"])
    assert ended.value.code == 2 and "'somebody=nowhere' is not NAME=FOLDER" in capsys.readouterr().err


def sweep(*layouts: dict[str, object], seconds: list[float]) -> MeasuredSweep:
    """Runs of one question that differ in their layouts alone; an infinite time ran out of memory."""
    cases, _ = some()
    table = np.zeros(len(layouts), LAYOUT_DTYPE)
    for row, layout in zip(table, layouts):
        for name in LAYOUT_DTYPE.names or ():
            row[name] = layout.get(name, 1)
    took = np.array(seconds)
    return MeasuredSweep("", [dataclasses.replace(cases[0], layout=row) for row in table], took, np.isinf(took), np.ones(len(took)))


def test_a_tuner_leaves_out_what_its_rules_say_a_run_has_settled() -> None:
    layouts = [{"micro_batch": micro, "recompute": full} for micro in (1, 2, 4) for full in (2, 0)]
    made = sweep(*layouts, seconds=[9.0, math.inf, 7.0, 6.0, 8.0, 5.0])
    hours, flagscale, paddle = np.ones(6), TUNERS[0], TUNERS[1]
    # FlagScale: 1 recomputed runs, 1 without does not fit, so no larger one without does; 2 and 4 recomputed are tried.
    assert tuned(made, flagscale, range(6), hours) == Outcome(7 / 5 - 1, 4, 4 / 6)
    # Both, once 4 without recomputation has run: everything else is taken to be slower.
    assert tuned(made, flagscale, range(5, -1, -1), hours) == Outcome(0.0, 1, 1 / 6)
    assert tuned(made, paddle, range(5, -1, -1), hours).trials == 1
    cut = sweep({"tensor": 4, "pipeline": 2}, {"tensor": 2, "pipeline": 4}, {"tensor": 1, "pipeline": 4}, seconds=[math.inf, 3.0, 2.0])
    assert tuned(cut, flagscale, range(3), np.ones(3)) == Outcome(0.0, 2, 2 / 3)


def test_a_patient_tuner_ends_after_so_many_trials_that_were_no_faster() -> None:
    made = sweep(*[{"micro_batch": micro} for micro in range(1, 9)], seconds=[5.0, 4.0, 9.0, 9.0, 9.0, 9.0, 9.0, 1.0])
    assert tuned(made, TUNERS[2], range(8), np.ones(8)) == Outcome(3.0, 7, 7 / 8)
