"""Latent attention: what all heads share, norms, widths, positions and scale, and the cache of latents."""

from __future__ import annotations

from tests.planted.defect import Defect

MODELS, CACHE = "trainer/models/latent.py", "trainer/generate/cache.py"
NAMED = "tests/numerics/test_matrix.py -k latents"
LOGITS = "tests/convert/test_logits.py -k deepseek"
TEXTS = "tests/generate/test_generate.py -k deepseek"

DEFECTS = [
    Defect(
        "the key that all heads share has the gradient of this rank's heads",
        "trainer/tensor/entered.py",
        "return ready(self.region.sum(dy.contiguous().clone()))",
        "return dy if self.region.parts == 1 else ready(self.region.sum(dy.contiguous().clone()))",
        NAMED,
    ),
    Defect(
        "the norm of a latent is taken for one of a tensor rank's own heads",
        MODELS,
        'FAMILIES[c.family].norm_offset, bias=c.norm == "layer")',
        'FAMILIES[c.family].norm_offset, bias=c.norm == "layer", placement={"tensor": Shard(0)})',
        NAMED,
    ),
    Defect(
        "values are as wide as keys without positions",
        "trainer/shared/run/resolved.py",
        "return self.heads * (self.latent.value or self.head_width) if self.latent.kv_rank else self.query_width",
        "return self.query_width",
        LOGITS,
    ),
    Defect(
        "halves turn together where neighbours do",
        MODELS,
        "return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) if self.interleaved else x",
        "return x",
        LOGITS,
    ),
    Defect(
        "scores lack the square of YaRN's magnitude",
        "trainer/shared/families/parts.py",
        '"attention_scale": magnitude**2 / math.sqrt(width)}',
        '"attention_scale": 1 / math.sqrt(width)}',
        LOGITS,
    ),
    Defect(
        "values of the cache are the last numbers of its keys",
        CACHE,
        "values = keys[..., : self.shared]",
        "values = keys[..., -self.shared :]",
        TEXTS,
    ),
    Defect(
        "the cache holds values beside the latents that they are",
        CACHE,
        "value[..., :0] if self.shared else value",
        "value",
        "tests/generate/test_generate.py -k bytes",
    ),
    Defect(
        "matrices of latents are shared out to tensor ranks",
        "launcher/cost/inputs/stages.py",
        "own.small_parameters + own.latent_parameters for own",
        "own.small_parameters for own",
        "tests/cost/test_trainer_memory.py -k latents",
    ),
    Defect(
        "queries with a latent of their own are made from the hidden state as well",
        "trainer/shared/families/block.py",
        "(latent.query_rank == 0) * queries, whole=made)",
        "queries, whole=made)",
        "tests/trainer/test_block_matrices.py",
    ),
    Defect(
        "the shared experts of a mixture are as wide as one that tokens are sent to",
        "trainer/shared/families/block.py",
        "network, mixture.shared_ffn)",
        "network, network.ffn)",
        "tests/trainer/test_block_matrices.py",
    ),
]
