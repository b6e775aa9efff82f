"""Where a key is text, text is taken as it was typed; what a message proposes works as it stands."""

from __future__ import annotations

import ast
import dataclasses
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from launcher.cli.main import main as run_program
from launcher.cli.overrides import with_texts
from launcher.cli.recipes import as_yaml
from launcher.cli.run import _value
from launcher.cli.train import main
from launcher.config import compose
from launcher.config.clusters import backend_names
from launcher.config.compose import check_overrides, config_groups, known_keys, parse_override
from launcher.config.jobs import Jobs
from launcher.config.text_keys import TEXT, in_quotes, type_of_key
from launcher.stages.graph import parse
from launcher.stages.kinds.train import TrainStage
from tests.draws import draws
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.value_types import value_type

pytestmark = pytest.mark.slow  # composes and plans whole runs

TYPED = ["2024_05_01", "1.10", "1e3", "+5", "true", "inf", "n[1-4]", "h100&ib", "it's", "a=b", "#1", "0x1F", "4:00:00"]
"""What Hydra or YAML read as something else, or not at all."""
ROOT = Path(__file__).resolve().parents[2]


def text_keys(backend: str) -> Iterator[tuple[str, str]]:
    """Every key of text, lists and mappings of text too, with the words around a text."""
    around = {TEXT: "{}", value_type(list[str]): "[x,{}]", value_type(dict[str, str]): "{{x: {}}}"}
    for name in known_keys(backend):
        kind, metadata = type_of_key(name, backend)
        kind = dataclasses.replace(kind, optional=False)
        if kind in around and not metadata.get("choices"):
            yield name, around[kind]


def read(override: str, backend: str, sweep: bool = False) -> Any:
    return parse_override(check_overrides([f"cluster={backend}", "tune.method=lora", override], sweep=sweep)[-1])


@pytest.mark.parametrize("backend", backend_names())
def test_every_key_of_text_keeps_what_was_typed(backend: str) -> None:
    found = [(name, around, TYPED[n % len(TYPED)]) for n, (name, around) in enumerate(text_keys(backend))]
    assert len(found) > 30
    words = [f"cluster={backend}", "tune.method=lora", *(f"{name}={around.format(typed)}" for name, around, typed in found)]
    for word, (name, around, typed) in zip(check_overrides(words)[2:], found, strict=True):
        assert parse_override(word).value() == {"{}": typed, "[x,{}]": ["x", typed]}.get(around, {"x": typed}), name


def test_every_text_is_kept_in_the_configuration() -> None:
    config = compose(
        [f"trainer.launch.arguments=[{','.join(TYPED)}]", *(f"cluster.env.A{n}={typed}" for n, typed in enumerate(TYPED)), "data.path=1_0"]
    )
    assert config.trainer.launch.arguments == list(config.cluster.env.values()) == TYPED
    assert config.data.path == "1_0"
    assert compose(["cluster=kubernetes", "+cluster.node_selector.real=true"]).cluster.node_selector == {"real": "true"}  # type: ignore[attr-defined]


def test_null_quotes_and_what_depends_on_other_keys_keep_their_meaning() -> None:
    assert compose(["sweep.name=null"]).sweep.name is None
    assert compose(["sweep.name='null'"]).sweep.name == "null"
    assert compose(["sweep.name=${model.family}"]).sweep.name == "gpt"
    assert compose(["data.path=a\\,b"]).data.path == "a,b"
    assert compose(["run.steps=1_000"]).run.steps == 1000


@draws(gate=25, campaign=2000)
@given(st.text("ab01_.,:;&|[](){}'\"\\=+-# $", max_size=8))
@example("'a',b")
@example("[a,b")
def test_a_text_is_a_text_or_one_plain_error(typed: str) -> None:
    assert parse_override(f"key={in_quotes(typed)}").value() == typed
    try:
        value = compose([f"data.path={typed}"]).data.path
    except ConfigError as error:
        assert len(str(error).splitlines()) == 1
    else:
        assert value in (typed.strip(), value) if set(typed) & set("'\"\\$ ") else value == typed


# -- text that nothing changes, and names with dots ---------------------------------------------------------------------------


@draws(gate=4, campaign=300)
@given(st.lists(st.text("ab01_.,:;&|[](){}'\"\\=+-# $\n", max_size=8), min_size=8, max_size=8))
@example(["\\${x}", "${oc.env:HOME}", "null"])
def test_texts_that_are_set_are_those_texts(typed: list[str]) -> None:
    words = [word for n, text in enumerate(typed) for word in with_texts(["--set", f"cluster.env.A{n}", text])]
    assert list(compose(words).cluster.env.values()) == typed
    assert [parse_override(word).value() for word in check_overrides(words, sweep=True)] == [parse_override(word).value() for word in words]


