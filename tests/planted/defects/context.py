"""Context ranks: positions, exchange, gradients, balance. Silent mistakes of this kind are the most that other trainers have had."""

from __future__ import annotations

from tests.planted.defect import Defect

REGION, EXCHANGE, BATCHES = "trainer/tensor/region.py", "trainer/tensor/context.py", "trainer/batches.py"
PIECES, GROUPS, BLOCKS = "trainer/shared/parallel/sequence.py", "trainer/comm/groups.py", "trainer/tensor/block_attention.py"
LAYOUTS = "tests/numerics/test_matrix.py::test_a_designed_layout_has_losses_norms_and_parameters_of_one_process"
RECORDED = "tests/numerics/test_communication_volume.py"
RING, MERGED = "trainer/tensor/ring.py", "tests/trainer/test_ring.py"
MASKED = "'tests/numerics/test_matrix.py::test_what_a_layout_could_get_wrong_is_right[targets that only one context rank has]'"

DEFECTS = [
    Defect(
        "positions are counted within a rank",
        REGION,
        "return zigzag(rows * self.context.size, self.context.size, self.context.index)",
        "return (range(rows),)",
        LAYOUTS,
    ),
    Defect(
        "a part of a rank's sequence begins where the rank's does",
        REGION,
        "self.parts, self.group.index if self.sequence_sharded else 0)",
        "self.parts, 0)",
        LAYOUTS,
    ),
    Defect(
        "gradients of keys and values are those of a rank's own queries",
        EXCHANGE,
        "    group.reduce_scatter(own, ranked).wait()\n",
        "    own.copy_(ranked.chunk(group.size)[group.index])\n",
        LAYOUTS,
    ),
    Defect(
        "gradients of keys and values are averaged",
        EXCHANGE,
        "    return own\n\n\ndef to_sequences",
        "    return own / group.size\n\n\ndef to_sequences",
        LAYOUTS,
    ),
    Defect(
        "keys stay in the order of ranks",
        EXCHANGE,
        "return ranked[order(len(ranked), group, own.device)]",
        "return ranked",
        LAYOUTS,
    ),
    Defect(
        "outputs of heads go back in the order of the sequence",
        EXCHANGE,
        "sent = by_rank(whole, group).unflatten",
        "sent = whole.unflatten",
        LAYOUTS,
    ),
    Defect(
        "gathered keys are kept for backward",
        EXCHANGE,
        "if again else contextlib",
        "if not again else contextlib",
        RECORDED,
    ),
    Defect(
        "a query of the second piece sees no key between the pieces",
        "trainer/models/attention.py",
        "(rows, slice(run.stop)) for rows",
        "(rows, slice(rows.stop)) for rows",
        LAYOUTS,
    ),
    Defect(
        "dropout of attention counts positions within a rank's sequence",
        "trainer/tensor/dropout.py",
        "torch.arange(keys, device=weights.device), length)\n",
        "torch.arange(keys, device=weights.device), keys)\n",
        LAYOUTS,
    ),
    Defect(
        "dropout in blocks counts queries from the start of the piece",
        BLOCKS,
        "places = range(before + block.start, before + block.stop)",
        "places = range(block.start, before + block.stop)[: len(block)]",
        LAYOUTS,
    ),
    Defect(
        "the loss is multiplied by the context ranks",  # Megatron-LM#673, #906
        "trainer/batches.py",
        "weight = loss_scale / self.tokens",
        "weight = loss_scale / self.tokens * self.config.layout.context",
        MASKED,
    ),
    Defect(
        "the loss is divided by a context rank's targets",  # verl#2857, transformers PR 41832
        "trainer/step.py",
        "mean = self.batches.tokens / own[2].clamp(min=1)",
        "mean = self.batches.tokens / (batch.targets * groups.world.size).clamp(min=1)",
        MASKED,
    ),
    Defect(
        "targets are those of the first tokens",
        BATCHES,
        "return rows_at(self.rows[micro_batch, self.read + 1 :], self.runs())",
        "return rows_at(self.rows[micro_batch, self.read + 1 :], (range(sum(map(len, self.runs()))),))",
        LAYOUTS,
    ),
    Defect(
        "gradients are summed over data ranks alone",
        GROUPS,
        "shared_at=_index(world.rank, by_level, Factors.of(layout)),",
        'shared_at=mesh.coordinates(world.rank)["data"],',
        LAYOUTS,
    ),
    Defect(
        "context ranks all attend with the first heads' dropout and slopes",
        "trainer/tensor/parallelize.py",
        "            core.heads = _part(core.heads, self.region.context)\n",
        "            core.heads = core.heads[: len(core.heads) // self.region.context.size]\n",
        LAYOUTS,
    ),
    Defect(
        "the balance of a sequence is that of a context rank's part of it",
        "trainer/tensor/experts.py",
        "for group in (dispatcher.region.group, dispatcher.region.context):",
        "for group in (dispatcher.region.group,):",
        LAYOUTS,
    ),
    Defect(
        "a row is answered if a rank has its part right",
        "trainer/tensor/cross_entropy.py",
        "    context.all_reduce(wrong).wait()\n",
        "",
        "tests/tuning/test_instructions.py",
    ),
    Defect(
        "the work of context ranks is not equal",
        PIECES,
        "first, last = width * index, length - width * (index + 1)",
        "first, last = 2 * width * index, 2 * width * index + width",
        "tests/shared/test_sequence.py",
    ),
    Defect(
        "what queries find in a part is merged without the greatest of their scores",
        RING,
        "    total = torch.logaddexp(logs, log)\n",
        "    total = torch.log(torch.exp(logs) + torch.exp(log))\n",
        MERGED,
    ),
    Defect(
        "weights of backward are those of a part alone",
        RING,
        "            weights = torch.exp(scores - log[..., None])\n",
        "            weights = torch.softmax(scores, -1)\n",
        MERGED,
    ),
    Defect(
        "keys of a ring are hidden by their rows on the rank",
        RING,
        "queries = run[block.start : block.stop]\n",
        "queries = range(run_rows.start + block.start, run_rows.start + block.stop)\n",
        MERGED,
    ),
    Defect(
        "linear biases of a ring know the rows of keys, not their positions",
        RING,
        "return (query, key) if alibi is None else alibi(query, key, self.core.heads, turn.other)",
        "return (query, key) if alibi is None else alibi(query, key, self.core.heads)",
        MERGED,
    ),
    Defect(
        "dropout of a ring is that of a rank's own keys",
        RING,
        "lost = self._lost(queries, at, turn.length, scores, masks.stamp)",
        "lost = self._lost(queries, places(turn.own, key.device)[seen], turn.length, scores, masks.stamp)",
        MERGED,
    ),
    Defect(
        "the last message of a ring brings no gradient home",
        RING,
        "        both = home.add_(came)\n",
        "        both = home\n",
        LAYOUTS,
    ),
    Defect(
        "gradients of a ring's keys are added up on the rank behind",
        RING,
        "            sent = (own if number == 1 else own.add_(came)).to(key.dtype)\n",
        "            sent = (home if number == 1 else own.add_(came)).to(key.dtype)\n",
        LAYOUTS,
    ),
    Defect(
        "a ring turns the other way",
        "trainer/comm/collectives.py",
        "ways = ((dist.isend, tensor, 1), (dist.irecv, into, -1))",
        "ways = ((dist.isend, tensor, -1), (dist.irecv, into, 1))",
        LAYOUTS,
    ),
    Defect(
        "a ring sends keys and values on once too often",
        RING,
        "            if step < size - 1:\n",
        "            if step < size:\n",
        RECORDED,
    ),
]
