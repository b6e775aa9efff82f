"""Every campaign test names an area that exists, and the history of campaigns is kept and shown."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import campaign

TESTS = Path(__file__).parent
LINE = {"area": "layouts", "date": "2026-01-02", "commit": "abc", "seed": 1, "tests": {"passed": 3}, "worst": {"fp64": 2e-13}}
LINE |= {"seconds": 120, "cpu_seconds": 180}


def test_every_area_that_a_test_names_is_run_by_the_campaign() -> None:
    named = {area for path in TESTS.rglob("*.py") for area in re.findall(r"mark\.campaign\(\"(\w*)\"\)", path.read_text())}
    assert named <= set(campaign.AREAS)
    assert set(campaign.AREAS) - {"draws", "planted"} <= named, "an area without a test"


def test_the_newest_line_of_each_area_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "campaign.json"
    campaign.add(LINE, path)
    campaign.add(LINE | {"commit": "def", "tests": {"failed": 1, "passed": 2}}, path)
    assert [line["commit"] for line in campaign.history(path)] == ["abc", "def"]
    page = campaign.page(campaign.history(path))
    assert "`def` | 1 failed, 2 passed | fp64 2e-13 | 2 min (3 of processors)" in page and "abc" not in page


@pytest.mark.parametrize(
    ("tests", "verdict"), [({"passed": 3}, False), ({"passed": 3, "error": 1}, True), ({"failed": 1}, True), ({}, True)]
)
def test_an_area_fails_if_a_test_fails_or_none_runs(tests: dict[str, int], verdict: bool) -> None:
    assert campaign.failed(LINE | {"tests": tests}) is verdict


def test_a_defect_that_escapes_fails_its_area_and_so_does_a_test_that_fails_without_any() -> None:
    caught = {"room": "state", "name": "one", "caught": True}
    sound = {"room": "", "name": "tests/test_one.py::test_one", "caught": False}
    assert campaign.planted_counts([sound, caught, caught]) == {"caught": 2}
    assert campaign.planted_counts([sound, caught, caught | {"caught": False}]) == {"caught": 1, "failed": 1}
    assert campaign.planted_counts([sound | {"caught": True}, caught]) == {"caught": 1, "error": 1}
    assert campaign.planted_counts([sound]) == campaign.planted_counts([]) == {"error": 1}


def test_an_unknown_area_is_refused_before_anything_runs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        campaign.main(["layuots"])
    assert ended.value.code == 2 and "AREA layuots is not known; choose from layouts" in capsys.readouterr().err
