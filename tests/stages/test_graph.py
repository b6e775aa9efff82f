"""Graphs of stages: whatever they are, each stage comes once and after what it needs; and a wrong one is one plain line, with nothing made."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from launcher.backends.slurm.cluster import SlurmCluster
from launcher.cli.main import main
from launcher.cli.run import _value
from launcher.config import compose
from launcher.stages.graph import KINDS, choose, parse, read_pipeline
from launcher.stages.plan import plan
from launcher.stages.predicted import ENCODED_PER_S, LEARNT_PER_S, of_preparation
from tests.draws import draws
from trainer.data.prepare import prepare
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.schema import DataConfig

pytestmark = pytest.mark.slow

GRAPH: dict[str, Any] = {
    "data": {"stage": "prepare", "data.source": "text.txt", "data.vocab": 300},
    "base": {"stage": "train", "inputs": {"data": "data"}, "model.vocab": 300, "model.seq": 16, "cluster.gpus_per_node": 1},
    "score": {"stage": "evaluate", "inputs": {"model": "base", "data": "data"}, "cluster.gpus_per_node": 1},
    "hf": {"stage": "convert", "inputs": {"model": "base"}},
    "text": {"stage": "generate", "inputs": {"model": "hf"}, "prompts": ["a"], "tokens": 4},
}

TUNE = {"stage": "tune", "inputs": {"model": "base"}, "cluster.gpus_per_node": 1, "data.kind": "instructions"}
EXAMPLES = {"data.source": "examples.jsonl", "data.template": "{question} {answer}"}
PROMPTED = TUNE | EXAMPLES | {"tune.method": "prompt"}
ASK = {"stage": "evaluate", "inputs": {"model": "hf"}}
LARGE = {"model.hidden": 65536, "model.layers": 50}


@st.composite
def graphs(draw: st.DrawFn) -> dict[str, Any]:
    """A random graph of right kinds, its stages in a random order in the file."""
    stages: dict[str, Any] = {}
    for number in range(draw(st.integers(1, 12))):
        possible = []
        for verb, kind in KINDS.items():
            sources = {name: [s for s, t in stages.items() if KINDS[t["stage"]].gives in kinds] for name, kinds in kind.takes.items()}
            if all(sources.values()):
                possible.append((verb, sources))
        verb, sources = draw(st.sampled_from(possible))
        inputs = {name: draw(st.sampled_from(found)) for name, found in sources.items()}
        stages[f"s{number}"] = {"stage": verb, "inputs": inputs} | ({"prompts": ["x"]} if verb == "generate" else {})
    return {name: stages[name] for name in draw(st.permutations(list(stages)))}


@draws(gate=150, campaign=3000)
@given(graphs())
def test_every_stage_comes_once_and_after_what_it_needs(stages: dict[str, Any]) -> None:
    order = [stage.name for stage in parse({"stages": stages})]
    assert sorted(order) == sorted(stages)
    for name, table in stages.items():
        assert all(order.index(source) < order.index(name) for source in table["inputs"].values())


@draws(gate=50, campaign=1000)
@given(graphs(), st.data())
def test_until_takes_all_that_is_needed_and_from_all_that_needs_it(stages: dict[str, Any], data: st.DataObject) -> None:
    order = parse({"stages": stages})
    name = data.draw(st.sampled_from(list(stages)))
    needs = {stage.name: set(stage.needs) for stage in order}
    until = {stage.name for stage in choose(order, name, None, None)}
    behind = {stage.name for stage in choose(order, None, name, None)}
    assert name in until and all(needs[each] <= until for each in until)
    assert name in behind and all(each in behind for each in needs if needs[each] & behind)
    assert until & behind == {name}
    assert [stage.name for stage in choose(order, None, None, name)] == [name]


WRONG: list[tuple[str, dict[str, Any], str]] = [
    (
        "verb",
        {"hf": {"stage": "covert"}},
        "stages.hf.stage=covert is not one of prepare, train, tune, evaluate, convert or generate; did you mean",
    ),
    ("no verb", {"hf": {"stage": None}}, "stages.hf.stage=None is not one of"),
    ("no mapping", {"hf": 3}, "stages.hf=3 is not a mapping"),
    ("name", {"H F": {"stage": "prepare"}}, "stages.H F: a stage's name is up to 32 small letters"),
    ("unknown input", {"hf": {"inputs": {"model": "bas"}}}, "stages.hf.inputs.model=bas is not a stage; did you mean 'base'?"),
    ("missing input", {"base": {"inputs": {}}}, "stages.base.inputs.data is missing: train takes a corpus"),
    (
        "input too many",
        {"more": {"stage": "prepare", "inputs": {"data": "hf"}}},
        "stages.more.inputs.data: prepare takes no inputs; leave it out",
    ),
    ("kind", {"hf": {"inputs": {"model": "data"}}}, "stages.hf.inputs.model=data gives a corpus; convert takes a checkpoint"),
    ("import", {"hf": {"format": "checkpoint"}}, "stages.hf.inputs.model=base gives a checkpoint; convert takes a huggingface or gguf"),
    (
        "import of nothing",
        {"hf": {"format": "checkpoint", "inputs": {"model": "./no.gguf"}}},
        "inputs.model=./no.gguf holds nothing that is known; convert takes a huggingface or a gguf",
    ),
    (
        "import of a torn file",
        {"hf": {"format": "checkpoint", "inputs": {"model": "./torn.gguf"}}},
        "stage hf: torn.gguf cannot be read as GGUF: it ends too early; give a whole .gguf file",
    ),
    (
        "text of an import",
        {
            "in": {"stage": "convert", "format": "checkpoint", "inputs": {"model": "hf"}},
            "score": {"inputs": {"model": "in", "data": "data"}},
        },
        "stage score: inputs.model=in was trained on another text than this; evaluate it by tasks",
    ),
    ("kind of two", {"text": {"inputs": {"model": "score"}}}, "gives a metrics; generate takes a checkpoint or huggingface"),
    ("inputs", {"hf": {"inputs": ["base"]}}, "stages.hf.inputs=['base'] is not a mapping of an input"),
    ("key", {"hf": {"dtyp": "float32"}}, "unknown key stages.hf.dtyp; did you mean 'dtype'?"),
    ("value", {"hf": {"dtype": "int8"}}, "stages.hf.dtype='int8' is not one of"),
    ("type", {"text": {"tokens": "many"}}, "stages.text.tokens='many' is not a whole number"),
    ("range", {"text": {"top_p": 0}}, "stages.text.top_p=0 is not above 0"),
    ("no prompts", {"text": {"prompts": []}}, "stages.text.prompts=[] leaves nothing to continue"),
    ("run key", {"base": {"layout.tenso": 2}}, "stage base: unknown key 'layout.tenso'; did you mean 'layout.tensor'"),
    ("run value", {"base": {"layout.tensor": 3}}, "stage base: layout.tensor=3 does not divide model.heads=4"),
    ("vocabulary", {"base": {"model.vocab": 299}}, "stage base: model.vocab=299 is smaller than data.vocab=300 of stage data"),
    ("no tokenizer", {"data": {"data.tokenizer": "none"}}, "data.tokenizer=none: none does not exist; give a whole tokenizer.json"),
    ("sequence", {"base": {"model.seq": 4000}}, "fewer than a sequence of model.seq=4000 needs"),
    ("memory", {"base": {"hardware": "h100", "model.hidden": 65536, "model.layers": 50}}, "stage base: the layout needs about"),
    ("model of a checkpoint", {"score": {"model.hidden": 8}}, "stage score: model.hidden=8: the model is the checkpoint's; leave it out"),
    (
        "longer rows",
        {"tuned": PROMPTED | {"model.seq": 32}},
        "stage tuned: model.seq=32 is longer than the 16 positions that the model was made for; use 16 or less",
    ),
    ("own folder", {"base": {"run.checkpoint.dir": "x"}}, "stage base: run.checkpoint.dir=x is decided by the pipeline"),
    ("own path", {"data": {"data.path": "x"}}, "stage data: data.path=x is decided by the pipeline"),
    ("no source", {"data": {"data.source": "nowhere.txt"}}, "stage data: data.source=nowhere.txt is neither"),
    ("one value", {"base": {"over": {"layout.tensor": [1]}}}, "stages.base.over={'layout.tensor': [1]} is not a mapping of keys to lists"),
    ("two models", {"base": {"over": {"model.layers": [1, 2]}}}, "stages.base.over.model.layers: all must train the same model"),
    (
        "best",
        {"base": {"over": {"optimizer.lr": [0.1, 0.2]}, "best": "speed"}},
        "stages.base.best='speed' is not one of step_time_s or loss",
    ),
    ("cluster", {"hf": {"cluster": "slurmm"}}, "stage hf: cluster=slurmm does not exist"),
    ("volume", {"base": {"cluster": "kubernetes", "cluster.container.image": "i"}}, "is on none of the pods' volumes"),
    (
        "no folder",
        {"hf": {"inputs": {"model": "./nothing"}}},
        "inputs.model=./nothing holds nothing that is known; convert takes a checkpoint",
    ),
    ("twice", {"again": {"stage": "convert", "inputs": {"model": "base"}}}, "stages again and hf are the same and would write one folder"),
    ("room", {"text": {"tokens": 16}}, "stage text: tokens=16 leave no room for a prompt in model.seq=16; ask for fewer"),
    ("heads of a generation", {"text": {"layout.tensor": 3}}, "stage text: layout.tensor=3 does not divide model.heads=4"),
    ("no ranks", {"hf": {"layout.tensor": 2}}, "unknown key stages.hf.layout.tensor (known: format, dtype)"),
    ("form", {"hf": {"format": "onnx"}}, "stages.hf.format='onnx' is not one of huggingface, gguf or checkpoint"),
    (
        "type of a form",
        {"hf": {"format": "gguf", "dtype": "float32"}, "text": {"inputs": {"model": "base"}}},
        "stages.hf.dtype=float32 is not a type of format=gguf; use float16 or q8_0",
    ),
    (
        "text of a GGUF file",
        {"hf": {"format": "gguf"}},
        "stages.text.inputs.model=hf gives a gguf; generate takes a checkpoint or huggingface",
    ),
    ("task", {"ask": ASK | {"tasks": ["adition"]}}, "stage ask: tasks: 'adition' is not there; did you mean 'addition'?"),
    (
        "task that is not fetched",
        {
            "got": {"stage": "prepare", "tasks": ["piqa"]},
            "ask": {"stage": "evaluate", "inputs": {"model": "hf", "tasks": "got"}, "tasks": ["boolq"]},
        },
        "stage ask: tasks: 'boolq' is not there; use addition, brackets, copying, members, prose or piqa",
    ),
    (
        "tasks as a text",
        {"data": {"stage": "prepare", "tasks": ["piqa"]}},
        "stages.base.inputs.data=data gives a tasks; train takes a corpus",
    ),
    ("task with a text", {"score": {"tasks": ["addition"]}}, "stages.score.inputs.data: evaluate takes model; leave it out"),
    ("items of no task", {"score": {"limit": 3}}, "stages.score.limit=3 is for tasks; name some with tasks, or leave it out"),
    (
        "file of a task",
        {"ask": ASK | {"tasks": ["own"], "tasks_folder": "tasks"}},
        "tasks: own (tasks/own.yaml) reads no.jsonl, which is not there",
    ),
    (
        "tokenizer",
        {"more": GRAPH["data"] | {"data.vocab": 290}, "score": {"inputs": {"model": "base", "data": "more"}}},
        "stage score: inputs.data=more has not the tokenizer of data, with which base is trained; evaluate on data",
    ),
    (
        "vocabulary of a folder",
        {"base": {"inputs": {"data": "./corpus"}, "model.vocab": 200}},
        "model.vocab=200 is smaller than the 273 tokens of the tokenizer in data.path=./corpus",
    ),
    (
        "field",
        {"tuned": PROMPTED | {"data.template": "{context} {answer}"}},
        "stage tuned: examples.jsonl line 1 has no text in field 'context' of data.template (fields with text: question, answer)",
    ),
    ("truncated", {"tuned": PROMPTED | {"data.truncate": "text"}}, "stage tuned: data.truncate=text is not a field of data.template="),
    ("no examples", {"tuned": PROMPTED | {"data.source": "no.jsonl"}}, "stage tuned: data.source=no.jsonl cannot be read"),
    ("held out", {"tuned": PROMPTED | {"data.held_out": 0.6}}, "leaves nothing to train on of the 2 examples"),
    (
        "rank",
        {"tuned": TUNE | EXAMPLES | {"tune.method": "lora", "tune.rank": 999}},
        "stage tuned: tune.rank=999 is above that of the matrix",
    ),
    ("own base", {"tuned": PROMPTED | {"tune.base": "x"}}, "stage tuned: tune.base=x is decided by the pipeline"),
    (
        "no base",
        {"tuned": PROMPTED, "again": TUNE | EXAMPLES | {"inputs": {"model": "tuned"}}},
        "stage again: inputs.model=tuned gives prompt weights alone, which cannot be tuned",
    ),
    (
        "other words",
        {"more": GRAPH["data"] | {"data.vocab": 290}, "tuned": {"stage": "tune", "inputs": {"model": "base", "data": "more"}}},
        "stage tuned: inputs.data=more has not the tokenizer of data",
    ),
    (
        "merge",
        {"tuned": PROMPTED, "hf": {"inputs": {"model": "tuned"}}},
        "stage hf: inputs.model=tuned gives prompt weights, which cannot be merged",
    ),
    ("memory of a generation", {"base": LARGE, "text": {"hardware": "h100"}}, "stage text: the layout needs about"),
    ("memory of an evaluation", {"base": LARGE, "score": {"hardware": "h100"}}, "stage score: the layout needs about"),
    ("trainer", {"base": {"trainer": "torchtitan"}}, "stage base: trainer=torchtitan is not told what a stage takes (data), and makes no"),
    (
        "trainer of a choice",
        {"base": {"trainer": "torchtitan", "over": {"run.seed": [1, 2]}}},
        "stage base-1: trainer=torchtitan is not told",
    ),
    (
        "trainer of a tuning",
        {"tuned": PROMPTED | {"trainer": "torchtitan"}},
        "stage tuned: trainer=torchtitan is not told what a stage takes",
    ),
    (
        "trainer of an evaluation",
        {"score": {"trainer": "torchtitan"}},
        "stage score: trainer=torchtitan is of no use to evaluate, which our own trainer does; leave it out",
    ),
    ("synthetic", {"base": {"data": "synthetic"}}, "stage base: data.kind=synthetic takes no corpus"),
]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that stages are given, with a corpus that is prepared once."""
    tmp_path = tmp_path_factory.mktemp("files")
    (tmp_path / "text.txt").write_text("some text to learn from\n" * 40)
    (tmp_path / "examples.jsonl").write_text('{"question": "a", "answer": "b"}\n' * 2)
    (tmp_path / "conf" / "pipeline").mkdir(parents=True)
    (tmp_path / "tasks").mkdir()
    (tmp_path / "torn.gguf").write_bytes(b"GGUF\x03\0\0\0\x02\0\0")
    (tmp_path / "tasks" / "own.yaml").write_text("dataset_kwargs: {data_files: {test: no.jsonl}}\n")
    prepare(DataConfig(source=str(tmp_path / "text.txt"), path=str(tmp_path / "corpus"), vocab=300))
    return tmp_path


