"""What the sources of published tables say: their trainers, their words, and the cells that they leave blank."""

from __future__ import annotations

from operator import attrgetter
from pathlib import Path

import pytest

from benchmarks.published.__main__ import main
from benchmarks.published.convert import canonical
from benchmarks.published.layout import layout_cells
from benchmarks.published.raw import RawRow
from benchmarks.published.sources import source_of
from launcher.config.trainers import changed, profile
from launcher.cost import predict
from launcher.cost.inputs.shape import Shape
from launcher.tables.canonical import COLUMNS, MeasuredRun, written
from launcher.tables.validation import PredictedRun, judge
from tests.cost.machines import HARDWARE, cluster, layout, mixed
from trainer.shared.run.schema import ModelConfig

pytestmark = pytest.mark.slow

DATA = Path(__file__).parents[2] / "benchmarks" / "published" / "data"
TESTED = Path(__file__).parents[1]
CELLS = {"gpus": "16", "tp": "1", "pp": "2", "mbs": "1", "gbs": "64"}


def judged(raw: RawRow) -> PredictedRun:
    """What is predicted of a published row."""
    cells = {name: COLUMNS[name].read(written(value)) for name, value in canonical(raw).items()}
    return judge([MeasuredRun(raw.number, cells)], HARDWARE)[0]


@pytest.mark.parametrize(("raw", "tested"), [("training", "cost/data"), ("dlperf", "cost/data"), ("layouts_13b", "search")])
def test_the_tables_of_the_tests_are_what_the_command_makes_of_those_that_were_published(raw: str, tested: str, tmp_path: Path) -> None:
    assert main([str(DATA / f"{raw}.csv"), str(tmp_path / "made.csv")]) == 0
    assert (tmp_path / "made.csv").read_text() == (TESTED / tested / f"{raw}.csv").read_text()


def test_a_source_that_nobody_knows_passes_and_every_assumption_is_listed() -> None:
    cells = canonical(RawRow(1, {**CELLS, "source": "somebody", "layers": "24", "hidden": "2048", "seq": "1024", "gpu": "A100-80GB"}))
    assert (cells["trainer"], cells["trainer_changes"], cells["step_time_s"]) == ("unknown_2024", "none", None)
    assumed = MeasuredRun(1, cells).assumed
    assert {"heads", "ffn", "vocab", "trainer", "recompute", "tied", "memory_gb"} <= assumed and not {"layers", "tensor", "gpus"} & assumed


def row(**cells: str) -> RawRow:
    return RawRow(1, cells)


