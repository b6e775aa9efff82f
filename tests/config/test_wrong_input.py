"""Wrong input gets one plain error that names the key, the value, what is allowed and what to do; nothing is started."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.cli.main import main
from launcher.config import compose, resolve
from launcher.config.rules import locate_data
from trainer.shared.run.errors import ConfigError

pytestmark = pytest.mark.slow

SLICED = ["layout.schedule=sliced_1f1b", "layout.slices=2"]
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
    (["model.transfer.kind=mup"], "say with model.transfer.hidden which model.hidden they were found with (of the base itself: 128)"),
    (["layout.tensr=2"], "unknown key 'layout.tensr'; did you mean 'layout.tensor'?"),
    (["+layout.tensr=2"], "unknown key 'layout.tensr'; did you mean 'layout.tensor'?"),
    (["layout={tensr: 2}"], "unknown key 'layout.tensr'; did you mean 'layout.tensor'?"),
    (["~layout.tensor"], "~layout.tensor deletes a setting"),
    (["layout.tensor=abc"], "layout.tensor='abc' is not a whole number; give a whole number"),
    (["layout.tensor=1.5"], "layout.tensor=1.5 is not a whole number"),
    (["layout.tensor=true"], "layout.tensor=True is not a whole number"),
    (["layout.tensor=0"], "layout.tensor=0 is below the smallest allowed value; use 1 or more"),
    (["optimizer.lr=nan"], "optimizer.lr=nan is not a finite number"),
    (["optimizer.lr=1" + "0" * 400], "optimizer.lr is too large a number; give one below 1e308"),
    (["model=gpt_tinny"], "model=gpt_tinny does not exist; did you mean 'gpt_tiny'?"),
    (
        ["cluster.name_prefix=Llm"],
        "cluster.name_prefix='Llm' cannot begin the name of a job; use up to 20 of a-z, 0-9 and '-', a letter first",
    ),
    (["cluster.name_prefix=a123456789-123456789b"], "cluster.name_prefix='a123456789-123456789b' cannot begin the name of a job"),
    (["cluster=lokal"], "cluster=lokal does not exist; did you mean 'local'?"),
    (
        ["layout.schedule=1f2b"],
        "layout.schedule='1f2b' is not one of gpipe, 1f1b, interleaved, zero_bubble or sliced_1f1b; did you mean '1f1b'?",
    ),
    (["layout.schedule=interleaved"], "interleaving needs both layout.schedule=interleaved and layout.virtual_pipeline of 2 or more"),
    (["layout.tensor=4", "layout.pipeline=2"], "layout.tensor=4 x layout.pipeline=2 x layout.data=1 needs 8 ranks, but the cluster has 4"),
    (["layout.data=8"], "needs 8 ranks, but the cluster has 4; lower one of them, or raise cluster.nodes or cluster.gpus_per_node"),
    (["layout.sharding.params=2"], "layout.sharding.params=2 does not divide layout.sharding.grads=1"),
    (["layout.sharding.optimizer=3"], "layout.sharding.optimizer=3 does not divide layout.data=4"),
    (["layout.sequence_parallel=true", "layout.tensor=4", "model.seq=126"], "shards model.seq=126 over layout.tensor=4"),
    (["model.heads=5"], "model.heads=5 does not divide model.hidden=128"),
    (["model.kv_heads=3"], "model.kv_heads=3 does not divide model.heads=4; use 1, 2 or 4"),
    (["layout.context=2", "run.task=generate"], "layout.context=2: context ranks share sequences of training, and texts are generated"),
    (["run.phases=[{global_batch: 4}]"], "run.phases[0].until is missing; give the tokens of the run with which the phase ends"),
    (["run.phases=[{until: 5000}, {until: 4096}]"], "run.phases[1].until=4096 leaves it no step: the phase before ends with 5120 tokens"),
    (["run.phases=[{until: 1, seq: 48}]"], "run.phases[0].seq=48 does not divide model.seq=128; use 2, 4, 8, 16, 32, 64 or 128"),
    (["run.phases=[{until: 1, seq: 256}]"], "run.phases[0].seq=256 is longer than model.seq=128, the length at the end; use"),
    (
        ["run.phases=[{until: 1, seq: 32, global_batch: 6}]"],
        "run.phases[0].global_batch=6 of run.phases[0].seq=32 tokens are not whole sequences of model.seq=128, of which they are pieces; "
        "use a multiple of 4, such as 8",
    ),
    (
        ["run.phases=[{until: 1, global_batch: 6}]"],
        "run.phases[0], of run.global_batch=6 and model.seq=128: run.global_batch=6 is not divisible by layout.micro_batch=1 x layout.data=4",
    ),
    (["run.phases=[{until: 1, sequence: 6}]"], "unknown key run.phases[0].sequence"),
    (["run.phases=[{until: 1, seq: 64}]", "data.kind=instructions"], "run.phases[0].seq=64 would cut examples of data.kind=instructions"),
    (["run.phases=[{until: 1, seq: 64}]", "tune.method=prompt"], "run.phases[0].seq=64 would cut virtual tokens of tune.method=prompt"),
    (["layout.slices=2"], "slices need both layout.schedule=sliced_1f1b and layout.slices of 2 or more"),
    (["layout.schedule=sliced_1f1b"], "slices need both layout.schedule=sliced_1f1b and layout.slices of 2 or more"),
    ([*SLICED, "layout.slices=129"], "layout.slices=129 is more than model.seq=128 has positions to cut; use 128 or fewer"),
    (
        [*SLICED, "layout.slice_lengths=[100,27]"],
        "layout.slice_lengths=[100, 27] must hold layout.slices=2 lengths of 1 or more that add up to model.seq=128; change them, or leave",
    ),
    ([*SLICED, "layout.slice_lengths=[128,0]"], "must hold layout.slices=2 lengths of 1 or more"),
    (
        [*SLICED, "layout.tensor=2", "layout.sequence_parallel=true", "layout.slice_lengths=[127,1]"],
        "each a multiple of layout.tensor=2, which sequence_parallel shards it over",
    ),
    ([*SLICED, "layout.context=2"], "layout.slices=2 keeps keys on one rank, and layout.context=2 ranks share them; use one or the other"),
    ([*SLICED, "run.task=generate"], "layout.slices=2 cuts sequences of training, and texts are generated token by token"),
    ([*SLICED, "run.compile=true"], "run.compile=true compiles blocks for one length of sequences, and layout.slices=2 has several"),
    (
        [*SLICED, "model=moe_tiny", "model.experts.balance_loss=0.1"],
        "layout.slices=2 with model.experts.balance_loss=0.1, which is a loss of whole sequences; use layout.slices=1, or balance_loss=0",
    ),
    (["layout.context=3"], "layout.context=3 cuts model.seq=128 in two pieces for each rank, one near its start and one near its end"),
    (
        ["model=llama_tiny", "layout.context=4", "run.context_exchange=all_to_all"],
        "run.context_exchange=all_to_all deals out the 2 key and value heads of a tensor rank to layout.context=4 ranks, which do not",
    ),
    (
        ["layout.context=2", "layout.data=3", "layout.sharding.optimizer=3", "layout.order=tensor-pipeline-data"],
        "layout.sharding.optimizer=3 neither divides layout.context=2 nor is a multiple of it, which layout.order=tensor-pipeline-data",
    ),
    (["run.warmup_steps=10"], "run.warmup_steps=10 leaves no step of run.steps=10 to measure; use 9 or less, or more steps"),
    (["run.steps=1"], "leaves no step of run.steps=1 to measure; use 0, or more steps"),
    (
        ["run.eval_every=5"],
        "run.eval_every=5 has no text to validate on: data.kind=synthetic, data.held_out=0; set data.held_out, such as 0.02",
    ),
    (["run.checkpoint.at=5"], "run.checkpoint.at=5 names a checkpoint of run.checkpoint.dir; give that, and resume=true"),
    (
        ["run.checkpoint.at=5", "run.checkpoint.dir=x", "run.checkpoint.every=5"],
        "run.checkpoint.at=5 continues from there in every attempt, and run.checkpoint.every=5 would save what none continues",
    ),
    (["run.checkpoint.at=5", "run.checkpoint.dir=x", "run.steps=5"], "run.checkpoint.at=5 leaves no step of run.steps=5; raise run.steps"),
    (["tracking.uri='http://me:secret@host:5000'"], "tracking.uri contains a user name or password"),
    (["layout.tensor='"], 'cannot read "layout.tensor=\'" as KEY=VALUE'),
    (["run.seed=${oc.env:NO_SUCH_VARIABLE}"], "NO_SUCH_VARIABLE"),
    (["sweep.name='a\0b'"], "NUL"),
    (["cluster.hardware.peak_tflops={bf17: 3}"], "unknown key cluster.hardware.peak_tflops.bf17; did you mean 'bf16'?"),
    (["layout.tensor"], "cannot read 'layout.tensor' as KEY=VALUE"),
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
    (
        ["hardware=a100_80", "run.precision=fp8"],
        "run.precision=fp8 on A100-80GB-SXM, which has no peak_tflops.fp8: it does not multiply numbers of 8 bits; use run.precision=bf16",
    ),
    (["tune.method=lora", "tune.targets=[qkv,up,qkv]"], "tune.targets=['qkv', 'up', 'qkv'] names qkv twice; name each matrix once"),
    (["model=t5_tiny", "model.encoder_layers=6"], "model.encoder_layers=6 of model.layers=6 leaves a stack without a block; use 1 to 5"),
    (["model=t5_tiny", "model.window=8"], "model.window=8 is for families without an encoder, and model.family=t5 has one; leave it out"),
    (["model=t5_tiny", "model.rope.factor=2"], "model.rope.factor=2.0 is for families without an encoder"),
    (
        ["model=t5_tiny", "model.positions=rotary"],
        "model.positions=rotary is for families without an encoder; use relative, learned or none",
    ),
    (["model=t5_tiny", "model.kv_heads=2"], "model.kv_heads=2: model.family=t5 has a key and a value for each head; leave it out"),
    (["model=t5_tiny", "model.relative_distance=16"], "model.relative_distance=16 is not beyond the 16 exact distances"),
    (["model.decoder_seq=8"], "model.decoder_seq=8 is for a family with an encoder, and model.family=gpt has none; leave it out"),
    (["model.encoder_layers=2"], "model.encoder_layers=2 is for a family with an encoder"),
    (["model.positions=relative"], "model.positions=relative is for model.family=t5, not gpt; use learned, rotary, alibi or none"),
    (["model=t5_tiny", "layout.context=2"], "layout.context=2 is not offered for model.family=t5, which has an encoder; leave it out"),
    (["model=t5_tiny", "run.compile=true"], "run.compile=true is not offered for model.family=t5"),
    (
        ["model=t5_tiny", "layout.tensor=2", "layout.sequence_parallel=true"],
        "layout.sequence_parallel shards model.decoder_seq=29 over layout.tensor=2, which does not divide it; set model.decoder_seq=30",
    ),
    (
        ["model=llama_tiny", "model.latent.kv_rank=16", "model.latent.rotary=8", "model.kv_heads=2"],
        "model.kv_heads=2 does not go with model.latent.kv_rank=16: keys and values of all heads are made from one latent",
    ),
    (
        ["model=llama_tiny", "model.latent.kv_rank=16", "model.latent.rotary=8", "model.kv_heads=4", "tune.method=lora", "tune.rank=4"],
        "adds to the one matrix of queries, keys and values, and model.latent.kv_rank=16 has several; use tune.targets=[output] with lora",
    ),
    (
        ["model=llama_tiny", "model.latent.kv_rank=16", "model.latent.rotary=0"],
        "model.latent.rotary=0 leaves no number for model.positions=rotary",
    ),
    (
        ["model=llama_tiny", "model.latent.kv_rank=16", "model.latent.rotary=7"],
        "model.latent.rotary=7 x model.rope.share=1 is 7 dimensions, which turn in pairs",
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


def volume(keys: str) -> str:
    return f"++cluster.volumes=[{{mount: /v, claim: a}}, {{{keys}}}]"


RUN_DIR = "is not inside a mounted volume; name one in cluster.volumes, or set cluster.run_dir=null"
BELOW = "is not a path below the volume; give a relative one without '..'"
SERVER = "is not SERVER:/PATH; give both, as in filer:/data or [fe80::1]:/data"
QUANTITY = "is not a quantity; give a number, 0 or more, with one of Kubernetes' suffixes or none: Ki, Mi, Gi, Ti (powers of 1024), k, M, G, T (of 1000)"
WORD = "give up to 63 letters, digits, '-', '_' and '.', a letter or digit at both ends"
PODS = [
    (volume("mount: /v/, claim: b"), "mount='/v/' is taken by another volume; mount the volume somewhere else"),
    (volume("mount: /trireme, claim: b"), "mount='/trireme' is taken by the run and its programs; mount the volume somewhere else"),
    (volume("mount: /trireme-code, claim: b"), "mount='/trireme-code' is taken by the code of the ranks"),
    (volume("mount: /trials, claim: b"), "mount='/trials' is taken by the output of the ranks"),
    (volume("mount: /x/../tmp, claim: b"), "mount='/x/../tmp' is taken by the folder of temporary files (cluster.container.writable=true has none"),
    (volume("mount: /dev/shm, claim: b"), "mount='/dev/shm' is taken by shared memory (cluster.shared_memory=null leaves it out)"),
    ("++cluster.container.mounts=['/a:/dev/shm']", "mount='/dev/shm' is taken by shared memory"),
    (volume("mount: '/a:b', claim: b"), "mount='/a:b' has a ':', which no mount may have; choose another path"),
    (volume("mount: /, claim: b"), "mount='/' would hide the image; choose a folder"),
    (volume("mount: /b, claim: b, sub_path: /c"), f"sub_path='/c' {BELOW}"),
    (volume("mount: /b, claim: b, sub_path: c/../../d"), f"sub_path='c/../../d' {BELOW}"),
    (volume("mount: /b, claim: ''"), "claim='' is not the name of an object; give small letters, digits, '-' and '.'"),
    (volume("mount: /b, secret: A_b"), "secret='A_b' is not the name of an object"),
    (volume("mount: /b, host_path: a"), "host_path='a' is not an absolute path without '..'; give one"),
    (volume("mount: /b, nfs: ':/p'"), f"nfs=':/p' {SERVER}"),
    (volume("mount: /b, nfs: '[fe80:/p'"), f"nfs='[fe80:/p' {SERVER}"),
    ("++cluster.run_dir=/v/../runs", f"cluster.run_dir=/v/../runs {RUN_DIR}"),
    ("++cluster.env={1A: x}", "cluster.env: '1A' is not the name of a variable; give letters, digits, '_', '-' and '.', no digit or '..' at"),
    ("++cluster.env={A/B: x}", "cluster.env: 'A/B' is not the name of a variable"),
    ("++cluster.secrets={..A: s/k}", "cluster.secrets: '..A' is not the name of a variable"),
    ("++cluster.secrets={WORLD_SIZE: s/k}", "cluster.secrets.WORLD_SIZE is set by the launcher in pods; rename it"),
    ("cluster.cpu=-1", f"cluster.cpu='-1' {QUANTITY}"),
    ("cluster.cpu=two", f"cluster.cpu='two' {QUANTITY}"),
    ("cluster.memory=4GB", f"cluster.memory='4GB' {QUANTITY}"),
    ("cluster.shared_memory=8GiB", f"cluster.shared_memory='8GiB' {QUANTITY}"),
    ("cluster.namespace=My_Team", "cluster.namespace='My_Team' is not the name of a namespace; give up to 63 small letters, digits and '-'"),
    (f"cluster.namespace={'a' * 64}", "is not the name of a namespace"),
    ("cluster.queue=Team", "cluster.queue='Team' is not the name of an object; give up to 63 small letters, digits, '-' and '.'"),
    ("cluster.pull_secrets=[a_b]", "cluster.pull_secrets='a_b' is not the name of an object"),
    ("++cluster.labels={team: 'a b'}", f"cluster.labels.team='a b' is not the value of a label; {WORD}, or nothing"),
    ("++cluster.labels={a/b/c: d}", f"cluster.labels: 'a/b/c' is not the name of a label or annotation; {WORD}; with or without DOMAIN/"),
    ("++cluster.node_selector={gpu: '-h100'}", "cluster.node_selector.gpu='-h100' is not the value of a label"),
    ("cluster.gpu_resource=gpu", "cluster.gpu_resource='gpu' is not a resource of a device plugin; give VENDOR/NAME, such as nvidia.com/gpu, or null"),
    ("cluster.container.image='my image'", "cluster.container.image='my image' is not the name of an image; give one without spaces"),
    ("cluster.container.image=''", "cluster.container.image='' is not the name of an image; give one without spaces, such as REGISTRY/trireme:1"),
    ("cluster.container.workdir=work", "cluster.container.workdir='work' is not an absolute path; give one that begins with '/'"),
    ("++cluster.tolerations=[{key: a, operator: Exist}]", "cluster.tolerations.0.operator='Exist' is not one of Exists, Equal, Lt or Gt; did you"),
    ("++cluster.tolerations=[{key: a, effect: No}]", "cluster.tolerations.0.effect='No' is not one of NoSchedule, PreferNoSchedule or NoExecute"),
    ("++cluster.tolerations=[{operator: Equal}]", "cluster.tolerations.0 has no key, which only operator=Exists can do without; give one"),
    ("++cluster.tolerations=[{key: a, operator: Exists, value: b}]", "cluster.tolerations.0.value='b' is compared with nothing by operator=Exists"),
    ("++cluster.tolerations=[{key: a, tolerationSeconds: 3}]", "cluster.tolerations.0.tolerationSeconds is for effect=NoExecute alone"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("override", "message"),
    [pytest.param(*case, id=case[0], marks=[pytest.mark.campaign("words")] * bool(i % 3)) for i, case in enumerate(PODS)],
)
def test_what_an_api_server_would_refuse_is_said_before_it_is_asked(override: str, message: str) -> None:
    refused_in_pods(message, override)


def test_a_variable_of_pods_has_one_value() -> None:
    refused_in_pods(
        "cluster.secrets.A and cluster.env.A are one variable; leave one of them out", "++cluster.env={A: x}", "++cluster.secrets={A: s/k}"
    )


@pytest.mark.parametrize("keys", ["claim: b, read_only: true", "config_map: b", "secret: b"])
def test_pods_write_to_no_volume_that_is_read_only(keys: str) -> None:
    words = "cluster.run_dir=/v/r/x is on the volume at /v/r, which pods cannot write to; take "
    refused_in_pods(words, volume(f"mount: /v/r, {keys}"), "cluster.run_dir=/v/r/x")
    locate_data(resolve(compose([*IN_PODS, volume(f"mount: /v/r, {keys}"), "cluster.run_dir=/v/rx"])))


def test_what_an_api_server_takes_is_not_refused() -> None:
    mounts = "{mount: /b, nfs: '[fe80::1]:/p'}, {mount: /c, nfs: 'filer:/a:/b'}, {mount: /d, claim: a.b-c, sub_path: a/..b}"
    given = ["cluster.cpu=500m", "cluster.memory=1e3", "cluster.shared_memory=.5Gi", "++cluster.env={a.b-C_1: x}", f"++cluster.volumes=[{mounts}]",
             "++cluster.labels={example.org/team: ''}", "cluster.rdma_resource=rdma/hca_shared_devices_a",
             "++cluster.tolerations=[{operator: Exists}, {key: a, effect: NoExecute, tolerationSeconds: 3}]"]  # fmt: skip
    locate_data(resolve(compose([*IN_PODS, *given])))


IN_PODS = ["data=synthetic", "cluster=kubernetes", "cluster.container.image=i"]


def refused_in_pods(message: str, *overrides: str) -> None:
    with pytest.raises(ConfigError) as caught:
        locate_data(resolve(compose([*IN_PODS, *overrides])))
    text = str(caught.value)
    assert message in text
    assert len(text) < 400 and "\n" not in text


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., list[str]]:
    """Runs ``trireme train`` in an empty folder, which ends with 2 and leaves nothing there; its lines on standard error."""
    monkeypatch.chdir(tmp_path)

    def train(*arguments: str) -> list[str]:
        assert main(["train", "data=synthetic", *arguments]) == 2
        said = capsys.readouterr()
        assert said.out == "" and "Traceback" not in said.err and list(tmp_path.iterdir()) == []
        return said.err.splitlines()

    return train


@pytest.mark.parametrize(
    "arguments", [["layout.tensor=3", "layout.data=1"], ["layout.tensr=2"], ["model=nope"], ["cluster.nodes=2"]], ids=" ".join
)
def test_a_run_that_is_refused_ends_with_one_plain_line_and_leaves_nothing(refused: Callable[..., list[str]], arguments: list[str]) -> None:
    *before, last = refused(*arguments)
    assert last.startswith("error: ") and not any(line.startswith(("error", "sweep")) for line in before)


def test_a_refused_command_is_a_process_that_exits_with_2_and_starts_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "launcher", "train", "-m", "data=synthetic", "layout.tensor=3,5", "layout.data=1"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=600)
    assert done.returncode == 2, done.stderr
    *before, last = done.stderr.strip().splitlines()
    assert last.startswith("error: ") and "Traceback" not in done.stderr
    assert not any(line.startswith(("error", "sweep")) for line in before)
    assert not list(tmp_path.glob("runs/trials/*/logs"))  # where a trial that was started would write


@pytest.mark.parametrize("name", ["x" * 300, f"not/yet/{'x' * 300}/runs"], ids=["last", "between"])
@pytest.mark.parametrize("flags", [[], ["-m"]], ids=["run", "sweep"])
def test_a_folder_that_no_file_system_can_make_is_named_by_its_key(refused: Callable[..., list[str]], name: str, flags: list[str]) -> None:
    said = refused(*flags, f"sweep.dir={name}", "cluster.gpus_per_node=1")
    assert said == [f"error: sweep.dir={name} cannot be written: File name too long; name another place"]


@pytest.mark.parametrize(
    ("wrong", "error"),
    [("sweep.name='a b'", "sweep.name='a b' cannot name a sweep"), ("sweep.follow=false", "sweep.follow=false requires")],
)
@pytest.mark.parametrize("flags", [[], ["-m"]], ids=["run", "sweep"])
def test_a_sweep_that_is_refused_leaves_no_folder_and_starts_no_copier(
    refused: Callable[..., list[str]], wrong: str, error: str, flags: list[str]
) -> None:
    said = [line for line in refused(*flags, wrong, "cluster.gpus_per_node=1") if "MLflow" in line or line.startswith("error")]
    assert len(said) == 1 and said[0].startswith(f"error: {error}"), said


def test_unknown_verb_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian"]) == 2
    assert "unknown verb 'trian'; did you mean 'train'?" in capsys.readouterr().err
