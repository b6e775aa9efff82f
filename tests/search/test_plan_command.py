"""``trireme plan`` says what it counted and why a layout is out, and refuses what train refuses in the same words."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from launcher.cli.main import main
from launcher.config import compose, resolve
from launcher.config.folders import conf_dir
from launcher.goals.training.plan import planned_of
from launcher.labels import amount, duration, interval
from launcher.planning.layout_filter import columns_wanted, describe
from launcher.planning.layout_names import name_of
from launcher.planning.plan import world
from trainer.shared.run.errors import ConfigError

pytestmark = pytest.mark.slow

SMALL = ["hardware=a100_80", "cluster.gpus_per_node=8", "model.layers=16", "model.hidden=2048", "model.heads=16", "model.vocab=32000",
         "model.seq=1024", "run.global_batch=64", "run.precision=bf16"]  # fmt: skip


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs ``trireme plan`` in an empty folder; its exit code, standard output and standard error."""
    monkeypatch.chdir(tmp_path)

    def run(*argv: str) -> tuple[int, str, str]:
        code = main(["plan", *argv])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.mark.parametrize("more", [["--limit", "20"], ["--limit", "20", "layout.tensor=2,4"]])
def test_what_is_in_and_what_is_out_are_all_that_was_predicted(plan: Any, more: list[str]) -> None:
    document = json.loads(plan(*SMALL, *more, "--json")[1])
    assert any(reason.startswith("edge") for reason in document["out"])
    assert document["considered"] == document["in"] + sum(document["out"].values())
    printed = plan(*SMALL, *more)[1].splitlines()
    (place,) = [i for i, line in enumerate(printed) if "layouts predicted" in line]
    (end,) = [i for i, line in enumerate(printed) if line.startswith("Not predicted")]
    counts = [int(line.split()[0].replace(",", "")) for line in printed[place + 1 : end]]
    considered, listed = (int(word.replace(",", "")) for word in re.findall(r"([\d,]+) (?:layouts|are in)", printed[place]))
    assert considered == listed + sum(counts) == document["considered"]
    assert not set(document["out"]) & set(document["not_predicted"])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[("layout.tensor", value) for value in ("abc", "null", "0", "1.5", "true", "1e30", "[2,4]")],
        *[("layout.sequence_parallel", value) for value in ("maybe", "1", "null")],
        *[("layout.schedule", value) for value in ("1f2b", "null", "0")],
        *[("layout.sharding.optimizer", value) for value in ("x", "0")],
        ("layout.micro_batch", "abc"),
        ("layout.recompute_layers", "-1"),
    ],
)
def test_values_of_layout_keys_are_read_as_those_of_a_run(plan: Any, key: str, value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose([f"{key}={value}"])
    for words in (value, f"1,{value}") if key == "layout.tensor" and value != "[2,4]" else (value,):
        assert plan(*SMALL, f"{key}={words}") == (2, "", f"error: {caught.value}\n")


def test_a_recipes_own_layout_stands_beside_the_fastest(plan: Any) -> None:
    document = json.loads(plan("recipe=llama31_8b", "--json", "layout.tensor=2")[1])
    own, best = document["configured"], document["layouts"][0]
    assert own["layout"]["tensor"] == 1 and own["layout"]["sharding"] == {"params": 8, "grads": 8, "optimizer": 8, "offload": 0.0}
    assert own["times_fastest"] == pytest.approx(own["step_time_s"] / best["step_time_s"]) and own["refused"] is None
    there = json.loads(plan("recipe=llama31_8b", "--json", "--explain", own["name"])[1])
    assert own["step_time_s"] == there["step_time_s"] and own["layout"] == there["layout"]
    slower = 100 * (own["times_fastest"] - 1)
    said = " ".join(plan("recipe=llama31_8b", "layout.tensor=2")[1].split())
    assert f"{own['name']}: {own['step_time_s']:.4g} s, {abs(slower):.1f} % {'slower' if slower > 0 else 'faster'} than the first; " in said


def test_a_recipes_layout_that_a_cluster_cannot_hold_says_why_and_no_layout_says_nothing(plan: Any) -> None:
    code, printed, _ = plan("recipe=gpt3_175b", "cluster.nodes=12", "run.global_batch=1536")
    assert code == 0 and "cannot be predicted here: layout.tensor=8 x layout.pipeline=8 = 64 ranks do not divide" in " ".join(
        printed.split()
    )
    assert json.loads(plan(*SMALL, "--json")[1])["configured"] is None


def test_a_plan_says_whose_times_they_are_what_the_whole_run_takes_and_what_to_type_next(plan: Any) -> None:
    words = [*SMALL, "run.steps=7200", "cluster.price_per_gpu_hour=2.5", "layout.tensor=1,2"]
    document = json.loads(plan(*words, "--json")[1])
    run, best = document["run"], document["layouts"][0]
    assert document["trainer"] == "trireme" and run["steps"] == 7200 and run["tokens"] == 7200 * 64 * 1024
    assert best["step_time_s"] == run["step_s"] and run["seconds"] == 7200 * run["step_s"]
    assert run["gpu_hours"] == pytest.approx(8 * 2 * run["step_s"]) and run["price"] == 2.5 * run["gpu_hours"]
    name, verb, *typed = shlex.split(document["next"]["command"])
    assert (name, verb, document["next"]["refused"]) == ("trireme", "train", None)
    assert name_of(resolve(compose(typed)).layout) == best["name"]
    printed = plan(*words)[1]
    assert document["next"]["command"] in printed and "\x1b" not in printed
    assert f"{amount(run['price'])} at 2.5 a GPU-hour." in printed
    assert duration(run["seconds"]) in printed and "trainer trireme" in printed


def test_without_a_price_a_plan_tells_gpu_hours_and_of_what_train_refuses_it_explains_the_layout(plan: Any) -> None:
    words = [*SMALL, "model.family=llama", "model.predicted_tokens=1", "run.steps=100"]
    document = json.loads(plan(*words, "--json")[1])
    assert document["run"]["price"] is None and document["trainer"] == "trireme"
    assert "predicted_tokens=1" in document["next"]["refused"]
    name, verb, *typed = shlex.split(document["next"]["command"])
    assert (name, verb, typed[-2:]) == ("trireme", "plan", ["--explain", document["layouts"][0]["name"]])
    assert document["layouts"][0]["name"] in plan(*typed)[1]


def test_lines_of_a_plan_for_people_fit_eighty_columns_but_for_the_command(plan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    printed = plan(*SMALL, "cluster.price_per_gpu_hour=2.5")[1]
    told = printed[printed.index("These are times") : printed.index("  trireme train")]
    assert max(len(line) for line in told.splitlines() if not line.startswith("  trireme ")) <= 80 and "GPU-hours" in told


def test_values_of_layout_keys_lead_back_to_the_words_they_were_read_from() -> None:
    given = {"layout.recompute": ["none", "full"], "layout.sharding.params": [1, 2.0, 2], "layout.recompute_layers": [None]}
    given["layout.sequence_parallel"] = [True]
    back = [describe(name, codes) for name, codes in columns_wanted(given).items()]
    assert back == [
        "layout.recompute=none,full",
        "layout.sharding.params=1,2",
        "layout.recompute_layers=null",
        "layout.sequence_parallel=true",
    ]
    assert columns_wanted({"layout.data": [None]}) == {}, "replicas that follow from the cluster leave every layout in"


def test_options_and_overrides_may_come_in_any_order(plan: Any) -> None:
    document = json.loads(plan("--json", *SMALL, "--top", "1", "layout.tensor=4")[1])
    assert [entry["layout"]["tensor"] for entry in document["layouts"]] == [4]


@pytest.mark.parametrize("override", ["model.heads=7", "model.kv_heads=3", "model.dropout=1"])
def test_a_model_that_train_refuses_is_refused_in_the_same_words(plan: Any, override: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(compose([*SMALL, override]))
    assert plan(*SMALL, override) == (2, "", f"error: {caught.value}\n")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--explain", "t2 p2 d1 mb1"], "uses 4 of 8 ranks"),
        (["--explain", "t1 p1 d8 mb1 zero-bubble"], "same: another layout of the space means the same run"),
        (["--explain", "t2 p2 d2 mb1", "layout.tensor=4"], "outside of search.space, or of the values given to layout keys"),
        (["--explain", "t0 p8 d1 mb1"], "layout.tensor=0 is below"),
        (["--explain", "t1 p1 d8 mb99999999999"], "layout.micro_batch=99999999999 is above"),
        (["--explain", ""], "layout '' has no data degree"),
        (["--explain", "²"], "means nothing"),
        (["--svg", "x.svg"], "--svg=x.svg"),
        (["--limit", "nan"], "--limit=nan"),
        (["layout=zero1"], "layout=zero1 selects a single layout, but this command enumerates all; restrict it with individual keys"),
        (["layout={tensor: 2}"], "layout={tensor: 2} selects a single layout"),
        (["layout.data=7"], "has layout.data=7; there are some with 1, 2, 4 or 8"),
        (["layout.tensor=3"], "has layout.tensor=3; there are some with 1, 2, 4 or 8"),
        (["layout.schedule=gpipe", "layout.virtual_pipeline=2"], "no layout"),
        (["layout.tensor=4", "layout.data=4"], "has layout.tensor=4 and layout.data=4 at once; give more values"),
        (["layout.virtual_pipeline=2", "layout.pipeline=1"], "has layout.virtual_pipeline=2 and layout.pipeline=1 at once; there are some"),
        (
            ["layout.recompute=none", "layout.recompute_every=2"],
            "layout.recompute_every=2 and layout.recompute=none at once; there are some",
        ),
        (["layout.sequence_parallel=true", "layout.tensor=1"], "=true and layout.tensor=1 at once; there are some with layout.sequence"),
        (["layout.tensor='['"], "error: "),
        (["layout.tensor = 4"], "cannot read 'layout.tensor = 4' as KEY=VALUE"),
        (["layout.tensor"], "cannot read 'layout.tensor' as KEY=VALUE"),
        (["layout.tensor=interval(1,4)"], "layout.tensor=interval(1,4) does not list its values; write them out"),
        (["layout.tensor=glob(*)"], "layout.tensor=glob(*) does not list its values"),
    ],
)
def test_what_cannot_be_answered_is_one_plain_error_that_says_why(plan: Any, argv: list[str], words: str) -> None:
    code, out, err = plan(*SMALL, *argv)
    assert code == 2 and out == "" and err.startswith("error: ") and words in err and len(err.splitlines()) == 1


def test_the_heading_names_the_device(plan: Any) -> None:
    cluster = compose(SMALL).cluster
    assert world(cluster) == "1 x 8 a100_80" and plan(*SMALL)[1].splitlines()[0].endswith(world(cluster))


def test_a_plan_says_among_how_many_layouts_the_fastest_is_and_what_finds_it(plan: Any) -> None:
    """Also among layouts that the table leaves out for another that is as fast: the search measures them."""
    among = json.loads(plan(*SMALL, "--json")[1])["contenders"]
    chances = sorted(planned_of(compose(SMALL), {}).chances, reverse=True)
    fewer, enough = sum(chances[: among["count"] - 1]), sum(chances[: among["count"]])
    assert fewer < among["sure"] <= enough + 1e-9 and among["count"] > 1
    words = plan(*SMALL)[1].splitlines()
    assert any(line.startswith(f"One of {among['count']} layouts is the fastest") for line in words)
    assert "  " + among["command"] in words and among["command"] == "trireme search " + shlex.join(SMALL)


def test_an_explanation_has_the_interval_and_says_how_far_own_runs_are(plan: Any) -> None:
    entry = json.loads(plan(*SMALL, "--top", "1", "--json")[1])["layouts"][0]
    words = plan(*SMALL, "--explain", entry["name"])[1]
    assert f"80 % of such steps take {interval(entry['interval_s'])}; it is the fastest" in words and "has learnt from" not in words
    place = "{tflops: 312, layers: 4, hidden: 128, seq: 128, gpus: 8, precision: fp32, trainer: trireme}"
    Path("runs/hardware").mkdir(parents=True, exist_ok=True)
    shipped = (conf_dir() / "hardware" / "a100_80.yaml").read_text()
    Path("runs/hardware/here.yaml").write_text(f"{shipped}\nlearnt: {{runs: [r1, r2], places: [{place}]}}\n")
    asked = [*SMALL, "hardware=here", "--explain", entry["name"]]
    away = json.loads(plan(*asked, "--json")[1])["learnt_distance"]
    assert f"has learnt from 2 runs here, the nearest of them {away:.1f} doublings away" in plan(*asked)[1]


def test_an_explanation_says_that_rates_are_assumed_where_they_are(plan: Any) -> None:
    explain = [*SMALL, "--explain", json.loads(plan(*SMALL, "--top", "1", "--json")[1])["layouts"][0]["name"]]
    assert "nobody fitted" not in plan(*explain)[1]
    assert "nobody fitted the rates of h20 to runs" in plan(*explain, "hardware=h20")[1]


@pytest.mark.parametrize(
    ("tensor", "more", "sizes"),
    [
        (8, [], []),  # 2,048 / 8 = 256 queries
        (1, ["model.hidden=2000"], [2000, 6000, 8000]),  # 64 does not divide 2,000, whatever the layout
        (8, ["model.hidden=1920", "model.heads=16"], [240, 720, 960]),  # 960 = 15 x 64 of the MLP in 16 bits, but 7.5 lines in 8
    ],
)
def test_an_explanation_names_sizes_whose_rows_begin_between_lines(plan: Any, tensor: int, more: list[str], sizes: list[int]) -> None:
    named = f"t{tensor} p1 d{8 // tensor} mb1"
    for precision, per_line in (("bf16", 64), ("fp8", 128)):
        asked = [*SMALL, "hardware=h100", f"run.precision={precision}", *more, "--explain", named]
        broken = [size for size in sizes if size % per_line]
        assert json.loads(plan(*asked, "--json")[1])["off_lines"] == broken
        words = f"on a rank, {per_line} does not divide {', '.join(f'{size:,}' for size in broken)}: weight products"
        assert (words in plan(*asked)[1]) == bool(broken)


def test_ends_of_an_interval_keep_their_digits() -> None:
    assert [interval(ends) for ends in ((0.0196, 1.15), (0.9, 1.15), (0.033, 0.357), None)] == [
        "19.6 ms-1.15 s",
        "0.90-1.15 s",
        "33.0-357 ms",
        "-",
    ]


def test_every_listed_layout_is_explained_by_its_name(plan: Any) -> None:
    document = json.loads(plan(*SMALL, "--top", "4", "--json")[1])
    for entry in document["layouts"]:
        again = json.loads(plan(*SMALL, "--explain", entry["name"], "--json")[1])
        assert np.isclose(again["step_time_s"], entry["step_time_s"])


def test_what_is_measured_first_are_layouts_of_the_list_that_leave_less_and_less_open(plan: Any) -> None:
    listed = {one["name"] for one in json.loads(plan(*SMALL, "--json", "--top", "10000")[1])["layouts"]}
    code, printed, _ = plan(*SMALL, "--measure", "4", "--json")
    found = json.loads(printed)
    spreads = [found["spread"], *(one["spread"] for one in found["measure"])]
    assert code == 0 and len({one["name"] for one in found["measure"]} & listed) == 4
    assert spreads == sorted(spreads, reverse=True) and len(set(spreads)) == 5


def test_the_commands_that_measure_train_those_layouts_in_one_sweep(plan: Any) -> None:
    printed = plan(*SMALL, "layout.tensor=2,4", "--measure", "2")[1]
    commands = [shlex.split(line) for line in printed.splitlines() if line.startswith("  trireme")]
    wanted = json.loads(plan(*SMALL, "layout.tensor=2,4", "--measure", "2", "--json")[1])["measure"]
    for words, one in zip(commands[:-1], wanted, strict=True):
        assert words[:2] == ["trireme", "train"] and "sweep.name=measured" in words
        layout = resolve(compose(words[2:])).layout
        assert name_of(layout) == one["name"]
    assert commands[-1][:3] == ["trireme", "calibrate", "measured"]


@pytest.mark.parametrize(
    "words", [[*SMALL, "--measure", "0"], [*SMALL, "--measure", "1", "--explain", "1"], ["task=inference", "--measure", "1"]]
)
def test_what_cannot_be_measured_first_is_one_line(plan: Any, words: list[str]) -> None:
    code, printed, error = plan(*words)
    assert code == 2 and not printed and error.count("\n") == 1 and "--measure" in error


def test_a_plan_in_which_nothing_fits_has_nothing_to_measure(plan: Any) -> None:
    code, _, error = plan(*SMALL, "--limit", "1.5", "--measure", "1")
    assert code == 2 and "no layout is likely to fit" in error
    code, out, _ = plan(*SMALL, "--limit", "1.5")
    assert code == 1 and "no layout is likely to fit into the 1.5 GB of a device" in out
