"""Sharded states, the norm, clipping, the optimizer, ties, initial weights."""

from __future__ import annotations

from tests.planted.defect import Defect

BUCKET, OPTIMIZER = "trainer/state/bucket.py", "trainer/state/optimizer.py"
LAYOUTS = "tests/numerics/test_layouts_agree.py tests/numerics/test_matrix.py"
MUON = "tests/numerics/test_matrix.py tests/trainer/test_muon.py"
AVERAGE = "tests/trainer/test_average.py"
TRANSFER = "tests/trainer/test_transfer.py"
ORACLE = "tests/numerics/test_plain_oracle.py"

DEFECTS = [
    Defect(
        "gradients are divided by the optimizer's shards where replicas remain",
        BUCKET,
        "                yield reducing, replicas.size > 1\n",
        "                yield reducing, replicas.size > 1\n"
        "                if replicas.size > 1:\n"
        "                    self.gradient.div_(optimizer.size)\n",
        "tests/numerics/test_matrix.py",
    ),
    Defect(
        "two levels of an update are published in the wrong order",
        BUCKET,
        "gathers = [gather for gather in gathers if gather[0].size > 1]",
        "gathers = [gather for gather in reversed(gathers) if gather[0].size > 1]",
        "tests/numerics/test_matrix.py",
    ),
    Defect(
        "gradient shards keep what the step before has left",
        BUCKET,
        "self.fresh = True  # nothing has been added to the gradient shard",
        "self.fresh = False",
        LAYOUTS,
    ),
    Defect(
        "parameters are gathered before their update is published",
        BUCKET,
        '            self._wait_published()\n            self.whole = self.pool.take("weights"',
        '            self.whole = self.pool.take("weights"',
        "tests/numerics/test_matrix.py",
    ),
    Defect(
        "a shard begins one element late",
        "trainer/shared/parallel/shards.py",
        "start += level.digit(data_index) * length\n",
        "start += level.digit(data_index) * length + (level.digit(data_index) > 0)\n",
        "tests/shared/test_state_shards.py",
    ),
    Defect(
        "levels of sharding mistake a rank's digit",
        "trainer/shared/parallel/shards.py",
        "return data_index // self.stride % self.size",
        "return data_index % self.size",
        "tests/shared/test_state_shards.py tests/shared/test_mesh.py",
    ),
    Defect(
        "a level's group has ranks of the level before",
        "trainer/shared/parallel/mesh.py",
        "left.insert(0, Digit(digit.size // size, digit.stride * size))",
        "left.insert(0, Digit(digit.size // size, digit.stride))",
        "tests/shared/test_state_shards.py tests/shared/test_mesh.py",
    ),
    Defect(
        "an average of weights begins a step early",
        "trainer/state/average.py",
        "if steps > self.start else 0",
        "if steps >= self.start else 0",
        AVERAGE,
    ),
    Defect(
        "weights that a host updates are averaged before their update",
        "trainer/state/average.py",
        """        if update is not None:
            update()
        torch._foreach_lerp_(averages, weights, share)
""",
        """        torch._foreach_lerp_(averages, weights, share)
        if update is not None:
            update()
""",
        AVERAGE,
    ),
    Defect(
        "the norm counts replicas of a shard again",
        OPTIMIZER,
        "counted = [piece.sums for piece in owned if piece.saves]",
        "counted = [piece.sums for piece in owned if piece.record.primary]",
        LAYOUTS,
    ),
    Defect(
        "the norm is that of one shard",
        "trainer/step.py",
        "        groups.world.all_reduce(own).wait()\n        own, load",
        "        groups.world.all_reduce(own[:3]).wait()\n        own, load",
        LAYOUTS,
    ),
    Defect(
        "a tied weight on two stages is not summed",
        "trainer/step.py",
        "sum_partial(self.trained, groups.axes)",
        'sum_partial(self.trained, {"tensor": groups.tensor})',
        LAYOUTS,
    ),
    Defect(
        "the norm counts a tied weight twice",
        "trainer/shared/parallel/placement.py",
        "for axis, place in at.items() if axis in placement)",
        'for axis, place in at.items() if axis == "tensor")',
        LAYOUTS,
    ),
    Defect(
        "biases and norms decay",
        "trainer/tensor/parallelize.py",
        "group=spec.group,",
        "group='matrices',",
        ORACLE,
    ),
    Defect(
        "clipping scales small gradients up",
        "trainer/step.py",
        "(clip / (norms + 1e-6)).clamp(max=1.0)",
        "(clip / (norms + 1e-6))",
        "tests/numerics/test_clipping.py",
    ),
    Defect(
        "warm-up begins with a rate of nothing",
        OPTIMIZER,
        "return config.lr * consumed(step + 1) / consumed(config.warmup_steps)",
        "return config.lr * consumed(step) / consumed(config.warmup_steps)",
        "tests/trainer/test_parts.py",
    ),
    Defect(
        "the rate never falls to its minimum",
        OPTIMIZER,
        "config.min_lr + (config.lr - config.min_lr) * LEFT",
        "config.min_lr + config.lr * LEFT",
        "tests/trainer/test_parts.py",
    ),
    Defect(
        "skipped steps count as updates",
        OPTIMIZER,
        "self.steps += 1 - skip",
        "self.steps += 1",
        "tests/trainer/test_cautious.py tests/numerics/test_low_precision.py",
    ),
    Defect(
        "the loss scale doubles with every step once it has doubled",
        "trainer/state/loss_scale.py",
        "self.value, self.good_steps = self.value * 2, 0",
        "self.value = self.value * 2",
        "tests/trainer/test_loss_scale.py tests/trainer/test_parts.py",
    ),
    Defect(
        "each tensor rank draws the rows of the first one",
        "trainer/state/parameters.py",
        "_normal_blocks(record.name, seed, rows[0] * row_numel, rows[1] * row_numel, math.prod(record.shape))",
        "_normal_blocks(record.name, seed, 0, (rows[1] - rows[0]) * row_numel, math.prod(record.shape))",
        LAYOUTS,
    ),
    Defect(
        "matrices are put together without the parts of other tensor ranks",
        "trainer/comm/groups.py",
        'by_level.group(world.rank, "tensor", *cuts)',
        "by_level.group(world.rank, *cuts)",
        MUON,
    ),
    Defect(
        "heads and experts are orthogonalised as one matrix",
        "trainer/state/muon.py",
        "orthogonalised(matrices, muon.steps, self.config.eps)",
        "orthogonalised(matrices.flatten(0, 1)[None], muon.steps, self.config.eps).view_as(matrices)",
        "tests/trainer/test_muon.py",
    ),
    Defect(
        "second moments of rows begin anew in every step",
        "trainer/state/muon.py",
        "torch._foreach_copy_(known, list(squares))",
        "torch._foreach_copy_(list(squares.clone()), list(squares))",
        "tests/trainer/test_muon.py",
    ),
    Defect(
        "a checkpoint has rows of one matrix for all of a parameter",
        "trainer/state/muon.py",
        "region = (*((i, i + 1) for i in index), (0, rows))",
        "region = (*((0, 1) for _ in index), (0, rows))",
        "tests/checkpoint/test_resume.py::test_a_killed_muon_resumes_where_matrices_are_cut_in_another_way",
    ),
    Defect(
        "experts have the update of vectors",
        "trainer/models/experts.py",
        'ParameterSpec(Init(std), "matrices", placement))',
        'ParameterSpec(Init(std), "vectors", placement))',
        "tests/trainer/test_muon.py",
    ),
    Defect(
        "an owner gets the momentum of another part of a shard",
        "trainer/state/matrices.py",
        "pieces[f.piece][f.position : f.position + f.numel]",
        "pieces[f.piece][: f.numel]",
        MUON,
    ),
    Defect(
        "parts of a matrix lie in the order of the ranks that sent them",
        "trainer/state/matrices.py",
        "sorted(flats, key=lambda pair: pair[0])",
        "flats[::-1]",
        MUON,
    ),
    Defect(
        "momentum falls in a step that is skipped",
        "trainer/state/muon.py",
        "((1 - muon.momentum) * (1 - skip.double()))",
        "((1 - muon.momentum) * torch.ones_like(skip).double())",
        "tests/trainer/test_muon.py",
    ),
    Defect(
        "a matrix decays as a vector does",
        "trainer/state/muon.py",
        "self.config.weight_decay_of(ORTHOGONALIZED)",
        "self.config.weight_decay_of('vectors')",
        "tests/trainer/test_muon.py",
    ),
    Defect(
        "vectors decay as matrices do",
        "trainer/shared/run/resolved.py",
        'return 0.0 if group == "vectors" else self.weight_decay',
        "return self.weight_decay",
        "tests/trainer/test_schedules.py",
    ),
    Defect(
        "the rate falls as soon as it has risen",
        OPTIMIZER,
        "start = config.warmup_steps + config.stable_steps",
        "start = config.warmup_steps",
        "tests/trainer/test_schedules.py",
    ),
    Defect(
        "a group's own rate is not that of its parameters",
        OPTIMIZER,
        "lr * self.config.lr_factor(group)",
        'lr * self.config.lr_factor("vectors")',
        "tests/trainer/test_schedules.py",
    ),
    Defect(
        "moments of one optimizer are continued by another",
        "trainer/shared/records/resume.py",
        'kind = manifest.get("optimizer", "adamw")',
        "kind = optimizer",
        "tests/trainer/test_muon.py",
    ),
    Defect(
        "matrices of a wider model have the learning rate of the base",
        "trainer/shared/run/transfer.py",
        "super().lr_factor(group) / self._matrix(group)",
        "super().lr_factor(group)",
        TRANSFER,
    ),
    Defect(
        "epsilon does not shrink with the gradients of a deeper model",
        "trainer/shared/run/transfer.py",
        "self.deeper if group in BLOCKS else 1",
        "1",
        TRANSFER,
    ),
    Defect(
        "matrices that write to the residual stream count the layers of the model, not of the base",
        "trainer/models/layers.py",
        "(c.transfer.layers or c.layers)",
        "c.layers",
        TRANSFER,
    ),
    Defect(
        "keys are exported with the factor of scores, too",
        "trainer/convert/folding.py",
        "groups[:, :-2] *= times",
        "groups[:, :-1] *= times",
        TRANSFER,
    ),
]
