"""Wrong input gets one plain error that names the key, the value, what is allowed and what to do; nothing is started."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from launcher.cli.main import main
from launcher.config import compose, resolve
from trainer.spec import ConfigError

CASES = [
    (["layout.tensor=3"], "layout.tensor=3 does not divide model.heads=4; use 1, 2 or 4"),
    (["layout.tensor=2", "cluster.gpus_per_node=5"], "layout.tensor=2 x layout.pipeline=1 = 2 ranks do not divide the cluster's 5"),
    (["layout.tensor=3", "layout.data=1"], "layout.tensor=3 does not divide model.heads=4; use 1, 2 or 4"),
    (
        ["layout.pipeline=3", "layout.data=1"],
        "layout.pipeline=3 x layout.virtual_pipeline=1 = 3 stages do not divide model.layers=4; use 1, 2 or 4 stages",
    ),
    (["layout.pipeline=8", "cluster.gpus_per_node=8"], "8 stages for model.layers=4; use at most 4 stages"),
    (["run.global_batch=6"], "run.global_batch=6 is not divisible by layout.micro_batch=1 x layout.data=4 = 4; use a multiple of 4"),
    (["layout.tensr=2"], "unknown key 'layout.tensr'; did you mean 'layout.tensor'?"),
    (["+layout.tensr=2"], "unknown key 'layout.tensr'; did you mean 'layout.tensor'?"),
    (["layout={tensr: 2}"], "unknown key 'layout.tensr'; did you mean 'layout.tensor'?"),
    (["~layout.tensor"], "~layout.tensor deletes a setting"),
    (["layout.tensor=abc"], "layout.tensor='abc' is not a whole number; give a whole number"),
    (["layout.tensor=1.5"], "layout.tensor=1.5 is not a whole number"),
    (["layout.tensor=true"], "layout.tensor=True is not a whole number"),
    (["layout.tensor=0"], "layout.tensor=0 is below the smallest allowed value; use 1 or more"),
    (["optimizer.lr=nan"], "optimizer.lr=nan is not a finite number"),
    (["model=gpt_tinny"], "model=gpt_tinny does not exist; did you mean 'gpt_tiny'?"),
    (["cluster=lokal"], "cluster=lokal does not exist; did you mean 'local'?"),
    (["layout.schedule=1f2b"], "layout.schedule='1f2b' is not one of gpipe, 1f1b, interleaved or zero_bubble; did you mean '1f1b'?"),
    (["layout.schedule=interleaved"], "interleaving needs both layout.schedule=interleaved and layout.virtual_pipeline of 2 or more"),
    (["layout.tensor=4", "layout.pipeline=2"], "layout.tensor=4 x layout.pipeline=2 x layout.data=1 needs 8 ranks, but the cluster has 4"),
    (["layout.data=8"], "needs 8 ranks, but the cluster has 4; lower one of them, or raise cluster.nodes or cluster.gpus_per_node"),
    (["layout.sharding.params=2"], "layout.sharding.params=2 does not divide layout.sharding.grads=1"),
    (["layout.sharding.optimizer=3"], "layout.sharding.optimizer=3 does not divide layout.data=4"),
    (["layout.sequence_parallel=true", "layout.tensor=4", "model.seq=126"], "shards model.seq=126 over layout.tensor=4"),
    (["model.heads=5"], "model.heads=5 does not divide model.hidden=128"),
    (["model.kv_heads=3"], "model.kv_heads=3 does not divide model.heads=4; use 1, 2 or 4"),
    (["layout.context=2"], "layout.context=2 can be planned but not trained yet; use 1"),
    (["run.warmup_steps=10"], "run.warmup_steps=10 leaves no step of run.steps=10 to measure; use 9 or less, or more steps"),
    (["run.steps=1"], "leaves no step of run.steps=1 to measure; use 0, or more steps"),
    (
        ["run.eval_every=5"],
        "run.eval_every=5 has no text to validate on: data.kind=synthetic, data.held_out=0; set data.held_out, such as 0.02",
    ),
    (["tracking.uri='http://me:secret@host:5000'"], "tracking.uri contains a user name or password"),
    (["layout.tensor='"], 'cannot read "layout.tensor=\'" as KEY=VALUE'),
    (["run.seed=${oc.env:NO_SUCH_VARIABLE}"], "NO_SUCH_VARIABLE"),
    (["sweep.name='a\0b'"], "NUL"),
    (["search.doubt=2"], "search.doubt=2.0 is above the largest allowed value; use 1 or less"),
    (["tune.base=base", "tune.rank=8"], "tune.rank is of a method that adds weights, and none is named: tune.method=full would train all"),
    (["trainer=torchtitan", "tune.method=lora"], "trainer=torchtitan cannot be told tune.method=lora, only full; give another value"),
    (["trainer=torchtitan", "tune.base=base"], "trainer=torchtitan cannot be told tune.base=base, only null; give another value"),
    (
        ["trainer=torchtitan", "run.precision=fp8"],
        "trainer=torchtitan cannot be told run.precision=fp8, only bf16 or fp32; give another value",
    ),
    (
        ["trainer=torchtitan", "layout.pipeline=2", "layout.stage_layers=[3,1]"],
        "trainer=torchtitan cannot be told layout.stage_layers=[3, 1]; use another layout, or add it to its profile",
    ),
    (["model.from=no/such"], "model.from=no/such: cannot read no/such/config.json"),
]


@pytest.mark.parametrize(("overrides", "message"), CASES, ids=[" ".join(c[0]).replace("\0", "NUL") for c in CASES])
def test_wrong_input_is_one_plain_error(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(compose(["data=synthetic", *overrides]))
    text = str(caught.value)
    assert message in text
    assert len(text) < 400 and "secret" not in text
    assert text.count("\n") <= 2


@pytest.mark.parametrize(
    "arguments",
    [
        ["layout.tensor=3", "layout.data=1"],
        ["layout.tensr=2"],
        ["-m", "layout.tensor=3,5", "layout.data=1"],
        ["model=nope"],
        ["cluster.nodes=2"],
    ],
)
def test_command_line_exits_2_and_starts_nothing(arguments: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "launcher", "train", f"sweep.dir={tmp_path}/runs", "data=synthetic", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert done.returncode == 2, done.stderr
    *before, last = done.stderr.strip().splitlines()
    assert last.startswith("error: ") and "Traceback" not in done.stderr
    assert not any(line.startswith(("error", "sweep")) for line in before)
    assert not list(tmp_path.glob("runs/trials/*/logs"))  # where a trial that was started would write


def test_unknown_verb_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian"]) == 2
    assert "unknown verb 'trian'; did you mean 'train'?" in capsys.readouterr().err
