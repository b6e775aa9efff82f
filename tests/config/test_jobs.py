"""Jobs composed by way of a shared composition are those that Hydra composes one by one."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from hypothesis import example, given
from hypothesis import strategies as st
from omegaconf import DictConfig

from launcher.config import compose
from launcher.config.compose import _hydra_compose, check_overrides, plain_errors, register_schema, to_config
from launcher.config.folders import conf_dir
from launcher.config.jobs import Jobs
from tests.draws import draws
from trainer.shared.run.errors import ConfigError

pytestmark = pytest.mark.slow

Loaded = tuple[Any, DictConfig]


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    """Hydra's loader, and the configuration that a sweep starts from."""
    register_schema()
    with initialize_config_dir(config_dir=str(conf_dir()), version_base=None):
        loader = GlobalHydra.instance().config_loader()
        return loader, loader.load_configuration("config", [], RunMode.MULTIRUN)


def typed(composing: Any, overrides: list[str]) -> object:
    try:
        with plain_errors():
            return composing(overrides)
    except ConfigError as error:
        return str(error)


LINES = st.sampled_from(
    [
        "model=gpt_tiny", "model=llama_tiny", "cluster=slurm", "hardware=h100", "data=synthetic", "layout.tensor=2", "layout.tensor=4", "run.steps=5",
        "run.seed=3", "model.layers=6", "model.ffn=null", "layout.stage_layers=[1,2,1]", "layout.sharding={params: 2}", "layout.sharding.params=4",
        "sweep.name='a b'", "run.precision=bf16", "data.path=${sweep.dir}/x", "+run.unknown=1", "run.unknown=1", "++cluster.env.A=1", "~data.path",
        "cluster.env.A=2", "layout={tensor: 3}", "layout.tensor=two", "hydra.job.name=x", "layout.nothing.at.all=1", "model@other=gpt_tiny", "run.steps=${run.seed}",
    ]
)  # fmt: skip


@draws(gate=2, campaign=60)
@example([["run.unknown=1", "+run.unknown=1"]])
@example([["+run.unknown=1", "run.unknown=2"]])
@example([["++cluster.env.A=1", "cluster.env.A=2", "++cluster.env.A=1"]])
@example([["layout.tensor=4", "layout={tensor: 3}"]])
@example([["layout.nothing.at.all=1", "+run.unknown=1", "+run.unknown=1"]])
@example([["data.path=x", "~data.path"]])
@example(
    [["layout.tensor=2"], ["layout.tensor=two", "cluster.nodes=x"], ["cluster.nodes=0", "run.steps=0"], ["run.seed=007"], ["run.seed=-3"]]
)
@example([["cluster.env.A=2", "layout.tensor=two"]])
@example([["run.steps=${run.seed}"], ["run.seed=5"], ["data.path=${sweep.dir}/x", "run.seed=5"]])
@given(st.lists(st.lists(LINES, max_size=4), min_size=1, max_size=4))
def test_every_typed_job_is_the_typed_form_of_what_hydra_composes(loaded: Loaded, jobs: list[list[str]]) -> None:
    loader, config = loaded

    @cache
    def composed(lines: tuple[str, ...]) -> DictConfig | Exception:
        try:
            return loader.load_sweep_config(config, [*lines])  # type: ignore[no-any-return]
        except Exception as error:
            return error

    def whole(lines: list[str]) -> DictConfig:
        """As Hydra composes, once for each list: a composition takes a tenth of a second."""
        if isinstance(found := composed(tuple(lines)), Exception):
            raise found
        return found

    composer = Jobs(whole)
    expected = [typed(lambda lines: to_config(whole(lines)), overrides) for overrides in jobs]
    for _ in range(2):  # the second time what was composed is there
        assert [typed(composer.config, overrides) for overrides in jobs] == expected


def test_jobs_do_not_share_what_they_set(loaded: Loaded) -> None:
    composer = Jobs(lambda lines: loaded[0].load_sweep_config(loaded[1], lines))
    jobs = [composer.config([f"run.steps={n}", *more]) for n, more in ((3, []), (4, ["layout.tensor=2"]), (5, ["run.seed=7"]), (6, []))]
    assert [(job.run.steps, job.layout.tensor, job.run.seed) for job in jobs] == [(3, 1, 1234), (4, 2, 1234), (5, 1, 7), (6, 1, 1234)]


def test_hydra_is_asked_once_for_all_jobs_of_the_same_choices(loaded: Loaded) -> None:
    asked: list[list[str]] = []

    def counted(lines: list[str]) -> DictConfig:
        asked.append(lines)
        return loaded[0].load_sweep_config(loaded[1], lines)  # type: ignore[no-any-return]

    composer = Jobs(counted)
    for model in ("gpt_tiny", "llama_tiny"):
        for steps in range(2, 12):
            composer.config([f"model={model}", f"run.steps={steps}"])
    assert asked == [["model=gpt_tiny"], ["model=llama_tiny"]]


@draws(gate=5, campaign=200)
@example(["cluster.env.A=${oc.env:HOME}", "cluster.env.A=2", "tracking.uri=https://name:secret@host"])
@given(st.lists(LINES, max_size=4))
def test_a_command_composes_what_hydra_composes(overrides: list[str]) -> None:
    expected = typed(lambda lines: to_config(_hydra_compose(check_overrides(lines))), overrides)
    assert [typed(compose, overrides) for _ in range(2)] == [expected, expected]


def test_what_is_written_between_two_compositions_is_in_the_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a search writes its winner: in runs/, in a folder of one's own, and in what its file builds on."""
    monkeypatch.chdir(tmp_path)
    for folder in (Path("runs"), Path("mine")):
        own = folder if folder.name == "mine" else None
        (folder / "model").mkdir(parents=True)
        (folder / "model" / "new.yaml").write_text(f"defaults: [below_{folder}, _self_]\nheads: 2\n")
        for layers in (2, 3):
            (folder / "model" / f"below_{folder}.yaml").write_text(f"layers: {layers}\n")
            config = compose(["model=new"], own)
            assert (config.model.layers, config.model.heads) == (layers, 2)
        (folder / "model" / "new.yaml").unlink()
        with pytest.raises(ConfigError, match="model=new does not exist"):
            compose(["model=new"], own)


def test_a_configuration_is_its_callers_own_and_of_its_own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("a", "b"):
        monkeypatch.setenv("NAME", value)
        config = compose(["cluster.env.NAME=${oc.env:NAME}"])
        assert config.cluster.env == {"NAME": value}
    for _ in range(2):
        assert compose([]).cluster.env == {}
        compose([]).cluster.env["OTHER"] = "x"
