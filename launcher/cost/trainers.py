"""Known trainers: what is documented, or can be read in their code, about their kernels, number formats and overlap."""

from __future__ import annotations

from dataclasses import replace

from launcher.cost.framework import Framework

MEGATRON_2021 = Framework(
    name="Megatron-LM 2021",  # arXiv 2104.04473: fused softmax, bias-GELU and bias-dropout-add; nothing overlapped
    attention="fused_softmax",
    causal_skip=False,
    accumulate_fused=True,
    gradient_bytes=2,
    reduce_bytes=2,
    logit_copies=(1, 1),  # the loss works in place on one 4-byte copy
    gathers_saved_inputs=True,
    gradient_overlap=False,
    gather_overlap=False,
    refresh_overlap=False,
    blocking_sends=True,
    split_sends=True,
)
MEGATRON_2022 = replace(
    MEGATRON_2021, name="Megatron-LM 2022", tensor_overlap="backward"
)  # arXiv 2205.05198: backward's communication beside products
MEGATRON_2023 = replace(MEGATRON_2022, name="Megatron-LM 2023", attention="flash2", causal_skip=True, blocking_sends=False)
MEGASCALE = replace(
    MEGATRON_2023, name="MegaScale", tensor_overlap="all", gradient_overlap=True, gather_overlap=True, refresh_overlap=True
)  # Jiang et al. 2024, arXiv 2402.15627, section 3: communication of all three kinds beside computation
VOCABULARY_1 = replace(
    MEGATRON_2023, name="Vocabulary Parallelism 1", spreads_vocabulary=True, more_in_flight=(2, 0)
)  # Yeung et al. 2024, arXiv 2411.05288: a fork of Megatron-LM, --fp16; README of sail-sg/VocabularyParallelism: p + 2 or p + 1 micro-batches
VOCABULARY_2 = replace(VOCABULARY_1, name="Vocabulary Parallelism 2", more_in_flight=(1, 0))
ZERO_BUBBLE_2P = replace(MEGATRON_2023, name="Megatron-LM, ZB-2p", more_in_flight=(0, 1))  # arXiv 2401.10241: twice the activations of 1F1B
INTERLACED = replace(VOCABULARY_1, name="interlaced", vocabulary_waits=True, more_in_flight=(0, 0.5))
MEGATRON_DEEPSPEED = replace(
    MEGATRON_2021,
    name="Megatron-DeepSpeed",
    accumulate_fused=False,
    bucket_bytes=3e9,
    buckets_at_end=True,
    keeps_outputs=True,
    lock_step=True,
    communicators=(1, 3, 1, 1),
)  # pipeline engine of DeepSpeed (is_pipe_partitioned, is_grad_partitioned: sends are split where there are tensor ranks), ZeRO-1
MEGATRON_PIPELINE = replace(
    MEGATRON_DEEPSPEED,
    name="Megatron-LM, spring 2021",
    bucket_bytes=0.0,
    buckets_at_end=False,
    keeps_outputs=False,
    communicators=(1, 2, 1, 1),
)  # the same model code without DeepSpeed's engine: gradients are reduced in place
BLOOM = replace(
    MEGATRON_DEEPSPEED, name="Megatron-DeepSpeed, BLOOM", launch_blocking=True
)  # its notes: CUDA_LAUNCH_BLOCKING=1 against hangs
NEMO_2022 = replace(MEGATRON_2022, name="NeMo 2022", gradient_bytes=4, reduce_bytes=2, gradient_overlap=True)  # O2: fp32 main gradients
MEGATRON_CORE = Framework(
    name="Megatron Core",  # Transformer Engine, distributed optimizer with overlapped reduction and gather, user-buffer TP overlap
    hopper_attention=True,
    pointwise="compiled",
    accumulate_fused=True,
    reduce_bytes=2,
    fused_loss=True,
    logit_copies=(2, 0),
    saves_low_precision=True,
    keeps_low_weights=True,  # Transformer Engine: is_first_microbatch
    gathers_saved_inputs=True,
    tensor_overlap="all",
)
NEMO = replace(MEGATRON_CORE, name="NeMo", gradient_bytes=2, optimizer_bytes=10)  # bf16 gradients; master weights keep only what bf16 lacks
DEEPSPEED = Framework(
    name="DeepSpeed ZeRO",
    attention="fused_softmax",
    causal_skip=False,
    gradient_bytes=2,
    reduce_bytes=2,
    logit_copies=(1, 1),
    frees_logits=True,  # its engine is called for the loss
    late_gradients=True,
    bucket_bytes=3e9,  # two reduce buckets and a gather bucket of 5e8 elements
    reduce_every_micro_batch=True,
    gathers_per_block=4.0,  # one for every matrix: they are larger than its prefetch bucket
    live_parameters=1e9,  # stage3_max_live_parameters
    can_offload=True,
)
DEEPSPEED_2021 = replace(DEEPSPEED, name="DeepSpeed ZeRO 2021", single_rail=True)
"""Inferred, not documented: on Selene (arXiv 2104.04473, table 2) and on Jean Zay alike its gathers got no more out of a node than one network
port carries; on Azure a year later they got several times that."""
MEGATRON_ZERO = replace(
    DEEPSPEED_2021,
    name="Megatron-LM with DeepSpeed ZeRO",
    bucket_bytes=4e8,
    sharded_checkpoints=True,
    inputs_on_host=True,
    gather_overlap=False,
    gradient_overlap=False,
    can_offload=False,
)  # BigScience, experiments/gpt2-meg-ds-zero: its run scripts set --partition-activations, --checkpoint-in-cpu and --synchronize-each-layer
# (nothing overlaps: forward took 35 s, of which products and copies are 24), its log prints buckets of hidden^2 elements
HUGGING_FACE = replace(
    DEEPSPEED_2021, name="Hugging Face with DeepSpeed ZeRO", attention="unfused", pointwise="eager", bucket_bytes=4e8
)  # BigScience, experiments/gpt2-hf-ds: GPT-2 of transformers, buckets "auto" (hidden^2 elements)
ALEPH_ALPHA = Framework(
    name="Aleph Alpha scaling",  # arXiv 2311.05610 and its code, Aleph-Alpha/scaling: lm_head (logits gathered, then 4-byte copies),
    pointwise="eager",  # optimizer/allreduce (summed whole, in 4 bytes, in buckets of 5e8), communicator (plain sends)
    fused_norm=False,
    gradient_bytes=2,
    reduce_bytes=2,
    lock_step=True,
    counts_ends=True,  # pipeline_partitioning: uniform
    blocking_sends=True,
    sharded_logits=False,
    loss_passes=(2.0, 2.5),  # losses/cross_entropy: gathered shards joined and argmax for the accuracy; there and back, torch's own kernels
    logit_copies=(1, 3),  # the loss keeps log-probabilities in 4 bytes; backward makes their gradient, then that of the logits
    gradient_overlap=False,
    gather_overlap=False,
    refresh_overlap=False,
)
ALEPH_ALPHA_DRAINING = replace(ALEPH_ALPHA, drains_after=256)
"""Its later runs at 2,048 tokens. Inferred, not documented: with two stages their step times grow with the micro-batch as a bubble of
(p - 1) / m does when m counts the micro-batches of 256 sequences, not of the whole 2,048, at every data- and tensor-parallel degree. 13B on 64
GPUs without tensor parallelism takes 36.7 s on one stage and 44.1, 47.4, 55.6 and 72.8 s on two for micro-batches of 1, 2, 4 and 8: with m = 8, 4, 2
and 1, 1 + 1 / m predicts 41.3, 45.9, 55.0 and 73.4 s. Gradients are reduced once, after all 2,048."""
FSDP = Framework(
    name="PyTorch FSDP",
    pointwise="eager",
    fused_norm=True,
    weight_bytes=4,  # sharded master weights are the parameters
    optimizer_bytes=8,
    gradient_bytes=4,
    reduce_bytes=2,
    sharded_logits=True,
    selective="per_op",
    reduce_every_micro_batch=True,
    whole_in_stages=True,  # torch.distributed.pipelining: no resharding and no reduction before a stage's last backward
)
LLM_FOUNDRY = replace(FSDP, name="llm-foundry", attention="flash1", fused_loss=True, logit_copies=(2, 0))
LLM_FOUNDRY_2024 = replace(LLM_FOUNDRY, stops_early=True)  # checkpoints without reentrance, which stop early from PyTorch 2.1 on
TORCHTITAN = replace(
    FSDP, name="torchtitan", pointwise="compiled", reduce_bytes=4, frees_logits=True, reads_every_step=False, stops_early=True
)  # reads losses back when it logs, every tenth step; the same checkpoints
TORCHTITAN_2026 = replace(TORCHTITAN, name="torchtitan 2026", hopper_attention=True)  # models/common/attention: cuDNN before flash
INTERNEVO = replace(
    Framework(), name="InternEvo", gradient_bytes=2, reduce_bytes=2, reduce_every_micro_batch=True
)  # AMSP (arXiv 2311.00257), section 4: T_p has a gather for each pass and a reduce-scatter, all in every micro-batch
JAX = replace(
    FSDP,
    name="JAX",  # its compiler drops what nothing asks for, and fuses the loss into its reading of the logits
    pointwise="compiled",
    hopper_attention=True,
    fused_loss=True,
    logit_copies=(2, 0),
    stops_early=True,
    whole_in_stages=False,
)
PAX = replace(JAX, name="Pax", selective="but_weights")  # google/paxml, contrib/gpu/scripts_gpu/configs.py
MAXTEXT = replace(JAX, name="MaxText", selective="but_queries")  # DGX Cloud, maxtext/configure.sh from v25.02 on
PAXML = replace(JAX, name="Paxml", selective="but_projections")  # paxml/paxml_mod_configs.py; MaxText before v25.02: out_proj=device too
NANOTRON = replace(
    Framework(), name="nanotron", gradient_bytes=6, pointwise="eager", gradient_overlap=False, gather_overlap=False, refresh_overlap=False
)  # bf16 gradients and their 4-byte sum
UNKNOWN = Framework(name="unknown")
UNKNOWN_BEFORE_FLASH = replace(UNKNOWN, attention="fused_softmax", causal_skip=False)  # attention in one kernel came into use with 2023
