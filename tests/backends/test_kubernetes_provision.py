"""What pods need before their ranks start: the launcher's own code, whatever their image holds, and the corpus."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.backends import backend_for
from launcher.backends.kubernetes.cluster import KubernetesCluster
from launcher.backends.kubernetes.logs import Unpacker
from launcher.backends.kubernetes.manifests import PROGRAMS, config_map
from launcher.backends.kubernetes.provision import archive, digest
from launcher.backends.kubernetes.volumes import VolumeConfig
from launcher.config import Config, locate_data
from launcher.config.schema import ContainerConfig
from launcher.trials.job import JobState
from launcher.trials.outcome import decide
from tests.backends.conformance import MODEL, SHORT, Ground, closing
from tests.backends.test_kubernetes_manifests import CONFIG, PLAIN, PROJECT, job
from tests.clusters.kubernetes.fixture import Kubernetes
from trainer.shared.records.outcome import Reason, Status
from trainer.shared.records.trial_files import failures_in
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.files import read_json
from trainer.shared.run.read import save
from trainer.shared.run.rules import resolve
from trainer.shared.run.schema import DataConfig, LayoutConfig, TrainConfig

RESULT = """
import json, os, sys
from pathlib import Path
path = Path(sys.argv[sys.argv.index("--out") + 1]) / "result.json"
path.write_text(json.dumps({"attempt": 0, "status": "done", "who": WHO}))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A pod's file system: the programs of its ConfigMap, and an image whose trainer calls itself the image's."""
    for program in PROGRAMS:
        (tmp_path / program.name).write_text(program.read_text())
    package(tmp_path / "image", "image")
    yield tmp_path


def package(folder: Path, who: str) -> Path:
    made = folder / "trainer"
    made.mkdir(parents=True)
    (made / "__init__.py").touch()
    (made / "__main__.py").write_text(RESULT.replace("WHO", repr(who)))
    return made


def run(folder: Path, interpreter: str = sys.executable, **environment: str) -> tuple[int, list[bytes]]:
    """Exit code and lines of a pod's first process. It starts in a folder that has the image's trainer, as an image's may."""
    given = {
        "TRIREME_INDEX_FROM": "INDEX", "INDEX": "0", "WORLD_SIZE": "1", "TRIREME_RANKS_PER_NODE": "1", "TRIREME_ATTEMPT": "0",
        "TRIREME_OUT": str(folder / "out"), "TRIREME_CONFIG": str(folder / "config.yaml"), "TRIREME_TERMINATION_LOG": str(folder / "end"),
    }  # fmt: skip
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [interpreter, "-u", folder / "entry.py"], env=inherited | given | environment, stdout=subprocess.PIPE, cwd=folder / "image"
    )
    return done.returncode, done.stdout.splitlines()


def home(folder: Path, lines: list[bytes]) -> Path:
    """The trial's directory, from what the pod sent."""
    directory = folder / "home"
    directory.mkdir()
    unpacker = Unpacker(directory, 0, range(1), {})
    for line in lines:
        unpacker.take(line)
    unpacker.close()
    return directory


# -- code -------------------------------------------------------------------------------------------------------------------------


