"""Optimizer states in host memory."""

from __future__ import annotations

from tests.planted.defect import Defect

HOST, BUCKET = "trainer/state/host.py", "trainer/state/bucket.py"
BITS = "tests/trainer/test_offload.py"

DEFECTS = [
    Defect(
        "weights go up from before their update",
        HOST,
        "        if update is not None:\n            update()\n        if self.outgoing is not self.weight:\n            self.outgoing.copy_(self.weight)\n",
        "        if self.outgoing is not self.weight:\n            self.outgoing.copy_(self.weight)\n        if update is not None:\n            update()\n",
        BITS,
    ),
    Defect(
        "a late wait for a reduce-scatter brings its result back",
        "trainer/comm/collectives.py",
        "if not self.waited:",
        "if True:",
        BITS,
    ),
    Defect(
        "the host updates a bucket twice",
        HOST,
        "        if update is not None:\n            update()\n",
        "        if update is not None:\n            update()\n            update()\n",
        BITS,
    ),
    Defect(
        "gradients go down without what their last collective adds",
        HOST,
        "pairs = [(self.gradient[part], gradient[part]) for part",
        "pairs = [(self.gradient[part], gradient[part].clone()) for part",
        BITS,
    ),
    Defect(
        "gradients that tensor ranks sum at the end of a step go down before",
        BUCKET,
        "late = {p.record.name for p in self.parameters if p.record.late}",
        "late = {p.record.name for p in self.parameters if p.record.late and p.record.partial('tied')}",
        BITS,
    ),
    Defect(
        "states of the host are read back into another part of their parameter",
        BUCKET,
        "own = OptimizerShard(record, piece.offset, piece.numel, weight, exp_avg, exp_avg_sq, gradient, saves, host, sums)",
        "own = OptimizerShard(record, piece.position, piece.numel, weight, exp_avg, exp_avg_sq, gradient, saves, host, sums)",
        BITS,
    ),
    Defect(
        "a step that is not finite changes the host's states",
        "trainer/state/offloaded.py",
        "        optimizer.step(lr, factors, skip)\n",
        "        optimizer.step(lr, factors, torch.zeros_like(skip))\n",
        BITS,
    ),
    Defect(
        "a shard is cut inside a vector of the processor",
        "trainer/shared/parallel/shards.py",
        "return min(numel, round(share * numel / ALIGNMENT) * ALIGNMENT)",
        "return min(numel, round(share * numel))",
        BITS,
    ),
    Defect(
        "what the host's share cuts in two counts twice in the norm",
        BUCKET,
        "sums = reduced.pop(piece.name, self.gradient[:0])",
        "sums = reduced.pop(piece.name, self.gradient[piece.position : piece.position + piece.numel])",
        BITS,
    ),
    Defect(
        "every rank of a host updates as fast as if it was alone",
        "launcher/cost/time/offload.py",
        " * case.device.host_sharers / c.host_update",
        " / c.host_update",
        "tests/cost/test_host_memory.py",
    ),
    Defect(
        "states on the host count on the device, too",
        "launcher/cost/memory/peak.py",
        'parts[OPTIMIZER] * (1 - case.field("offload"))',
        "parts[OPTIMIZER]",
        "tests/cost/test_host_memory.py",
    ),
]
