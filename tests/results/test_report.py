"""The report: whole, self-contained, safe to open, and true to the files it was made from."""

from __future__ import annotations

import json
import re
import shlex
import xml.etree.ElementTree as xml
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.cli import report as report_verb
from launcher.config import compose
from launcher.results import plots, report, timeline
from launcher.results.plots import Series
from launcher.results.predicted_timeline import foreseen
from launcher.results.reasons import largest_differences, next_commands
from launcher.results.svg import Scale
from launcher.results.timeline import Timeline, covered
from launcher.trials.store import Point, Store
from tests.results.trial_files import STEPS, SweepOnDisk, demo_sweep, losses, metric_line, point, seeded, write_json
from tests.tracking.headless import Page
from trainer.shared.records.outcome import Reason, Status
from trainer.shared.run.errors import ConfigError

pytestmark = pytest.mark.slow

HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>{{ 7*7 }}{% raw %}&amp;\x1b[31m\x00 $(touch /tmp/x) `id`\u202e"
VOID = {"meta", "br", "link", "img", "input", "hr"}


class Structure(HTMLParser):
    """Reads a page and notes every element, attribute and text; fails on elements that are closed in the wrong order."""

    def __init__(self, page: str):
        super().__init__()
        self.open: list[str] = []
        self.names: set[str] = set()
        self.links: list[str] = []
        self.handlers: list[str] = []
        self.text = ""
        self.feed(page)
        assert self.open == [], f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "action", "srcset")]
        self.handlers += [name for name, _ in attrs if name.startswith("on")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def rendered(sweep: SweepOnDisk) -> str:
    return report.render(sweep.store.sweep(sweep.name))


def test_report_shows_every_trial_and_every_part(tmp_path: Path) -> None:
    sweep = demo_sweep(tmp_path)
    page = rendered(sweep)
    text = Structure(page).text
    for record in sweep.records:
        assert record.id[:8] in text, f"{record.id} is hidden"
    for section in ("ranking", "step-times", "timelines", "losses", "memory", "predictions", "unsuccessful"):
        assert f'<section id="{section}">' in page
    assert "out of memory" in text and "layout.tensor=3 does not divide model.heads=4" in text
    assert "+10.0 %" in text, "the error of the prediction"
    assert "error: needs 3.2e9 bytes, has 2e9" in text, "the end of the failed rank's log"


def test_report_needs_no_network_and_no_script(tmp_path: Path) -> None:
    page = rendered(demo_sweep(tmp_path))
    structure = Structure(page)
    assert structure.links == [] and structure.handlers == []
    assert structure.names.isdisjoint({"script", "link", "img", "iframe", "object", "use", "image", "foreignObject"})
    assert not re.search(r"url\(|@import", page)
    assert "default-src 'none'" in page


def test_report_is_small(tmp_path: Path) -> None:
    assert len(rendered(demo_sweep(tmp_path))) < 200_000


def test_hostile_words_are_shown_as_text(tmp_path: Path) -> None:
    sweep = SweepOnDisk(tmp_path)
    done = sweep.done(point(1, 1), 0.2, versions={HOSTILE: HOSTILE})
    trace = json.loads((done.directory / "timeline.json").read_text())
    write_json(
        done.directory / "timeline.json", trace | {"schedule": HOSTILE, "events": [e | {"kind": HOSTILE} for e in trace["events"][:2]]}
    )
    sweep.failed(point(2, 1), Reason.ERROR, HOSTILE, log=HOSTILE)
    sweep.add(Point((HOSTILE,), None, HOSTILE))
    page = rendered(sweep)
    structure = Structure(page)
    assert structure.handlers == [] and structure.names.isdisjoint({"script", "img"})
    assert "\x1b" not in page and "\x00" not in page
    assert "<script>alert(1)</script>" in structure.text and "{{ 7*7 }}" in structure.text


@pytest.mark.parametrize("damage", [
    "", "{", "[]", '{"events": 3}', '{"events": [{"rank": "x"}, 3, null, {"rank": 0, "kind": "forward", "start_s": 1, "end_s": 0}]}',
])  # fmt: skip
def test_damaged_files_cost_their_own_part_only(tmp_path: Path, damage: str) -> None:
    sweep = SweepOnDisk(tmp_path)
    good, bad = sweep.done(point(1, 1), 0.2), sweep.done(point(2, 1), 0.3)
    for name in ("timeline.json", "metrics.jsonl", "failure-0.json"):
        (bad.directory / name).write_text(damage)
    (bad.directory / "logs" / "attempt0.rank0.log").write_bytes(b"\xff\xfe\x00")
    page = rendered(sweep)
    assert good.id[:8] in page and bad.id[:8] in page and "Pipeline of one step" in page


def test_sweep_without_any_measurement_is_still_a_report(tmp_path: Path) -> None:
    sweep = SweepOnDisk(tmp_path)
    sweep.failed(point(1, 1))
    sweep.add(point(2, 1))
    text = Structure(rendered(sweep)).text
    assert "No trial was measured to the end." in text and "out of memory" in text


def test_largest_loss_difference_is_printed_with_its_step_and_trials(tmp_path: Path) -> None:
    sweep = SweepOnDisk(tmp_path)
    sweep.done(point(1, 1), 0.2)
    odd = sweep.done(point(2, 1), 0.3)
    lines = [json.loads(line) for line in (odd.directory / "metrics.jsonl").read_text().splitlines()]
    lines[4]["loss"] *= 1 + 2.5e-4
    (odd.directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = " ".join(Structure(rendered(sweep)).text.split())
    assert "Largest relative difference between any two of 2 trials: 2.5e-04 at step 5, between t1 p1 d4 mb1 and t2 p1 d2 mb1" in text


def test_equal_losses_are_said_to_be_equal(tmp_path: Path) -> None:
    sweep = SweepOnDisk(tmp_path)
    sweep.done(point(1, 1), 0.2)
    sweep.done(point(2, 1), 0.3)
    assert "any two of 2 trials: 0.0e+00 (precision fp32)" in " ".join(Structure(rendered(sweep)).text.split())


def test_a_loss_that_is_not_a_number_in_one_trial_only_is_the_largest_difference() -> None:
    one, other = Series("a", 0, losses={1: 2.0, 2: 3.0}), Series("b", 1, losses={1: 2.0, 2: float("nan")})
    assert plots.widest_gap([one, other]) == (1.0, 2, "a", "b")


def test_only_trials_that_must_train_alike_are_compared(tmp_path: Path) -> None:
    sweep = SweepOnDisk(tmp_path)
    records = [sweep.done(point(1, 1), 0.2), sweep.done(point(2, 1), 0.3)]
    assert report.problem(records[0].config) == report.problem(records[1].config)
    other = {**records[1].config, "optimizer": {**records[1].config["optimizer"], "lr": 0.5}}
    assert report.problem(records[0].config) != report.problem(other)


def test_timeline_shares_add_up_and_count_overlap_once() -> None:
    def event(rank: int, kind: str, start: float, end: float) -> dict[str, object]:
        return {"rank": rank, "stage": rank, "chunk": 0, "kind": kind, "micro_batch": 0, "start_s": start, "end_s": end}

    read = Timeline.read({"step": 3, "schedule": "1f1b", "events": [
        event(0, "forward", 0.0, 2.0), event(0, "send", 1.0, 3.0), event(0, "backward", 5.0, 10.0), event(1, "receive", 2.0, 3.0),
        event(1, "forward", 3.0, 4.0), event(1, "gather", 3.5, 4.5),
    ]})  # fmt: skip
    assert read is not None
    assert (read.use[0].computing, read.use[0].communicating, read.use[0].idle) == pytest.approx((0.7, 0.1, 0.2))
    assert (read.use[1].computing, read.use[1].communicating, read.use[1].idle) == pytest.approx((0.1, 0.15, 0.75))
    assert read.mean_use.computing == pytest.approx(0.4)


def test_communication_inside_of_a_computation_is_no_computing() -> None:
    """So that the pipeline of a step says of tensor parallelism what the parts of the mean step say."""
    event = {"rank": 0, "stage": 0, "chunk": 0, "kind": "forward", "micro_batch": 0, "start_s": 0.0, "end_s": 8.0, "waited_s": 6.0}
    last = {**event, "kind": "optimizer", "start_s": 8.0, "end_s": 10.0, "waited_s": 0.0}
    read = Timeline.read({"step": 3, "schedule": "1f1b", "events": [event, last]})
    assert read is not None
    assert (read.use[0].computing, read.use[0].communicating, read.use[0].idle) == pytest.approx((0.4, 0.6, 0.0))


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)).map(sorted).map(tuple)))
def test_covered_length_is_that_of_the_union(spans: list[tuple[int, int]]) -> None:
    assert covered(spans) == len({second for start, end in spans for second in range(start, end)})


