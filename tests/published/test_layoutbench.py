"""Predictors side by side: none is told what it is asked, and what it cannot say is not made up."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from benchmarks.fit import timed_cases
from benchmarks.history.__main__ import SHIPPED
from benchmarks.history.figures import rows_of
from benchmarks.layoutbench.__main__ import asked, fixed_share, main
from benchmarks.layoutbench.peers import Unsaid, dense
from benchmarks.layoutbench.splits import check, freeze
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
