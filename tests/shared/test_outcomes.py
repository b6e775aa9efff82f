"""What an attempt writes of its end never takes the place of what a later one wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.shared.records.trial_files import write_outcome
from trainer.shared.run.files import read_json


@pytest.mark.parametrize(("there", "comes", "stays"), [(1, 0, 1), (0, 0, 0), (0, 1, 1), (7, 6, 7), (None, 3, 3)])
def test_an_outcome_gives_way_to_that_of_its_own_and_of_a_later_attempt_alone(
    tmp_path: Path, there: int | None, comes: int, stays: int, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "result.json"
    if there is not None:
        write_outcome(path, {"attempt": there, "by": "the one there"})
    write_outcome(path, {"attempt": comes, "by": "the one that comes"})
    found = read_json(path)
    late = there is not None and comes < there
    assert found is not None and (found["attempt"], found["by"]) == (stays, "the one there" if late else "the one that comes")
    assert ("leaves it alone" in capsys.readouterr().err) is late