def test_the_launchers_trainer_is_shipped_whole_and_the_same_files_give_the_same_bytes(tmp_path: Path) -> None:
    shipped = archive(PROJECT / "trainer")
    assert shipped == archive(PROJECT / "trainer")
    (tmp_path / "code.tar.gz").write_bytes(shipped)
    with tarfile.open(tmp_path / "code.tar.gz") as files:
        files.extractall(tmp_path, filter="data")
    assert digest(tmp_path / "trainer") == digest(PROJECT / "trainer")
    others = [path for path in (PROJECT / "trainer").rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc", ".typed")]
    assert others == [], "only Python files are shipped"


def test_the_shipped_code_runs_though_the_image_has_another(folder: Path) -> None:
    own = package(folder / "own", "launcher")
    (folder / "trainer.tar.gz").write_bytes(archive(own))
    code, _ = run(folder, TRIREME_CODE=digest(own), TRIREME_CODE_DIR=str(folder / "code"))
    assert (code, (read_json(folder / "out" / "result.json") or {})["who"]) == (0, "launcher")


def test_an_image_with_the_launchers_code_runs_without_a_word(folder: Path) -> None:
    code, lines = run(folder, TRIREME_CODE=digest(folder / "image" / "trainer"))
    assert code == 0 and "message" not in (read_json(home(folder, lines) / "result.json") or {})


def test_an_image_with_other_code_is_named_in_the_log_and_in_the_trials_record(folder: Path) -> None:
    code, lines = run(folder, TRIREME_CODE="0123456789ab")
    words = f"the image's trainer (code {digest(folder / 'image' / 'trainer')}) is not the launcher's (code 0123456789ab)"
    assert code == 0 and any(words.encode() in line for line in lines)
    result = read_json(home(folder, lines) / "result.json")
    verdict = decide(0, JobState(Status.DONE), result)
    assert verdict.status is Status.DONE and words in verdict.detail and "cluster.code=snapshot" in verdict.detail


def test_an_image_without_the_trainer_is_a_configuration_error_with_a_remedy(folder: Path) -> None:
    (folder / "image" / "trainer").rename(folder / "elsewhere")
    bare = f"{sys.base_prefix}/bin/python3"  # without the packages of this environment
    code, lines = run(folder, bare, TRIREME_CODE="0123456789ab")
    (failure,) = failures_in(home(folder, lines))
    assert code == 2 and failure["reason"] == Reason.CONFIGURATION.value and "cluster.code=snapshot" in failure["message"]
    assert json.loads((folder / "end").read_text())["content"]["reason"] == Reason.CONFIGURATION.value


def test_code_that_no_config_map_can_hold_is_refused_with_a_remedy() -> None:
    with pytest.raises(ConfigError, match=r"use cluster\.code=image"):
        config_map(job(), PLAIN, CONFIG + f"x: {'y' * 1_000_000}\n")


# -- data -------------------------------------------------------------------------------------------------------------------------

PODS = KubernetesCluster(backend="kubernetes", container=ContainerConfig(image="i"))
VOLUME = dataclasses.replace(PODS, volumes=[VolumeConfig(mount="/data", claim="corpora")])


def located(data: DataConfig, cluster: KubernetesCluster = PODS) -> tuple[str, str | None]:
    config = locate_data(Config(data=data, cluster=cluster))
    assert isinstance(config.cluster, KubernetesCluster)
    return config.data.path, config.cluster.data


def test_the_default_corpus_is_made_in_the_pods_since_their_image_has_its_source() -> None:
    assert located(DataConfig()) == ("/trireme-data/stdlib", "prepare")
    mounted = dataclasses.replace(PODS, container=ContainerConfig(image="i", workdir="/code", mounts=["/code:/code:ro"]))
    assert located(DataConfig(), mounted) == ("/trireme-data/stdlib", "prepare"), "a mounted folder need not hold it"


def test_a_corpus_on_a_volume_is_used_from_there_or_made_there() -> None:
    assert located(DataConfig(path="/data/ours", source="/texts"), VOLUME) == ("/data/ours", "present")
    assert located(DataConfig(path="/data/ours"), dataclasses.replace(VOLUME, data="prepare")) == ("/data/ours", "prepare")


def test_random_tokens_need_nothing() -> None:
    assert located(DataConfig(kind="synthetic")) == ("data/stdlib", None)


@pytest.mark.parametrize(
    ("data", "how", "words"),
    [
        (DataConfig(path="/mine", source="/texts"), None, "data.path=/mine is on none of the pods' volumes; mount the one that holds it"),
        (DataConfig(path="mine"), "present", "data.path=mine is relative"),
    ],
)
def test_a_corpus_that_pods_cannot_have_is_refused_before_anything_is_submitted(data: DataConfig, how: str | None, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        located(data, dataclasses.replace(PODS, data=how))
    assert words in str(refused.value) and "\n" not in str(refused.value)


def test_a_corpus_that_cannot_be_made_ends_the_trial_as_a_configuration_error(folder: Path) -> None:
    save(TrainConfig(data=DataConfig(source=str(folder / "nothing"), path=str(folder / "corpus"))), folder / "config.yaml")
    (folder / "trainer.tar.gz").write_bytes(archive(PROJECT / "trainer"))
    code, lines = run(folder, TRIREME_CODE_DIR=str(folder / "code"), TRIREME_PREPARE="1")
    (failure,) = failures_in(home(folder, lines))
    assert code == 2 and failure["reason"] == Reason.CONFIGURATION.value
    assert failure["message"].startswith("the corpus could not be prepared in the pod: data.source=")


def test_a_corpus_is_prepared_with_no_more_packages_than_the_trainers_image_has(tmp_path: Path) -> None:
    """``rich`` draws progress bars for people; deploy/Dockerfile leaves it out."""
    (tmp_path / "text").write_text("to be or not to be\n" * 100)
    save(TrainConfig(data=DataConfig(source=str(tmp_path / "text"), path=str(tmp_path / "corpus"), vocab=300)), tmp_path / "config.yaml")
    program = "import sys; sys.modules['rich'] = None; from trainer.data.__main__ import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "config.yaml"], capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0 and done.stdout.startswith("prepared "), done.stderr


def test_real_pods_prepare_their_corpus_themselves_with_the_shipped_code(real_node: Kubernetes, tmp_path: Path) -> None:
    with real_node.namespace() as namespace:
        cluster = real_node.cluster(namespace, nodes=2, gpus_per_node=1, data="prepare")
        for ground in closing(Ground(lambda: backend_for(cluster), cluster, tmp_path)):
            task = ground.job()
            data = DataConfig(source=str(PROJECT / "recipes"), path="/trireme-data/recipes", vocab=300)
            model = dataclasses.replace(MODEL, vocab=300)
            save(resolve(TrainConfig(model=model, layout=LayoutConfig(tensor=2, data=1), data=data, run=SHORT), 2), task.config_path)
            (handle,) = ground.submit(task)
            assert ground.end(task, handle).status is Status.DONE, task.log_path(0).read_text()
            assert "prepared /trireme-data/recipes" in task.log_path(0).read_text() and "prepared" in task.log_path(1).read_text()
