"""The verbs plan, size and search: one JSON document or tables on standard output, one plain error for wrong input."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher.cli.main import main
from launcher.cli.overrides import layouts_asked
from launcher.config import compose, resolve
from launcher.planning.layout_filter import columns_wanted, from_layout, widen_space
from launcher.planning.plan import plan
from trainer.shared.run.schema import LayoutConfig, ShardingConfig

pytestmark = pytest.mark.slow

CSV = str(Path(__file__).parent / "layouts_13b.csv")
SMALL = ["hardware=a100_80", "cluster.gpus_per_node=8", "model.layers=16", "model.hidden=2048", "model.heads=16", "model.vocab=32000",
         "model.seq=1024", "run.global_batch=64", "run.precision=bf16"]  # fmt: skip

BUDGET = ["--gpus", "8", "--days", "1", "--tokens", "1e9"]
UNSIZED = ["model.layers=5", "run.global_batch=7", "layout.tensor=1", "optimizer.lr=1", "recipe=gpt3_20b", "sweep.dir=x"]


@pytest.fixture
def trireme(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a command line in an empty folder; its exit code, standard output and standard error."""
    monkeypatch.chdir(tmp_path)

    def run(*argv: str) -> tuple[int, str, str]:
        code = main(list(argv))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_plan_prints_the_fastest_layouts_as_json_and_nothing_else(trireme: Any) -> None:
    code, out, err = trireme("plan", *SMALL, "--top", "5", "--json")
    document = json.loads(out)
    assert code == 0 and err == ""
    seconds = [entry["step_time_s"] for entry in document["layouts"]]
    assert len(seconds) == 5 and seconds == sorted(seconds)
    assert document["considered"] > 500 and sum(document["out"].values()) > 500
    first = document["layouts"][0]
    assert sum(first["time"].values()) == pytest.approx(first["step_time_s"])
    assert resolve(compose([*SMALL, *first["overrides"]])).layout.data == first["layout"]["data"]


def test_plan_lists_layouts_and_reasons_for_people(trireme: Any) -> None:
    code, out, _ = trireme("plan", *SMALL, "--top", "3")
    assert code == 0 and "tokens/s" in out and "dominated" in out and "layers: more stages than layers" in out


def test_plan_explains_a_layout_by_place_or_name_with_a_picture(trireme: Any) -> None:
    code, out, _ = trireme("plan", *SMALL, "--explain", "t2 p2 d2 mb2 1f1b sp zero-1", "--svg", "mine.svg")
    assert code == 0 and "matrix products" in out and "optimizer states" in out
    drawn = ElementTree.parse("mine.svg").getroot()
    assert drawn.tag.endswith("svg") and {"forward", "backward"} <= {node.get("class") for node in drawn.iter()}
    code, out, _ = trireme("plan", *SMALL, "--explain", "1", "--json")
    assert code == 0 and json.loads(out)["timeline"] is None and not [*Path().glob("*.svg")][1:]  # none unasked


def test_layout_keys_keep_plan_and_search_to_layouts_that_have_their_values(trireme: Any) -> None:
    code, out, _ = trireme("plan", *SMALL, "layout.tensor=2,4", "layout.schedule=gpipe", "--top", "500", "--json")
    layouts = [entry["layout"] for entry in json.loads(out)["layouts"]]
    assert code == 0 and {layout["tensor"] for layout in layouts} == {2, 4} and {layout["schedule"] for layout in layouts} == {"gpipe"}
    wanted, others = layouts_asked(["layout.recompute=none", "layout.sharding.optimizer=1,8", "run.steps=3"])
    assert others == ["run.steps=3"] and wanted == {"recompute": [0], "optimizer": [1, 8]}


def test_a_sweep_is_searched_over_the_grid_that_it_would_run() -> None:
    layout = LayoutConfig(tensor=1, micro_batch=2, schedule="1f1b", sharding=ShardingConfig(1, 1, 2))
    wanted = from_layout(layout, columns_wanted({"layout.tensor": [1, 2], "layout.pipeline": [1, 2]}))
    config = compose(SMALL)
    table = plan(config, widen_space(wanted, config.search.space), wanted).space.table
    assert {(row["tensor"], row["pipeline"]) for row in table} == {(1, 1), (1, 2), (2, 1), (2, 2)} and len(table) == 4
    assert {(row["micro_batch"], row["optimizer"], row["recompute"]) for row in table} == {(2, 2, 0)}


