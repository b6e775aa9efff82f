"""The function of another Hydra application as trials: what Hydra expects of a launcher, and what Trireme promises of a trial."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from hydra._internal.callbacks import Callbacks
from hydra._internal.hydra import Hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton
from hydra.core.utils import JobStatus
from hydra.errors import CompactHydraException
from hydra.test_utils.launcher_common_tests import BatchedSweeperTestSuite, IntegrationTestSuite, LauncherTestSuite
from hydra.types import HydraContext, RunMode
from hydra.version import VersionBase, setbase
from omegaconf import OmegaConf

from hydra_plugins.trireme import TriremeLauncher
from launcher.backends.pool import Backends
from launcher.stages.function import Application, TrialFailed, call_all, settings_of
from launcher.trials.store import Store
from tests.clusters.slurm.fixture import Slurm
from trainer.shared.records.outcome import Reason
from trainer.shared.run.errors import ConfigError

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("hydra_restore_singletons")]


@pytest.fixture(scope="module", autouse=True)
def _plugins() -> None:
    """What Hydra's fixture restores after a test includes the plugins."""
    Plugins.instance()


@pytest.fixture(autouse=True)
def _application(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has each run in its folder, with the defaults of a version of Hydra, whatever was composed before in this process."""
    monkeypatch.chdir(tmp_path)
    setbase("1.3")


@pytest.fixture
def any_version() -> None:
    """Hydra's own suites want those of none."""
    Singleton._instances.pop(VersionBase, None)


def application(function: Callable[[Any], Any], *overrides: str) -> Application:
    """An application with ``function``, as Hydra makes it for a multirun."""
    GlobalHydra.instance().clear()
    hydra = Hydra.create_main_hydra_file_or_module(None, "hydra.test_utils.a_module", "configs", "a_module")
    config = hydra.compose_config("compose", ["hydra.sweep.dir=out", *overrides], RunMode.MULTIRUN)
    return Application(HydraContext(hydra.config_loader, Callbacks(config)), function, config)


def test_a_function_is_called_by_trials_and_hydra_knows_how_each_ended() -> None:
    def function(config: Any) -> Any:
        with open("calls", "a") as file:
            file.write(f"{config.a}\n")
        if config.a == 1:
            raise LookupError("one is bad")
        if config.a == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return {"pid": os.getpid(), "value": config.foo + config.a}

    jobs = [["+a=0", "foo=5"], ["+a=1"], ["+a=2"]]
    app, settings = application(function), settings_of(["cluster.max_processes=3", "sweep.retries=0", "sweep.name=calls"])
    with Backends() as backends:
        done, bad, killed = call_all(app, settings, backends, jobs, 4)
        assert [found.overrides for found in (done, bad, killed)] == jobs
        assert (done.status, bad.status, killed.status) == (JobStatus.COMPLETED, JobStatus.FAILED, JobStatus.FAILED)
        assert done.return_value["value"] == 5 and done.return_value["pid"] != os.getpid()
        assert done.cfg == {"foo": 5, "bar": 100, "a": 0} and done.task_name == "a_module" and Path("out/4/.hydra/config.yaml").is_file()
        assert [OmegaConf.select(found.hydra_cfg, "hydra.job.num") for found in (done, bad, killed)] == [4, 5, 6]
        with pytest.raises(LookupError, match="one is bad"):
            _ = bad.return_value
        with pytest.raises(TrialFailed, match=r"trial [0-9a-f]{12}: node: .*SIGKILL.*; see: trireme logs"):
            _ = killed.return_value
        records = Store("runs").sweep("calls").records
        assert [record.stage for record in records] == ["job-4", "job-5", "job-6"] and records[1].reason is Reason.ERROR
        assert "LookupError: one is bad" in (records[1].directory / "logs" / "attempt0.rank0.log").read_text()

        again = call_all(app, settings, backends, jobs[:1], 4)[0]
        assert again.return_value == done.return_value and Path("calls").read_text().count("0\n") == 1, "it was called once"
        anew = dataclasses.replace(settings, sweep=dataclasses.replace(settings.sweep, rerun=True))
        second = call_all(app, anew, backends, jobs[:1], 4)[0].return_value
        elsewhere = call_all(application(function, "hydra.sweep.dir=other"), settings, backends, jobs[:1], 4)[0]
        assert len({found["pid"] for found in (done.return_value, second, elsewhere.return_value)}) == 3


def test_a_function_that_was_edited_is_called_again(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "def function(config):\n    return {}\n"
    settings = settings_of(["sweep.name=calls"])
    with Backends() as backends:
        for number, value in enumerate(("'before'", "'after'")):
            Path(f"edited{number}.py").write_text(text.format(value))
            spec = importlib.util.spec_from_file_location("edited", f"edited{number}.py")
            assert spec and spec.loader
            monkeypatch.setitem(sys.modules, "edited", module := importlib.util.module_from_spec(spec))
            spec.loader.exec_module(module)
            cloudpickle.register_pickle_by_value(module)
            (returned,) = call_all(application(module.function), settings, backends, [[]], 0)
            assert repr(returned.return_value) == value


def test_what_cannot_be_sent_is_said_before_anything_is_started() -> None:
    lock = sys._getframe()
    with pytest.raises(ConfigError, match=r"the function of a_module cannot be sent to another process \(TypeError: .*frame"):
        call_all(application(lambda config: lock), settings_of([]), Backends(), [[]], 0)
    assert not Store("runs").names()


def test_our_groups_and_an_applications_do_not_mix() -> None:
    """``cluster`` and ``model`` are frequent names of groups."""
    from hydra.core.config_store import ConfigStore

    store = ConfigStore.instance()
    store.store(group="cluster", name="_local", node={"theirs": 1})
    store.store(name="schema", node={"theirs": 1})
    app, running = application(lambda config: None), GlobalHydra.instance().hydra
    before = {name: id(entry) for name, entry in store.repo.items()}
    assert settings_of(["cluster=slurm", "cluster.partition=long"]).cluster.backend == "slurm"
    assert {name: id(entry) for name, entry in store.repo.items()} == before
    assert app.context.config_loader.load_configuration("schema", [], RunMode.RUN).theirs == 1
    assert GlobalHydra.instance().hydra is running


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["cluster=slrum"], "cluster=slrum does not exist; did you mean 'slurm'?"),
        (
            ["cluster=kubernetes"],
            "hydra/launcher=trireme needs a cluster that shares this machine's files, and cluster=kubernetes does not",
        ),
        (["cluster=slurm", "sweep.follow=false"], "sweep.follow=false with hydra/launcher=trireme, whose sweeper waits"),
    ],
)
def test_a_wrong_place_is_one_plain_line_of_hydras(overrides: Sequence[str], words: str) -> None:
    app = application(lambda config: None)
    made = TriremeLauncher(overrides)
    made.setup(hydra_context=app.context, task_function=app.function, config=app.config)
    with pytest.raises(CompactHydraException) as caught:
        made.launch([[]], 0)
    assert str(caught.value).startswith(words) and "\n" not in str(caught.value) and not Path("runs").exists()


