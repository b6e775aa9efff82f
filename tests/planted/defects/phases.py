"""Phases: what a step reads, its learning rate, the sizes that the ranks are ready for, and the time of the whole run."""

from __future__ import annotations

from tests.planted.defect import Defect

TABLE, STEP, BUILD = "trainer/shared/run/phases.py", "trainer/step.py", "trainer/build.py"
CHAIN, PURE = "tests/trainer/test_phases.py", "tests/shared/test_phase_table.py"
LAYOUTS = "tests/numerics/test_matrix.py::test_a_designed_layout_has_losses_norms_and_parameters_of_one_process"

DEFECTS = [
    Defect(
        "a step of short sequences counts as many whole ones",
        STEP,
        "self.samples += self.phase.stride",
        "self.samples += self.phase.global_batch",
        CHAIN,
    ),
    Defect("short sequences begin anew in every phase", "trainer/batches.py", "start *= self.pieces", "start *= 1", CHAIN),
    Defect("a phase has the learning rate of the last one", STEP, "self.phases.consumed) * self.phase.lr", "self.phases.consumed)", CHAIN),
    Defect("the learning rate goes with steps", STEP, "self.updates, self.phases.consumed)", "self.updates)", CHAIN),
    Defect("experts are balanced as if sequences were whole", BUILD, "self.balance.seq = config.model.seq", "pass", CHAIN),
    Defect(
        "ranks hand on sequences of the last phase",
        BUILD,
        "boundary = _boundary(config, self.region, self.precision, self.device)\n        self.pipeline",
        "boundary = self.pipeline.boundary\n        self.pipeline",
        LAYOUTS,
    ),
    Defect("a phase ends a step too late", TABLE, "bisect_right(self.phases, step, key", "bisect_right(self.phases, step - 1, key", PURE),
    Defect(
        "the step time of a run is that of its last phase",
        "trainer/shared/records/summary.py",
        "(sum(each.share * getattr(each, name) for each in phases)",
        "(getattr(phases[-1], name)",
        PURE,
    ),
    Defect(
        "a plan is of the last phase alone",
        "launcher/cost/phases.py",
        "if len(phases) == 1:\n        return phases[0][1]",
        "if phases:\n        return phases[-1][1]",
        "tests/cost/test_phase_pricing.py",
    ),
    Defect(
        "cautious AdamW decays everything",
        "trainer/state/optimizer.py",
        "old * (old * average > 0) * (lr",
        "old * (lr",
        "tests/trainer/test_cautious.py",
    ),
    Defect(
        "a skipped step decays cautiously",
        "trainer/state/optimizer.py",
        "(lr * decay * (1 - skip).to(old.dtype))",
        "(lr * decay)",
        "tests/trainer/test_cautious.py",
    ),
]
