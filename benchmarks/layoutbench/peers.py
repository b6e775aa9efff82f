"""Other predictors of a training step behind one method: seconds of a case, or why it cannot be said.

A peer is used as its repository has it, from a folder that is given; nothing of it is here. It gets a machine that it ships a description
of, and the run as near as its inputs come to it.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Protocol

from launcher.tables.cases import TableCase

UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


class Unsaid(Exception):
    """A case that a predictor has no input for; its text says which."""


class Predictor(Protocol):
    """Step times, one case at a time."""

    def seconds(self, case: TableCase) -> float:
        """Predicts the step time in seconds. ``Unsaid`` where it cannot."""


def dense(case: TableCase) -> None:
    """Raises ``Unsaid`` for what no peer here has inputs for, or none that it uses."""
    shape, layout = case.shape, case.layout
    for name, found in (
        ("a mixture of experts", shape.experts is not None),
        ("two stacks", len(shape.stacks) > 1),
        ("context ranks", layout["context"] > 1),
        ("adapters", shape.frozen),
        ("a window", bool(shape.window)),
        ("a precision below 16 bits", case.precision in ("fp8", "fp4")),
    ):
        if found:
            raise Unsaid(name)


def shards_states_alone(case: TableCase) -> None:
    """Raises ``Unsaid`` where gradients or weights are sharded, for peers that know only ZeRO-1."""
    if case.layout["grads"] > 1:
        raise Unsaid("shards of gradients or weights")


def machine(case: TableCase, names: dict[str, str]) -> str:
    """What a peer calls the device of a case."""
    name = case.row["hardware"]
    if name not in names:
        raise Unsaid(f"no description of {name}")
    return names[name]


class Calculon:
    """Calculon (Isaev, McDonald, Dennison & Vuduc, SC 2023): systems as shipped. A gated MLP is one of 1.5 times the width."""

    SYSTEMS: ClassVar = {"a100_80": "a100_80g", "h100": "h100_80g_nvl8"}
    RECOMPUTE: ClassVar = {"none": "none", "selective": "attn_only", "full": "full"}

    def __init__(self, folder: Path):
        sys.path.insert(0, str(folder))
        self.module = importlib.import_module("calculon.llm.llm").Llm
        self.system = importlib.import_module("calculon.system").System
        self.folder, self.log = folder, logging.getLogger("calculon")

    def seconds(self, case: TableCase) -> float:
        dense(case)
        shards_states_alone(case)
        shape = case.shape
        path = self.folder / "systems" / f"{machine(case, self.SYSTEMS)}.json"
        model = {
            "hidden": int(shape.hidden),
            "feedforward": int(shape.ffn * (1.5 if shape.gated else 1)),
            "seq_size": int(shape.seq),
            "attn_heads": int(shape.heads),
            "attn_size": int(shape.head_width),
            "num_blocks": int(shape.layers),
        }
        try:
            application = self.module.Application(model)
            run = self.module(application, self.log)
            system = self.system(json.loads(path.read_text()))
            run.compile(system, self.module.Execution.from_json(self._execution(case)))
            run.run(system)
        except (self.module.Error, AssertionError) as error:
            raise Unsaid(str(error).split("\n")[0][:80] or "a case that it asserts cannot be") from None
        return float(run.get_total_time())

    def _execution(self, case: TableCase) -> dict[str, Any]:
        layout = case.layout
        tensor, data, pipeline = (int(layout[name]) for name in ("tensor", "data", "pipeline"))
        return {
            "num_procs": tensor * data * pipeline,
            "tensor_par": tensor,
            "pipeline_par": pipeline,
            "data_par": data,
            "tensor_par_net": 0,
            "pipeline_par_net": 1,
            "data_par_net": int(tensor * data > case.device.domain),
            "batch_size": case.global_batch,
            "microbatch_size": int(layout["micro_batch"]),
            "datatype": "float16",
            "fused_activation": True,
            "attention_type": "multihead",
            "activation_recompute": self.RECOMPUTE[recompute(case)],
            "pipeline_interleaving": int(layout["virtual_pipeline"]),
            "optimizer_sharding": bool(layout["optimizer"] > 1),
            "tensor_par_comm_type": "rs_ag" if layout["sequence_parallel"] else "ar",
            "tensor_par_overlap": "none",
            "seq_par_ag_redo": False,
            "data_par_overlap": False,
            "weight_offload": False,
            "activations_offload": False,
            "optimizer_offload": False,
            "training": True,
        }


class LLMAnalysis:
    """llm-analysis (Li): GPU files as shipped, half of the peak and 0.9 of the memory's bandwidth as in its example of LLaMA."""

    MACHINES: ClassVar = {
        "a100_40": "a100-sxm-40gb",
        "a100_80": "a100-sxm-80gb",
        "h100": "h100-sxm-80gb",
        "v100_16": "v100-sxm-16gb",
        "v100_32": "v100-sxm-32gb",
        "mi250x": "mi250x-128gb",
    }
    RECOMPUTE: ClassVar = {"none": 0, "selective": 1, "full": 4}

    def __init__(self, folder: Path):
        sys.path.insert(0, str(folder))
        with contextlib.redirect_stdout(io.StringIO()):
            self.analysis = importlib.import_module("llm_analysis.analysis")
            self.config = importlib.import_module("llm_analysis.config")
        logging.getLogger("llm_analysis").setLevel(logging.ERROR)
        self.analysis.logger.setLevel(logging.ERROR)

    def seconds(self, case: TableCase) -> float:
        dense(case)
        shape, layout = case.shape, case.layout
        gpu = self.config.get_gpu_config_by_name(machine(case, self.MACHINES))
        model = self.config.ModelConfig(
            name="case", num_layers=int(shape.layers), n_head=int(shape.heads), hidden_dim=int(shape.hidden), vocab_size=int(shape.vocab),
            max_seq_len=int(shape.seq), num_key_value_heads=int(shape.kv_heads), ffn_embed_dim=int(shape.ffn),
            mlp_gated_linear_units=shape.gated,
        )  # fmt: skip
        zero = next((stage for stage, name in ((3, "params"), (2, "grads"), (1, "optimizer")) if layout[name] > 1), 0)
        ranks = self.config.ParallelismConfig(
            tp_size=int(layout["tensor"]),
            pp_size=int(layout["pipeline"]),
            dp_size=int(layout["data"]),
            sp_size=int(layout["tensor"]) if layout["sequence_parallel"] else 1,
        )
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                analysis = self.analysis.LLMAnalysis(
                    model, gpu, self.config.get_dtype_config_by_name("w16a16e16"), ranks, flops_efficiency=0.5, hbm_memory_efficiency=0.9
                )
                found = analysis.training(
                    batch_size_per_gpu=int(layout["micro_batch"]),
                    global_batch_size=case.global_batch,
                    seq_len=int(shape.seq),
                    activation_recomputation=self.analysis.ActivationRecomputation(self.RECOMPUTE[recompute(case)]),
                    ds_zero=self.analysis.DSZeRO(zero),
                    flash_attn=shape.fused_attention,
                )
        except (AssertionError, ValueError, ZeroDivisionError) as error:
            raise Unsaid(str(error).split("\n")[0][:80] or "a case that it asserts cannot be") from None
        return float(found["latency_per_iter"])


