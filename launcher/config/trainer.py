"""A trainer, as far as step time and memory depend on it: its kernels and number formats, and what it keeps, recomputes and overlaps. Data:
conf/trainer/NAME.yaml.

A profile states facts of a code base, each with its source in a comment; nothing in it is fitted. Keys that a profile leaves out have the
values usual for trainers of today. The profile of this project's own trainer is ``trireme``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Optional

from trainer.shared.run.foreign import REPORTS, STARTS
from trainer.shared.run.keys import key

ATTENTION_KERNELS = ("unfused", "fused_softmax", "tiled", "flash1", "flash2")
POINTWISE = ("eager", "fused", "compiled")
SELECTIVE = ("attention", "per_op", "norms", "products", "but_weights", "but_queries", "but_projections")
PROGRAMS = ("none", "embedded", "command")
TENSOR_OVERLAPS = ("none", "backward", "all")
CONTEXT_WAYS = ("ring", "all_gather", "all_to_all")


@dataclass(frozen=True)
class KernelProfile:
    """The computation of operations on the device."""

    attention: str = key("flash2", "attention kernel; fused_softmax: scale, mask and softmax in one; tiled: Triton's, or PyTorch's memory-efficient one", choices=ATTENTION_KERNELS)
    attention_dropout: bool = key(True, "the attention kernel applies dropout; false: with dropout the scores are written to memory")
    dropout_in_blocks: bool = key(False, "and if false, scores are computed a block of queries at a time, again in backward, and none is kept")
    causal_skip: bool = key(True, "the attention kernel skips the scores above the diagonal")
    newest_attention: bool = key(False, "attention kernels for the newest devices (cuDNN, flash 3), not hardware.legacy_kernel_factor of the peak")
    fused_norm: bool = key(True, "a norm is one kernel")
    pointwise: str = key("fused", "bias, dropout and activation: eager, fused (one kernel each) or compiled", choices=POINTWISE)
    fused_loss: bool = key(False, "one kernel computes the loss from 16-bit logits")
    loss_passes_forward: float = key(0.0, "further reads and writes of 4-byte logits in forward", minimum=0)
    loss_passes_backward: float = key(0.0, "further reads and writes of 4-byte logits in backward", minimum=0)
    late_loss: bool = key(False, "head and loss wait for backward, which makes logits and their gradients together")
    accumulate_fused: bool = key(False, "the product that computes a weight gradient adds it to the gradient buffer")
    cast_weights_once: bool = key(False, "weights are cast to 8 bits once per step, not for every micro-batch")
    adapts_in_place: bool = key(False, "what LoRA adds goes straight into a matrix' result; false: kernels of its own scale it, add it and add gradients up")
    eager_casts: bool = key(False, "8-bit casts are made of tensor operations, not of one kernel")
    eager_ring: bool = key(False, "parts of a ring of context ranks are merged by tensor operations, and a selective recomputation goes round again")
    launches_per_block: float = key(40, "kernels launched by a block's forward; backward launches twice as many", minimum=0)
    host_forward: float = key(1.0, "host time of a block's forward / that of plain PyTorch modules which launch as many kernels", minimum=0)
    host_backward: float = key(1.0, "the same of its backward", minimum=0)
    host_shards: float = key(5, "host time of gathering, or of reducing, a block's shards, in kernel launches of plain PyTorch", minimum=0)
    host_tensor: float = key(5, "host time of a collective of tensor ranks with what layers do around it, in kernel launches of plain PyTorch", minimum=0)
    launches_per_mixture: float = key(150, "further launches of a mixture of experts: routing, sorting, dispatch, products", minimum=0)
    mlp_dropout: bool = key(False, "behind an encoder and in it, dropout between the matrices of an MLP, too, as T5 has it")
    launch_blocking: bool = key(False, "the host waits for every kernel (CUDA_LAUNCH_BLOCKING=1)")


@dataclass(frozen=True)
class NumberProfile:
    """Number formats in 16-bit (or narrower) training, in bytes per parameter."""

    weight_bytes: float = key(2, "stored parameters", minimum=0)
    gradient_bytes: float = key(4, "gradient buffer", minimum=0)
    reduce_bytes: float = key(4, "gradients on the wire", minimum=0)
    wide_unless_fp16: bool = key(False, "gradients are kept and summed in 4 bytes all the same, unless the run is in fp16")
    optimizer_bytes: float = key(12, "optimizer states: master weights and two moments", minimum=0)
    averages_weights: bool = key(False, "an average of the master weights is kept beside them, in fp32")
    orthogonal_steps: int = key(0, "iterations in which the momentum of blocks' matrices, their only moment, is orthogonalised (Muon); 0 = Adam", minimum=0)
    orthogonal_rows: bool = key(False, "rows of those matrices have a second moment each (NorMuon)")
    block_scaled: bool = key(False, "8-bit operands have a scale per row or block, so both orientations are cast; false: one per tensor")
    wide_weight_gradients: bool = key(False, "weight gradients of 8-bit training are products of 16-bit numbers")
    stores_low_precision: bool = key(False, "8-bit training stores its weights in 8 bits: they are not cast but transposed, for input gradients")
    saves_low_precision: bool = key(False, "8-bit training keeps the 8-bit inputs of products for backward")
    gathers_low_precision: bool = key(False, "8- and 4-bit training casts activations before it gathers them over tensor ranks")


@dataclass(frozen=True)
class CommunicatorProfile:
    """Communicators that a rank opens per parallel axis on which it has neighbours."""

    tensor: int = key(1, "communicators of the tensor group", minimum=0)
    pipeline: int = key(1, "communicators of the pipeline group", minimum=0)
    data: int = key(1, "communicators of the data-parallel group", minimum=0)
    context: int = key(1, "communicators of the context-parallel group", minimum=0)


@dataclass(frozen=True)
class MemoryProfile:
    """Contents of device memory, and how long they stay there."""

    sharded_logits: bool = key(True, "tensor ranks keep their part of the logits; false: they gather all of them")
    logit_copies: float = key(1, "copies of the logits and their gradient alive at the peak, in the format of the product", minimum=0)
    logit_copies_fp32: float = key(3, "the same in 4 bytes", minimum=0)
    logit_chunk_bytes: Optional[float] = key(
        None, "head and loss take chunks of tokens whose logits are up to so many bytes, in 4-byte numbers; null = all at once", above=0
    )
    padded_vocabulary: bool = key(False, "embedding and head have rows of padding, as trainer.shared.parallel.shards says")
    frees_logits: bool = key(False, "nothing refers to the logits while the blocks run backward")
    copied_heads: bool = key(False, "rotated or regrouped queries and keys are new tensors while the product's output stays")
    score_copies: float = key(2, "copies of the attention scores, where attention is unfused", minimum=0)
    bucket_bytes: float = key(0, "communication buckets that hold copies of gradients or weights", minimum=0)
    buckets_at_end: bool = key(False, "a pipeline fills its buckets after its last micro-batch")
    pooled_buffers: bool = key(False, "gathered parameters and unsharded gradients live in a pool that never shrinks")
    live_parameters: Optional[float] = key(None, "most sharded parameters that are gathered at a time; null = no limit", minimum=0)
    late_frees: bool = key(False, "gradients that tensor ranks sum beside a product are freed when the device has summed them, not when the host lets go "
        "(record_stream of torch.distributed)")
    late_gradients: bool = key(False, "backward allocates gradient shards while it frees the stored inputs of blocks")
    keeps_expert_outputs: bool = key(False, "outputs of experts stay for the gradients of their weights, with what names their order")
    whole_experts: bool = key(False, "tensor ranks have different experts, each of them whole but for layout.expert_tensor; false: every expert is cut over them")
    optimizer_on_host: bool = key(False, "optimizer states live in host memory")
    host_layers: float = key(0, "blocks of the model whose saved activations travel to host memory and back", minimum=0)
    communicators: CommunicatorProfile = key(CommunicatorProfile, "communicators of a rank")


@dataclass(frozen=True)
class RecomputeProfile:
    """Recomputation of activations: its extent and its stored inputs."""

    selective: str = key("attention", "what layout.recompute=selective recomputes (launcher/cost/time/recompute.py)", choices=SELECTIVE)
    keeps_attention: bool = key(False, "where whole blocks are recomputed, attention's output is kept")
    stops_early: bool = key(False, "recomputation of a block leaves out the product that ends it, which backward does not need")
    sharded_inputs: bool = key(False, "stored block inputs are sharded over the tensor ranks")
    inputs_on_host: bool = key(False, "stored block inputs travel to host memory and back")


@dataclass(frozen=True)
class PipelineProfile:
    """Pipeline stages: how they are cut and how they meet."""

    counts_ends: bool = key(False, "stages share out blocks, embedding, final norm and head evenly, each of them counting as one block")
    cuts_by_cost: bool = key(False, "layout.balance=equal cuts a stage off behind the block with which its products exceed an equal share; a head counts by its size")
    spreads_vocabulary: bool = key(False, "every pipeline rank computes an equal part of embedding and head (arXiv 2411.05288)")
    vocabulary_waits: bool = key(False, "and stands still while those parts are summed")
    extra_in_flight: float = key(0, "micro-batches in flight beyond those of the schedule", minimum=0)
    extra_in_flight_per_stage: float = key(0, "the same per pipeline rank", minimum=0)
    keeps_outputs: bool = key(False, "a stage keeps the activation that it sent until its gradient arrives")
    blocking_sends: bool = key(False, "a rank stands still while it sends activations")
    split_sends: bool = key(False, "each tensor rank sends a part of an activation that all of them hold")
    whole_parameters: bool = key(False, "under a pipeline sharded parameters stay gathered for a step, gradients are reduced at its end")


@dataclass(frozen=True)
class OverlapProfile:
    """Communication: its kind, its frequency, and its overlap with computation."""

    tensor: str = key("none", "tensor-parallel communication that overlaps matrix products", choices=TENSOR_OVERLAPS)
    context: str = key("ring", "how context ranks see all keys: passed around behind attention, gathered before it, or by exchanging heads",
        choices=CONTEXT_WAYS)
    regathers_inputs: bool = key(False, "sequence parallelism keeps inputs sharded and gathers them again in backward")
    gradients: bool = key(True, "gradient reduction overlaps backward")
    gathers: bool = key(True, "sharded parameters are prefetched while the block before is computed")
    refresh: bool = key(True, "updated parameters travel while the next step begins")
    gathers_per_block: float = key(1, "collectives that gather a block's sharded parameters, or scatter its gradients", above=0)
    reduce_every_micro_batch: bool = key(False, "sharded gradients are reduce-scattered after every micro-batch (FSDP without no_sync)")
    all_reduces_shards: bool = key(False, "sharded gradients are summed by all-reduce, not by reduce-scatter: twice the bytes")
    all_reduces_states: bool = key(False, "the same where ranks hold whole parameters, and share gradients or optimizer states (ZeRO-1 and 2)")
    states_wait: bool = key(False, "where ranks hold whole parameters and share states, their gradients are reduced after backward, beside nothing")
    owners_broadcast: bool = key(False, "a tensor is updated by one rank as a whole, and each owner broadcasts its own: one collective per owner")
    adapters_exchange: bool = key(False, "under sequence parallelism, what LoRA adds to a sum over tensor ranks goes to the rank of each token, not to all")
    experts: bool = key(False, "dispatch and return of tokens overlap the computation of another micro-batch")
    dispatch_by_domain: bool = key(False, "a token travels to each link domain once, whatever experts it has there (DeepEP, HybridEP)")
    reads_every_step: bool = key(True, "the host waits for the loss of every step, to log it or to look for overflows")


@dataclass(frozen=True)
class LaunchProfile:
    """The start, the command line and the log of a trainer's trials (launcher/config/command.py).

    A trainer can be told the keys that a profile mentions, as ``{KEY}`` or as a key of ``options`` or ``variables``; layouts that differ
    from the defaults in other keys are left out.
    """

    program: str = key(
        "none", "none: it can be predicted, not launched; embedded: the trainer of this project; command: another one", choices=PROGRAMS
    )
    starts: str = key("rank", "the command runs once per rank, with torchrun's variables, or once per node and starts its ranks", choices=STARTS)
    command: list[str] = key(list, "the command; {KEY} stands for a value of the run, {script} for the user's program, {folder} for that of files")
    script: Optional[str] = key(None, "the user's program")
    python: Optional[str] = key(None, "what {python} stands for; null = the interpreter of the rank")
    arguments: list[str] = key(list, "the user's own words, between the command and the options")
    options: dict[str, Any] = key(dict, "further words by key: a list with {} for its value, or {VALUE: list}; null = none, for a key or a value")
    variables: dict[str, Any] = key(dict, "names of one's own for {NAME}: {by: KEY, values: {VALUE: ANY}}")
    files: dict[str, Any] = key(dict, "files (.json, .yaml, .toml) that the command reads: mappings with {KEY} inside")
    environment: dict[str, str] = key(dict, "environment variables of the command")
    shards_context: bool = key(False, "context ranks always share parameters: with layout.context > 1 there is no stage 0")
    log: list[str] = key(list, "patterns that read its log; their named groups are step, loss, grad_norm, and times, rates and memory by unit")
    reports: str = key("first", "which rank's log tells of steps", choices=REPORTS)
    failures: dict[str, list[str]] = key(dict, "patterns of the log by the reason that they stand for")
    success: Optional[str] = key(None, "pattern without which a run that ended with code 0 has failed; null = none is needed")

    def __hash__(self) -> int:  # tables are grouped by trainer, and lists have no hash
        return hash((self.program, self.script, self.starts))


@dataclass(frozen=True)
class TrainerProfile:
    """One trainer. Without ``launch.program`` it is for predictions alone."""

    name: str = key("unknown", "name of the trainer")
    on_newer_devices: Optional[str] = key(None, "profile in place of this one on devices with hardware.legacy_kernel_factor below 1")
    kernels: KernelProfile = key(KernelProfile, "how operations are computed")
    numbers: NumberProfile = key(NumberProfile, "number formats")
    memory: MemoryProfile = key(MemoryProfile, "what stays in device memory")
    recompute: RecomputeProfile = key(RecomputeProfile, "what recomputation means")
    pipeline: PipelineProfile = key(PipelineProfile, "how stages are cut and how they meet")
    overlap: OverlapProfile = key(OverlapProfile, "which communication overlaps computation")
    launch: LaunchProfile = key(LaunchProfile, "how trials are started, told and read")

    @property
    def embedded(self) -> bool:
        """Returns whether this is the project's own trainer."""
        return self.launch.program == "embedded"

    @property
    def foreign(self) -> bool:
        """Returns whether this is another program that can be launched."""
        return self.launch.program == "command"
