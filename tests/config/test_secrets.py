"""Secrets in clear are found by their names and by their values, wherever settings are free, and ordinary settings are let through."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launcher.backends.slurm.cluster import SlurmCluster
from launcher.cli.main import main
from launcher.config.secrets import refuse_secrets, secrets_in
from trainer.shared.run.errors import ConfigError

pytestmark = pytest.mark.slow

NAMED = {
    "OPENAI_KEY": "abcd1234", "PGPASS": "hunter22", "PGPASSWORD": "12", "SSHPASS": "a b", "MYSQL_PWD": "root1", "HF_TOKEN": "x",
    "HFTOKEN": "x", "openaiKey": "zzz", "DEPLOY_KEY_2": "qqqq", "API_KEY_OF_US": "abc", "DB_CREDENTIALS": "me and you", "SENTRY_DSN": "abcd",
}  # fmt: skip
KNOWN = [
    "hf_" + "a1" * 12, "ghp_" + "b2" * 18, "glpat-" + "c3" * 10, "sk-proj-" + "d4" * 12, "AKIA" + "E5" * 8, "xoxb-1234567890-abc", "eyJhbGciOiJI.eyJzdWIiOiIx.sig",
    "https://hooks.slack.com/services/T/B/x", "http://me:word@proxy:3128", "-----BEGIN OPENSSH PRIVATE KEY-----", "Authorization: Bearer " + "f6" * 12,
]  # fmt: skip
ORDINARY = {
    "TOKENIZERS_PARALLELISM": "false", "NCCL_IB_PKEY": "0x7fff", "KEYSTONE": "1", "MONKEY": "x", "BYPASS": "all", "MAX_TOKENS": "4096", "SORT_KEY": "2",
    "HF_TOKEN_PATH": "token", "GOOGLE_APPLICATION_CREDENTIALS": "/etc/gcp/key.json", "PWD": "/home/a", "USE_AUTH": "true", "SECRET_NAME": "mlflow",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "XLA_FLAGS": "--a=b", "COMMIT": "3f786850e387550fdab836ed7e6dc881de23001b", "EMPTY_TOKEN": "",
}  # fmt: skip


@pytest.mark.parametrize("where", ["env", "labels", "annotations"])
@pytest.mark.parametrize("name", NAMED)
def test_a_name_that_says_secret_is_enough_where_people_choose_names(name: str, where: str) -> None:
    assert list(secrets_in({where: {name: NAMED[name]}})) == [(f"{where}.{name}", "a secret")]


@pytest.mark.parametrize("value", KNOWN)
def test_a_value_of_a_known_sort_is_found_under_any_name_and_anywhere(value: str) -> None:
    for settings in (
        {"env": {"X": value}},
        {"comment": value},
        {"extra": ["--a", f"--b={value}"]},
        {"patch": {"Pod": {"spec": [{"x": value}]}}},
    ):
        assert len(list(secrets_in(settings))) == 1


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"setup": ["module load cuda", "export OPENAI_KEY=abcdefg"]}, "setup.1"),
        ({"extra": ["--export=HF_TOKEN=abc,ALL"]}, "extra.0"),
        ({"args": ["--password", "hunter22"]}, "args.1"),
        ({"args": ["--api-key=abcd"]}, "args.0"),
        ({"command": ["sh", "-c", "curl 'https://host/x?token=abc'"]}, "command.2"),
        ({"annotations": {"config": '{"token":"abc"}'}}, "annotations.config"),
        ({"containers": [{"name": "node", "env": [{"name": "PGPASS", "value": "hunter22"}]}]}, "containers.0.env.0.PGPASS"),
        ({"ConfigMap": {"data": {"api-key": "abcd"}}}, "ConfigMap.data.api-key"),
    ],
)
def test_commands_lists_and_patches_are_searched(settings: dict[str, Any], key: str) -> None:
    assert list(secrets_in(settings)) == [(key, "a secret")]


@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_variables_are_not_taken_for_secrets(name: str) -> None:
    assert list(secrets_in({"env": {name: ORDINARY[name]}})) == []


@pytest.mark.parametrize(
    "settings",
    [
        {"secrets": {"MLFLOW_TOKEN": "mlflow/token"}},
        {"tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}]},
        {"affinity": {"podAffinity": {"required": [{"topologyKey": "kubernetes.io/hostname"}]}}},
        {"setup": ["export HF_TOKEN=$(cat ~/.token)", "export KEY=$OTHER"]},
        {"container": {"image": "registry/token:1"}},
        {"Pod": {"spec": {"volumes": [{"name": "s", "secret": {"secretName": "mlflow"}}]}}},
        {"env": [{"name": "A_TOKEN", "valueFrom": {"secretKeyRef": {"name": "mlflow", "key": "token"}}}]},
    ],
)
def test_references_and_the_words_of_a_schema_are_let_through(settings: dict[str, Any]) -> None:
    assert list(secrets_in(settings)) == []


def test_the_refusal_names_the_key_and_the_remedy_and_does_not_repeat_the_value() -> None:
    with pytest.raises(ConfigError) as refused:
        refuse_secrets(SlurmCluster(env={"OPENAI_KEY": "hunter2"}))
    assert str(refused.value).startswith("cluster.env.OPENAI_KEY looks like a secret") and "cluster.env_inherit=[OPENAI_KEY]" in str(
        refused.value
    )
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    ("address", "verb"),
    [
        ("http://me:hunter2@host:5000", ["train"]),
        ("postgresql://me:hunter2@host/mlflow", ["train", "-m", "run.seed=1,2"]),
        ("https://host/?token=hunter2", ["search", "data=synthetic"]),
        ("http://me:hunter2@host:5000", ["plan"]),
    ],
)
def test_a_password_in_the_address_of_mlflow_is_refused_before_anything_is_written(
    address: str, verb: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*verb, "model=gpt_tiny", f"tracking.uri='{address}'"]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("error: tracking.uri ") and "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD" in said.err
    assert "hunter2" not in said.out + said.err and list(tmp_path.iterdir()) == []


def test_a_password_in_one_address_of_a_sweep_is_kept_in_no_record_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A combination that is wrong is otherwise recorded with the words that asked for it."""
    monkeypatch.chdir(tmp_path)
    assert main(["train", "-m", "model=gpt_tiny", "data=synthetic", "tracking.uri=null,'http://me:hunter2@host'"]) == 2
    assert "tracking.uri contains a user name or password" in capsys.readouterr().err and list(tmp_path.iterdir()) == []
