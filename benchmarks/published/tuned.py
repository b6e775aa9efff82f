"""What recipes of tuning say of rows that print neither their adapters nor their data: from the scripts behind the rows, none is fitted."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from benchmarks.published.raw import RawRow

SQUAD = 200
"""Tokens of the text that a token of SQuAD 1.1 is in: a paragraph with a question and its answer. The 269 of its first article have 1,030
characters on average, and a token has four to five. Memory sets the pace of such short texts: 130 or 300 change no step by 0.3 %."""


@dataclass(frozen=True)
class Tuning:
    """A kind of rows, and what their recipe says beyond the cells."""

    source: str  # pattern of its name
    model: str  # pattern of the model's
    text: int = 0  # tokens of one of the texts packed into a sequence; 0: whole sequences
    rank: int = 0  # of LoRA
    beside: tuple[str, ...] = ("qkv",)  # the matrices that have it
    virtual_pipeline: int | None = None  # where the cell is blank
    sequence_parallel: bool | None = None  # where the cell is blank
    changes: Mapping[str, object] = field(default_factory=dict)  # keys of the trainer's profile

    @property
    def targets(self) -> tuple[str, ...]:
        return self.beside if self.rank else ()


STORED: dict[str, object] = {"numbers.stores_low_precision": True}
"""``fp8_params``: weights are kept in 8 bits."""
UNFUSED: dict[str, object] = STORED | {"kernels.fused_loss": False}
"""And ``cross_entropy_loss_fusion=False``."""
TUNINGS = (
    # NeMo 24.07. Data: "we use SQuAD-v1.1, and the inputs are packed to 4096 tokens" (docs/source/performance_benchmarks.md). Layout,
    # fp8_params, adapter_dim: NVIDIA/NeMo-Framework-Launcher 24.07, examples/peft/llama/h100 and conf/peft/llama/sft.yaml; without
    # sequence parallelism NeMo turns ub_tp_comm_overlap off (megatron_base_model.py). Targets: peft_config.py. Nothing sets
    # cross_entropy_loss_fusion
    Tuning("NeMo performance docs", r"13b.*sft", SQUAD, virtual_pipeline=10, changes=UNFUSED),
    Tuning("NeMo performance docs", r"70b.*sft", SQUAD, virtual_pipeline=20, changes=UNFUSED),
    Tuning("NeMo performance docs", r"sft", SQUAD, changes=UNFUSED),
    Tuning("NeMo performance docs", r"lora", SQUAD, 32, sequence_parallel=False, changes=UNFUSED | {"overlap.tensor": "none"}),
    # dgxc-benchmarking v25.04, ft_llama3: finetune_recipe(performance_mode=True) of NeMo 25ec4e98, llm/recipes/llama3_8b.py:
    # SQuAD packed to 4096; with LoRA dim 8, linear_qkv, cross_entropy_loss_fusion False; precision/mixed_precision.py: fp8_params
    Tuning("DGX Cloud", r"finetun.*sft", SQUAD, changes=STORED),
    Tuning("DGX Cloud", r"finetun.*lora", SQUAD, 8, changes=UNFUSED),
    # Megatron-Bridge 0.5, scripts/performance/configs/llama/llama3_llm_finetune.py and recipes/llama/llama3.py: with LoRA dim 16,
    # linear_qkv, cross_entropy_loss_fusion False; mixed_precision.py: fp8_param. The FLOPs per token of the LoRA rows are what
    # flop_utils.py counts for packed SQuAD alone (4 N). Nothing says that SFT had other data than scripts/performance takes unless told:
    # whole sequences (--data mock)
    # llama2_70b_lora of NVIDIA's submissions, conf/megatron_gpt_peft_tuning_config.yaml and train.py: dim 16, "attention", fp8_params,
    # packed_sequence_return_cu_seqlen False: attention does not stop at the ends of texts; cross_entropy_loss_fusion False, or nothing sets
    # it; a2a_experimental (LORA_A2A of config_common.sh); disable_parameter_transpose_cache
    Tuning("MLPerf", r"lora", 0, 16, ("qkv", "output"), changes=UNFUSED | {"overlap.adapters_exchange": True, "numbers.weight_bytes": 1}),
    Tuning("Megatron-Bridge", r"lora", SQUAD, 16, changes=UNFUSED),
    Tuning("Megatron-Bridge", r"sft", changes=STORED),
)
"""The first whose source and model fit."""


def tuning_of(row: RawRow) -> Tuning | None:
    """What the recipe of a row says, where one is known."""
    model = row.text("model").lower()
    return next((t for t in TUNINGS if re.search(t.source, row.source) and re.search(t.model, model)), None)
