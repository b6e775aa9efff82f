"""The trainers that ship are told what they understand and read as they write: lines of real logs, with their sources."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest
import yaml

from launcher.cli.main import main
from launcher.config import Config, check_launchable, compose, resolve
from launcher.config.command import command_of, inexpressible, untold
from launcher.config.rules import run_of
from launcher.config.trainers import profile, profile_names
from launcher.cost.inputs.layouts import to_layout
from launcher.planning.expressible import expressible
from launcher.planning.space import space
from trainer.shared.records.log_reader import LogReader, plain
from trainer.shared.run.derived import world_size_of
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.rules import resolve as resolve_run
from trainer.shared.run.schema import PRECISIONS, LayoutConfig, ShardingConfig, TuneConfig

pytestmark = pytest.mark.slow

OLDER = {"torchtitan_2026": "torchtitan"}
"""Profiles of the same program, known by another year."""
LAUNCHABLE = sorted(name for name in profile_names() if profile(name).foreign)

LOGS = {
    # epfLLM/Megatron-LLM issue 11; the memory line as report_memory of Megatron-LM writes it
    "megatron_core": [
        " [2024-01-01 10:00:00] iteration      122/  250000 | consumed samples:       124928 | elapsed time per iteration (ms): {ms:.1f} | learning rate: 9.150E-06 | "
        "global batch size:  1024 | lm loss: 2.504220E+00 | loss scale: 1.0 | grad norm: 0.231 | number of skipped iterations:   0 | number of nan iterations:   0 |",
        "[Rank 7] (after 122 iterations) memory (MB) | allocated: 900.5 | max allocated: 1234.5 | reserved: 1500.0 | max reserved: 1500.0",
    ],
    # bridge/training/utils/train_utils.py (version 0.3)
    "megatron_bridge": [
        "Step Time : 0.25s GPU utilization: 700.1MODEL_TFLOP/s/GPU",
        " [2026-01-01 10:00:00] iteration       12/     100 | consumed samples:         1536 | elapsed time per iteration (ms): {ms:.1f} | learning rate: 9.150000E-06 | "
        "global batch size:   128 | lm loss: 2.504220E+00 | loss scale: 1.0 | grad norm: 0.231 | number of skipped iterations:   0 | number of nan iterations:   0 |",
    ],
    # pytorch/torchtitan pull request 2389, in its colours
    "torchtitan": [
        "[titan] 2026-02-24 19:46:17,508 - root - INFO - \x1b[31mstep:  4  \x1b[32mloss:  7.62585  \x1b[38;2;180;60;0mgrad_norm: 26.6250  \x1b[36mmemory: 66.91GiB(37.51%)  "
        "\x1b[34mtps: {tps_rank:,.0f}  \x1b[36mtflops: 314.71  \x1b[35mmfu: 13.99%\x1b[39m"
    ],
    # deepspeedai/DeepSpeed issue 2629
    "deepspeed": [
        "[2022-12-20 08:26:26,101] [INFO] [logging.py:69:log_dist] [Rank 0] step=17, skipped=0, lr=[5e-05], mom=[[0.9, 0.999]]",
        "[2022-12-20 08:26:26,101] [INFO] [timer.py:197:stop] 0/17, RunningAvgSamplesPerSec=158.31157878546472, CurrSamplesPerSec={samples:.4f}, MemAllocated=1.75GB, MaxMemAllocated=2.6GB",
    ],
    # huggingface/nanotron pull request 23
    "nanotron": [
        "01/17/2024 14:02:16 [INFO|DP=0|PP=0|TP=0|ip-26-0-160-225]: iteration: 991 / 1000 | consumed_tokens: 634K | elapsed_time_per_iteration_ms: {ms:.0f} | "
        "tokens_per_sec: 2.35K | tokens_per_sec_per_gpu: 294 | global_batch_size: 20 | lm_loss: 9.63 | lr: 1e-05 | grad_norm: 1.11 | cuda_memory_allocated: 90.9M | cuda_max_memory_reserved: 570M"
    ],
    # olmo_core/train/callbacks/console_logger.py (version 3.0)
    "olmo_core": [
        "2026-05-01 10:00:00.000\thost:0\tolmo_core.train.callbacks.console_logger:107\tINFO\t[step=12/100,epoch=1,eta=2m]",
        "    train/CE loss=8.123",
        "    optim/total grad norm=1.250",
        "    throughput/device/TPS={tps_rank:,.1f}",
        "    gpu_memory/GPU reserved mem (GiB)=10.5",
    ],
    # transformers/trainer_callback.py, PrinterCallback (version 5)
    "huggingface": ["{{'loss': '10.5', 'grad_norm': '1.25', 'learning_rate': '5e-05', 'epoch': '0.01'}}"],
}
"""Lines of one step as the trainer prints them; {ms}, {tps_rank} and {samples} are planted."""
TOLD = {
    "megatron_core": (2.50422, 0.231, 1234.5 * 2**20),
    "megatron_bridge": (2.50422, 0.231, None),
    "torchtitan": (7.62585, 26.625, 66.91 * 2**30),
    "deepspeed": (None, None, 2.6 * 2**30),
    "nanotron": (9.63, 1.11, 570e6),
    "olmo_core": (8.123, 1.25, 10.5 * 2**30),
    "huggingface": (10.5, 1.25, None),
}


def of(name: str, *overrides: str) -> Config:
    script = [] if profile(name).launch.script else ["trainer.launch.script=train.py"]
    given = ["recipe=llama_7b" if name == "nanotron" else "recipe=gpt3_5b", f"trainer={name}", *script, *overrides]
    return compose(given)


def test_every_profile_that_can_be_launched_has_a_recorded_log() -> None:
    assert sorted([*LOGS, *OLDER]) == LAUNCHABLE and LOGS.keys() == TOLD.keys()
    for name, program in OLDER.items():
        assert profile(name).launch == profile(program).launch


@pytest.mark.parametrize("name", sorted(LOGS))
def test_a_recorded_log_is_read_into_time_loss_and_memory(name: str) -> None:
    launch, tokens, sequences, ranks, seconds = profile(name).launch, 2048 * 1024, 1024, 64, 0.25
    reader = LogReader(launch.log, tokens, sequences, ranks)
    values = {"ms": 1000 * seconds, "tps_rank": tokens / seconds / ranks, "samples": sequences / seconds}
    reader.take("a line before", 0.0)
    for line in LOGS[name]:
        assert reader.take(plain(line.format(**values)), 10.0) is None
    step = reader.rest()
    loss, norm, memory = TOLD[name]
    assert step is not None and (step["loss"], step["grad_norm"], reader.peak_memory_bytes) == (loss, norm, memory)
    assert step["step_time_s"] == (pytest.approx(seconds, rel=1e-3) if name != "huggingface" else None)


@pytest.mark.parametrize("name", sorted(LOGS))
def test_what_a_trainer_can_be_told_is_the_same_for_one_layout_and_for_a_table(name: str) -> None:
    config = of(name, "cluster.nodes=2")
    whole = space(config.model, config.cluster, config.run.global_batch, config.search.space)
    left = expressible(whole, config.trainer)
    assert 0 < len(left.table) < len(whole.table)
    kept = {tuple(row.tolist()) for row in left.table}
    for row in np.random.default_rng(0).choice(whole.table, 300, replace=False):
        assert (not inexpressible(config.trainer, to_layout(row))) == (tuple(row.tolist()) in kept)


@pytest.mark.parametrize("name", sorted(LOGS))
def test_two_layouts_that_can_be_told_are_told_differently(name: str) -> None:
    """Else the trainer would run one layout under the name of another."""
    config = of(name, "cluster.nodes=1")
    table = expressible(space(config.model, config.cluster, config.run.global_batch, config.search.space), config.trainer).table
    told = {}
    for row in np.random.default_rng(0).choice(table, min(60, len(table)), replace=False):
        try:
            command = command_of(resolve(dataclasses.replace(config, layout=to_layout(row))))
        except ConfigError as error:
            assert "cannot be told" in str(error) or "has nothing for" in str(error)
            continue
        assert command is not None
        told.setdefault(json.dumps([command.words, command.files, command.environment]), set()).add(
            str(row[["tensor", "pipeline", "micro_batch", "recompute", "params"]])
        )
    assert told and all(len(layouts) == 1 for layouts in told.values())


@pytest.mark.parametrize("name", LAUNCHABLE)
def test_two_precisions_that_can_be_told_are_told_differently(name: str) -> None:
    """Else one run would be recorded under several."""
    told, refused = set(), []
    for precision in PRECISIONS:
        config = of(name, f"run.precision={precision}", "layout.recompute=none", "layout.sequence_parallel=false")
        config = dataclasses.replace(config, layout=LayoutConfig())
        try:
            check_launchable(config)
        except ConfigError as error:
            refused.append(precision)
            assert f"cannot be told run.precision={precision}, only " in str(error)
            continue
        command = command_of(resolve(config))
        assert command is not None
        told.add(json.dumps([command.words, command.files]))
    assert len(told) + len(refused) == len(PRECISIONS) and "bf16" not in refused and "fp8" in refused


def test_a_search_in_a_precision_that_cannot_be_told_is_refused_before_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("torchtitan", "torchtitan_2026"):
        assert main(["search", f"trainer={name}", "recipe=llama_7b", "data=synthetic", "run.precision=fp8"]) == 2
        assert "cannot be told run.precision=fp8, only bf16 or fp32;" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_megatron_is_told_the_options_of_its_documentation() -> None:
    config = of(
        "megatron_core",
        "cluster.nodes=2",
        "layout.tensor=4",
        "layout.pipeline=2",
        "layout.virtual_pipeline=3",
        "layout.schedule=interleaved",
        "layout.sequence_parallel=true",
        "layout.recompute=selective",
        "layout.sharding={params: 1, grads: 1, optimizer: 2}",
        "layout.micro_batch=2",
    )
    command = command_of(resolve(config))
    assert command is not None and command.reports == "last"
    for word in (
        "--tensor-model-parallel-size=4",
        "--pipeline-model-parallel-size=2",
        "--sequence-parallel",
        "--recompute-activations",
        "--use-distributed-optimizer",
        f"--num-layers-per-virtual-pipeline-stage={config.model.layers // 6}",
        "--micro-batch-size=2",
        "--bf16",
        "--tokenizer-type=NullTokenizer",
        f"--vocab-size={config.model.vocab - 1}",  # it adds the end of a document: 51200 would become 51201, padded to 51328
    ):
        assert word in command.words
    assert not any("{" in word.replace("{python}", "").replace("{folder}", "") for word in command.words)


def test_deepspeed_is_given_a_file_with_numbers_and_truths() -> None:
    sharding = "layout.sharding={params: 1, grads: 16, optimizer: 16}"
    command = command_of(
        resolve(
            of(
                "deepspeed",
                "cluster.nodes=2",
                "layout.tensor=1",
                "layout.pipeline=1",
                sharding,
                "layout.micro_batch=4",
                "layout.sequence_parallel=false",
                "layout.recompute=none",
            )
        )
    )
    assert command is not None
    settings = json.loads(command.files["ds_config.json"])
    assert (
        settings["zero_optimization"] == {"stage": 2}
        and settings["train_micro_batch_size_per_gpu"] == 4
        and settings["bf16"] == {"enabled": True}
    )


@pytest.mark.parametrize(
    "key, value, words",
    [
        ("command", "[]", "starts nothing"),
        ("log", "['loss .*']", "no named group"),
        ("log", "['(?P<step>x) (?P<time>y)']", "does not say its unit; use seconds, milliseconds"),
        ("log", "['(?P<step>x) (?P<stepp>y)']", "is not known; did you mean 'step'"),
        ("log", "['(?P<step>']", "is not a regular expression"),
        ("log", "['(?P<memory_gb>x)']", "no pattern has a group 'step' or 'loss'"),
        ("failures", "{oom: [x]}", "unknown key trainer.launch.failures.oom"),
        ("command", "['{layout.tensr}']", "did you mean 'layout.tensor'"),
        ("options", "{layout.tensor: 3}", "is not a list of words"),
        ("variables", "{x: 3}", "is not a choice"),
        ("files", "{../x.json: {}}", "is not a plain file name"),
        ("files", "{x.ini: {a: 1}}", "is of no known kind"),
    ],
)
def test_a_wrong_profile_is_one_plain_line(key: str, value: str, words: str) -> None:
    given = {"program": "command", "command": ["run"], "log": [r"(?P<step>\d+)"], key: yaml.safe_load(value)}
    config = compose(["model=gpt_tiny", "cluster.gpus_per_node=1"])
    launch = dataclasses.replace(profile("deepspeed").launch, **{"files": {}, "variables": {}, "options": {}, **given})
    with pytest.raises(ConfigError, match=None) as error:
        resolve(dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, name="mine", launch=launch)))
    assert words in str(error.value) and "\n" not in str(error.value)


def test_a_layout_that_a_trainer_has_no_words_for_is_refused_by_its_key() -> None:
    assert inexpressible(profile("deepspeed"), LayoutConfig(tensor=2, data=4)) == ["layout.tensor=2"]
    assert inexpressible(profile("deepspeed"), LayoutConfig(data=4, sharding=ShardingConfig(1, 2, 4))) == [
        "layout.sharding={params: 1, grads: 2, optimizer: 4}"
    ]
    assert inexpressible(profile("trireme"), LayoutConfig(tensor=2, data=4)) == []


TUNINGS = [
    (["recipe=llama_7b_lora"], "tune.method=lora, only full"),
    (["recipe=gpt3_5b_p_tuning"], "tune.method=p_tuning, only full"),
    (["recipe=llama_7b_sft", "tune.base=base"], "tune.base=base, only null"),
    (["recipe=llama_7b_sft", "data.kind=instructions"], "data.kind=instructions, only corpus or synthetic"),
]


@pytest.mark.parametrize(
    ("name", "words", "refused"),
    [
        pytest.param(name, *tuning, marks=[pytest.mark.campaign("words")] * (i % len(TUNINGS) != j))
        for i, name in enumerate(sorted(LOGS))
        for j, tuning in enumerate(TUNINGS)
    ],
)
def test_a_tuning_is_refused_where_it_would_be_a_training_from_the_start(name: str, words: list[str], refused: str) -> None:
    """Whatever the layout: a search is told before its first trial."""
    config = of(name, *words)
    assert refused in untold(config)
    for judge in (command_of, check_launchable):
        with pytest.raises(ConfigError, match=f"trainer={config.trainer.name} cannot be told .*; give another value, use trainer=trireme"):
            judge(config)


def test_a_tuning_is_told_where_the_profile_has_words_for_it() -> None:
    config = of("megatron_core", "recipe=llama_7b_lora", "tune.rank=8", "layout.sharding.optimizer=8")
    options = {"tune.method": {"lora": ["--lora"], "full": []}, "tune.rank": ["--lora-rank={}"], "tune.alpha": ["--lora-alpha={}"]}
    launch = config.trainer.launch
    able = dataclasses.replace(launch, options=launch.options | options)
    config = dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, launch=able))
    with pytest.raises(ConfigError, match=re.escape("cannot be told tune.targets=['qkv'], only ['qkv', 'output', 'up', 'down'];")):
        resolve(config)
    run = run_of(resolve(dataclasses.replace(config, tune=TuneConfig(method="lora", rank=8))))
    assert run.command is not None and {"--lora", "--lora-rank=8", "--lora-alpha=32"} <= set(run.command.words)
    resolve_run(run, world_size_of(run.layout))  # the ranks take it as it is


def test_a_tuning_that_cannot_be_told_is_planned_and_neither_trained_nor_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("pretrain_gpt.py").write_text("")
    run = ["recipe=llama_7b_lora", "trainer=megatron_core", "data=synthetic"]
    for verb in (["train"], ["train", "-m", "layout.micro_batch=1,2"], ["search"], ["trainers", "check"]):
        assert main([*verb, *run]) == 2
        said = capsys.readouterr().err
        assert said.startswith("error: trainer=Megatron Core cannot be told tune.method=lora") and said.count("\n") == 1
    assert [path.name for path in Path().iterdir()] == ["pretrain_gpt.py"]
    assert main(["plan", *run, "--json"]) == 0
    capsys.readouterr()
    assert main(["plan", *run, "--explain", "t1 p8 d1 mb1 gpipe"]) == 2  # its own reason, not the tuning
    assert "cannot be told layout.schedule=gpipe" in capsys.readouterr().err


@pytest.mark.parametrize("name", LAUNCHABLE)
def test_a_split_of_ones_own_is_refused_where_the_trainer_would_make_another(name: str) -> None:
    trainer, key = profile(name), {"pipeline": 2, "data": 1}
    assert "layout.stage_layers=[3, 1]" in inexpressible(trainer, LayoutConfig(**key, stage_layers=[3, 1]))
    by_cost = "layout.balance=cost" in inexpressible(trainer, LayoutConfig(**key, balance="cost"))
    assert by_cost == ("stage_symbols" not in str(trainer.launch.options)), "only Megatron Core and its kin have words for it"
    same = inexpressible(trainer, LayoutConfig(**key, stage_layers=[2, 2]))  # which is no other split than that without the key
    assert same == inexpressible(trainer, LayoutConfig(**key))
    order = inexpressible(trainer, LayoutConfig(**key, order="tensor-pipeline-data"))
    assert ("layout.order=tensor-pipeline-data" in order) == (name != "megatron_core")


def test_layouts_with_uneven_stages_are_left_out_of_a_plan_by_their_key() -> None:
    config = of("nanotron", "model.family=llama", "model.layers=28", "cluster.nodes=2")
    whole = space(config.model, config.cluster, config.run.global_batch, config.search.space)
    left = expressible(whole, config.trainer)
    assert whole.table["balance"].any() and not left.table["balance"].any()
    assert left.dropped["trainer: cannot be told layout.balance"] > 0


def test_the_example_profile_is_short(tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "examples/own_trainer/trainer/own.yaml"
    assert len(example.read_text().splitlines()) <= 40
