"""Who published a measurement, and what that says beyond the cells: the trainer, and what a blank cell means there.

Everything here is documented by the source (paper, README, run scripts); nothing is fitted. A row without a source, or of source
``trireme``, is the reader's own, measured with this project's trainer; of other sources that nobody knows here, the usual is assumed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from benchmarks.published.raw import RawRow
from benchmarks.published.tuned import tuning_of
from launcher.config.trainers import profile


@dataclass(frozen=True)
class Source:
    """A source: a pattern of its name, its trainer, and its defaults."""

    pattern: str
    trainer: str  # a profile of conf/trainer
    sequence_parallel: bool = False  # where the cell is blank
    vocab: int | None = None
    dropout: bool = False  # of its GPTs
    tied: bool | None = None  # None: as the family usually is
    tied_below: int = 0  # inner width: smaller models are tied
    balance: str = "equal"  # how blocks are dealt out to stages
    micro_batches: str = ""  # where their size is blank and there are stages: "as stages", or of one sample
    sharding: str = ""  # where the cell is blank
    recompute: str = ""  # where the cell is blank
    since: int = 0  # year of the first row that this describes
    reports: str = "allocated"  # what its peak memory counts: allocated or reserved by the trainer, or all of the device
    changes: Mapping[str, object] = field(default_factory=dict)  # keys of the profile in which this row differs from it

    def ties(self, inner: int | None) -> bool | None:
        """Returns whether embedding and head share their matrix in a model of this inner width; None if the source does not say."""
        return inner < self.tied_below if self.tied_below and inner else self.tied


SOURCES = (
    Source(r"BigScience BLOOM", "megatron_deepspeed_bloom", vocab=250000, reports="device"),
    Source(r"BigScience", "megatron_deepspeed", dropout=True, vocab=50257, reports="device"),
    Source(r"llm-foundry|MosaicML", "llm_foundry_2024", since=2024),
    Source(r"llm-foundry|MosaicML", "llm_foundry"),
    Source(r"Efficient Parallelization Layouts", "aleph_alpha_scaling", vocab=128000, tied=True),  # its weight_tying is on by default
    Source(r"NeMo performance docs|Megatron-Bridge|DGX Cloud|MLPerf", "nemo", True, sharding="ZeRO-1", since=2025),
    # examples/training of NVIDIA/NeMo-Framework-Launcher 24.07, gpt3 of MLPerf 3.0 and 3.1 (config_common.sh) do not set fp8_params
    Source(r"NeMo performance docs|MLPerf", "nemo", True, sharding="ZeRO-1", changes={"numbers.stores_low_precision": False}),
    Source(r"Megatron-Bridge|DGX Cloud", "nemo", True, sharding="ZeRO-1"),
    Source(r"Megatron-LM CI", "megatron_core", True, sharding="ZeRO-1"),
    Source(r"Megatron-LM repository", "megatron_core", True, sharding="ZeRO-1", since=2023),
    Source(r"torchtitan", "torchtitan_2026", True, recompute="selective (per-op)", since=2026, reports="reserved"),
    Source(r"torchtitan", "torchtitan", True, recompute="selective (per-op)", since=2025, reports="reserved"),
    Source(r"torchtitan", "torchtitan", True, recompute="selective (per-op)", micro_batches="as stages", reports="reserved"),
    Source(r"MT-NLG", "megatron_deepspeed", dropout=True),
    Source(r"Megatron-LM SC21", "megatron_lm_2021", dropout=True),
    Source(r"Megatron-LM repository", "megatron_lm_2021", dropout=True),
    Source(r"Korthikanti", "megatron_lm_2022", dropout=True),
    Source(r"NeMo Framework Launcher", "nemo_2022", dropout=True),
    Source(r"Vocabulary Parallelism", "megatron_lm_2023", tied=False),  # its script: --untie-embeddings-and-output-weights
    Source(r"Zero Bubble", "megatron_lm_2022"),  # its table 1 counts 5 a s / h of scores: no flash attention
    Source(r"MegaScale", "megatron_lm_2023"),
    Source(r"Megatron-LM layouts", "megatron_lm_2023", dropout=True, reports="reserved"),  # its arguments are in its logs
    Source(r"BloombergGPT", "unknown_before_flash", vocab=131072, recompute="full"),  # arXiv 2303.17564, section 3: fused softmax kernels
    Source(r"Megatron-DeepSpeed", "megatron_deepspeed_2024", since=2024),
    Source(r"Megatron-DeepSpeed|GPT-NeoX|Pythia|GLM-130B", "megatron_deepspeed"),
    Source(r"DeepSpeed", "deepspeed", since=2024),
    Source(r"DeepSpeed", "deepspeed_2022", since=2022),
    Source(r"DeepSpeed", "deepspeed_2021"),
    Source(r"AMSP", "amsp"),
    Source(r"InternEvo|InternLM", "internevo"),
    Source(r"Pax", "pax"),
    Source(r"JAX|MaxText", "jax"),
    # Its scripts/scaling_benchmarks.py ties them where intermediate_size < 10_000. The sizes in the models' names count them so.
    Source(r"nanotron benchmark summary|Ultra-scale playbook", "nanotron", True, tied_below=10_000),
    Source(r"nanotron", "nanotron", True),
    Source(r"FSDP|LitGPT|Lightning|AutoModel|KempnerForge", "fsdp"),
    Source(r"trireme|^$", "trireme"),
    Source(r"Megatron|Nemotron", "megatron_core", True, since=2024),
    Source(r"Megatron", "megatron_lm_2023", dropout=True, since=2023),  # megatron/arguments.py: 0.1 unless the command line says otherwise
    Source(r"Megatron", "megatron_lm_2022", dropout=True, since=2022),
    Source(r"Megatron", "megatron_lm_2021", dropout=True),
    Source(r"LiBai", "unknown_before_flash", dropout=True),  # configs/gpt2_pretrain.py
    Source("", "unknown_2024", True, since=2024),
    Source("", "unknown", since=2023),
    Source("", "unknown_before_flash"),
)
"""The first whose name and year fit."""
LATEST = 9999
"""The year of a row that does not say."""


def source_of(row: RawRow) -> Source:
    """The publisher of a row, with what the row itself says of the trainer."""
    year = row.whole("year") or LATEST
    found = next(p for p in SOURCES if year >= p.since and re.search(p.pattern, row.source, re.IGNORECASE))
    trainer, changes = _trainer(row, found.trainer)
    balance = "cost" if _method(row) == "redis" else found.balance
    recompute = _policy(row, trainer) or found.recompute
    changes = {**found.changes, **changes}
    if tuning := tuning_of(row):
        changes = {**changes, **tuning.changes}
    if profile(trainer).kernels.pointwise == "eager" and re.search(r"(?<!no )torch\.compile", row.notes):
        changes = {**changes, **COMPILED}
    return replace(found, trainer=trainer, changes=changes | _as_noted(row), balance=balance, recompute=recompute)


COMPILED = {f"kernels.{name}": getattr(profile("torchtitan").kernels, name) for name in ("pointwise", "host_forward", "host_backward")}
"""What torch.compile makes of an eager trainer's blocks."""


