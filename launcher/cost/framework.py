"""What distinguishes one trainer from another physically: number formats, kernels, what is sharded, what overlaps.

These are documented facts of code bases, not fitted numbers. ``TRIREME`` is this project's own trainer.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Framework:
    """One trainer, as far as time and memory depend on it."""

    name: str = "trireme"
    # kernels
    attention: str = "flash2"  # unfused | fused_softmax | flash1 | flash2
    fused_dropout: bool = True  # that kernel drops out weights itself; otherwise scores are written out where weights are dropped out
    fused_norm: bool = True
    pointwise: str = "fused"  # eager | fused (bias, dropout, activation each one kernel) | compiled
    hopper_attention: bool = False  # attention kernels made for the newest devices (cuDNN, flash 3)
    causal_skip: bool = True  # the attention kernel leaves out what lies above the diagonal
    kernels_per_block: int = 40  # kernels of a block's forward pass; backward has twice as many
    launch_blocking: bool = False  # the host waits for every kernel (CUDA_LAUNCH_BLOCKING=1)
    kernels_per_mixture: int = 150  # further ones of a mixture of experts: routing, sorting, dispatch, one product per group
    expert_overlap: bool = False  # dispatch and return of tokens run beside the computation of another micro-batch
    dispatch_by_domain: bool = False  # a token travels to each link domain once, however many of its experts live there (DeepEP, HybridEP)
    # numbers
    weight_bytes: int = 2  # stored parameters in 16-bit training
    gradient_bytes: int = 4  # gradient buffer
    reduce_bytes: int = 4  # gradients on the wire
    optimizer_bytes: int = 12  # master weights and two moments
    bucket_bytes: float = 0.0  # communication buckets that hold copies of gradients or weights
    buckets_at_end: bool = False  # a pipeline fills them when all its micro-batches are through
    accumulate_fused: bool = False  # weight gradients are added to the buffer inside the matrix product
    # what is sharded
    sharded_logits: bool = True
    loss_passes: tuple[float, float] = (0.0, 0.0)  # further reads and writes of 4-byte logits, forward and backward
    fused_loss: bool = False  # one kernel computes the loss from 16-bit logits
    logit_copies: tuple[float, float] = (1, 3)  # copies of the logits and their gradient alive at the peak: as computed, in 4 bytes
    frees_logits: bool = False  # nothing refers to the logits while the blocks run backward
    sharded_checkpoints: bool = False  # recompute: stored block inputs are sharded over the tensor ranks
    keeps_low_weights: bool = False  # weights are brought into 8 bits once per step, not for every micro-batch
    eager_casts: bool = False  # tensor operations bring 8-bit operands into their format, not one kernel
    block_scaled: bool = False  # 8-bit operands have a scale per row or block, not one per tensor: they are brought into 8 bits twice
    # what is kept for backward
    saves_low_precision: bool = False  # 8-bit training keeps the 8-bit inputs of products for backward
    copied_heads: bool = False  # queries and keys that are rotated or regrouped are new tensors while the product's output stays
    score_copies: float = 2  # of the scores, where attention is spelled out
    can_offload: bool = False
    host_layers: int = 0  # blocks of the model whose kept activations travel to host memory and back beside the computation
    offloaded: bool = False  # optimizer states live in host memory
    inputs_on_host: bool = False  # recompute: stored block inputs travel to host memory and back
    late_gradients: bool = False  # backward allocates the shards of gradients while it frees the stored inputs of blocks
    live_parameters: float = float("inf")  # sharded parameters that are whole at a time
    pooled: bool = False  # whole parameters and gradients of sharded ones live in a pool that never shrinks
    keeps_outputs: bool = False  # a stage keeps what it handed on until that comes back
    communicators: tuple[int, int, int, int] = (1, 1, 1, 1)  # of a rank, where it has neighbours by tensor, pipeline, data, context
    # recompute
    selective: str = "attention"  # what "selective" recomputes: a policy of launcher.cost.recompute
    keeps_attention: bool = False  # where whole blocks are recomputed, attention is not: its output is kept
    stops_early: bool = False  # whole blocks are recomputed up to the last input that backward needs: without the product that ends them
    # stages
    spreads_vocabulary: bool = False  # every pipeline rank computes an equal part of embedding and head (arXiv 2411.05288)
    vocabulary_waits: bool = False  # and stands still while those parts are added up
    more_in_flight: tuple[float, float] = (0, 0)  # micro-batches that ranks hold beyond their schedule's: so many, and so many per stage
    counts_ends: bool = False  # stages share out blocks, embedding, final norm and head evenly, each of them counting as one block
    # overlap and communication
    reads_every_step: bool = True  # the host waits for the loss of every step, to log it or to look for overflows
    gathers_saved_inputs: bool = False  # sequence parallelism keeps inputs sharded and gathers them again in backward
    tensor_overlap: str = "none"  # tensor-parallel communication beside products: none | backward | all
    gradient_overlap: bool = True
    gathers_per_block: float = 1.0  # collectives that bring a block's sharded parameters together, or spread its gradients
    gather_overlap: bool = True  # sharded parameters arrive while the block before is computed
    refresh_overlap: bool = True  # updated parameters travel while the next step begins
    single_rail: bool = False  # data-parallel collectives use one network port of a node, however many ranks take part
    blocking_sends: bool = False  # a rank stands still while it hands activations on
    lock_step: bool = False  # pipeline ranks meet their neighbours before and after every micro-batch (DeepSpeed's schedule)
    split_sends: bool = False  # tensor ranks each send a part of an activation that all of them hold
    drains_after: int = 0  # sequences of a global batch after which the pipeline runs empty and fills again; 0: at the end of a step
    reduce_every_micro_batch: bool = False  # sharded gradients are reduce-scattered after every micro-batch, as by FSDP without no_sync
    whole_in_stages: bool = False  # under a pipeline sharded parameters stay whole for a step, and their gradients are reduced at its end


TRIREME = Framework(
    pointwise="eager",
    stops_early=True,
    fused_dropout=False,
    logit_copies=(1, 0),  # the loss works in place
    frees_logits=True,
    copied_heads=True,
    score_copies=1,
    pooled=True,
    reduce_every_micro_batch=True,
)
