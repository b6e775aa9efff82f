"""The cost model: times, memory, intervals, calibration."""

from __future__ import annotations

from tests.planted.defect import Defect

UNCERTAINTY, PEAK, COLLECTIVES = "launcher/cost/uncertainty.py", "launcher/cost/memory/peak.py", "launcher/cost/time/collectives.py"

DEFECTS = [
    Defect(
        "an interval of 80 % is one of 60 %",
        UNCERTAINTY,
        "LOW, HIGH = 0.1, 0.9\n",
        "LOW, HIGH = 0.2, 0.8\n",
        "tests/cost/test_spreads.py tests/cost/test_predict.py tests/search/test_surrogate.py",
    ),
    Defect(
        "a second measurement of one layout tells as much as one of another",
        UNCERTAINTY,
        "same = (index[:, None] == index[None, :]) & (index >= 0)[:, None] | np.eye(len(index), dtype=bool)",
        "same = np.eye(len(index), dtype=bool)",
        "tests/search/test_repeated_runs.py tests/search/test_surrogate.py",
    ),
    Defect(
        "an all-reduce moves the bytes of a gather",
        COLLECTIVES,
        "2 * (group.size - 1) / group.size, payload",
        "(group.size - 1) / group.size, payload",
        "tests/cost/test_collectives.py",
    ),
    Defect(
        "every rank of a domain shares one network port",
        COLLECTIVES,
        "device.network * constants.network * group.rails /",
        "device.network * constants.network * 1 /",
        "tests/cost/test_collectives.py",
    ),
    Defect(
        "optimizer states lack a moment",
        PEAK,
        "(w, w, 2 * w) if case.wide",
        "(w, w, w) if case.wide",
        "tests/cost/test_memory.py tests/cost/test_trainer_memory.py",
    ),
    Defect(
        "parameters that are gathered take no room",
        PEAK,
        "np.where(sharded, gathered * case.width, 0.0)",
        "np.where(sharded, 0.0 * gathered * case.width, 0.0)",
        "tests/cost/test_memory.py tests/cost/test_trainer_memory.py",
    ),
    Defect(
        "the first pipeline rank holds as many micro-batches as the last",
        PEAK,
        '{"first": 0.0, "middle": 1.0, "last": case.pipeline - 1}',
        '{"first": case.pipeline - 1, "middle": 1.0, "last": case.pipeline - 1}',
        "tests/cost/test_memory.py tests/cost/test_trainer_memory.py",
    ),
    Defect(
        "the bubble of 1F1B is that of one rank less",
        "launcher/cost/time/pipeline.py",
        "whole = self.traversal(p, 0, 1) + 2 * (p - 1) * self.send",
        "whole = self.traversal(p - 1, 0, 1) + 2 * (p - 1) * self.send",
        "tests/cost/test_pipeline.py",
    ),
    Defect(
        "full recomputation costs what selective does",
        "trainer/shared/run/flops.py",
        "again = each - skipping * matrix_flops(tokens, model.hidden * model.ffn)",
        "again = float(attention_core_flops(model.seq, model.hidden))",
        "tests/trainer/test_parts.py",
    ),
    Defect(
        "updated parameters are renewed by too few bytes",
        "launcher/cost/time/data_parallel.py",
        "for group, level in ((between, params), (further, grads)))",
        "for group, level in ((between, params), (further, params * grads)))",
        "tests/cost/test_trainers.py",
    ),
    Defect(
        "a norm of queries and keys keeps nothing",
        "launcher/cost/memory/activations.py",
        "rows(case) * (unfed + once) + head_norms(case)",
        "rows(case) * (unfed + once)",
        "tests/cost/test_trainer_memory.py",
    ),
    Defect(
        "two norms of one input keep it twice",
        "launcher/cost/memory/activations.py",
        "rows(case) * (unfed + once)",
        "rows(case) * unfed",
        "tests/cost/test_trainer_memory.py",
    ),
    Defect(
        "orthogonalised matrices keep a second moment",
        PEAK,
        "parts[OPTIMIZER] - moment * owned",
        "parts[OPTIMIZER] - 0 * moment * owned",
        "tests/trainer/test_muon.py",
    ),
    Defect(
        "every tensor rank sends a matrix whole",
        "launcher/cost/time/orthogonal.py",
        "one.sharers * (1 - 1 / pieces(case, one))",
        "one.sharers * one.parts * (1 - 1 / pieces(case, one))",
        "tests/trainer/test_muon.py",
    ),
    Defect(
        "a stage that is cut by cost ends before the block that passes its share",
        "launcher/cost/inputs/stages.py",
        "np.clip(np.floor(share * (rank + 1)) + 1, 0, layers)",
        "np.clip(np.floor(share * (rank + 1)), 0, layers)",
        "tests/cost/test_trainers.py",
    ),
    Defect(
        "gradients of shared states hide behind backward whatever the trainer does",
        "launcher/cost/model.py",
        'early = ~(f.overlap.states_wait & (case.field("optimizer") > 1) & (case.field("params") == 1))',
        'early = ~(f.overlap.states_wait & (case.field("optimizer") < 1) & (case.field("params") == 1))',
        "tests/cost/test_trainers.py",
    ),
    Defect(
        "every trainer starts a collective of tensor ranks in five calls",
        "launcher/cost/time/block.py",
        "one = case.trainer.kernels.host_tensor",
        "one = 5",
        "tests/cost/test_trainers.py",
    ),
    Defect(
        "rates of a chip that nobody fitted are called assumed after runs here, too",
        "launcher/cost/known.py",
        'and not hardware.calibration and not hardware.learnt.get("places")',
        "and not hardware.calibration",
        "tests/cost/test_known.py",
    ),
    Defect(
        "a mixture of experts is served like its dense part",
        "launcher/cost/inference/passes.py",
        "whole = whole + case.sparse * _multiplied(",
        "whole = whole + 0 * _multiplied(",
        "tests/cost/test_inference.py tests/cost/test_inference_tables.py",
    ),
    Defect(
        "one token reads all experts",
        "launcher/cost/inference/case.py",
        "e.count * (1 - (1 - np.asarray(e.active / e.count)) ** np.asarray(tokens, float))",
        "e.count + 0 * np.asarray(tokens, float)",
        "tests/cost/test_inference.py",
    ),
    Defect(
        "a served rank holds one expert of each layer",
        "launcher/cost/inference/memory.py",
        "s.experts.count * case.expert_parameters",
        "case.expert_parameters",
        "tests/cost/test_inference.py",
    ),
]