def _policy(row: RawRow, trainer: str) -> str:
    """What trainers in JAX recompute where the cell is blank."""
    if trainer in ("maxtext", "paxml"):
        return "selective"
    found = (how for size, how in PAX_POLICIES if re.search(size, row.text("model"), re.IGNORECASE))
    return next(found, "") if trainer == "pax" else ""


PAX_POLICIES = ((r"126M", "none"), (r"\b5B", "selective"), (r"175B", "full"))
"""Its configurations of those models: GPT126M does not repeat layers, so nothing is checkpointed; GPT175B has the default, SAVE_NOTHING."""


def _trainer(row: RawRow, usual: str) -> tuple[str, dict[str, object]]:
    """The trainer of a row where its source has several, and what it did otherwise."""
    model = row.text("model").lower()
    if "maxtext" in model:
        return "maxtext", {"recompute.selective": "but_projections"} if "llama2" in model else {}
    if "paxml" in model:
        return "paxml", {}
    if "zero-3" in row.sharding and usual.startswith(("megatron", "megascale")):
        return _sharded(row), {}
    if usual == "megatron_deepspeed" and "Megatron-LM" in row.notes:
        return "megatron_lm_spring_2021", {}
    if row.source.startswith("MegaScale") and "MegaScale" in row.notes + row.text("model") and "Megatron-LM" not in row.notes:
        return "megascale", {}
    return METHODS.get(_method(row), usual), {}


