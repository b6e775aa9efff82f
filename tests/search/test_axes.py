"""Context and expert ranks, from the first minute with a model to the words that another trainer is told; refusals in one line."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from launcher.config import Config, check_launchable, compose, resolve
from launcher.config.command import command_of, untold
from launcher.cost.inputs.groups import PlacedGroup
from launcher.cost.inputs.layouts import to_table
from launcher.cost.inputs.stages import held
from launcher.cost.time.block import expert_seconds
from launcher.cost.time.collectives import all_gather, all_to_all, reduce_scatter
from launcher.cost.time.products import products
from launcher.goals.training.search import search_training
from launcher.planning.layout_names import layout_of, name_of
from launcher.planning.plan import plan
from launcher.search.policy import SearchTrial
from launcher.search.problem import ladder, shrunk
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.schema import LayoutConfig, ShardingConfig

pytestmark = pytest.mark.slow

LLAMA_3_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192, "vocab_size": 128256,
    "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "tie_word_embeddings": False,
}  # fmt: skip
NODES = ["hardware=h100", "cluster.nodes=2", "cluster.gpus_per_node=8", "run.global_batch=128", "run.precision=bf16", "data=synthetic"]
MIXTRAL = [
    "model.family=llama", "model.layers=32", "model.hidden=4096", "model.heads=32", "model.kv_heads=8", "model.ffn=14336",
    "model.vocab=32000", "model.seq=4096", "model.experts.count=8", "model.experts.active=2",
]  # fmt: skip
FEW = ["search.space.max_tensor=2", "search.space.max_pipeline=2", "search.space.max_virtual=1", "search.space.max_micro_batch=2"]
CONTEXT_FLAGS = {"torchtitan": "--parallelism.context_parallel_degree={}", "megatron_core": "--context-parallel-size={}"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_8B))
    (tmp_path / "pretrain_gpt.py").touch()
    return tmp_path


def words_of(config: Config, layout: LayoutConfig) -> list[str]:
    command = command_of(resolve(dataclasses.replace(config, layout=layout)))
    assert command is not None
    return command.words


@pytest.mark.parametrize("trainer", CONTEXT_FLAGS)
def test_a_published_model_is_planned_and_tried_with_context_ranks_in_its_trainers_words(trainer: str, folder: Path) -> None:
    config = compose([f"model.from={folder}", f"trainer={trainer}", *NODES, *FEW])
    table = plan(config).space.table
    assert set(table["context"].tolist()) == {1, 2} and (table["expert"] == 1).all(), "8,192 tokens are enough for two ranks"
    found = search_training(config, {"context": [2]})
    layout = found.problem.layout(0)
    assert layout.context == 2 and " c2 " in name_of(layout) and layout_of(name_of(layout)) == layout
    for trial in (SearchTrial(0, True, None), SearchTrial(0, False, None)):
        tried = found.problem.trial_config(trial)
        assert CONTEXT_FLAGS[trainer].format(2) in words_of(tried, tried.layout)


def test_every_planned_layout_of_our_own_trainer_resolves_whatever_its_context(folder: Path) -> None:
    config = compose([f"model.from={folder}", *NODES, *FEW, "search.space.max_context=4", "run.context_exchange=all_to_all"])
    found = plan(config)
    assert set(found.space.table["context"].tolist()) == {1, 2, 4}
    for i in range(0, len(found.space.table), max(1, len(found.space.table) // 200)):
        resolve(dataclasses.replace(config, layout=found.layout(i)))


def test_heads_that_no_layout_can_exchange_are_refused_in_one_line() -> None:
    words = ["model=llama_tiny", "hardware=h100", "cluster.gpus_per_node=8", "run.global_batch=8", "run.context_exchange=all_to_all"]
    with pytest.raises(ConfigError, match="deals out the 2 key and value heads of the model, and no layout has a tensor x context"):
        plan(compose(words), wanted={"context": [4]}, limits=dataclasses.replace(compose(words).search.space, max_context=4))


def test_a_trainer_that_cannot_be_told_of_context_refuses_it(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"trainer=HF Trainer.* cannot be told layout\.context=2;|cannot be told layout\.context=2;"):
        plan(compose([f"model.from={folder}", "trainer=huggingface", *NODES]), wanted={"context": [2]})


def test_a_mixture_is_planned_with_expert_ranks_and_told_to_megatron(folder: Path) -> None:
    config = compose(["trainer=megatron_core", *MIXTRAL, *NODES, *FEW, "cluster.nodes=8"])
    check_launchable(config)
    found = plan(config, wanted={"expert": [8]})
    layout = found.layout(int(found.order[0]))
    assert layout.expert == 8 and " e8 " in name_of(layout)
    words = words_of(config, layout)
    for word in (
        "--num-experts=8", "--moe-router-topk=2", "--moe-ffn-hidden-size=14336", "--moe-grouped-gemm", "--expert-model-parallel-size=8",
        "--expert-tensor-parallel-size=1", "--moe-token-dispatcher-type=alltoall", "--position-embedding-type=rope", "--disable-bias-linear",
    ):  # fmt: skip
        assert word in words
    assert not [word for word in words if word.startswith(("--moe-layer-freq", "--kv-channels", "--moe-shared", "--multi-latent"))]
    assert set(plan(config).space.table["expert"].tolist()) == {1, 8}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["model.head_width=64", "model.qk_norm=head", "model.biases=[qkv]"], ["--kv-channels=64", "--qk-layernorm", "--add-qkv-bias"]),
        (["model.window=1024", "model.full_every=4"], ["--window-size=1023,0", "--window-attn-skip-freq=4"]),
        (
            ["model.rope.kind=llama3", "model.rope.factor=8", "model.rope.original=8192"],
            ["--use-rope-scaling", "--rope-scaling-factor=8"],
        ),
        (
            ["model.experts.dense_layers=3", "model.experts.ffn=2048", "model.experts.shared_ffn=2048"],
            ["--moe-layer-freq=[0]*3+[1]*29", "--moe-ffn-hidden-size=2048", "--moe-shared-expert-intermediate-size=2048"],
        ),
        (["model.experts.every=2", "model.layers=4"], ["--moe-layer-freq=[0,1,0,1]"]),
        (
            ["model.latent.kv_rank=512", "model.latent.query_rank=1536", "model.latent.value=96", "model.predicted_tokens=1"],
            ["--multi-latent-attention", "--kv-lora-rank=512", "--q-lora-rank=1536", "--v-head-dim=96", "--mtp-num-layers=1"],
        ),
        (["model.norm_eps=1e-6"], ["--norm-epsilon=1e-06"]),
        (["model.latent.kv_rank=512", "model.latent.value=96"], ["--rope-type=rope"]),
    ],
)
def test_megatron_is_told_what_a_model_is(given: list[str], words: list[str], folder: Path) -> None:
    told = words_of(compose(["trainer=megatron_core", *MIXTRAL, *given, *NODES]), LayoutConfig())
    assert set(words) <= set(told)
    assert ("--group-query-attention" in told) == ("--multi-latent-attention" not in told), "Megatron takes one of them"


def test_megatron_is_told_deepseeks_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    published = Path(__file__).parents[1] / "config" / "published_configs.json"
    (tmp_path / "config.json").write_text(json.dumps(json.loads(published.read_text())["deepseek_v3"]["config"]))
    monkeypatch.chdir(tmp_path)
    Path("pretrain_gpt.py").touch()
    config = compose(["trainer=megatron_core", f"model.from={tmp_path}", *NODES, "cluster.nodes=128", "run.global_batch=4096"])
    check_launchable(config)
    words = words_of(config, LayoutConfig(pipeline=16, expert=64, balance="cost"))
    for word in (
        "--multi-latent-attention", "--kv-lora-rank=512", "--q-lora-rank=1536", "--qk-head-dim=128", "--qk-pos-emb-head-dim=64", "--v-head-dim=128",
        "--rope-type=yarn", "--rotary-scaling-factor=40", "--mscale=1", "--mscale-all-dim=1", "--moe-layer-freq=[0]*3+[1]*58",
        "--mtp-num-layers=1",
    ):  # fmt: skip
        assert word in words, word
    for other in ("model.rope.original=8192", "model.rope.fast=16", "model.rope.magnitude=1.5"):
        with pytest.raises(ConfigError, match=r"cannot be told model\.rope\."):
            check_launchable(compose(["trainer=megatron_core", f"model.from={tmp_path}", *NODES, other]))


@pytest.mark.parametrize(
    "given",
    ["norm_at=both", "score_cap=50", "attention_scale=0.5", "residual=parallel", "qk_norm=width", "biases=[qkv,output]", "embedding_scale=2",
     "rope.local_theta=1000", "rope.kind=dynamic", "experts.router_bias=true", "logit_scale=0.5"],
)  # fmt: skip
@pytest.mark.parametrize("trainer", ["megatron_core", "nanotron"])
def test_what_a_trainer_has_no_words_for_in_a_model_is_refused_by_its_key(trainer: str, given: str, folder: Path) -> None:
    plain = [f"trainer={trainer}", *(MIXTRAL if trainer == "megatron_core" else MIXTRAL[:-2]), *NODES]
    assert not untold(compose(plain))
    key = given.partition("=")[0]
    if key.startswith("experts.") and trainer == "nanotron":
        plain += ["model.experts.count=8"]
    with pytest.raises(ConfigError, match=rf"cannot be told model\.({key}|experts\.count)=.*, only ") as error:
        check_launchable(compose([*plain, f"model.{given}"]))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["layout.expert=3"], "layout.expert=3 does not divide model.experts.count=8; use 1, 2, 4 or 8"),
        (["layout.expert=8", "model.experts.count=0"], "layout.expert=8 deals out the experts of a block, and the model has none"),
        (["layout.context=3"], "layout.context=3 cuts model.seq=4096 in two pieces for each rank"),
        (["layout.expert=8", "layout.pipeline=4", "layout.tensor=1"], "layout.expert=8 does not divide the 4 ranks of layout.tensor x "),
        (["layout.context=2", "layout.sharding.optimizer=5"], "does not divide layout.data x layout.context=16 (each of"),
    ],
)
def test_degrees_that_do_not_divide_are_one_plain_line(given: list[str], message: str, folder: Path) -> None:
    with pytest.raises(ConfigError) as error:
        resolve(compose(["trainer=megatron_core", *MIXTRAL, *NODES, *given]))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_torchtitan_always_shards_over_context_ranks(folder: Path) -> None:
    config = compose([f"model.from={folder}", "trainer=torchtitan", *NODES])
    assert words_of(config, LayoutConfig(context=2, sharding=ShardingConfig(16, 16, 16)))
    with pytest.raises(ConfigError, match=r"cannot be told layout\.sharding="):
        words_of(config, LayoutConfig(context=2))
    table = plan(config, wanted={"context": [2]}).space.table
    assert (table["grads"] == table["data"] * 2).all()


def test_a_small_trial_keeps_context_ranks_shards_and_whole_sets_of_experts(folder: Path) -> None:
    assert ladder(2, 16, (1, 1, 32), 8, context=2) == (4, 8, 16)
    assert ladder(2, 16, (1, 1, 4), 8, context=2, unit=8) == (8, 16)
    found = plan(compose(["trainer=megatron_core", *MIXTRAL, *NODES, *FEW, "cluster.nodes=8"]), wanted={"expert": [8]})
    small, _ = shrunk(found.case, 8, 128)
    ranks = small["tensor"] * small["context"] * small["data"]
    assert (ranks % small["expert"] == 0).all() and (small["data"] < found.space.table["data"]).any()
    assert np.array_equal(small["optimizer"] > 1, found.space.table["optimizer"] > 1)


def test_the_busiest_expert_rank_sets_the_pace_and_needs_the_memory(folder: Path) -> None:
    def predicted(**experts: float) -> tuple[float, float]:
        given = [f"model.experts.{name}={value}" for name, value in experts.items()]
        found = plan(compose(["trainer=megatron_core", *MIXTRAL, *given, *NODES, *FEW]), wanted={"expert": [8], "tensor": [2]})
        return float(found.seconds[0]), float(found.estimate.memory_total[0])

    even, uneven = predicted(), predicted(imbalance=1.5)
    assert 1.1 < uneven[0] / even[0] < 1.5 and uneven[1] > even[1]


def test_experts_of_a_rank_are_whole_or_cut_and_never_more_than_all(folder: Path) -> None:
    config = compose(["trainer=megatron_core", *MIXTRAL, *NODES])
    case = plan(config, wanted={"expert": [8]}).case
    table = to_table([LayoutConfig(tensor=2, data=8, expert=expert) for expert in (1, 8)])
    whole = dataclasses.replace(case, table=table)
    cut = dataclasses.replace(
        whole, trainer=dataclasses.replace(case.trainer, memory=dataclasses.replace(case.trainer.memory, whole_experts=False))
    )
    assert whole.experts_alike.tolist() == [16, 2] and cut.experts_alike.tolist() == [8, 1]
    assert (whole.experts_alike * whole.expert_tensor * whole.expert == 16).all()


def test_parts_of_experts_are_planned_for_mixtures_on_trainers_that_have_them(folder: Path) -> None:
    small = ["model=moe_tiny", "data=synthetic", "cluster=local", "cluster.gpus_per_node=4", "hardware=cpu", "run.global_batch=8"]
    config = compose(small)
    assert set(plan(config).space.table["expert_tensor"].tolist()) == {1, 4}
    cut = compose([*small, "search.space.max_expert_tensor=2", "search.space.max_expert=2"])
    found = plan(cut, wanted={"expert_tensor": [2], "expert": [2]})
    assert len(found.order) and (found.space.table["expert_tensor"] == 2).all()
    layout = found.layout(int(found.order[0]))
    assert " e2 et2 " in name_of(layout) and layout_of(name_of(layout)) == layout
    assert resolve(dataclasses.replace(config, layout=layout))
    assert (plan(compose([*small, "model=llama_tiny"])).space.table["expert_tensor"] == 1).all()
    with pytest.raises(ConfigError, match=r"cannot be told layout\.expert_tensor=2;"):
        plan(compose(["trainer=megatron_core", *MIXTRAL, *NODES]), wanted={"expert_tensor": [2]})


def test_parts_of_experts_cost_a_gather_and_a_sum_of_tokens_once_not_of_their_copies(folder: Path) -> None:
    """Eight ranks of a node, which either have different experts, or parts of all: a rank has as many parameters and operations, copies
    for 2 of 8 experts cross twice each way, tokens to 8 ranks and sums back. Only expert ranks can have an unequal load."""
    config = compose([*MIXTRAL, *NODES, "model.experts.imbalance=1.5"])
    case = plan(config, wanted={"expert": [8], "tensor": [1], "pipeline": [1]}).case
    layouts = [LayoutConfig(tensor=t, data=16 // t, **cut) for t in (1, 2) for cut in ({"expert": 8}, {"expert_tensor": 8})]
    case = dataclasses.replace(case, table=to_table(layouts))
    rows, group, hidden = case.tokens / case.tensor, 8, case.shape.hidden * case.width
    machine = case.device, case.constants, PlacedGroup.of(case.device, np.array([8.0] * 4), 1)
    copies = all_to_all(*machine, rows * 2 * 1.5 * hidden)
    tokens = all_gather(*machine, rows * group * hidden) + reduce_scatter(*machine, rows * group * hidden)
    chosen = all_gather(*machine, rows * group * 2 * 8) + all_gather(*machine, rows * group * 2 * 4)
    assert expert_seconds(case) == pytest.approx(np.where(case.expert > 1, 2 * copies, tokens + chosen))
    work = [sum(p.rows * p.columns * p.inner * p.batch for p in products(case) if p.name == "experts")[i] for i in range(4)]
    assert [work[0] / work[1], work[2] / work[3]] == pytest.approx([1.5, 1.5])
    parameters = held(case).expert.most()
    assert parameters == pytest.approx(parameters[0])
    assert (case.experts_alike == 2).all() and case.expert_shards("optimizer").tolist() == [1.0] * 4


def test_a_model_of_a_prime_number_of_blocks_is_cut_by_cost_in_megatrons_symbols(folder: Path) -> None:
    config = compose([f"model.from={folder}", "model.layers=61", "trainer=megatron_core", *NODES])
    words = words_of(config, LayoutConfig(pipeline=4, balance="cost"))
    (told,) = [word.partition("=")[2] for word in words if word.startswith("--pipeline-model-parallel-layout=")]
    stages = [part.count("t") for part in told.split("|")]
    assert told.strip("tEL|") == "" and told[0] == "E" and told[-1] == "L" and (len(stages), sum(stages)) == (4, 61) and max(stages) <= 16
    even = words_of(compose([f"model.from={folder}", "trainer=megatron_core", *NODES]), LayoutConfig(pipeline=4))
    assert not any(word.startswith("--pipeline-model-parallel-layout") for word in even)