@pytest.mark.parametrize(
    ("cells", "facts"),
    [
        (
            {"source": "AMSP", "notes": "no broadcast overlap"},
            {"overlap.refresh": False, "overlap.gradients": True, "overlap.gathers": True},
        ),
        (
            {"source": "AMSP", "notes": "no all-reduce overlap"},
            {"overlap.refresh": False, "overlap.gradients": False, "overlap.gathers": True},
        ),
        ({"source": "AMSP", "notes": "no overlap"}, {"overlap.refresh": False, "overlap.gradients": False, "overlap.gathers": False}),
        ({"source": "InternEvo"}, {"overlap.owners_broadcast": True, "overlap.refresh": False, "overlap.all_reduces_states": True}),
        (
            {"source": "Megatron-DeepSpeed", "year": "2024", "notes": "BF16Optimizer; CUDA_LAUNCH_BLOCKING=1"},
            {"overlap.all_reduces_states": True, "numbers.reduce_bytes": 4, "kernels.launch_blocking": True},
        ),
        (
            {"source": "Megatron-LM", "year": "2023", "notes": "no-bias-gelu-fusion no-gradient-accumulation-fusion"},
            {"kernels.pointwise": "eager", "kernels.accumulate_fused": False, "overlap.tensor": "backward"},
        ),
        (
            {"source": "Megatron-LM", "year": "2023", "notes": "no-async-tensor-model-parallel-allreduce"},
            {"overlap.tensor": "none", "kernels.pointwise": "fused"},
        ),
        ({"source": "Megatron-DeepSpeed", "year": "2022"}, {"overlap.all_reduces_states": False}),
        ({"source": "somebody", "year": "2022"}, {"pipeline.split_sends": True, "numbers.reduce_bytes": 2}),
        ({"source": "BigScience GPT2 V100", "notes": "Megatron-LM"}, {"memory.bucket_bytes": 0.0}),
        ({"source": "Megatron-LM SC21", "year": "2021", "zero_stage_or_sharding": "ZeRO-3"}, {"overlap.all_reduces_shards": True}),
        ({"source": "DeepSpeed blogs", "year": "2021", "zero_stage_or_sharding": "ZeRO-3"}, {"overlap.all_reduces_shards": True}),
        ({"source": "DeepSpeed blogs", "year": "2022", "zero_stage_or_sharding": "ZeRO-3"}, {"overlap.all_reduces_shards": False}),
        ({"source": "JAX-Toolbox Pax", "model": "GPT 5B"}, {"name": "Pax", "recompute.selective": "but_weights"}),
        (
            {"source": "BigScience GPT2 V100", "table_or_file": "experiments/gpt2.md HF", "zero_stage_or_sharding": "ZeRO-3"},
            {
                "kernels.attention": "unfused",
                "recompute.inputs_on_host": False,
                "memory.optimizer_on_host": False,
                "overlap.gathers": False,
            },
        ),
        (
            {"source": "BigScience GPT2 V100", "table_or_file": "experiments/gpt2.md ZeRO", "zero_stage_or_sharding": "ZeRO-3"},
            {"recompute.inputs_on_host": True, "memory.optimizer_on_host": False, "overlap.gathers": False},
        ),
        (
            {
                "source": "BigScience GPT2 V100",
                "table_or_file": "experiments/gpt2.md ZeRO",
                "zero_stage_or_sharding": "ZeRO-3",
                "notes": "With full cpu offload",
            },
            {"recompute.inputs_on_host": True, "memory.optimizer_on_host": True, "overlap.gathers": False},
        ),
        (
            {
                "source": "BigScience GPT2 V100",
                "table_or_file": "experiments/gpt2.md ZeRO",
                "zero_stage_or_sharding": "ZeRO-3",
                "notes": "With full cpu offload; ScatEmb=Y; PA_CPU=N",
            },
            {"recompute.inputs_on_host": False, "memory.optimizer_on_host": False, "overlap.gathers": False},
        ),
        (
            {"source": "Megatron-Bridge", "notes": "recipes differ: CPU activation offload 40 layers | CPU activation offload 20 layers"},
            {"memory.host_layers": 20},
        ),
        ({"source": "torchtitan", "year": "2025"}, {"kernels.newest_attention": False, "recompute.keeps_attention": False}),
        (
            {"source": "torchtitan", "year": "2026", "notes": "graph trainer"},
            {"recompute.keeps_attention": True, "memory.logit_copies_fp32": 2},
        ),
        ({"source": "DGX Cloud", "model": "Maxtext Llama3 70b"}, {"recompute.selective": "but_queries", "recompute.stops_early": True}),
        ({"source": "DGX Cloud", "model": "Llama2-70b (MaxText)"}, {"recompute.selective": "but_projections"}),
        (
            {"source": "torchtitan", "notes": "SimpleFSDP (aot_eager)"},
            {"kernels.pointwise": "eager", "memory.logit_copies_fp32": 2, "kernels.eager_casts": False},
        ),
        ({"source": "torchtitan", "notes": "eager float8 (no compile)"}, {"kernels.pointwise": "eager", "kernels.eager_casts": True}),
        (
            {"source": "Megatron-Bridge", "arch": "moe", "model": "DeepSeekV3", "gpu": "B200", "ep": "32", "notes": "container 26.04"},
            {"overlap.experts": True, "overlap.dispatch_by_domain": True},
        ),
        ({"source": "torchtitan", "year": "2026"}, {"kernels.newest_attention": True}),
        ({"source": "torchtitan", "recompute": "selective (default policy)"}, {"recompute.selective": "products"}),
        (
            {"source": "Megatron-Bridge", "arch": "moe", "gpu": "GB200", "precision": "mxfp8", "notes": "container 26.06"},
            {"kernels.launches_per_block": 0, "overlap.experts": True},
        ),
        ({"source": "Megatron-Bridge", "arch": "moe", "gpu": "GB200", "notes": "container 26.02"}, {"kernels.launches_per_mixture": 60}),
        ({"source": "MLPerf Training", "year": "2023"}, {"numbers.stores_low_precision": False, "numbers.gathers_low_precision": True}),
        ({"source": "MLPerf Training", "year": "2025"}, {"numbers.stores_low_precision": True, "kernels.launches_per_block": 40}),
        (
            {"source": "MLPerf Training", "year": "2024", "notes": "container 24.04; CUDA graph of each layer; fp8 parameters"},
            {"numbers.stores_low_precision": True, "kernels.launches_per_block": 2, "overlap.tensor": "all"},
        ),
        (
            {"source": "MLPerf Training", "year": "2025", "notes": "CUDA graph of the whole step; no overlap of tensor communication"},
            {"kernels.launches_per_block": 0, "overlap.tensor": "backward"},
        ),
    ],
)
def test_rows_say_what_their_trainer_did(cells: dict[str, str], facts: dict[str, object]) -> None:
    found = source_of(row(**cells))
    trainer = changed(profile(found.trainer), found.changes)
    assert {name: attrgetter(name)(trainer) for name in facts} == facts