class SimuMax:
    """SimuMax (Moore Threads): the B200 that it ships, and an A100 with its operators' efficiencies and the links of its documentation's
    template, since the one that it ships is on PCIe."""

    SYSTEMS: ClassVar = {"a100_80": "a100_pcie", "b200": "b200_bf16_ceperm"}

    def __init__(self, folder: Path):
        sys.path.insert(0, str(folder))
        with contextlib.redirect_stdout(io.StringIO()):
            self.config = importlib.import_module("simumax.core.config")
            self.perf = importlib.import_module("simumax.core.perf_llm")
        self.folder = folder

    def seconds(self, case: TableCase) -> float:
        dense(case)
        shards_states_alone(case)
        name = machine(case, self.SYSTEMS)
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                perf = self.perf.PerfLLM()
                perf.configure(self._strategy(case), self._model(case), self._system(name))
                perf.run_estimate()
                found = perf.analysis_cost()
        except Exception as error:  # of many kinds
            raise Unsaid(f"{type(error).__name__}: {error}".split("\n")[0][:80]) from None
        value, unit = str(found.data["metrics"]["step_time"] if "metrics" in found.data else found.data["duration_time_per_iter"]).split()
        return float(value) * UNITS[unit]

    def _system(self, name: str) -> Any:
        written = json.loads((self.folder / "configs" / "system" / f"{name}.json").read_text())
        if name == "a100_pcie":
            written["networks"] = template(self.folder)
        return self.config.SystemConfig.init_from_dict(written)

    def _model(self, case: TableCase) -> Any:
        shape = case.shape
        return self.config.ModelConfig.init_from_dict(
            {
                "model_type": "dense",
                "model_name": "case",
                "hidden_size": int(shape.hidden),
                "head_num": int(shape.heads),
                "kv_head_num": int(shape.kv_heads),
                "head_size": int(shape.head_width),
                "intermediate_size": int(shape.ffn),
                "layer_num": int(shape.layers),
                "vocab_size": int(shape.vocab),
                "use_swiglu": bool(shape.gated),
            }
        )

    def _strategy(self, case: TableCase) -> Any:
        layout, kind = case.layout, recompute(case)
        data = int(layout["data"])
        if layout["virtual_pipeline"] > 1:
            raise Unsaid("interleaved stages")
        return self.config.StrategyConfig.init_from_dict(
            {
                "seq_len": int(case.shape.seq),
                "micro_batch_size": int(layout["micro_batch"]),
                "micro_batch_num": case.global_batch // (data * int(layout["micro_batch"])),
                "dtype": "bf16",
                "world_size": int(layout["tensor"]) * int(layout["pipeline"]) * data,
                "tp_size": int(layout["tensor"]),
                "pp_size": int(layout["pipeline"]),
                "ep_size": 1,
                "etp_size": 1,
                "moe_dispatcher_policy": "all2all",
                "enable_sequence_parallel": bool(layout["sequence_parallel"]),
                "interleaving_size": 1,
                "zero_state": int(layout["optimizer"] > 1),
                "enable_dropout": bool(case.shape.dropout),
                "use_fused_norm": True,
                "use_math_sdp": not case.shape.fused_attention,
                "use_flash_sdp": bool(case.shape.fused_attention),
                "use_fp32_accum_grad": True,
                "enable_recompute": kind != "none",
                "mem_factor": 0.94,
            }
            | ({"recompute_granularity": "full_block", "recompute_layer_num": int(case.shape.layers)} if kind == "full" else {})
            | ({"recompute_granularity": "selective_recompute", "attn_recompute": True} if kind == "selective" else {})
        )


def template(folder: Path) -> dict[str, Any]:
    """The networks of the minimal template of SimuMax's documentation."""
    text = (folder / "docs" / "system.md").read_text()
    block = text.split("Minimal viable template", 1)[1].split("```json", 1)[1].split("```", 1)[0]
    return dict(json.loads(block)["networks"])


def recompute(case: TableCase) -> str:
    """None, selective or full: what all peers know."""
    from trainer.shared.run.schema import RECOMPUTE

    kind = RECOMPUTE[int(case.layout["recompute"])]
    if kind not in ("none", "selective", "full"):
        raise Unsaid(f"recomputation of kind {kind}")
    if kind == "full" and case.layout["recompute_layers"] >= 0:
        raise Unsaid("recomputation of some blocks")
    return kind


PEERS: dict[str, Callable[[Path], Predictor]] = {"calculon": Calculon, "llm-analysis": LLMAnalysis, "simumax": SimuMax}
"""By the name under which a folder is given."""
