"""What the sources of published tables say of their trainers and of cells that they leave blank."""

from __future__ import annotations

from operator import attrgetter

import pytest

from launcher.config.trainers import changed, profile
from launcher.tables.published import Row
from launcher.tables.publishers import publisher
from launcher.tables.questions import Unanswerable, layout_of


def row(**cells: str) -> Row:
    return Row(1, cells)


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
        ({"source": "BigScience GPT2 V100", "notes": "Megatron-LM"}, {"memory.bucket_bytes": 0.0}),
        ({"source": "Megatron-LM SC21", "year": "2021", "zero_stage_or_sharding": "ZeRO-3"}, {"overlap.single_rail": True}),
        ({"source": "DeepSpeed blogs", "year": "2021", "zero_stage_or_sharding": "ZeRO-3"}, {"overlap.single_rail": True}),
        ({"source": "DeepSpeed blogs", "year": "2022", "zero_stage_or_sharding": "ZeRO-3"}, {"overlap.single_rail": False}),
        ({"source": "JAX-Toolbox Pax", "model": "GPT 5B"}, {"name": "Pax", "recompute.selective": "but_weights"}),
        (
            {"source": "BigScience GPT2 V100", "table_or_file": "experiments/gpt2.md HF", "zero_stage_or_sharding": "ZeRO-3"},
            {"kernels.attention": "unfused", "recompute.inputs_on_host": False, "memory.optimizer_on_host": False, "overlap.gathers": True},
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
            {"recompute.inputs_on_host": False, "memory.optimizer_on_host": False, "overlap.gathers": True},
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
        (
            {
                "source": "Megatron-Bridge",
                "model": "LLAMA3_70B",
                "gpu": "GB200",
                "zero_stage_or_sharding": "FSDP 64",
                "notes": "container 26.04",
            },
            {"memory.host_layers": 40},
        ),
    ],
)
def test_rows_say_what_their_trainer_did(cells: dict[str, str], facts: dict[str, object]) -> None:
    found = publisher(row(**cells))
    trainer = changed(profile(found.trainer), found.changes)
    assert {name: attrgetter(name)(trainer) for name in facts} == facts


@pytest.mark.parametrize(("model", "recompute"), [("GPT 126M", "none"), ("GPT 5B", "selective"), ("GPT 175B", "full"), ("LLaMA 70B", "")])
def test_pax_recomputes_what_its_configurations_say(model: str, recompute: str) -> None:
    assert publisher(row(source="JAX-Toolbox Pax READMEs", model=model)).recompute == recompute


def test_a_batch_that_is_not_given_is_what_the_row_implies() -> None:
    """A micro-batch for each replica where parameters are sharded, or as many as the notes count."""
    sharded = {"source": "X", "gpus": "64", "tp": "1", "pp": "1", "mbs": "2", "zero_stage_or_sharding": "ZeRO-3"}
    plain = {**sharded, "zero_stage_or_sharding": "ZeRO-1"}
    named = {**sharded, "mbs": "", "model": "Llama3 70b (FSDP+DP MBS=4)"}
    found = [layout_of(row(**cells), publisher(row(**cells)))[1] for cells in (sharded, {**plain, "notes": "micro_num 4"}, named)]
    assert found == [128, 512, 256]
    with pytest.raises(Unanswerable, match="global batch"):
        layout_of(row(**plain), publisher(row(**plain)))


@pytest.mark.parametrize(("year", "size"), [("2024", 4), ("2025", 1)])
def test_torchtitan_once_made_as_many_micro_batches_as_stages(year: str, size: int) -> None:
    cells = {"source": "torchtitan", "year": year, "gpus": "512", "tp": "8", "pp": "8", "gbs": "256", "zero_stage_or_sharding": "FSDP2 8"}
    one = row(**cells)
    assert layout_of(one, publisher(one))[0]["micro_batch"] == size


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
    found = publisher(Row(1, {"source": "Vocabulary Parallelism (arXiv 2411.05288)", "notes": notes}))
    assert (profile(found.trainer).name, found.balance, found.tied) == (name, balance, False)
