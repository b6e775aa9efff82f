"""The schema of a run: model, layout, data, optimizer, run, tracking. Plain dataclasses, no torch.

Every field is a Hydra key of the same name (``layout.tensor`` is ``LayoutConfig.tensor``). The text in
``doc`` is the manual: it is printed by ``trireme train --help`` and checked to exist by a test. A field with
``choices`` accepts only those values. ``None`` means "derived": ``resolve`` fills it in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from trainer.shared.families.family import MATRICES
from trainer.shared.families.registry import FAMILIES
from trainer.shared.run.foreign import CommandConfig
from trainer.shared.run.keys import MOST, key
from trainer.shared.run.optimizer import OptimizerConfig

GATED = ("swiglu", "geglu")
"""Activations of an MLP with two matrices up, one of which gates the other."""
ACTIVATIONS = ("gelu", "gelu_exact", "relu", "squared_relu", *GATED)
POSITIONS = ("learned", "rotary", "alibi", "relative", "none")
NORM_VECTORS = {"layer": 2, "layer_no_bias": 1, "rms": 1}
"""Parameters of a norm by its kind, in vectors: scale and shift, or scale alone."""
ROUTERS = ("softmax", "sigmoid")
ROPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble", "sliced_1f1b")
RECOMPUTE = ("none", "selective", "full")
EXCHANGES = ("all_gather", "all_to_all", "ring")
PRECISIONS = ("fp32", "fp64", "bf16", "fp16", "fp8")
RATED = (*PRECISIONS, "fp4")
"""Precisions that a device may have a rate for."""
TASKS = ("train", "evaluate", "generate", "inference", "probe")
METHODS = ("full", "lora", "adapter", "prompt", "p_tuning", "ia3")
TARGETS = MATRICES
"""Matrices that LoRA may be added to."""
TRANSFERS = ("none", "mup", "completep")
ZEROED = ("output", "down", "head")
"""Matrices that may begin as zero: what they multiply still learns, one step later."""


@dataclass
class RopeConfig:
    """Rotary positions: which part of a head turns, and how its angles are scaled for texts longer than those of pre-training."""

    kind: str = key("default", "scaling of the angles; default = none", choices=ROPES)
    share: float = key(1.0, "share of a head's width that turns, from its start; at most 1", above=0)
    factor: float = key(1.0, "positions after scaling / before it", minimum=1)
    original: Optional[int] = key(None, "yarn, llama3, longrope: sequence length before scaling", minimum=1)
    low: float = key(1.0, "llama3: waves longer than original / low are scaled", above=0)
    high: float = key(4.0, "llama3: waves shorter than original / high are not", above=0)
    fast: float = key(32.0, "yarn: dimensions that turn more often over the original length are not scaled", above=0)
    slow: float = key(1.0, "yarn: dimensions that turn less often are scaled wholly", above=0)
    rounded: bool = key(True, "yarn: the border dimensions are whole numbers")
    magnitude: Optional[float] = key(None, "yarn, longrope: factor of sines and cosines; null = by factor and original", above=0)
    short: list[float] = key(list, "longrope: a factor for each pair of dimensions, for sequences up to the original length", above=0)
    long: list[float] = key(list, "longrope: the same for longer sequences", above=0)
    local_theta: Optional[float] = key(None, "base in blocks that attend to a window, unscaled; null = model.rope_theta, scaled", minimum=1)
    skip_every: int = key(0, "every k-th block has no positions; 0 = all have", minimum=0, maximum=MOST)


@dataclass
class ExpertsConfig:
    """A mixture of experts in place of the MLP."""

    count: int = key(0, "experts of a block; 0 = a dense model", minimum=0, maximum=1_000_000)
    active: int = key(2, "experts that each token visits", minimum=1, maximum=1_000_000)
    ffn: Optional[int] = key(None, "inner width of one expert; null = model.ffn", minimum=1, maximum=100_000_000)
    shared_ffn: int = key(0, "inner width, in all, of the experts that every token visits", minimum=0, maximum=100_000_000)
    shared_gate: bool = key(False, "the output of those is weighed by a gate")
    dense_layers: int = key(0, "leading blocks that have an MLP instead", minimum=0, maximum=100_000)
    every: int = key(1, "only every k-th block has experts, the others an MLP", minimum=1, maximum=100_000)
    router_bias: bool = key(False, "the router has a bias for each expert")
    router: str = key("softmax", "scores of the experts: softmax over all of them, or the sigmoid of each", choices=ROUTERS)
    normalized: bool = key(True, "a token's experts are weighed by their shares in the sum of their scores; false: by the scores themselves")
    scale: float = key(1.0, "factor of those weights", above=0)
    groups: int = key(1, "groups of neighbouring experts", minimum=1, maximum=1_000_000)
    active_groups: int = key(1, "the best groups, from which a token's experts are chosen", minimum=1, maximum=1_000_000)
    correction: Optional[float] = key(None, "what each step adds to, or takes from, the correction of an expert's score in the choice, towards equal "
        "load (DeepSeek-V3: 0.001); 0 = the correction stays; null = there is none", minimum=0)
    balance_loss: float = key(0.0, "factor of the loss by which the experts of each sequence are balanced", minimum=0)
    z_loss: float = key(0.0, "factor of the mean square of the router's log-sum-exp", minimum=0)
    forced: bool = key(False, "experts take turns whatever the router says: equal load, for speed runs")
    imbalance: float = key(1.0, "tokens of the busiest expert rank / their mean", minimum=1)


@dataclass
class LatentConfig:
    """Queries, keys and values made from low-rank latents (multi-head latent attention)."""

    kv_rank: int = key(0, "width of the latent of keys and values; 0 = none", minimum=0, maximum=10_000_000)
    query_rank: int = key(0, "width of the latent of queries; 0 = they are made from the hidden state", minimum=0, maximum=10_000_000)
    rotary: int = key(64, "further width of a query or key, which holds its position", minimum=0, maximum=10_000_000)
    value: Optional[int] = key(None, "width of a value; null = that of a head", minimum=1, maximum=10_000_000)
    interleaved: bool = key(True, "of the numbers that hold a position the neighbours 2i and 2i + 1 turn together; false = i and i + rotary / 2")


@dataclass
class TransferConfig:
    """Hyper-parameters found with a small base model, carried over to this one: initial weights, learning rates, weight decays and epsilon are
    told as those of the base, and follow from them by the ratios of width and depth."""

    kind: str = key("none", "none, mup (over widths; Yang et al. 2022, arXiv 2203.03466), or completep (over widths and depths; Dey et al. 2025, "
        "arXiv 2505.01618)", choices=TRANSFERS)
    hidden: Optional[int] = key(None, "mup, completep: model.hidden of the base", minimum=1, maximum=10_000_000)
    layers: Optional[int] = key(None, "completep: model.layers of the base", minimum=1, maximum=100_000)
    head_width: Optional[int] = key(None, "mup, completep: model.head_width of the base; null = that of this model, which has more heads",
        minimum=1, maximum=10_000_000)


@dataclass
class ModelConfig:
    """The shape of the network. null: as the family has it (trainer/shared/families)."""

    family: str = key(next(iter(FAMILIES)), "architecture: " + ", ".join(each.title or each.name for each in FAMILIES.values()),
        choices=tuple(FAMILIES))
    layers: int = key(4, "transformer blocks, of an encoder and its decoder together", minimum=1, maximum=100_000)
    hidden: int = key(128, "width of the residual stream", minimum=1, maximum=10_000_000)
    heads: int = key(4, "attention heads", minimum=1, maximum=10_000_000)
    kv_heads: Optional[int] = key(None, "key/value heads (grouped-query attention); null = heads", minimum=1, maximum=10_000_000)
    ffn: Optional[int] = key(None, "inner width of the MLP; null = 4 hidden (gated: 8/3 hidden, rounded up to 64)",
        minimum=1, maximum=100_000_000)
    vocab: int = key(4096, "vocabulary size, before any padding", minimum=2, maximum=MOST)
    seq: int = key(128, "sequence length in tokens", minimum=1, maximum=MOST)
    tied: Optional[bool] = key(None, "share input embedding and output head; null = by family (llama: no)")
    activation: Optional[str] = key(None, "MLP non-linearity; null = by family (llama: swiglu, gpt: gelu)", choices=ACTIVATIONS)
    dropout: float = key(0.0, "dropout of embeddings, attention and residuals", minimum=0)
    attention: str = key("fused", "fused (scaled_dot_product_attention; with dropout a block of queries at a time) or unfused (matmul, "
        "softmax, matmul)", choices=("fused", "unfused"))
    rope_theta: float = key(10000.0, "base of the rotary position embedding (llama)", minimum=1)
    norm_eps: float = key(1e-5, "epsilon of the normalisation layers", minimum=0)
    init_std: Optional[float] = key(None, "standard deviation of initial weights; null = 0.64 / sqrt(hidden); with model.transfer, of the base's", minimum=0)
    zero_init: list[str] = key(list, "matrices that begin as zero: those that write to the residual stream (output, down), the head",
        choices=ZEROED, empty=True)
    head_width: Optional[int] = key(None, "width of a head; null = hidden / heads", minimum=1, maximum=10_000_000)
    positions: Optional[str] = key(None, "how positions are told; null = by family (gpt: learned, llama: rotary)", choices=POSITIONS)
    norm: Optional[str] = key(None, "normalisation; null = by family (gpt: layer, llama: rms)", choices=tuple(NORM_VECTORS))
    norm_at: Optional[str] = key(None, "norms stand before attention and MLP, after them, or both; null = by family",
        choices=("before", "after", "both"))
    qk_norm: Optional[str] = key(None, "norm of queries and keys: none, of each head, or of all heads together; null = by family",
        choices=("none", "head", "width"))
    biases: Optional[list[str]] = key(None, "matrices that have a bias; null = by family (gpt: qkv, output, up, down; llama: none)",
        choices=(*MATRICES, "head"), empty=True)
    residual: Optional[str] = key(None, "attention and MLP one after the other, in parallel, or in parallel behind one norm; null = by family",
        choices=("sequential", "parallel", "parallel_one_norm"))
    window: Optional[int] = key(None, "positions that attention looks back, its own among them; null = all", minimum=1, maximum=MOST)
    full_every: int = key(0, "every k-th block attends to all positions in spite of model.window; 0 = none does", minimum=0, maximum=MOST)
    score_cap: Optional[float] = key(None, "attention scores become cap tanh(score / cap); null = they stay", above=0)
    logit_cap: Optional[float] = key(None, "logits likewise", above=0)
    attention_scale: Optional[float] = key(None, "factor of attention scores; null = 1 / sqrt(width of a query), or by model.transfer", above=0)
    embedding_scale: float = key(1.0, "factor of token embeddings", above=0)
    residual_scale: Optional[float] = key(None, "factor of what attention and MLP add to the residual stream; null = 1, or by model.transfer", above=0)
    logit_scale: Optional[float] = key(None, "factor of logits; null = 1, or by model.transfer", above=0)
    predicted_tokens: int = key(0, "further tokens that modules at the end predict (planned, not trained yet)", minimum=0, maximum=100)
    encoder_layers: Optional[int] = key(None, "how many of them, from the first, are an encoder's; null = by family (t5: half; others: none)",
        minimum=0, maximum=100_000)
    decoder_seq: Optional[int] = key(None, "t5: tokens that the decoder writes, while model.seq counts those that the encoder reads; null = as many as "
        "span corruption leaves", minimum=0, maximum=MOST)
    relative_buckets: int = key(32, "positions=relative: rows of the table of biases", minimum=4, maximum=1_000_000)
    relative_distance: int = key(128, "positions=relative: distance from which on all keys share a row", minimum=2, maximum=MOST)
    rope: RopeConfig = key(RopeConfig, "scaling of rotary positions")
    experts: ExpertsConfig = key(ExpertsConfig, "mixture of experts")
    latent: LatentConfig = key(LatentConfig, "multi-head latent attention")
    transfer: TransferConfig = key(TransferConfig, "hyper-parameters of a small base, carried over")

    @property
    def wider(self) -> float:
        """Returns the width over that of the base."""
        return self.hidden / self.transfer.hidden if self.transfer.hidden else 1.0

    @property
    def deeper(self) -> float:
        """Returns the depth over that of the base."""
        return self.layers / self.transfer.layers if self.transfer.layers else 1.0


@dataclass
class ShardingConfig:
    """State sharding factors over data x context ranks (ZeRO, AMSP): params <= grads <= optimizer <= data, each dividing the next.

    (1,1,1) is plain data parallel, (1,1,d) ZeRO-1, (1,d,d) ZeRO-2, (d,d,d) ZeRO-3, equal and below d HSDP.
    """

    params: int = key(1, "shards of the parameters", minimum=1, maximum=MOST)
    grads: int = key(1, "shards of the gradients", minimum=1, maximum=MOST)
    optimizer: int = key(1, "shards of the optimizer states and master weights", minimum=1, maximum=MOST)
    offload: float = key(0.0, "share of each of those shards that lives in host memory and is updated there; AdamW", minimum=0, maximum=1)


@dataclass
class LayoutConfig:
    """How the model is laid over the ranks."""

    tensor: int = key(1, "tensor-parallel ranks", minimum=1, maximum=MOST)
    pipeline: int = key(1, "pipeline stages", minimum=1, maximum=MOST)
    virtual_pipeline: int = key(1, "model chunks per pipeline rank (interleaving)", minimum=1, maximum=MOST)
    data: Optional[int] = key(None, "data-parallel replicas; null = world size / (tensor x pipeline x context)", minimum=1, maximum=MOST)
    context: int = key(1, "context-parallel ranks, which share every sequence", minimum=1, maximum=MOST)
    expert: int = key(1, "expert-parallel ranks, among those of tensor, context and data", minimum=1, maximum=MOST)
    expert_tensor: int = key(1, "ranks that have a part of each expert's width, among the same ones; neighbours", minimum=1, maximum=MOST)
    micro_batch: int = key(1, "sequences in one micro-batch", minimum=1, maximum=MOST)
    schedule: str = key("1f1b", "pipeline schedule", choices=SCHEDULES)
    slices: int = key(1, "slices of every sequence, which sliced_1f1b computes one after the other", minimum=1, maximum=MOST)
    slice_lengths: Optional[list[int]] = key(None, "positions of each slice, first to last; null = for equal work")
    sequence_parallel: bool = key(False, "shard norms, dropout and residuals along the sequence over the tensor ranks")
    recompute: str = key("none", "activations recomputed in backward: none, selective (attention core), full (blocks)", choices=RECOMPUTE)
    recompute_layers: Optional[int] = key(None, "full: recompute only the first N blocks of each chunk; null = all",
        minimum=0, maximum=MOST)
    recompute_every: int = key(1, "full: recompute every k-th block", minimum=1, maximum=MOST)
    balance: str = key("equal", "blocks per stage: equal, or cost (embedding and head weighed in, uneven allowed)",
        choices=("equal", "cost"))
    stage_layers: Optional[list[int]] = key(
        None, "blocks of each chunk in model order (pipeline x virtual_pipeline entries); null = by layout.balance"
    )
    order: str = key("tensor-data-pipeline", "rank placement, fastest-changing axis first",
        choices=("tensor-data-pipeline", "tensor-pipeline-data"))
    sharding: ShardingConfig = key(ShardingConfig, "state sharding factors")


@dataclass
class DataConfig:
    """The data that the run trains on."""

    kind: str = key("corpus", "corpus (a prepared folder), instructions (examples of a JSONL file, of which answers are learnt) or synthetic (random "
        "tokens, for speed runs)", choices=("corpus", "instructions", "synthetic"))
    source: str = key("stdlib", "text to prepare: 'stdlib' (Python's own sources) or a file or folder of text or JSONL")
    path: str = key("data/stdlib", "prepared folder: tokenizer, token file and index, written by 'trireme prepare'")
    pattern: str = key("**/*", "which files of a source folder are read")
    text_key: str = key("text", "JSONL: the field that holds the text")
    vocab: int = key(4096, "size of the BPE vocabulary that 'prepare' trains", minimum=257, maximum=10_000_000)
    template: str = key("{prompt}\n{answer}", "instructions: an example from the fields of a line; ends with the answer")
    answer: str = key("answer", "instructions: the field that holds the answer")
    truncate: Optional[str] = key(None, "instructions: the field that is cut where an example is too long; null = the end of the answer")
    task: Optional[str] = key(None, "instructions: the field that holds the number of an example's task, from 0 (tune.tasks); null = there is one")
    pack: bool = key(False, "instructions: as many examples in a row as fit, each at position 0 and blind to the others")
    held_out: float = key(0.0, "share of the corpus, at its end, that is not trained on and that 'evaluate' reads; below 1", minimum=0)
    tokenizer: Optional[str] = key(None, "prepare: a tokenizer.json, or a folder with one, whose words text is written in; null = a BPE is trained")


@dataclass
class TuneConfig:
    """The part of a model that is trained, and the weights it starts from."""

    method: str = key("full", "full (all weights), lora, adapter (a bottleneck behind attention and MLP), prompt (virtual tokens), "
        "p_tuning (virtual tokens by an encoder), ia3 (scales of keys, values and the MLP's inner width)", choices=METHODS)
    base: Optional[str] = key(None, "checkpoint whose weights are tuned, or a folder of them; null = initial weights")
    targets: list[str] = key(lambda: list(TARGETS), "lora: matrices of a block beside which a product is trained", choices=TARGETS)
    rank: int = key(16, "lora: rank of the product; adapter: inner width", minimum=1, maximum=MOST)
    alpha: float = key(32.0, "lora: the product is scaled by alpha / rank", above=0)
    dropout: float = key(0.0, "lora: dropout of the product's input; below 1", minimum=0)
    virtual_tokens: int = key(10, "prompt, p_tuning: virtual tokens, which take the first positions of each sequence", minimum=1, maximum=MOST)
    encoder: int = key(128, "p_tuning: inner width of the encoder", minimum=1, maximum=MOST)
    tasks: int = key(1, "prompt, p_tuning: tasks that are trained at once, each with virtual tokens of its own, as if alone", minimum=1, maximum=MOST)


@dataclass
class CheckpointConfig:
    """Where and how often training state is saved."""

    dir: Optional[str] = key(None, "folder of the checkpoints; null = 'checkpoints' in the trial's directory")
    every: int = key(0, "steps between checkpoints; 0 = none (a given dir is still resumed from)", minimum=0)
    keep: int = key(2, "how many checkpoints are kept", minimum=1)
    resume: bool = key(True, "continue from the newest whole checkpoint when there is one")
    at: Optional[int] = key(None, "continue from the checkpoint after so many steps, saving none; null = the newest", minimum=1)
    new_data: bool = key(False, "continue a checkpoint of another corpus or run.seed with the first sample of this one; false = refuse it")


LOSS_CHUNK_MB = {"cpu": 64.0, "cuda": 1024.0}
"""Default of ``run.loss_chunk_mb``. Every chunk adds to the gradient of the whole head, for which a GPU wants a few thousand tokens."""


@dataclass
class PhaseConfig:
    """Steps of another size, up to a number of tokens of the run."""

    until: Optional[int] = key(None, "tokens of the run with which the phase ends, after the step that reaches them", minimum=1)
    global_batch: Optional[int] = key(None, "sequences of a step; null = run.global_batch", minimum=1, maximum=MOST)
    seq: Optional[int] = key(None, "tokens of a sequence, which is a piece of one of model.seq; null = model.seq", minimum=1, maximum=MOST)
    lr: Optional[float] = key(None, "factor of the learning rate; null = square root of a step's tokens over those of the last phase", minimum=0)


@dataclass
class RunConfig:
    """The length and precision of the run, and its measurements."""

    task: str = key(
        "train", "train; evaluate: the loss of a checkpoint (set by 'trireme evaluate'); generate: text from one (set by 'trireme "
        "generate' and 'trireme serve'); inference: time requests (set by 'trireme search task=inference'); probe: measure what the machine gives its ranks (set by 'trireme doctor')", choices=TASKS
    )
    steps: int = key(10, "optimizer steps", minimum=1)
    warmup_steps: int = key(2, "first steps left out of the step-time statistics", minimum=0)
    global_batch: int = key(8, "sequences per optimizer step, over all replicas", minimum=1, maximum=MOST)
    phases: list[PhaseConfig] = key(list, "phases before the steps of run.global_batch and model.seq, each with until, global_batch, seq, lr")
    eval_every: int = key(0, "steps between validations on the text that data.held_out keeps back; 0 = none", minimum=0)
    eval_batches: int = key(8, "a validation reads this many batches of global_batch sequences, or all there are", minimum=1)
    seed: int = key(1234, "seed of weights, data order and dropout", minimum=0)
    precision: str = key("fp32", "fp32, fp64, or with fp32 master weights and reductions bf16, fp16 or fp8 (bf16, and 8 bits in products of "
        "the blocks' matrices but for their gradients)", choices=PRECISIONS)
    moments: str = key("fp32", "AdamW's two moments: fp32 (fp64 in fp64 runs), or bf16, which halves their bytes and rounds them",
        choices=("fp32", "bf16"))
    device: str = key("auto", "auto takes CUDA when there is one", choices=("auto", "cpu", "cuda"))
    compile: Optional[bool] = key(None, "torch.compile each transformer block, as one graph; null = on CUDA")
    compile_fallback: bool = key(False, "a block that cannot be compiled is computed eagerly, with a warning; false: it ends the run")
    context_exchange: str = key("all_gather", "context ranks: all_gather of keys and values, all_to_all, which gives each whole sequences of a part of the "
        "heads, or ring, which passes keys and values on beside attention", choices=EXCHANGES)
    async_tensor: bool = key(False, "tensor ranks with sequence parallelism communicate while they multiply; GPUs need NVLink in one host")
    deterministic: bool = key(False, "the same run on the same devices gives the same bits; slower on GPUs")
    threads: int = key(1, "intra-op CPU threads per rank", minimum=1)
    timeout_s: float = key(300.0, "seconds after which a collective that does not complete ends the run", minimum=1)
    on_nonfinite: str = key("stop", "non-finite loss or gradient norm: stop the run, or skip the step", choices=("stop", "skip"))
    bucket_mb: float = key(25.0, "size of a gradient bucket in MiB", minimum=0)
    loss_chunk_mb: Optional[float] = key(
        None, "logits that head and loss hold at once, in MiB of 4-byte numbers; null = 64 on a CPU, 1024 on a GPU", above=0
    )
    timeline: bool = key(True, "record one measured step's pipeline events to timeline.json")
    peak_tflops: Optional[float] = key(None, "peak TFLOP/s of one device at this precision, for MFU; null = no MFU", above=0)
    memory_gb: Optional[float] = key(
        None, "device memory budget in 1e9 bytes: more counted tensor bytes end the run as out of memory; null = the device's own", above=0
    )
    offload_path: Optional[str] = key(
        None, "folder on a disk of each node for the optimizer states of layout.sharding.offload, a file per rank; null = in memory"
    )
    checkpoint: CheckpointConfig = key(CheckpointConfig, "saving and resuming")


@dataclass
class TrackingConfig:
    """Where measurements are mirrored. The files in the trial's directory are the truth."""

    uri: Optional[str] = key(None, "MLflow server that rank 0 writes to; null = the launcher mirrors into its own SQLite")
    experiment: str = key("trireme", "MLflow experiment")
    loggers: list[str] = key(list, "further copies beside MLflow's, in exports/ next to the trials", choices=("csv", "parquet", "tensorboard", "wandb"), empty=True)
    owner: Optional[str] = key(
        None, "mark by which a launcher knows the runs that its own trials began on a shared server (set by the launcher)"
    )