@pytest.mark.parametrize(
    ("cells", "facts"),
    [
        (
            {"source": "NVIDIA NeMo performance docs", "model": "LLAMA2-70B (LoRA)", "tp": "2", "pp": "4"},
            {"text": 200, "adapter_rank": 32, "adapter_targets": ("qkv",), "sequence_parallel": False, "virtual_pipeline": 1},
        ),
        (
            {"source": "NVIDIA NeMo performance docs", "model": "LLAMA2-70B (SFT)", "tp": "4", "pp": "4"},
            {"text": 200, "adapter_rank": 0, "adapter_targets": (), "sequence_parallel": True, "virtual_pipeline": 20},
        ),
        ({"source": "NVIDIA DGX Cloud", "model": "Llama3-8b finetuning LoRA", "tp": "1", "pp": "1"}, {"text": 200, "adapter_rank": 8}),
        (
            {"source": "NVIDIA Megatron-Bridge", "model": "LLAMA3_70B (LoRA)", "tp": "2", "pp": "4", "virtual_pp": "20"},
            {"text": 200, "adapter_rank": 16, "sequence_parallel": True, "virtual_pipeline": 20},
        ),
        ({"source": "NVIDIA Megatron-Bridge", "model": "LLAMA3_70B (SFT)", "tp": "4", "pp": "4"}, {"text": 0, "adapter_rank": 0}),
        ({"source": "NVIDIA NeMo performance docs", "model": "LLAMA2-70B", "tp": "4", "pp": "4"}, {"text": 0, "virtual_pipeline": 1}),
        (
            {"source": "MLPerf Training", "year": "2024", "model": "Llama-2-70B (LoRA)", "tp": "4", "pp": "1"},
            {"text": 0, "adapter_rank": 16, "adapter_targets": ("qkv", "output")},
        ),
        ({"source": "somebody", "model": "7B LoRA", "tp": "1", "pp": "1"}, {"text": 0, "adapter_rank": 0, "adapters": True}),
    ],
)
def test_rows_of_tuning_have_what_the_recipes_of_their_source_say(cells: dict[str, str], facts: dict[str, object]) -> None:
    """And list it as assumed; of other rows nothing is known."""
    found = canonical(row(**CELLS | {"layers": "80", "hidden": "8192", "seq": "4096", "gpu": "H100", "precision": "fp8"} | cells))
    assert {name: found[name] for name in facts} == facts
    told = {name for name in ("text", "adapter_rank", "adapter_targets") if found[name]}
    assert told == MeasuredRun(1, found).assumed & {"text", "adapter_rank", "adapter_targets"}