def test_plan_for_less_memory_is_slower_and_says_when_nothing_fits(trireme: Any) -> None:
    def best(*more: str) -> float:
        return float(json.loads(trireme("plan", *SMALL, "--json", *more)[1])["layouts"][0]["step_time_s"])

    assert best("--limit", "8") > best()
    code, out, _ = trireme("plan", *SMALL, "--limit", "0.5")
    assert code == 1 and "no layout is likely to fit" in out


def test_size_writes_a_recipe_that_composes_and_plans(trireme: Any) -> None:
    code, out, err = trireme(
        "size", "--gpus", "64", "--days", "5", "--tokens", "100e9", "--json", "--out", "runs/recipe/mine.yaml", "hardware=h100"
    )
    document = json.loads(out)
    assert code == 0 and "written" in err
    assert document["choice"]["days"] == pytest.approx(5, rel=0.1) and len(document["alternatives"]) == 3
    config = resolve(compose(["recipe=mine"]))
    assert config.cluster.world_size == 64 and config.model.hidden == document["choice"]["model"]["hidden"]
    assert config.cluster.hardware.name.startswith("H100") and config.optimizer.lr == document["optimizer"]["lr"]


def test_size_prints_the_configuration_that_it_would_write(trireme: Any) -> None:
    code, out, _ = trireme("size", "--parameters", "13e9", "--tokens", "1e12", "--family", "llama")
    printed = yaml.safe_load(out[out.index("# @package _global_") :])
    assert code == 0 and printed["model"] == {
        "family": "llama", "layers": 40, "hidden": 5120, "heads": 40, "ffn": 13824, "vocab": 32000, "seq": 2048, "init_std": 0.008944,
    }  # fmt: skip
    assert printed["optimizer"]["lr"] == 3e-4 and printed["run"]["global_batch"] == 2048


def test_size_keeps_the_place_and_the_data_that_it_was_given(trireme: Any) -> None:
    words = ["cluster=slurm", "cluster.partition=big", "data=synthetic", "hardware=h100", "run.precision=fp16"]
    code, _, err = trireme("size", "--gpus", "16", "--days", "1", *words, "--tokens", "10e9", "--out", "runs/recipe/mine.yaml")
    assert code == 0 and err == "written: runs/recipe/mine.yaml; use it: trireme train recipe=mine\n"
    config = resolve(compose(["recipe=mine"]))
    assert (config.cluster.backend, config.cluster.partition, config.cluster.world_size) == ("slurm", "big", 16)  # type: ignore[attr-defined]
    assert config.data.kind == "synthetic" and config.run.precision == "fp16" and config.cluster.hardware.name.startswith("H100")


@pytest.mark.parametrize("out", ["mine.yaml", "runs/recipe/gpt3_20b.yaml", "runs/recipe/mine.yml"])
def test_size_says_where_a_recipe_has_to_be_to_be_found(trireme: Any, out: str) -> None:
    code, _, err = trireme("size", "--parameters", "1e9", "--tokens", "1e9", "--out", out)
    assert code == 0 and err.startswith(f"written: {out}; 'trireme train recipe=NAME' would find it as runs/recipe/NAME.yaml")


def test_size_answers_with_the_largest_that_fits_where_memory_binds(trireme: Any) -> None:
    code, out, _ = trireme("size", "--gpus", "8", "--days", "10", "--tokens", "1e9", "hardware=h100", "--json")
    choice = json.loads(out)["choice"]
    assert code == 0 and choice["limit"] == "memory" and choice["days"] < 9 and choice["parameters"] > 20e9
    code, out, _ = trireme("size", "--gpus", "8", "--days", "10", "--tokens", "1e9", "hardware=h100")
    assert code == 0 and "memory, not days, limits the size" in out