@pytest.mark.campaign("slurm")
def test_a_function_is_called_by_slurm_jobs(slurm: Slurm) -> None:
    place = ["cluster=slurm", "cluster.gpu_request=none", "cluster.poll_seconds=0.2", "cluster.visibility_s=1", "sweep.name=calls"]
    app, settings = application(lambda config: (config.a, os.environ["SLURM_JOB_ID"])), settings_of(place)
    with Backends() as backends:
        found = [done.return_value for done in call_all(app, settings, backends, [["+a=1"], ["+a=2"]], 0)]
        assert [value for value, _ in found] == [1, 2] and len({job for _, job in found}) == 2
        assert [done.return_value for done in call_all(app, settings, backends, [["+a=1"], ["+a=2"]], 0)] == [tuple(one) for one in found]


@pytest.mark.campaign("launchers")
@pytest.mark.usefixtures("any_version")
@pytest.mark.parametrize("launcher_name, overrides", [("trireme", [])])
class TestLauncher(LauncherTestSuite):
    """Hydra's own tests of a launcher."""


@pytest.mark.campaign("launchers")
@pytest.mark.usefixtures("any_version")
@pytest.mark.parametrize("launcher_name, overrides", [("trireme", ["hydra.sweeper.max_batch_size=2"])])
class TestBatches(BatchedSweeperTestSuite):
    """Likewise, of batches."""


@pytest.mark.campaign("launchers")
@pytest.mark.usefixtures("any_version")
@pytest.mark.parametrize("task_launcher_cfg, extra_flags", [({}, ["-m", "hydra/launcher=trireme"])])
class TestApplication(IntegrationTestSuite):
    """Likewise, of applications with a file of their own."""
