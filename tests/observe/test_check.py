"""``trireme trainers check`` says which words of a command the trainer refused, and which key of the profile told them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from launcher.cli.main import main
from launcher.cli.trainers import refused, teller
from launcher.config.trainers import profile
from tests.observe.test_observe import observed
from tests.warm import python

pytestmark = pytest.mark.slow

REFUSALS = {
    # what torchtitan 0.3 (tyro) printed
    "torchtitan": ("--training.stepz=2", "  Unrecognized options: --training.stepz=2                                      "),
    # what OLMo-core 3.0 raised
    "olmo_core": (
        "--trainer.foo=1",
        "olmo_core.exceptions.OLMoConfigurationError: Failed to construct 'trainer' in config: class 'TrainerConfig' has no attribute 'foo'",
    ),
    "megatron_core": ("--no-such", "pretrain_gpt.py: error: unrecognized arguments: --no-such"),
    # transformers/hf_argparser.py (version 5)
    "huggingface": ("--nope=1", "ValueError: Some specified arguments are not used by the HfArgumentParser: ['--nope=1']"),
    "nanotron": ("--config-file", 'dacite.exceptions.UnexpectedDataError: can not match "pq" to any data class field; --config-file'),
    # what Hydra 1.3 and DeepSpeed 0.19 printed
    "megatron_bridge": ("model.pp=2", "Could not override 'model.pp'."),
    "deepspeed": ("--deepspeed_config", "  Extra inputs are not permitted [type=extra_forbidden, input_value=1] --deepspeed_config"),
}


@pytest.mark.parametrize("name", sorted(REFUSALS))
def test_a_refusal_is_a_wrong_configuration_and_names_its_word(name: str, tmp_path: Path) -> None:
    word, line = REFUSALS[name]
    code, result, _ = observed(tmp_path, f"import sys; sys.exit({line!r})", failures=profile(name).launch.failures)
    assert (code, result["reason"]) == (1, "configuration") and line.strip() in result["message"]
    assert refused(["python", "train.py", "--steps=5", word, "8"], result["message"]) == [word]


@pytest.mark.parametrize("line", ["Error: No such option '--micro'.", "Error: Invalid value for '--micro': 'abc' is not a valid integer."])
def test_what_click_refuses_is_named(line: str, tmp_path: Path) -> None:
    _, result, _ = observed(tmp_path, f"import sys; sys.exit({line!r})")
    assert result["reason"] == "configuration" and refused(["x.py", "--micro", "2", "--micros", "2"], result["message"]) == ["--micro"]


def test_an_error_of_training_refuses_nothing() -> None:
    assert refused(["train.py", "--lr=0.1", "--steps=5"], "RuntimeError: the learning rate is out of steps") == []


def test_the_key_that_told_a_word_is_found() -> None:
    launch = profile("torchtitan").launch
    assert teller(launch, "--parallelism.no-enable_sequence_parallel") == "trainer.launch.options.layout.sequence_parallel"
    assert teller(launch, "--training.steps=5") == "trainer.launch.command" and teller(launch, "--module") == "trainer.launch.arguments"


@pytest.mark.parametrize("paths", [["."], pytest.param([], marks=pytest.mark.campaign("launchers"))])
def test_a_folder_may_have_a_trainer_of_its_own(paths: list[str], tmp_path: Path) -> None:
    """And the modules that many folders have; its program finds its own, not ours."""
    for name in ("trainer", "tests", *(["launcher"] if not paths else [])):
        (tmp_path / f"{name}.py").write_text(f"print('the one of {name}.py')")
    (tmp_path / "train.py").write_text("import trainer\nfor i in (1, 2): print(f'it {i} took 100 ms')")
    root = Path(__file__).parents[2]
    words = ["trainer.launch.program=command", "trainer.launch.script=train.py", "trainer.launch.command=['{python}','{script}']",
             r"trainer.launch.log=['it (?P<step>\d+) took (?P<milliseconds>\d+)']", "model=gpt_tiny", "cluster.gpus_per_node=2"]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-P", "-m", "launcher", "trainers", "check", *words], cwd=tmp_path, capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([*paths, str(root)])},
    )  # fmt: skip
    assert "its log was understood: 0.1 s a step" in done.stdout, done.stderr
    assert "Traceback" not in done.stderr and "the one of" not in done.stdout


def test_one_wrong_flag_in_a_profile_of_ones_own_gets_a_helpful_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example = Path(__file__).parents[2] / "examples" / "own_trainer"
    mine = yaml.safe_load((example / "trainer" / "own.yaml").read_text())
    mine["launch"]["options"]["layout.recompute"]["none"] = ["--keep"]
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "mine.yaml").write_text(yaml.safe_dump(mine))
    monkeypatch.chdir(tmp_path)
    run = ["trainer=mine", f"trainer.launch.script={example}/train.py", "model=gpt_tiny", "cluster.gpus_per_node=1", "data=synthetic",
           f"trainer.launch.python={python()}"]  # fmt: skip
    assert main(["trainers", "check", "--config-dir", str(tmp_path), *run]) == 2
    said = capsys.readouterr().err
    assert "unrecognized arguments: --keep" in said
    assert said.splitlines()[-1] == "refused: --keep, told by trainer.launch.options.layout.recompute; correct it there"
