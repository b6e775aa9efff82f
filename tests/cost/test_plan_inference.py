"""A plan of inference: what it recommends keeps what was asked, and what contradicts itself is one plain line."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.cli.main import main
from launcher.config import compose
from launcher.config.engine import EngineProfile
from launcher.config.inference import SlaConfig
from launcher.config.schema import Config
from launcher.config.trainers import engine, engine_names
from launcher.goals.serving.plan import ServingPlan, nearest
from launcher.planning.serving.commands import command
from launcher.planning.serving.limits import LIMITS, outward
from launcher.planning.serving.plan import SATURATED, InferencePlan, front, plan_inference
from launcher.planning.serving.space import name_of
from launcher.tables.trace import read_trace
from tests.draws import draws
from trainer.shared.run.errors import ConfigError

pytestmark = pytest.mark.slow  # composes and plans whole runs

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "docs" / name for name in ("commands.md", "inference.md", "how-to/serving.md")]
BASE = ["task=inference", "recipe=gpt3_175b", "workload=nemo", "cluster.nodes=8", "serving.weights=fp16", "serving.kv=fp16"]


def planned(*words: str) -> InferencePlan:
    return plan_inference(compose([*BASE, "engine=fastertransformer", *words]))


def test_the_front_is_what_nothing_beats() -> None:
    values = np.array([[3.0, 1.0], [1.0, 3.0], [2.0, 2.0], [2.0, 2.5], [3.0, 3.0], [1.0, 3.0]])
    assert sorted(front(values[:, 0], values[:, 1]).tolist()) == [0, 1, 2]


def test_no_row_that_fits_beats_a_row_of_the_front() -> None:
    plan = planned()
    latency, cost = plan.values["latency_ms"], plan.values["cost"]
    for row in plan.front:
        assert not np.any(plan.possible & (latency < latency[row]) & (cost < cost[row]))


def test_the_best_under_limits_keeps_them_and_is_the_cheapest_that_does() -> None:
    plan = planned("sla.latency_ms=1300", "sla.devices=32")
    row = plan.recommended["best under your limits"]
    assert row is not None and plan.values["latency_ms"][row] <= 1300 and plan.values["devices"][row] <= 32
    assert plan.values["cost"][row] == plan.values["cost"][plan.kept].min()


def test_where_nothing_keeps_the_limits_the_relaxation_is_what_makes_it_possible() -> None:
    plan = planned("sla.latency_ms=200")
    assert plan.recommended["best under your limits"] is None
    (only,) = plan.relaxations()
    ((name, value),) = only.limits.items()
    assert planned(f"sla.{name}={value}").recommended["best under your limits"] is not None
    assert planned(f"sla.{name}={value * 0.99}").recommended["best under your limits"] is None


CHAT = ["task=inference", "recipe=llama_7b", "hardware=h100", "engine=vllm", "workload=chat"]
WIDE = ["task=inference", "recipe=llama_65b", "hardware=h100", "engine=vllm", "workload=chat", "cluster.nodes=2"]


@pytest.mark.parametrize(
    ("words", "devices"),
    [
        (["sla.devices=1"], "2"),
        (["sla.devices=1", "workload.concurrency=8"], "2"),
        (["sla.devices=2", "workload.rate=20"], "8"),
        (["sla.devices=2", "sla.tpot_ms=20"], "4"),
    ],
)
def test_devices_are_a_limit_that_can_give_within_the_cluster(capsys: pytest.CaptureFixture[str], words: list[str], devices: str) -> None:
    assert main(["plan", *WIDE, *words]) == 1
    found = re.findall(r"sla.devices=(\d+) \(devices\), by", capsys.readouterr().out)
    assert found == [devices]
    assert main(["plan", *WIDE, *words, f"sla.devices={devices}"]) == 0
    assert "nearest" not in capsys.readouterr().out


def test_no_row_of_more_devices_than_are_allowed_is_on_the_front() -> None:
    plan = plan_inference(compose([*WIDE, "sla.devices=2", "sla.tpot_ms=5"]))
    assert plan.wider is not None and plan.values["devices"].max() == 2 and plan.wider.values["devices"].max() == 16
    assert all(one.limits.keys() <= {"devices", "tpot_ms"} for one in plan.relaxations())


@pytest.mark.parametrize("words", [CHAT, [*CHAT, "engine=sglang", "workload=code"], [*WIDE, "sla.devices=8"], [*CHAT, "engine=trireme"]])
def test_the_most_that_is_served_is_served_and_not_a_hundredth_more(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    plan = plan_inference(compose([*words, "workload.rate=1e5"]))
    assert plan.most_served is not None
    most, row = plan.most_served
    assert plan_inference(compose([*words, f"workload.rate={most}"])).possible.any()
    assert not plan_inference(compose([*words, f"workload.rate={1.01 * most}"])).possible.any()
    assert main(["plan", *words, "workload.rate=1e5"]) == 1
    told = capsys.readouterr().out
    assert f"100000 requests/s arrive and at most {most:g} are served, by {name_of(plan.table[row])}; fewer have to arrive" in told


def test_where_nothing_fits_no_rate_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *WIDE, "cluster.nodes=1", "cluster.gpus_per_node=1", "workload.rate=1"]) == 1
    told = capsys.readouterr().out
    assert "nothing fits; more devices, a smaller model" in told and "are served" not in told


@given(st.floats(1e-12, 1e12), st.sampled_from(sorted({*LIMITS} - {"devices"})), st.sampled_from([4, 6, 9, 17]))
def test_a_limit_is_rounded_to_where_it_is_kept_and_no_further(value: float, name: str, digits: int) -> None:
    found = outward(value, name, digits)
    assert found <= value if name == "throughput" else found >= value
    assert found == pytest.approx(value, rel=max(1.01 * 10.0 ** (1 - digits), 1e-15), abs=0)


@draws(gate=15, campaign=500)
@given(st.data())
def test_the_plan_under_a_relaxation_as_it_is_printed_keeps_it(data: st.DataObject) -> None:
    """And where several limits have to give together, each of them has to."""
    ranges = {"latency_ms": (5, 600), "ttft_ms": (1, 50), "tpot_ms": (0.05, 5), "throughput": (1, 9000), "cost": (0.01, 0.5)}
    names = data.draw(st.sets(st.sampled_from(sorted(ranges)), min_size=1))
    words = {f"sla.{name}": f"{data.draw(st.floats(*ranges[name])):.4g}" for name in sorted(names)}
    if (plan := under(words)) is None:
        return
    lines = nearest(ServingPlan(chat(), plan).relaxed())
    assert bool(lines) == (not plan.kept.any())
    for line in lines:
        given = dict(re.findall(r"(sla\.\w+)=(\S+)", line))
        assert (found := under({**words, **given})) is not None and found.kept.any(), line
        for key in given if len(given) > 1 else ():
            assert (found := under({**words, **given, key: words[key]})) is None or not found.kept.any(), (line, key)


@cache
def chat() -> Config:
    return compose(CHAT)


def under(words: dict[str, str]) -> InferencePlan | None:
    """The plan under limits as words of the command line; None where they contradict each other."""
    try:
        return plan_inference(dataclasses.replace(chat(), sla=SlaConfig(**{key[4:]: float(value) for key, value in words.items()})))
    except ConfigError:
        return None


def told_of(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    main(["plan", *CHAT, *words])
    return [line for line in capsys.readouterr().out.splitlines() if "sla." in line]


def test_limits_that_have_to_give_together_are_told_from_those_of_which_one_is_enough(capsys: pytest.CaptureFixture[str]) -> None:
    (both,) = told_of(capsys, "sla.latency_ms=100", "sla.tpot_ms=0.5")
    assert re.match(r"nothing keeps all limits; nearest: sla.latency_ms=\S+ \(.*\) together with sla.tpot_ms=", both)
    one, other = told_of(capsys, "sla.tpot_ms=3", "sla.cost=1")
    assert re.match(r"nothing keeps all limits; nearest: sla.tpot_ms=\S+ \(ms per token\), by", one) and other.startswith("  or sla.cost=")
    main(["plan", *CHAT, "sla.latency_ms=100", "sla.tpot_ms=0.5", "--json"])
    (found,) = json.loads(capsys.readouterr().out)["relaxations"]
    assert [each["limit"] for each in found["limits"]] == ["latency_ms", "tpot_ms"] and found["row"]["name"] == both.split(", by ")[1]


def test_a_higher_rate_needs_more_and_an_impossible_one_says_so() -> None:
    few, many = (plan_inference(compose([*BASE, "engine=vllm", f"workload.rate={rate}", "sla.tpot_ms=80"])) for rate in (1, 150))
    best = [plan.recommended["best under your limits"] for plan in (few, many)]
    assert best[0] is not None and best[1] is not None
    assert few.values["devices"][best[0]] < many.values["devices"][best[1]]
    assert not plan_inference(compose([*BASE, "engine=vllm", "workload.rate=1e6"])).possible.any()


@pytest.mark.parametrize("name", ["vllm", "trireme"])
@pytest.mark.parametrize("concurrency", [1, 3, 9, 100])
def test_no_more_is_in_flight_than_was_asked_for(name: str, concurrency: int) -> None:
    plan = plan_inference(compose([*BASE, f"engine={name}", f"workload.concurrency={concurrency}"]))
    in_flight = plan.values["throughput"] * plan.values["latency_ms"] / 1e3
    assert np.all(plan.table["replicas"] <= concurrency) and np.all(in_flight <= concurrency * (1 + 1e-9))


def test_a_plan_is_that_of_the_release_which_runs(capsys: pytest.CaptureFixture[str]) -> None:
    today, before = (plan_inference(compose([*CHAT, "engine.version=" + version])) for version in ("0.14.0rc1", "0.13"))
    assert np.all(before.values["tpot_ms"] > today.values["tpot_ms"]), "its scheduler was waited for"
    assert main(["plan", *CHAT, "engine.version=0.13"]) == 0
    assert ", vLLM 0.13, " in capsys.readouterr().out.splitlines()[0]


def test_what_is_out_is_out_for_load_only_where_requests_arrive_and_there_is_room() -> None:
    for name in ("vllm", "trireme"):
        words = ["task=inference", "recipe=gpt3_126m", "workload=chat", f"engine={name}"]
        assert list(plan_inference(compose([*words, "workload.rate=1e6"])).out) == [SATURATED]
    assert SATURATED not in planned("recipe=gpt3_175b", "engine=vllm", "hardware=v100_16").out


@pytest.mark.parametrize(("name", "kept"), [("trireme", {1, 2, 6}), ("vllm", {1, 2, 6, 12})])
def test_heads_of_keys_are_shared_out_evenly_and_copied_only_by_engines_that_do(name: str, kept: set[int]) -> None:
    """Our generator shards them; the others give a head to several ranks, where ranks are a multiple of the heads."""
    words = ["model.kv_heads=6", "serving.tensor=[1,2,4,6,12,12]", f"engine={name}"]
    assert set(planned(*words).table["tensor"].tolist()) == kept


def test_a_value_that_is_given_twice_is_one() -> None:
    once, twice = planned("serving.batch=[4,8]", "serving.tensor=[8]"), planned("serving.batch=[4,8,4]", "serving.tensor=[8,8]")
    assert once.table.tolist() == twice.table.tolist()


def test_rendered_commands_have_the_layout_and_the_formats() -> None:
    config = compose([*BASE, "engine=vllm", "serving.kv=fp8"])
    plan = plan_inference(config)
    row = int(plan.front[0])
    line = command(plan, row, config.workload, "org/model")
    assert line.startswith("vllm serve org/model") and "--kv-cache-dtype fp8" in line
    assert f"--tensor-parallel-size {plan.table['tensor'][row]} " in line


@pytest.mark.parametrize("load", ["workload.batch=3", "workload.concurrency=3", "workload.rate=0.5"])
def test_our_own_command_has_the_layout_the_requests_and_the_format(load: str) -> None:
    config = compose([*BASE, "engine=trireme", "serving.weights=bf16", load])
    plan = plan_inference(config)
    row = int(plan.front[0])
    line = command(plan, row, config.workload, "MODEL")
    verb = "generate MODEL --tokens 20 --prompts PROMPTS" if load.startswith("workload.batch") else "serve MODEL"
    assert line.startswith(f"trireme {verb} --batch ") and line.endswith(" run.precision=bf16")
    assert f"layout.tensor={plan.table['tensor'][row]} layout.pipeline={plan.table['pipeline'][row]} " in line


@pytest.mark.parametrize(
    "load", ["workload.concurrency=1000000000", "workload.batch=100000", "workload.concurrency=640", "workload.rate=50"]
)
def test_no_command_allows_more_at_once_than_there_is_room_for(load: str) -> None:
    config = compose([*CHAT, load])
    plan = plan_inference(config)
    for row in np.flatnonzero(plan.possible):
        for name, option in (("vllm", "--max-num-seqs"), ("sglang", "--max-running-requests"), ("tensorrt_llm", "--max_batch_size")):
            allowed = int(command(plan, int(row), config.workload, "MODEL", engine(name)).split(f"{option} ")[1].split()[0])
            assert 1 <= allowed <= plan.estimate.room[row]
            assert allowed == min(plan.table["batch"][row], plan.estimate.room[row]) or "rate" in load


def test_an_engine_of_static_batches_is_given_the_whole_batch() -> None:
    config = compose([*BASE, "engine=fastertransformer", "workload.batch=64"])
    plan = plan_inference(config)
    assert all("max_batch_size=64 " in command(plan, int(row), config.workload, "MODEL") for row in np.flatnonzero(plan.possible))


@pytest.mark.parametrize(
    ("name", "needs"),
    [
        ("vllm", "a Ray cluster over them, or .* --nnodes 2 --node-rank 0, 1, ... --master-addr ADDRESS"),
        ("sglang", "--nnodes 2 --node-rank 0, 1, ... --dist-init-addr ADDRESS:PORT"),
        ("tensorrt_llm", "mpirun -n 16 with a host list .* trtllm-llmapi-launch"),
        ("fastertransformer", "mpirun to be given a host list"),
        ("trireme", "cluster=slurm cluster.nodes=2 cluster.gpus_per_node=8"),
    ],
)
def test_a_replica_over_several_nodes_has_a_note_of_what_its_command_needs_and_no_other_has(
    capsys: pytest.CaptureFixture[str], name: str, needs: str
) -> None:
    words = [*WIDE, f"engine={name}", "serving.tensor=[8]", "serving.batch=[1]"]
    main(["plan", *words, "serving.pipeline=[2]", "cluster.nodes=4"])
    assert len(re.findall(rf"^  note: a replica is on 2 nodes, and needs .*{needs}", capsys.readouterr().out, re.MULTILINE)) >= 3
    main(["plan", *words, "serving.pipeline=[2]", "cluster.nodes=4", "--json"])
    told = json.loads(capsys.readouterr().out)
    assert all(re.search(needs, one["note"]) for one in told["recommended"].values()) and told["notes"].keys() == told["commands"].keys()
    main(["plan", *words, "serving.pipeline=[1]", "--json"])
    told = json.loads(capsys.readouterr().out)
    assert not told["notes"] and not any(one["note"] for one in told["recommended"].values())


def test_a_command_says_of_every_format_other_than_16_bits_how_it_is_had() -> None:
    for name in engine_names():
        for kind, key in (("formats", "weights"), ("kv_formats", "kv")):
            profile = engine(name)
            assert "fp8" not in getattr(profile, kind) or (getattr(profile, kind)["fp8"] and f"{{{key}}}" in profile.command), (name, kind)


ODD = ["my model; rm -rf /", "two  blanks", "it's {x}", "[bold]x[/bold]", ":car:", "$(reboot)", "#1", "a'b\"c`d`"]


@pytest.mark.parametrize("checkpoint", ODD)
@pytest.mark.parametrize("name", ["vllm", "trireme"])
def test_a_checkpoint_is_one_word_of_every_command_whatever_is_in_it(
    capsys: pytest.CaptureFixture[str], name: str, checkpoint: str
) -> None:
    quoted = "'" + checkpoint.replace("'", "\\'") + "'"
    words = [*BASE, f"engine={name}", "serving.weights=bf16", "serving.kv=bf16", f"serving.checkpoint={quoted}"]
    assert main(["plan", *words]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if re.match(r"  (?!note: )\S.* --", line)]
    assert len(lines) == 5 + (name == "trireme")
    assert all(checkpoint in shlex.split(line) for line in lines)


def test_no_blank_of_a_comment_or_a_value_is_lost_or_breaks_the_line() -> None:
    config = compose([*BASE, "engine=fastertransformer"])
    plan = plan_inference(config)
    line = command(plan, int(plan.front[0]), config.workload, "my  model")
    assert line.endswith(" model_dir='my  model'") and "\n" not in line


@pytest.mark.parametrize("line", ["serve {nope}", "serve {model", "serve {} {0}", "serve {tensor:zz}", "serve {model.x}"])
def test_a_profile_whose_command_cannot_be_filled_in_is_one_plain_line(line: str) -> None:
    config = compose([*BASE, "engine=vllm"])
    with pytest.raises(ConfigError, match=r"engine.command=.* of Mine cannot be filled in; in braces it may have {model}"):
        plan_inference(dataclasses.replace(config, engine=EngineProfile(name="Mine", command=line)))


def test_the_commands_of_the_documentation_are_taken_as_they_are_printed() -> None:
    lines = [line for page in PAGES for line in page.read_text().splitlines() if re.match(r"trireme (plan|search) task=inference ", line)]
    words = [line.partition("#")[0].split()[2:] for line in lines if "..." not in line]
    assert len(words) >= 5
    for each in words:
        config = compose(["hardware=h100" if word == "hardware=mine" else word for word in each])
        assert plan_inference(config).possible.any(), each


WRONG = [
    (["workload.batch=4", "workload.rate=2"], "contradict each other"),
    (["engine=fastertransformer", "workload.concurrency=4"], "serves static batches"),
    (["sla.latency_ms=100", "sla.ttft_ms=200"], "sla.ttft_ms=200 is above sla.latency_ms=100"),
    (["sla.latency_ms=100", "sla.tpot_ms=50"], "takes longer than sla.latency_ms=100 allows; give 5.26 or less"),
    (["engine=vllm", "workload.rate=1", "sla.throughput=5"], "no more is served than arrives"),
    (["sla.devices=4", "serving.tensor=[8]"], "at least 8 devices, and sla.devices allows 4"),
    (["sla.devices=400"], "sla.devices=400 is more than the cluster has (64)"),
    (["workload.input=4000"], "are more than model.seq=2048"),
    (["model.family=t5"], "task=inference predicts and measures models of one stack, and model.family=t5 has an encoder"),
    (["workload.longest=70"], "workload.longest=70 is less than workload.input=60 + workload.output=20; give 80 or more"),
    (["workload.longest=2049"], "workload.longest=2049 is more than model.seq=2048"),
    (["serving.tensor=[5]"], "no tensor x pipeline is possible"),
    (["serving.tensor=[1,0]"], "serving.tensor[1]=0 is below the smallest allowed value; use 1 or more"),
    (["serving.batch=[4,-1]"], "serving.batch[1]=-1 is below the smallest allowed value"),
    (["serving.batch=[3000000000]"], "serving.batch[0]=3000000000 is above the largest allowed value"),
    (
        ["engine=fastertransformer", "serving.weights=fp8"],
        "serving.weights=fp8 is not a format of FasterTransformer; use fp16, bf16 or fp32",
    ),
    (["engine=trireme", "serving.weights=fp8"], "serving.weights=fp8 is not a format of Trireme"),
    (
        ["engine=vllm", "serving.weights=fp32"],
        "serving.kv=fp16 with serving.weights=fp32 is nothing that vLLM keeps; give serving.kv=fp32 or fp8",
    ),
    (["engine=trireme", "serving.kv=fp8"], "give serving.kv=fp16"),
    (["serving.batch=[]"], "serving.batch=[] leaves no size to compare"),
    (["serving.device_hour=1e308"], "is above the largest allowed value"),
    (["serving.checkpoint=''"], "serving.checkpoint='' names no checkpoint that a command could serve"),
    (["serving.checkpoint='a\nrm -rf b'"], "serving.checkpoint='a\\nrm -rf b' names no checkpoint"),
    (["engine.memory.share=1.5"], "engine.memory.share=1.5 is above the largest allowed value; use 1 or less"),
    (["workload.rate=1e-300"], "workload.rate=1e-300 is below the smallest allowed value"),
    (["model.kv_heads=5"], "model.kv_heads=5 does not divide model.heads=96"),
]


@pytest.mark.parametrize(("words", "message"), WRONG, ids=lambda value: str(value)[:40])
def test_what_contradicts_itself_is_refused_in_one_line(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        plan_inference(compose([*BASE, *words]))
    assert message in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("time,input,output\n1,2,3\n", "has no column arrival"),
        ("arrival,input,output\n1,x,3\n", "row 1 of workload.trace"),
        ('arrival,input,output\n1,"5\n,3\n', "has input='5\\n,3\\n'; give a number from 0 to 1000000000"),
        ("arrival,input,output\n1,1e308,3\n2,1e308,3\n", "has input='1e308'"),
        ("arrival,input,output\n1,nan,3\n", "has input='nan'"),
        ("arrival,input,output\n1,2,3\n", "no rate"),
        ("arrival,input,output\n0,5,120,21,3\n", "row 1 of workload.trace"),
        ("arrival,input,output\n0,5,120,21,3\n", "has more cells than there are columns; write 1.5, not 1,5"),
        ("arrival,input,output,input\n0,1,2,3\n", "has the column input more than once; keep one"),
        ("arrival,input,output\n0,1_000,2\n", "row 1 of workload.trace"),
    ],
)
def test_a_trace_that_is_none_ends_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, message: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(content)
    assert main(["plan", *BASE, "engine=vllm", f"workload.trace={path}"]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_trace_is_its_mean_lengths_at_its_rate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("arrival,input,output\n0,50,10\n1,70,30\n2,60,20\n")
    assert main(["plan", *BASE, "engine=vllm", f"workload.trace={path}", "--json"]) == 0
    work = json.loads(capsys.readouterr().out)["workload"]
    assert (work["input"], work["output"], work["rate"]) == (60, 20, 1.0)


TRACE = "arrival,input,output\n0,100,20\n1,149,22\n2,120,21\n"


def traced_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    (path := tmp_path / "trace.csv").write_text(TRACE)
    assert main(["plan", *BASE, *words, f"workload.trace={path}"]) == 0
    return capsys.readouterr().out


def test_commands_of_a_trace_allow_its_longest_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = traced_lines(tmp_path, capsys, "engine=vllm")
    for option in ("--max-model-len", "--context-length", "--max_seq_len"):
        assert set(re.findall(rf"{option} (\d+)", told)) == {"171"}
    assert "123 tokens in, 21 out" in told


def test_a_request_of_a_trace_that_the_model_has_no_positions_for_is_refused_with_its_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (path := tmp_path / "trace.csv").write_text(TRACE + "3,2040,9\n4,1,1\n")
    assert main(["plan", *BASE, "engine=vllm", f"workload.trace={path}"]) == 2
    error = capsys.readouterr().err
    assert "row 4 of workload.trace=" in error and "2049 tokens, more than model.seq=2048" in error and error.count("\n") == 1


def test_no_request_of_a_trace_is_longer_than_the_longest_that_was_read(tmp_path: Path) -> None:
    for rows in ([(2, 1), (1, 1)], [(2, 2), (1, 1)], [(0, 0), (0, 0)], [(7.5, 1), (3, 9)]):
        (path := tmp_path / "t.csv").write_text("arrival,input,output\n" + "".join(f"{at},{i},{o}\n" for at, (i, o) in enumerate(rows)))
        trace = read_trace(path)
        assert trace.longest >= max(max(i + o for i, o in rows), trace.input + trace.output)
        assert sum(rows[trace.row - 1]) == max(i + o for i, o in rows)


def test_the_document_has_the_whole_front_whatever_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *CHAT, "--json", "--top", "1"]) == 0
    front = json.loads(capsys.readouterr().out)["front"]
    plan = plan_inference(compose(CHAT))
    assert [one["name"] for one in front] == [name_of(plan.table[row]) for row in plan.front] and len(front) > 10


def test_a_small_rate_is_shown_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *CHAT, "workload.rate=0.0004"]) == 0
    assert "128 out, rate 0.0004, vLLM" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["nope", "../engine/vllm", "../../conf/engine/vllm"])
def test_an_engine_is_a_name_and_no_path(name: str) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        engine(name)


def test_an_unknown_workload_ends_with_2_and_names_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "task=inference", "workload=chatt"]) == 2
    assert "did you mean 'chat'?" in capsys.readouterr().err


def test_parts_of_an_explained_row_add_up_to_its_latency(capsys: pytest.CaptureFixture[str]) -> None:
    name = name_of(planned().table[0])
    assert main(["plan", *BASE, "engine=fastertransformer", "--explain", name, "--json"]) == 0
    one = json.loads(capsys.readouterr().out)
    first, each = (sum(part["ms"] for part in one[key].values()) for key in ("first_token", "per_token"))
    assert first + 19 * each == pytest.approx(one["latency_ms"])