def test_replay_reports_every_sweep(trireme: Any) -> None:
    code, out, _ = trireme("search", "--replay", CSV, "--json")
    assert code == 0 and len(json.loads(out)) == 4
    code, out, _ = trireme("search", "--replay", CSV, "--only", "seq 8192")
    assert code == 0 and "2 sweeps" in out


@pytest.mark.parametrize(
    "words",
    [("size", "--gpus", "1024", "--days", "24", "--tokens", "300e9", "hardware=a100_80"), ("search", "--replay", CSV), ("validate", CSV)],
)
def test_in_eighty_columns_no_name_is_cut(trireme: Any, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = trireme(*words)
    assert code == 0 and "…" not in out


def test_a_replay_without_trials_says_nothing_of_the_best(trireme: Any) -> None:
    code, out, _ = trireme("search", "--replay", CSV, "search.max_gpu_hours=0")
    assert code == 1 and "inf" not in out and "nan" not in out
    code, out, _ = trireme("search", "--replay", CSV, "search.max_gpu_hours=0", "--json")
    assert code == 1 and {each["behind_best"] for each in json.loads(out)} == {None}


def test_a_replay_without_the_repository_is_one_plain_line(trireme: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "benchmarks.replay.table", None)
    code, out, err = trireme("search", "--replay", CSV)
    assert code == 2 and out == "" and err.count("\n") == 1 and "run it in a checkout" in err


def test_options_and_overrides_come_in_any_order(trireme: Any) -> None:
    one = trireme("search", "search.max_trials=1", "--replay", CSV, "run.steps=6", "--json", "search.tolerance=0.05")
    assert one == trireme("search", "--replay", CSV, "--json", "search.max_trials=1", "run.steps=6", "search.tolerance=0.05")
    one = trireme("size", "hardware=h100", "--gpus", "8", "data=synthetic", "--parameters", "1e9", "--tokens", "1e9", "cluster.env.A=1")
    assert one[0] == 0 and "A: '1'" in one[1]


@pytest.mark.parametrize(
    "argv, words",
    [
        (["plan"], "hardware"),
        (["plan", *SMALL, "--explain", "99999"], "not a place of the list"),
        (["plan", *SMALL, "--explain", "t3 p1 d2 mb1"], "layout.tensor=3"),
        (["plan", *SMALL, "--explain", "t1 p1 d8 mb8 shard-4/8/8"], "search.space"),
        (["plan", *SMALL, "--limit", "-1"], "--limit"),
        (["plan", *SMALL, "--top", "0"], "--top=0"),
        (["plan", *SMALL, "layout.tensr=2"], "layout.tensor"),
        (["plan", *SMALL, "layout.tensor=3"], "has layout.tensor=3"),
        (["search", *SMALL, "layout.schedule=2f2b"], "1f1b"),
        (["plan", *SMALL, "search.space.max_tensor=0"], "search.space.max_tensor"),
        (["plan", *SMALL, "run.global_batch=63", "search.space.max_pipeline=1", "search.space.max_tensor=1"], "no layout fits"),
        (["plan", "hardware=h1000"], "h100"),
        (["size", "--gpus", "8", "--days", "1"], "--tokens"),
        (["size", "--gpus", "8", "--tokens", "1e9"], "--days"),
        (["size", "--gpus", "8", "--days", "1", "--tokens", "1e9", "--compute-optimal"], "contradict"),
        (["size", "--gpus", "8", "--days", "1", "--parameters", "1e9", "--tokens", "1e9"], "which GPUs?"),
        (["size", "--parameters", "1e9", "model=llama31_8b", "--tokens", "1e9"], "--parameters=1e+09 and model=llama31_8b contradict"),
        (
            ["size", "model=deepseek_v3", "--tokens", "1e9", "--days", "1", "hardware=h100"],
            "model=deepseek_v3: hyper-parameters of published",
        ),
        (
            ["size", "model=llama31_8b", "--seq", "10", "--tokens", "1e9", "--days", "1", "hardware=h100"],
            "with model=llama31_8b say model.seq=10",
        ),
        (
            ["size", "--parameters", "2e10", "--tokens", "3e11", "--days", "1", "--gpus", "8", "hardware=h100"],
            "no number of GPUs up to 8 ends",
        ),
        (
            ["size", "--parameters", "1e9", "--tokens", "1e9", "--days", "1", "hardware=h100", "cluster.nodes=3"],
            "is an answer of this command",
        ),
        (["size", "--gpus", "-8", "--days", "1", "--tokens", "1e9"], "--gpus=-8"),
        (["size", "--gpus", "12", "--days", "1", "--tokens", "1e9", "hardware=h100"], "does not fill nodes"),
        (["size", "--gpus", "8", "--days", "1", "--tokens", "1e9", "--tflops", "100", "hardware=h100"], "--tflops replaces"),
        *((["size", *BUDGET, "hardware=h100", word], f"{word} is not for 'trireme size'") for word in UNSIZED),
        (["size", *BUDGET, "hardware=h100", "cluster.nodes=3"], "cluster.nodes=3 contradicts --gpus=8"),
        (["size", *BUDGET, "hardware=h100", "--recompute", "full"], "--recompute=full says what --tflops counts"),
        (["size", "--parameters", "1e9", "--tokens", "1e9", "hardware=h100"], "--gpus"),
        (["size", "--parameters", "1e9", "--tokens", "1e9", "--tflops", "100"], "--gpus"),
        (["size", "--parameters", "175e9", "--tokens", "1e9", "--gpus", "1", "hardware=h100"], "--parameters=1.75e+11 does not fit"),
        (["size", *BUDGET, "hardware=h100", "--vocab", "1", "--out", "x.yaml"], "--vocab=1 is below the smallest allowed value; use 2"),
        (["size", *BUDGET, "hardware=h100", "--vocab", "99999999999", "--out", "x.yaml"], "--vocab=99999999999 is above the largest"),
        (["size", *BUDGET, "hardware=h100", "--seq", "99999999999", "--out", "x.yaml"], "--seq=99999999999 is above the largest"),
        (
            ["size", "--gpus", "1000000000", *BUDGET[2:], "hardware=h100", "--out", "x.yaml"],
            "--gpus=1000000000: cluster.nodes=125000000 is",
        ),
        (
            ["size", "--parameters", "1e9", "--tokens", "1e12", "--gpus", "30000000001", "--tflops", "10", "--out", "x.yaml"],
            "these options lead to a run that cannot be: run.global_batch=30000000001 is above",
        ),
        (["search", "--replay", "missing.csv"], "cannot read"),
        (["search", "--replay", CSV, "--only", "banana"], "no sweep"),
        (["search", "--replay", CSV, "layout.tensor=2,4"], "layout.tensor=2,4 changes nothing"),
        (["search", "--replay", CSV, "hardware=h100"], "hardware=h100 changes nothing"),
        (["search", "--replay", CSV, "search.space.max_tensor=2"], "search.space.max_tensor=2 changes nothing"),
        (["search", *SMALL, "--only", "13B"], "--replay"),
        (["search", *SMALL, "data=synthetic", "search.recipe=gpt3_20b"], "search.recipe=gpt3_20b is a shipped recipe"),
        (["search", *SMALL, "search.tolerance=-1"], "search.tolerance"),
        *(
            (["search", *SMALL, "data=synthetic", f"search.recipe={name}"], f"search.recipe='{name}' cannot name a recipe; use up to 64")
            for name in ("../../x", "/x", "mine/x", "..")
        ),
    ],
)
def test_wrong_input_is_one_plain_error_and_leaves_nothing(trireme: Any, argv: list[str], words: str) -> None:
    code, out, err = trireme(*argv)
    assert code == 2 and out == "" and err.startswith("error: ") and words in err and "Traceback" not in err
    assert not Path("runs").exists() and not Path("x.yaml").exists()


def test_a_table_without_the_needed_columns_is_named(trireme: Any) -> None:
    Path("wrong.csv").write_text("model,layers,hidden,seq,gpu,gpus,tp,pp,batch,gbs\nx,1,1,1,A100,8,1,1,1,1\n")
    code, _, err = trireme("search", "--replay", "wrong.csv")
    assert code == 2 and "no column source, family, heads and 4" in err and "python -m benchmarks.published" in err