@pytest.fixture
def folder(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(files, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(folder: Path, capsys: pytest.CaptureFixture[str], graph: Any, *words: str) -> str:
    (folder / "conf" / "pipeline" / "wrong.yaml").write_text(yaml.safe_dump(graph))
    assert main(["run", "pipeline=wrong", "--config-dir", "conf", *words]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("error: ") and said.err.count("\n") == 1
    assert not (folder / "runs").exists()
    return said.err


@pytest.mark.parametrize(
    ("change", "message"),
    [pytest.param(*case, id=name, marks=[pytest.mark.campaign("words")] * bool(i % 3)) for i, (name, *case) in enumerate(WRONG)],
)
def test_a_wrong_graph_is_one_plain_line_and_nothing_is_started(
    folder: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], message: str
) -> None:
    graph = copy.deepcopy(GRAPH)
    for name, keys in change.items():
        graph[name] = graph.get(name, {}) | keys if isinstance(keys, dict) else keys
    assert message in refused(folder, capsys, {"stages": graph})


UNSENDABLE = {
    "stage data: cluster.time=4h is not a valid time limit; use minutes": ["cluster=slurm", "cluster.time=4h"],
    "stage base: cluster.time=4h is not a valid time limit; use minutes": ["stages.base.cluster=slurm", "stages.base.cluster.time=4h"],
    "stage data: cluster.env has 'A-B', which cannot name": ["cluster=slurm", "++cluster.env={A-B: x}"],
    "stage data: cluster.patch.Pod.spec=null changes or takes away spec": ["cluster=kubernetes", "++cluster.patch={Pod: {spec: null}}"],
    "stage data: sweep.follow=false requires a backend that queues jobs": ["sweep.follow=false"],
}


@pytest.mark.parametrize(
    "dry", [pytest.param([], id="run", marks=pytest.mark.campaign("words")), pytest.param(["--dry-run"], id="dry run")]
)
@pytest.mark.parametrize(("message", "words"), UNSENDABLE.items(), ids=[" ".join(words) for words in UNSENDABLE.values()])
def test_what_no_cluster_would_be_sent_is_refused_with_its_stage_in_a_dry_run_too(
    folder: Path, capsys: pytest.CaptureFixture[str], message: str, words: list[str], dry: list[str]
) -> None:
    pods = ["cluster.container.image=i", f"++cluster.volumes=[{{mount: '{folder}', claim: c}}]"] if words[0] == "cluster=kubernetes" else []
    place = [f"sweep.dir={folder}/runs", "data.source=text.txt"]
    assert message in refused(folder, capsys, {"stages": GRAPH}, *words, *pods, *place, *dry)


def test_wrong_words_of_the_command_are_refused_likewise(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph = {"stages": GRAPH}
    assert "'stages:'" in refused(folder, capsys, {"stage": GRAPH})
    assert "there is no stage 'bse'; did you mean 'base'?" in refused(folder, capsys, graph, "stages.bse.run.steps=3")
    assert "--until scor: there is no such stage; did you mean 'score'?" in refused(folder, capsys, graph, "--until", "scor")
    assert "leave out --until and --from" in refused(folder, capsys, graph, "--only", "hf", "--until", "hf")
    assert "have no stage in common" in refused(folder, capsys, graph, "--from", "hf", "--until", "data")
    assert "takes what stage base makes, which is not there" in refused(folder, capsys, graph, "--only", "hf")
    assert main(["run", "pipeline=wron", "--config-dir", "conf"]) == 2
    assert "did you mean 'wrong'?" in capsys.readouterr().err


def test_another_trainer_is_refused_by_the_stage_that_would_train_with_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whether or not another stage takes its model: its own stage would end without an artifact."""
    said = refused(folder, capsys, {"stages": GRAPH}, "trainer=deepspeed")  # which lacks a script, as no stage has to hear
    assert said.startswith("error: stage base: trainer=DeepSpeed ZeRO is not told") and "run it outside of pipelines: trireme train" in said
    alone = {name: GRAPH[name] for name in ("data", "base")}
    assert "stage base: trainer=torchtitan" in refused(folder, capsys, {"stages": alone}, "stages.base.trainer=torchtitan")


def test_tasks_that_a_stage_fetches_are_known_before(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ask = {"stage": "evaluate", "inputs": {"model": "hf", "tasks": "got"}, "tasks": ["piqa", "prose"]}
    graph = GRAPH | {"got": {"stage": "prepare", "tasks": ["piqa", "boolq"]}, "ask": ask}
    (folder / "conf" / "pipeline" / "asked.yaml").write_text(yaml.safe_dump({"stages": graph}))
    planned = {stage.stage.name: stage for stage in plan(read_pipeline("asked", {}, Path("conf")), (), Path("conf"))}
    assert planned["got"].run.settings == {"tasks": ["piqa", "boolq"]} and planned["got"].run.gives == "tasks"
    assert planned["ask"].run.settings["tasks_folder"] == str(planned["got"].artifact_folder)
    (folder / "tasks" / "tasks.json").write_text(json.dumps({"tasks": ["piqa"]}))
    assert main(["run", "pipeline=asked", "--config-dir", "conf", "--dry-run", "stages.ask.inputs.tasks=./tasks"]) == 0


def test_stages_that_need_each_other_are_named() -> None:
    stages = {"a": {"stage": "train", "inputs": {"data": "b"}}, "b": {"stage": "train", "inputs": {"data": "a"}}}
    with pytest.raises(ConfigError, match=r"in a circle: (a <- b <- a|b <- a <- b); take one of these inputs away"):
        parse({"stages": stages})


def test_a_stage_tunes_in_shorter_rows_and_the_model_keeps_its_length(folder: Path) -> None:
    tuned = TUNE | EXAMPLES | {"tune.method": "lora", "model.seq": 8}
    after = {"asked": {"stage": "evaluate", "inputs": {"model": "tuned"}} | EXAMPLES | {"data.kind": "instructions"}}
    after |= {"text": GRAPH["text"] | {"inputs": {"model": "tuned"}, "tokens": 12}}
    planned = plan(parse({"stages": {name: GRAPH[name] for name in ("data", "base")} | {"tuned": tuned} | after}), ())
    assert {item.stage.name: item.config.model.seq for item in planned} | {"data": 0} == {
        "data": 0, "base": 16, "tuned": 8, "asked": 8, "text": 16
    }  # fmt: skip


def test_every_stage_is_predicted_where_something_is_known_of_its_hardware(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "conf" / "pipeline" / "small.yaml").write_text(yaml.safe_dump({"stages": GRAPH}))
    predicted: dict[str, Any] = {}
    for words in ([], ["hardware=h100"]):
        assert main(["run", "pipeline=small", "--config-dir", "conf", "--dry-run", "--json", *words]) == 0
        predicted = {stage["name"]: stage["predicted_s"] for stage in json.loads(capsys.readouterr().out)["stages"]}
        known = {name for name, seconds in predicted.items() if seconds is not None}
        assert known == (set(GRAPH) if words else {"data", "hf"})
    assert 0 < predicted["score"] < predicted["base"] and predicted["text"] > 0
    size = (folder / "text.txt").stat().st_size
    (folder / "text.txt").write_text("x" * (size + 44_000_000))
    assert main(["run", "pipeline=small", "--config-dir", "conf", "--dry-run"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "million weights/s" in said and "hardware=mine after" in said
    longer = of_preparation(size + 44_000_000) - predicted["data"]
    assert longer == pytest.approx(44e6 / LEARNT_PER_S + 44e6 / ENCODED_PER_S)


def test_values_reach_hydra_as_the_file_has_them(tmp_path: Path) -> None:
    """Quoted text stays text, and numbers are those of other configuration files."""
    (tmp_path / "pipeline").mkdir()
    texts = ["1e3", "1.10", "1_000", "null", "true", "NaN", "-1", "0x10", "1:30:00", "a/b.c", "/abs/path", "it's", "a,b"]
    for number, text in enumerate(texts):
        file = f"stages: {{base: {{stage: train, inputs: {{data: ./corpus}}, cluster.account: {json.dumps(text)}, optimizer.lr: 1e-3}}}}\n"
        (tmp_path / "pipeline" / f"p{number}.yaml").write_text(file)
        (stage,) = read_pipeline(f"p{number}", {}, tmp_path)
        config = compose(["cluster=slurm", *stage.overrides])
        assert isinstance(config.cluster, SlurmCluster) and (config.cluster.account, config.optimizer.lr) == (text, 1e-3)


def test_times_in_base_60_are_refused_in_a_file_and_are_text_on_the_command_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "conf" / "pipeline" / "timed.yaml").write_text(yaml.safe_dump({"stages": GRAPH}))
    words = ["run", "pipeline=timed", "--config-dir", "conf", "cluster=slurm", "--until", "data", "--dry-run", "data.source=text.txt"]
    assert main([*words, "stages.data.cluster.time=1:30:00", f"sweep.dir={folder}/runs"]) == 0
    read = read_pipeline("timed", {"data.cluster.time": _value("stages.data.cluster.time=1:30:00")}, Path("conf"))
    assert 'cluster.time="1:30:00"' in read[0].overrides
    capsys.readouterr()
    assert main([*words, "stages.data.cluster={time: 1:30:00}"]) == 2
    assert "YAML reads time: 1:30:00 as the number 5400; write it in quotes, time: '1:30:00'" in capsys.readouterr().err
    file = folder / "conf" / "pipeline" / "timed.yaml"
    file.write_text(file.read_text() + "    cluster.time: 1:30:00\n")
    assert main(words) == 2
    assert "as the number 5400; write it in quotes" in capsys.readouterr().err


def test_a_stage_of_a_wrong_type_and_a_task_in_another_encoding_are_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for verb in (["train"], {"a": 1}, None):
        assert "is not one of prepare, train" in refused(folder, capsys, {"stages": GRAPH | {"base": GRAPH["base"] | {"stage": verb}}})
    (folder / "tasks" / "own.yaml").write_bytes(b"task: own # caf\xe9\n")
    ask = {"stage": "evaluate", "inputs": {"model": "hf"}, "tasks": ["own"], "tasks_folder": "tasks"}
    assert "cannot be read: 'utf-8' codec" in refused(folder, capsys, {"stages": GRAPH | {"ask": ask}}, "data.source=text.txt")