def test_many_ranks_are_drawn_as_one_of_each_stage() -> None:
    events = [
        {"rank": rank, "stage": rank // 16, "chunk": 0, "kind": "forward", "micro_batch": 0, "start_s": 0.0, "end_s": 1.0}
        for rank in range(64)
    ]
    read = Timeline.read({"step": 1, "schedule": "gpipe", "events": events})
    assert read is not None and read.shown() == [0, 16, 32, 48]


def test_pictures_are_well_formed_and_say_each_micro_batch(tmp_path: Path) -> None:
    record = SweepOnDisk(tmp_path).done(point(2, 2), 0.2)
    read = Timeline.read(json.loads((record.directory / "timeline.json").read_text()))
    assert read is not None
    picture = xml.fromstring(str(timeline.picture(read, "a <title>")))
    words = [element.text for element in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert {"rank 0 · stage 0", "rank 3 · stage 1", *map(str, range(8))} <= set(words)
    assert picture.attrib["aria-label"] == "a <title>"


def test_predicted_pipeline_is_drawn_under_the_traced_one_in_the_same_scale(tmp_path: Path) -> None:
    sweep = SweepOnDisk(tmp_path)
    predicted = sweep.done(point(2, 2, predicted={"step_time_s": 0.22, "memory_bytes": 2e7, "parts": {}}), 0.2)
    sweep.done(point(1, 1), 0.3)
    drawn, _ = report.pictures(report.gather(sweep.records))
    assert [pipeline.predicted is not None for pipeline in drawn] == [True, False]
    expected = foreseen(predicted)
    assert expected is not None and list(expected.by_rank) == [0, 1], "one row for each pipeline rank"
    assert {e.micro_batch for e in expected.events} == set(range(8)) and {e.kind for e in expected.events} >= {"forward", "backward"}
    widths = [
        xml.fromstring(str(image)).findall("{*}path[@class='idle']")[0].attrib["d"] for image in (drawn[0].traced, drawn[0].predicted)
    ]
    reach = [float(re.findall(r"h([0-9.]+)", path)[0]) for path in widths]
    read = drawn[0].timeline
    assert reach[0] / reach[1] == pytest.approx(read.seconds / expected.seconds, rel=0.01)


def test_page_stays_small_however_much_was_traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = SweepOnDisk(tmp_path)
    for tensor, pipeline in ((1, 1), (2, 1), (1, 2), (2, 2)):
        sweep.done(point(tensor, pipeline), 0.1 * tensor + 0.01 * pipeline)
    monkeypatch.setattr(report, "PICTURES_BYTES", 1)
    text = Structure(rendered(sweep)).text
    assert text.count("% computing") == 1 and "3 slower trials are not drawn here" in text


@given(st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=5), st.booleans(), st.booleans())
def test_scale_holds_its_values_and_its_ticks(values: list[float], log: bool, zero: bool) -> None:
    scale = Scale.over(values, 10, 110, zero=zero and not log, log=log)
    inside = (10 - 1e-6, 110 + 1e-6)
    assert all(inside[0] <= scale(v) <= inside[1] for v in values)
    ticks = scale.ticks()
    assert ticks == sorted(ticks) and len(ticks) <= 14
    assert all(inside[0] <= scale(t) <= inside[1] for t in ticks)


def test_step_times_far_apart_are_on_a_logarithmic_scale() -> None:
    close = str(plots.step_times([Series("a", 0, [1.0, 1.1]), Series("b", 1, [2.0, 2.2])]))
    apart = str(plots.step_times([Series("a", 0, [1.0, 1.1]), Series("b", 1, [200.0, 220.0])]))
    assert ">1.50 s<" in close and ">100 s<" in apart and ">10.0 s<" in apart


def test_verb_writes_the_page_where_it_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    demo_sweep(tmp_path / "runs")
    page = tmp_path / "deep" / "page.html"
    assert report_verb.main(["planted", "--dir", str(tmp_path / "runs"), "-o", str(page)]) == 0
    assert capsys.readouterr().out == f"{page}\n"
    assert page.read_text().startswith("<!doctype html>")


def test_output_that_cannot_be_written_is_one_plain_error(tmp_path: Path) -> None:
    demo_sweep(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--output=.* cannot be written"):
        report_verb.main(["--dir", str(tmp_path), "-o", str(tmp_path / "file" / "report.html")])


@pytest.mark.parametrize("dark", [False, True])
def test_browser_draws_the_page_from_disk_without_a_request(tmp_path: Path, page: Page, dark: bool) -> None:
    sweep = demo_sweep(tmp_path)
    sweep.failed(point(1, 2), Reason.ERROR, HOSTILE, log=HOSTILE)
    sweep.done(seeded(7), 0.1, step_split_s={"forward": 0.08, "communication": 0.02})
    sweep.done(seeded(8), 0.15, step_split_s={"forward": 0.07, "communication": 0.06})
    path = tmp_path / "report.html"
    path.write_text(report.render(Store(tmp_path).sweep()))
    page.prefer(dark)
    page.open(path.as_uri())
    page.wait_for("document.readyState === 'complete' && document.querySelectorAll('svg').length >= 6")
    assert page.requests == [path.as_uri()]
    assert page.evaluate("[...document.querySelectorAll('svg')].every(s => s.getBoundingClientRect().height > 40)")
    page.resize(1300, 900)
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), "nothing makes the page wider than the window"
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(20, 23, 29)") is dark
    rows = page.evaluate("[...document.querySelectorAll('#ranking tbody tr')].map(r => r.innerText)")
    assert len(rows) == len(sweep.records)
    page.resize(390, 844)  # a phone
    wide = "[document.documentElement, document.querySelector('#ranking .wide')].every(e => e.scrollWidth <= e.clientWidth)"
    assert page.evaluate(wide), "nothing of the ranking is out of sight on a phone"
    assert page.evaluate("document.querySelector('#why table').scrollWidth <= document.querySelector('main').clientWidth")
    assert page.evaluate("parseFloat(getComputedStyle(document.querySelector('#why td')).fontSize) >= 12"), "small print"


def test_pictures_show_the_fastest_trials_and_differences_of_losses_are_those_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "DRAWN", 2)
    sweep = SweepOnDisk(tmp_path)
    for number, planned in enumerate((point(4, 1), point(2, 2), point(1, 4))):
        record = sweep.done(planned, 0.1 + number / 10)
    line = metric_line(STEPS, 0.3)
    with (record.directory / "metrics.jsonl").open("a") as file:  # the slowest trial's last step, as it was run again
        file.write(json.dumps(line | {"loss": line["loss"] * (1 + 1e-7)}) + "\n")
    drawn = report.page(Store(tmp_path).sweep())
    (group,) = drawn["losses"]
    assert drawn["rows_left_out"] == 1
    for name in ("step_times", "memory"):
        assert ["t4 p1" in str(drawn[name]), "t1 p4" in str(drawn[name])] == [True, False]
    assert group.widest is not None and 0 < group.widest[0] < 1e-6, "the third differs, and is not drawn"
    assert "In the table alone: 1 slower trial. Pictures" in (text := rendered(sweep)) and "t1 p4" in text