def _sharded(row: RawRow) -> str:
    """The trainer of a row with sharded parameters, of a source that has several."""
    table = row.text("table_or_file")
    if table.startswith("experiments/gpt2"):
        return "huggingface_deepspeed" if "HF" in table else "megatron_zero"
    year = row.whole("year") or 0
    return next(name for since, name in ((2024, "deepspeed"), (2022, "deepspeed_2022"), (0, "deepspeed_2021")) if year >= since)


METHODS = {
    "zb-2p": "zero_bubble_2p",
    "vocab-1": "vocabulary_parallelism_1",
    "vocab-2": "vocabulary_parallelism_2",
    "interlaced": "interlaced",
}
"""What the papers on zero bubbles and on vocabulary parallelism compare, beside a ``baseline`` and a balanced ``redis`` of Megatron-LM."""


def _method(row: RawRow) -> str:
    """Which of them a row of those papers is."""
    if row.source.startswith("Zero Bubble"):
        return "zb-2p" if row.schedule in ("zb-2p", "zb-h2") else "baseline"
    if not row.source.startswith("Vocabulary Parallelism"):
        return ""
    words = f"{row.notes} {row.text('table_or_file')} {row.text('model')} {row.text('zero_stage_or_sharding')}".lower()
    found = re.search(r"redis|vocab(?:ulary)?[- ]?[12]\b|interlaced", words)
    return re.sub(r"vocab\w*[- ]?", "vocab-", found.group()) if found else "baseline"


def _as_noted(row: RawRow) -> dict[str, object]:
    """The kernels and modes that a row names in its notes and cells."""
    changes: dict[str, object] = {}
    kernel = row.kernel
    if kernel:
        changes["kernels.attention"] = _kernel(kernel)
        changes["kernels.causal_skip"] = "flash" in kernel
        changes["kernels.fused_norm"] = "RMS" in kernel
    notes = "; ".join([row.notes, *map(row.text, ("precision", "zero_stage_or_sharding", "recompute"))]).lower()
    for words, change in NOTES:
        if re.search(words, notes):
            changes |= change
    if layers := re.findall(r"activation offload (\d+) layers", notes):  # where versions of a recipe differ: what they have in common
        changes["memory.host_layers"] = min(map(int, layers))
    if found := re.search(r"container (\d+)\.(\d+)", row.notes):
        changes |= _recipe(row, (int(found.group(1)), int(found.group(2))))
    for words, kind in SELECTIVE:
        if re.search(words, row.text("recompute").lower()):
            changes["recompute.selective"] = kind
    return changes


GRAPHS: dict[str, object] = {"kernels.launches_per_block": 2, "kernels.launches_per_mixture": 60, "overlap.dispatch_by_domain": True}
"""CUDA graphs of attention and router, HybridEP."""


