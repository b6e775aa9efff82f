"""Mixtures of experts: routing, exchange, gradients, balance. Each has been a public bug of another trainer, or nearly one of ours."""

from __future__ import annotations

from tests.planted.defect import Defect

MODELS, PARALLEL, BUILD = "trainer/models/experts.py", "trainer/tensor/experts.py", "trainer/build.py"
NUMBER = "tests/numerics/test_matrix.py::test_a_designed_layout_has_losses_norms_and_parameters_of_one_process"
LAYOUTS = f"{NUMBER}[2] {NUMBER}[4]"
OWN = "tests/trainer/test_experts.py"

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
        "the norm leaves experts out",
        "trainer/state/optimizer.py",
        "for piece in owned if piece.saves]",
        'for piece in owned if piece.saves and "expert" not in piece.record.placement]',
        "tests/numerics/test_plain_oracle.py",
    ),
    Defect(
        "the router's gradient is that of a part of the tokens",
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