def test_losses_of_a_diverged_trial_are_drawn_as_far_as_they_go(tmp_path: Path) -> None:
    series = [Series("a", 0, losses=dict(enumerate(losses(5), 1))), Series("b", 1, losses={1: 5.0, 2: float("inf"), 3: float("nan")})]
    drawn = str(plots.loss_curves(series))
    xml.fromstring(drawn)
    assert not re.search(r"\b(nan|inf)\b", drawn)


def test_stopped_trial_is_listed_with_its_reason(tmp_path: Path) -> None:
    sweep = SweepOnDisk(tmp_path)
    sweep.done(point(1, 1), 0.2)
    sweep.add(point(2, 1), Status.STOPPED, Reason.CANNOT_WIN, "0.9 s a step cannot reach 0.2 s")
    text = Structure(rendered(sweep)).text
    assert "cannot win" in text and "0.9 s a step cannot reach 0.2 s" in text


def test_the_parts_that_make_the_winner_faster_are_the_largest_differences_first() -> None:
    found = largest_differences({"forward": 1.0, "bubble": 0.5, "data": 0.1}, {"forward": 1.2, "bubble": 0.1, "copies": 0.9, "data": 0.101})
    assert [(each.part, round(each.saved, 3)) for each in found] == [("copies", 0.9), ("bubble", -0.4), ("forward", 0.2)]
    assert largest_differences({}, {"forward": 1.0}) == []