@pytest.mark.parametrize(("model", "recompute"), [("GPT 126M", "none"), ("GPT 5B", "selective"), ("GPT 175B", "full"), ("LLaMA 70B", "")])
def test_pax_recomputes_what_its_configurations_say(model: str, recompute: str) -> None:
    assert source_of(row(source="JAX-Toolbox Pax READMEs", model=model)).recompute == recompute


def test_a_batch_that_is_not_given_is_what_the_row_implies() -> None:
    """A micro-batch for each replica where parameters are sharded, or as many as the notes count."""
    sharded = {"source": "X", "gpus": "64", "tp": "1", "pp": "1", "mbs": "2", "zero_stage_or_sharding": "ZeRO-3"}
    plain = {**sharded, "zero_stage_or_sharding": "ZeRO-1"}
    named = {**sharded, "mbs": "", "model": "Llama3 70b (FSDP+DP MBS=4)"}
    rows = [row(**cells) for cells in (sharded, {**plain, "notes": "micro_num 4"}, named, plain)]
    assert [layout_cells(each, source_of(each))["global_batch"] for each in rows] == [128, 512, 256, None]


@pytest.mark.parametrize(("year", "size"), [("2024", 4), ("2025", 1)])
def test_torchtitan_once_made_as_many_micro_batches_as_stages(year: str, size: int) -> None:
    cells = {"source": "torchtitan", "year": year, "gpus": "512", "tp": "8", "pp": "8", "gbs": "256", "zero_stage_or_sharding": "FSDP2 8"}
    one = row(**cells)
    assert layout_cells(one, source_of(one))["micro_batch"] == size


@pytest.mark.parametrize(
    ("notes", "name", "balance"),
    [
        ("method: Vocab-1; MFU", "Vocabulary Parallelism 1", "equal"),
        ("vocab 2", "Vocabulary Parallelism 2", "equal"),
        ("Interlaced", "interlaced", "equal"),
        ("Redis", "Megatron-LM 2023", "cost"),
        ("baseline of table 5", "Megatron-LM 2023", "equal"),
    ],
)
def test_the_methods_of_the_paper_on_vocabulary_parallelism(notes: str, name: str, balance: str) -> None:
    found = source_of(RawRow(1, {"source": "Vocabulary Parallelism (arXiv 2411.05288)", "notes": notes}))
    assert (profile(found.trainer).name, found.balance, found.tied) == (name, balance, False)