def _recipe(row: RawRow, container: tuple[int, int]) -> dict[str, object]:
    """What the performance recipes of Megatron-Bridge switch on for mixtures of experts, by GPU and container (its perf_recipes folder)."""
    gpu, low = row.text("gpu"), "mxfp8" in row.text("precision").lower()
    if row.text("arch") != "moe":
        return {}
    if (
        gpu.startswith("B200") and "deepseek" in row.text("model").lower() and (row.whole("ep") or 1) > 8
    ):  # DeepEP, overlap_moe_expert_parallel_comm
        return {"overlap.experts": True, "overlap.dispatch_by_domain": True}
    if gpu.startswith("H100"):
        staged = (row.whole("pp") or 1) > 1
        return {"overlap.experts": staged} if staged or container < (26, 4) else dict(GRAPHS)
    if container >= (26, 6) and low:  # one CUDA graph of the whole step, HybridEP beside another micro-batch
        return {
            "kernels.launches_per_block": 0,
            "kernels.launches_per_mixture": 0,
            "overlap.experts": True,
            "overlap.dispatch_by_domain": True,
        }
    return dict(GRAPHS) if gpu.startswith("GB") else {}


def _kernel(name: str) -> str:
    if not name.startswith("flash"):
        return "fused_softmax" if name == "fused" else "unfused"
    return "flash1" if "v1" in name else "flash2"


NOTES: tuple[tuple[str, dict[str, object]], ...] = (
    (r"full cpu offload(?!; scatemb)", {"memory.optimizer_on_host": True}),
    (r"cpu offload variant: following 2:|pa_cpu=n", {"recompute.inputs_on_host": False}),  # gpt2.md: without --checkpoint-in-cpu
    (r"mxfp8|rowwise|blockwise", {"numbers.block_scaled": True}),
    (r"\beager\b|aot_eager", {"kernels.pointwise": "eager"}),
    (r"eager float8", {"kernels.eager_casts": True}),
    # torchtitan's graph trainer before its memory policies, and what it was made of: README of then, "compiled with the aot_eager
    # backend", buckets
    # that make collectives overlap only on demand
    (
        r"compiler toolkit|graph trainer.*(per-op|graph pass)",
        {"kernels.pointwise": "eager", "overlap.gradients": False, "overlap.gathers": False},
    ),
    # in the graph of a whole step tensors die after their last use; graph trainer's memory policies keep what is tagged as random:
    # attention
    (r"graph trainer|compiler toolkit|simplefsdp", {"memory.logit_copies": 0, "memory.logit_copies_fp32": 2}),
    (r"graph trainer", {"recompute.keeps_attention": True}),
    (r"async tp", {"overlap.tensor": "all"}),
    # AMSP, section 6.4, adds them one by one: gathers of sharded parameters, then the gradients' all-reduce, then the broadcast of updates
    (r"no overlap", {"overlap.gradients": False, "overlap.gathers": False, "overlap.refresh": False}),
    (r"no all-reduce overlap", {"overlap.gradients": False, "overlap.refresh": False}),
    (r"no broadcast overlap", {"overlap.refresh": False}),
    (r"cuda graph of the whole step", {"kernels.launches_per_block": 0}),
    (r"cuda graph of each layer", {"kernels.launches_per_block": 2}),
    (r"fp8 parameters", {"numbers.stores_low_precision": True}),
    (r"no overlap of tensor communication", {"overlap.tensor": "backward"}),  # without user buffers: gathers beside the backward's products
    (r"cuda_launch_blocking=1", {"kernels.launch_blocking": True}),
    # bf16 gradients and their 4-byte sum, which ranks sum as a whole (deepspeed/runtime/pipe/engine.py: _bf16_reduce_grads)
    (r"fp32 grad accumulation|bf16optimizer", {"numbers.gradient_bytes": 6, "numbers.reduce_bytes": 4, "overlap.all_reduces_states": True}),
    (r"no-bias-gelu-fusion", {"kernels.pointwise": "eager"}),  # options of Megatron-LM's command line
    (r"no-gradient-accumulation-fusion", {"kernels.accumulate_fused": False}),
    (r"no-async-tensor-model-parallel-allreduce", {"overlap.tensor": "none"}),
    (r"reduced in bf16", {"numbers.reduce_bytes": 2}),  # DeepSpeed's default since its pull request 3370 (April 2023)
)
SELECTIVE = ((r"default policy", "products"), (r"per-op|graph pass", "per_op"), (r"layernorm|moe_act|mla_up_proj", "norms"))
"""What the words of the recompute column mean."""