LOADS = ("static", "closed", "open")


@dataclass
class RequestsConfig:
    """The requests that an inference is measured with: their number, made-up tokens and arrival."""

    mode: str = key("static", "batches that begin and end together, a closed loop of requests in flight, or arrivals at random", choices=LOADS)
    input: int = key(512, "tokens of a prompt", minimum=1, maximum=MOST)
    output: int = key(128, "tokens generated per request", minimum=1, maximum=MOST)
    batch: int = key(1, "requests in flight per replica; open: after so many are told, a line is written", minimum=1, maximum=MOST)
    rate: Optional[float] = key(None, "open: requests per second over all replicas", above=0)


@dataclass
class TrainConfig:
    """One complete run, as ``python -m trainer CONFIG.yaml`` reads it."""

    model: ModelConfig = key(ModelConfig, "the shape of the network")
    layout: LayoutConfig = key(LayoutConfig, "how it is laid over the ranks")
    data: DataConfig = key(DataConfig, "the data that it learns from")
    optimizer: OptimizerConfig = key(OptimizerConfig, "how weights are updated")
    run: RunConfig = key(RunConfig, "how long and how exactly")
    tracking: TrackingConfig = key(TrackingConfig, "where measurements are mirrored")
    tune: TuneConfig = key(TuneConfig, "what of the model is trained")
    command: Optional[CommandConfig] = key(None, "another trainer that trains in place of ours; null = ours (set by the launcher)")
    requests: Optional[RequestsConfig] = key(None, "run.task=inference: the requests to the model (set by the launcher)")