def test_the_report_says_why_the_fastest_wins_over_the_fastest_that_it_can_be_told_from(tmp_path: Path) -> None:
    sweep = SweepOnDisk(tmp_path)
    parts = {"matrix products": 0.05, "pipeline bubble": 0.01}
    predicted = [{"step_time_s": 0.1, "memory_bytes": 2e7, "parts": parts | {"pipeline bubble": bubble}} for bubble in (0.01, 0.08)]
    sweep.done(point(4, 1, predicted=predicted[0]), 0.2, step_split_s={"forward": 0.1, "backward": 0.05, "communication": 0.02})
    sweep.done(point(2, 2), 0.2001, step_split_s={"forward": 0.1})  # cannot be told from it
    sweep.done(point(1, 4, predicted=predicted[1]), 0.3, step_split_s={"forward": 0.1, "backward": 0.25, "communication": 0.02})
    text = " ".join(Structure(rendered(sweep)).text.split())
    said = text.partition("Why the fastest wins")[2].partition("What to try next")[0]
    assert "t4 p1" in said and "t1 p4" in said and "t2 p2" not in said
    figures = said.replace(" ", "")
    assert "backwardmeasured50.0ms250ms200ms" in figures and "pipelinebubblepredicted10.0ms80.0ms70.0ms" in figures
    assert "communication" not in said and "matrix products" not in said


def test_what_to_try_next_is_a_command_that_composes_and_repeats_no_secret(tmp_path: Path) -> None:
    sweep = SweepOnDisk(tmp_path)
    first, second = sweep.done(seeded(1, "sweep.name=a b"), 0.2), sweep.done(seeded(2), 0.2)
    commands = [shlex.split(command) for _, command in next_commands([first, second])]
    assert [words[:2] for words in commands] == [["trireme", "train"], ["trireme", "train"], ["trireme", "search"]]
    assert all(f"run.steps={4 * STEPS}" in words for words in commands[:2]) and "run.seed=1" in commands[0] and "run.seed=2" in commands[1]
    for _, _, *words in commands:
        assert compose(words).run.seed in (1, 2)
    (only,) = next_commands([first])
    assert only[1] == "trireme search model=gpt_tiny run.seed=1"
    assert next_commands([sweep.done(seeded(3, "cluster.env.TOKEN=abc"), 0.2)]) == [] == next_commands([])
