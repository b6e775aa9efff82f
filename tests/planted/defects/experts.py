"""Mixtures of experts: routing, exchange, gradients, balance. Each has been a public bug of another trainer, which a comment names, or
nearly one of ours."""

from __future__ import annotations

from tests.planted.defect import Defect

MODELS, PARALLEL, BUILD = "trainer/models/experts.py", "trainer/tensor/experts.py", "trainer/build.py"
LAYOUTS = "tests/numerics/test_matrix.py::test_a_designed_layout_has_losses_norms_and_parameters_of_one_process"
OWN = "tests/trainer/test_experts.py"
CASE = "tests/numerics/test_matrix.py::test_what_a_layout_could_get_wrong_is_right"
UNEVEN = f"'{CASE}[tokens that tensor ranks do not divide]'"
ORTHOGONAL = f"'{CASE}[orthogonalised matrices of parts of experts]'"

DEFECTS = [
    Defect(
        "gradients of experts are summed over the ranks of dense weights",
        BUILD,
        "levels=groups.expert_levels)",
        "levels=groups.levels)",
        LAYOUTS,
    ),
    Defect(
        "shards of experts are those of the data rank",
        BUILD,
        "data_index=groups.experts_at",
        'data_index=groups.at["data"]',
        LAYOUTS,
    ),
    Defect(
        "gradients of experts are multiplied by the expert degree",  # pytorch#160285, DeepSpeed#5618, Megatron-LM PR 5956
        PARALLEL,
        "return ctx.route.reversed.exchange(gradients[0]), None",
        "return ctx.route.reversed.exchange(gradients[0]) * ctx.route.group.size, None",
        UNEVEN,
    ),
    Defect(
        "the norm has the experts of the first tensor rank alone",  # Megatron-LM PR 5916 and 6165
        "trainer/tensor/parallelize.py",
        "primary=counts(placement, at)",
        'primary=counts(placement, at) and not ("expert" in placement and at["tensor"])',
        UNEVEN,
    ),
    Defect(
        "tensor ranks with the same tokens send all of them",  # Megatron-LM and DeepSpeed without sequence parallelism
        PARALLEL,
        "return self.region.group.size > 1 and not self.region.sequence_sharded",
        "return False",
        UNEVEN,
    ),
    Defect(
        "the gradient of tokens is that of a tensor rank's part of them",  # torchtitan#1805
        PARALLEL,
        "return Shares.of(ctx.tokens, ctx.group).gather(gradients[0]), None",
        "return F.pad(gradients[0], (0, 0, 0, ctx.tokens - len(gradients[0]))), None",
        UNEVEN,
    ),
    Defect(
        "losses of routers grow with tensor ranks",  # Megatron-LM#1652, #3672
        PARALLEL,
        "return self.weight * sum(losses[1:], losses[0])",
        "return self.weight * dispatcher.region.group.size * sum(losses[1:], losses[0])",
        UNEVEN,
    ),
    Defect(
        "losses of routers have no gradient",  # Automodel#1408
        PARALLEL,
        "return gradients[0], ctx.one, None",
        "return gradients[0], None, None",
        "tests/numerics/test_plain_oracle.py",
    ),
    Defect(
        "the gradient of tokens is that of a part of their experts",
        PARALLEL,
        "return ctx.shares.sum(gradients[0]), None",
        "return gradients[0].split(list(ctx.shares.sizes))[ctx.shares.group.index], None",
        UNEVEN,
    ),
    Defect(
        "the router's gradient is that of a part of its experts",  # transformers#48687
        PARALLEL,
        "shares.gather(choice.experts), _Gathered.apply(choice.weights, shares)",
        "shares.gather(choice.experts), shares.gather(choice.weights.detach())",
        UNEVEN,
    ),
    Defect(
        "ranks with parts of experts are taken to have as many tokens",
        PARALLEL,
        "part_of(tokens, tensor.size, (first + place) % tensor.size)",
        "part_of(tokens, tensor.size, tensor.index)",
        UNEVEN,
    ),
    Defect(
        "matrices of experts are put together without the parts of other ranks",
        "trainer/comm/groups.py",
        'folded.group(world.rank, "expert_tensor", *cuts)',
        "folded.group(world.rank, *cuts)",
        ORTHOGONAL,
    ),
    Defect(
        "gradients that come back are divided by the expert degree",
        PARALLEL,
        "return ctx.route.reversed.exchange(gradients[0]), None",
        "return ctx.route.reversed.exchange(gradients[0]) / ctx.route.group.size, None",
        LAYOUTS,
    ),
    Defect(
        "gradients of experts double",
        PARALLEL,
        "layer.gradients.add_grouped(layer.weight, dy, rows, sizes), dy, rows",
        "layer.gradients.add_grouped(layer.weight, 2 * dy, rows, sizes), dy, rows",
        "tests/numerics/test_plain_oracle.py",
    ),
    Defect(
        "the norm leaves experts out",  # Megatron-LM PR 5916
        "trainer/state/optimizer.py",
        "for piece in owned if piece.saves]",
        'for piece in owned if piece.saves and "expert" not in piece.record.placement]',
        "tests/numerics/test_plain_oracle.py",
    ),
    Defect(
        "the router's gradient is that of a part of the tokens",  # transformers#48687 and PR 48205
        MODELS,
        'own = {"tensor": Partial()}',
        'own: dict[str, Partial | Replicate] = {"tensor": Replicate()}',
        LAYOUTS,
    ),
    Defect(
        "the balance of a sequence is that of a rank's part of it",
        PARALLEL,
        "for group in (dispatcher.region.group, dispatcher.region.context):",
        "for group in ():",
        LAYOUTS,
    ),
    Defect(
        "experts of equal scores are chosen in any order",
        MODELS,
        "return ranked.sort(dim=-1, descending=True, stable=True).indices[..., :count]",
        "return ranked.flip(-1).topk(count).indices.neg() + ranked.shape[-1] - 1",
        OWN,
    ),
    Defect(
        "corrections move away from equal load",
        PARALLEL,
        "(mean - self.load).sign()",
        "(self.load - mean).sign()",
        OWN,
    ),
    Defect(
        "a correction changes the weights of experts",
        MODELS,
        "weights = scores.gather(-1, chosen)",
        "weights = (scores if correction is None else scores + correction).gather(-1, chosen)",
        OWN,
    ),
    Defect(
        "no rank saves the corrections",
        BUILD,
        'first = groups.at["tensor"] == groups.at["context"] == groups.at["data"] == 0',
        "first = False",
        OWN,
    ),
    Defect(
        "the router keeps a view of gathered weights for backward",
        PARALLEL,
        "logits = _Logits.apply(tokens, self.weight, self)",
        "logits = F.linear(tokens.to(torch.promote_types(tokens.dtype, torch.float32)), self.weight.to(tokens.dtype))",
        "tests/numerics/test_matrix.py::test_what_a_layout_could_get_wrong_is_right",
    ),
]