def test_texts_of_a_list_are_its_entries_and_other_words_stay() -> None:
    words = with_texts(["a=1", "--set", "cluster.extra", "--exclude=n[1-4],n7", "-m", "--set", "cluster.extra", "-x"])
    assert words[:2] == ["a=1", "-m"] and compose(["cluster=slurm", words[2]]).cluster.extra == ["--exclude=n[1-4],n7", "-x"]  # type: ignore[attr-defined]
    (word,) = with_texts(["--set", "stages.base.data.path", "a: b,c"])
    assert _value(word) == "a: b,c"


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["--set", "run.steps", "1_0"], "--set run.steps 1_0: run.steps is not text; write run.steps=1_0"),
        (["--set", "data.path"], "--set takes a KEY and a TEXT, as in --set sweep.name 'a,b'"),
        (["--set", "data.path=a", "b"], "--set 'data.path=a': a KEY and a TEXT are two words, as in --set sweep.name 'a,b'"),
    ],
)
def test_a_text_that_cannot_be_set_is_one_plain_line(words: list[str], answer: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_program(["plan", *words]) == 2
    assert capsys.readouterr().err == f"error: {answer}\n"


def test_a_name_with_dots_is_one_entry_of_a_mapping_of_texts() -> None:
    words = ["cluster=kubernetes", "cluster.labels.app.kubernetes.io/name=a,b", "cluster.labels.team=x", "cluster.annotations.a/b=true"]
    cluster: Any = compose(words).cluster
    assert cluster.labels == {"app.kubernetes.io/name": "a,b", "team": "x"} and cluster.annotations == {"a/b": "true"}
    swept = read("cluster.labels.a.b/c=x,'y,z'", "kubernetes", sweep=True)
    lines = [f"++cluster.labels={value}" for value in swept.sweep_string_iterator()]
    jobs: list[Any] = [Jobs(_composed).config(["cluster=kubernetes", line]).cluster for line in lines]
    assert [job.labels for job in jobs] == [{"a.b/c": "x"}, {"a.b/c": "y,z"}]


# -- sweeps -----------------------------------------------------------------------------------------------------------------


SWEEPS = {
    "main,one": ["main", "one"],
    "2024_05_01,1_0": ["2024_05_01", "1_0"],
    "choice(1e3,b)": ["1e3", "b"],
    "n[1-4],n[5,6]": ["n[1-4]", "n[5,6]"],
    "'main,one',two": ["main,one", "two"],
}


def test_a_sweep_has_the_values_that_its_commas_separate() -> None:
    jobs = Jobs(lambda words: pytest.fail(f"Hydra is asked for {words}") if "partition" in str(words) else _composed(words))
    for values, expected in SWEEPS.items():
        lines = read(f"cluster.partition={values}", "slurm", sweep=True).sweep_string_iterator()
        assert [jobs.config(["cluster=slurm", f"cluster.partition={line}"]).cluster.partition for line in lines] == expected  # type: ignore[attr-defined]


def _composed(words: list[str]) -> Any:
    from launcher.config.compose import _hydra_compose, register_schema

    register_schema()
    return _hydra_compose(words)


def test_a_comma_in_a_sweep_of_text_is_said_with_words_for_one_text(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = f"-m cluster=slurm model=gpt_tiny data=synthetic cluster.gpus_per_node=1 sweep.dir={tmp_path} --dry-run".split()
    main([*words, "cluster.partition=main,one"])
    output = capfd.readouterr()
    assert [line for line in output.out.splitlines() if "--partition" in line] == ["#SBATCH --partition=main", "#SBATCH --partition=one"]
    main([*words, *shlex.split(output.err.splitlines()[0].partition("one text is ")[2])])
    output = capfd.readouterr()
    assert [line for line in output.out.splitlines() if "--partition" in line] == ["#SBATCH --partition=main,one"]


# -- files ------------------------------------------------------------------------------------------------------------------

FILES = {
    "cluster": "defaults: [_slurm, _self_]\nbackend: slurm\n{}\n",
    "recipe": "# @package _global_\ndefaults: [override /cluster: slurm]\ncluster:\n  {}\n",
}


@pytest.mark.parametrize(
    ("group", "line"),
    [("cluster", "partition: 2024_05_01"), ("cluster", "partition: on"), ("cluster", "extra: [1_0]"), ("recipe", "partition: 1e3")],
)
def test_text_that_yaml_reads_otherwise_is_refused_with_words_that_are_read(tmp_path: Path, group: str, line: str) -> None:
    def cluster(text: str) -> Any:
        (tmp_path / group).mkdir(exist_ok=True)
        (tmp_path / group / "ours.yaml").write_text(FILES[group].format(text))
        return compose([f"{group}=ours"], tmp_path).cluster

    with pytest.raises(ConfigError, match=r"ours\.yaml, line \d: YAML reads .* in quotes, \S+: '.*'$") as refused:
        cluster(line)
    name, _, typed = line.partition(": ")
    remedy = str(refused.value).rpartition("in quotes, ")[2]
    value = getattr(cluster(remedy if "[" not in line else f"{name}: [{remedy.partition(': ')[2]}]"), name)
    assert value == (typed if "[" not in line else ["1_0"])


def test_numbers_in_files_may_be_written_as_yaml_allows(tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "ours.yaml").write_text("# @package _global_\nrun: {steps: 1_000}\noptimizer: {lr: 1e-3}\nsweep: {name: 2026}\n")
    config = compose(["recipe=ours"], tmp_path)
    assert (config.run.steps, config.optimizer.lr, config.sweep.name) == (1000, 1e-3, "2026")


def test_a_recipe_is_read_as_it_was_written(tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "2024_05_01.yaml").write_text(as_yaml({"cluster": {"env": dict(zip("abcdefghijklm", TYPED))}}))
    assert list(compose(["recipe=2024_05_01"], tmp_path).cluster.env.values()) == TYPED


def test_a_stage_keeps_its_text() -> None:
    texts = [*TYPED, r"\d+ a", "x y"]
    for typed in texts:
        stage = TrainStage("base", {}, {"data.path": typed, "trainer.launch.log": [typed]})
        assert [parse_override(word).value() for word in stage.overrides] == [typed, [typed]]
    for typed in TYPED[:5]:
        changed = {"base.data.path": _value(f"stages.base.data.path={typed}")}
        stages = parse({"stages": {"base": {"stage": "train", "inputs": {"data": "./x"}}}}, changed)
        assert stages[0].settings["data.path"] == typed
    assert _value("stages.base.cluster.time=4:00:00") == "4:00:00"
    assert _value("stages.base.run.steps=1_000") == 1000
    with pytest.raises(ConfigError, match="as the number 20240501"):
        _value("stages.base.cluster.env={A: 2024_05_01}")


# -- remedies ---------------------------------------------------------------------------------------------------------------


def test_the_remedies_for_several_values_work_as_they_are_printed() -> None:
    refused, groups = 0, config_groups()
    for backend in backend_names():
        for name in [*known_keys(backend), *groups] if backend == "local" else [key for key in known_keys(backend) if key[:7] == "cluster"]:
            kind, metadata = type_of_key(name, backend)
            of = metadata.get("choices") or {int: "12", float: "12", bool: ("true", "false")}.get(kind.base, "ab")
            first, second = (groups[name] * 2)[:2] if name in groups else (of[0], of[-1])
            try:
                check_overrides([f"cluster={backend}", f"{name}={first},{second}"])
            except ConfigError as error:
                refused += 1
                for remedy in str(error).partition("sweep over them: ")[2].split(", or write a list: "):
                    *_, word = shlex.split(remedy)
                    values = read(word, backend, sweep="train -m" in remedy)
                    assert values.is_sweep_override() is ("train -m" in remedy)
                    assert kind.base is list or "train -m" in remedy
    assert refused > 100


_PROPOSED = r"""(?<![\w.{])\+?((\w+(?:\.\w+)+)=(?:\[[^\]]*\]|\{[^}]*\}|(?:[^\s,;:()'"`.[{]|\.(?=\w))+))"""


@cache
def proposed() -> dict[str, str]:
    """Every KEY=VALUE with a key that exists in a literal of a message, and where it stands."""
    known = {name for backend in backend_names() for name in known_keys(backend)}
    found: dict[str, str] = {}
    for path in sorted([*(ROOT / "launcher").rglob("*.py"), *(ROOT / "trainer").rglob("*.py")]):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if re.search(_PROPOSED, text) else ():
            if isinstance(node, ast.Raise) and node.exc is not None:
                for text in (each.value for each in ast.walk(node.exc) if isinstance(each, ast.Constant) and isinstance(each.value, str)):
                    for remedy, key in re.findall(_PROPOSED, text):
                        if key in known - {"cluster.backend"} and not re.search(r"=(?:[A-Z/]|\.)", remedy):
                            found[remedy] = f"{path.relative_to(ROOT)}:{node.lineno}"
    return found


def test_every_setting_that_a_message_proposes_is_accepted() -> None:
    assert len(proposed()) > 20
    for remedy, where in proposed().items():
        key = remedy.partition("=")[0]
        backend = next(name for name in backend_names() if key in known_keys(name))
        try:
            compose([*([f"cluster={backend}"] if key.startswith("cluster.") else []), *shlex.split(remedy)])
        except ConfigError as error:
            assert str(error).startswith(f"{key} is of a method"), f"{where}: {remedy}: {error}"