@pytest.mark.parametrize(
    ("billions", "layers", "hidden", "inner"),
    [(1.34, 16, 2048, 8192), (3.57, 28, 3072, 8192), (8.86, 32, 4096, 14336), (80, 80, 8192, 28672)],
)
def test_models_have_the_size_that_their_name_says_with_embeddings_tied_as_the_script_of_the_source_has_it(
    billions: float, layers: int, hidden: int, inner: int
) -> None:
    shape = {"layers": layers, "hidden": hidden, "heads": hidden // 128, "ffn": inner, "vocab": 131072, "seq": 4096}
    cells = canonical(
        row(source="nanotron benchmark summary", year="2025", arch="llama", model="Llama-style", **{k: str(v) for k, v in shape.items()})
    )
    assert cells["tied"] is (inner < 10_000)
    made = ModelConfig(
        **{k: cells[k] for k in ("family", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq")}, tied=cells["tied"]
    )
    assert Shape.of(made).parameters / 1e9 == pytest.approx(billions, rel=0.006)


def test_our_own_runs_are_predicted_by_validate_as_by_plan() -> None:
    # fmt: off
    row = RawRow(1, {
        "model": "7B", "arch": "gpt", "layers": "32", "hidden": "4096", "heads": "32", "vocab": "50304", "seq": "2048", "gpu": "a100_80", "gpus": "64", "nodes": "8",
        "tp": "2", "pp": "1", "mbs": "1", "gbs": "256", "recompute": "none", "zero_stage_or_sharding": "ZeRO-1", "precision": "bf16",
    })
    # fmt: on
    model = ModelConfig(layers=32, hidden=4096, heads=32, vocab=50304, seq=2048)
    planned = predict(model, layout(2, 1, 32), mixed(256), cluster(64))
    found = judged(row).prediction
    assert found is not None
    assert found.step_time_s == pytest.approx(planned.step_time_s) and found.memory_bytes == pytest.approx(planned.memory_bytes)


@pytest.mark.parametrize(
    ("words", "sharded"),
    [
        ("none", (1, 1, 1)), ("ZeRO-1", (1, 1, 8)), ("zero 2", (1, 8, 8)), ("ZeRO stage 3", (8, 8, 8)), ("Zero3", (8, 8, 8)), ("FSDP 4", (4, 4, 4)),
        ("FULL_SHARD", (8, 8, 8)), ("SHARD_GRAD_OP", (1, 8, 8)), ("distributed optimizer", (1, 1, 8)), ("AMSP P1 G2 OS8", (1, 2, 8)), ("ZeRO-0", (1, 1, 1)),
        ("MiCS", (8, 8, 8)), ("ZeRO-3 (MiCS) 4", (4, 4, 4)), ("HSDP 2", (2, 2, 2)), ("FSDP2 4 + DP", (4, 4, 4)), ("ZeRO-1 over 2", (1, 1, 2)),
    ],
)  # fmt: skip
def test_words_of_sharding(words: str, sharded: tuple[int, int, int]) -> None:
    row = RawRow(1, {**CELLS, "source": "somebody", "zero_stage_or_sharding": words})
    cells = layout_cells(row, source_of(row))
    assert (cells["shard_params"], cells["shard_grads"], cells["shard_optimizer"]) == sharded


@pytest.mark.parametrize(
    ("words", "sharded"),
    [
        ("none", (1, 1, 1)),
        ("ZeRO-1", (1, 1, 8)),
        ("FSDP2 4", (8, 8, 8)),
        ("FSDP2 2", (4, 4, 4)),
        ("ZeRO-3", (8, 8, 8)),
        ("HSDP 2", (4, 4, 4)),
    ],
)
def test_context_ranks_share_states_with_the_data_ranks_that_words_of_sharding_count(words: str, sharded: tuple[int, int, int]) -> None:
    row = RawRow(1, {**CELLS, "source": "somebody", "zero_stage_or_sharding": words, "cp": "2"})
    cells = layout_cells(row, source_of(row))
    assert cells["data"] == 4
    assert (cells["shard_params"], cells["shard_grads"], cells["shard_optimizer"]) == sharded


@pytest.mark.parametrize(
    ("words", "kind", "layers", "every"),
    [
        ("none", "none", 0, 1), ("full", "full", 0, 1), ("full (uniform)", "full", 0, 1), ("activation checkpointing", "full", 0, 1), ("no", "none", 0, 1),
        ("selective (per-op)", "selective", 0, 1), ("4 layers", "full", 4, 1), ("4 of 32 layers", "full", 4, 1), ("every 2nd layer", "full", 0, 2),
    ],
)  # fmt: skip
def test_words_of_recomputation(words: str, kind: str, layers: int, every: int) -> None:
    row = RawRow(1, {**CELLS, "source": "somebody", "recompute": words})
    cells = layout_cells(row, source_of(row))
    assert (cells["recompute"], cells["recompute_layers"], cells["recompute_every"]) == (kind, layers, every)


@pytest.mark.parametrize(
    ("cells", "schedule"),
    [
        ({}, "1f1b"), ({"notes": "schedule ZB-2p"}, "zero_bubble"), ({"notes": "zero bubble, against 1F1B"}, "zero_bubble"), ({"model": "7B GPipe"}, "gpipe"),
        ({"notes": "1F1B, against ZB-1p"}, "1f1b"), ({"notes": "ZB-H1", "pp": "1", "tp": "2"}, "1f1b"), ({"notes": "ZB-V", "virtual_pp": "2"}, "interleaved"),
    ],
)  # fmt: skip
def test_words_of_schedules(cells: dict[str, str], schedule: str) -> None:
    row = RawRow(1, {**CELLS, "source": "Zero Bubble", **cells})
    assert layout_cells(row, source_of(row))["schedule"] == schedule


def test_zb_2p_is_faster_than_zb_1p_and_holds_twice_the_micro_batches() -> None:
    # fmt: off
    cells = {
        **CELLS, "source": "Zero Bubble", "gpu": "A100-80GB", "pp": "8", "gpus": "8", "layers": "24", "hidden": "2048", "seq": "2048", "model": "1B", "gbs": "16",
    }
    # fmt: on
    one, two = (judged(RawRow(1, {**cells, "notes": name})).prediction for name in ("ZB-1p", "ZB-2p"))
    assert one is not None and two is not None
    assert 0.8 * one.step_time_s < two.step_time_s < 0.95 * one.step_time_s
    assert 1.3 * one.reported_bytes < two.reported_bytes < 2 * one.reported_bytes


@pytest.mark.parametrize(
    ("source", "year", "trainer", "attention"),
    [
        ("Megatron-LM on our cluster", "2021", "Megatron-LM 2021", "fused_softmax"), ("Megatron-LM on our cluster", "2023", "Megatron-LM 2023", "flash2"),
        ("Megatron-LM on our cluster", "", "Megatron Core", "flash2"), ("Megatron-DeepSpeed, a thesis", "2023", "Megatron-DeepSpeed", "fused_softmax"),
        ("somebody", "2021", "unknown, before 2023", "fused_softmax"), ("somebody", "2023", "unknown", "flash2"), ("somebody", "2024", "unknown, since 2024", "flash2"), ("", "", "trireme", "flash2"),
    ],
)  # fmt: skip
def test_a_source_that_nobody_knows_had_the_trainers_of_its_time(source: str, year: str, trainer: str, attention: str) -> None:
    found = profile(source_of(RawRow(1, {"source": source, "year": year})).trainer)
    assert (found.name, found.kernels.attention) == (trainer, attention)


PRINTED = {"source": "somebody", "gpus": "8", "gbs": "32", "seq": "8192", "step_time_s": "0.92"}


@pytest.mark.parametrize(
    ("cells", "seconds"),
    [
        ({"tokens_per_s_total": "142469"}, None),  # half of 32 x 8192 / 0.92
        ({"tokens_per_s_per_gpu": "17809"}, None),
        ({"seq": "4096", "tokens_per_s_total": "569878"}, None),  # four times
        ({"tokens_per_s_total": "142469", "notes": "tokens without padding"}, 0.92),
        ({"tokens_per_s_total": "142469", "tokens_per_s_per_gpu": "35600"}, None),
        ({"tokens_per_s_total": "284939"}, 0.92),
        ({"tokens_per_s_total": "260000"}, 0.92),  # a tenth off: other windows of averaging
        ({"step_time_s": "0.9", "tokens_per_s_per_gpu": "38000"}, 0.9),
        ({"tokens_per_s_total": "142469", "gbs": ""}, 0.92),
        ({"tokens_per_s_per_gpu": "17809", "gpus": ""}, 0.92),
        ({"step_time_s": "", "tokens_per_s_total": "262144"}, 1.0),
    ],
)
def test_a_row_whose_tokens_per_second_say_another_step_time_has_none(cells: dict[str, str], seconds: float | None) -> None:
    found = canonical(row(**PRINTED | cells))
    assert found["step_time_s"] == seconds
    assert ("step_time_s (left out: its tokens/s say another)" in found["assumed"]) == (seconds is None)
