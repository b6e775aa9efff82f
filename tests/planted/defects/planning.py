"""The space of layouts, plans, sizes, searches."""

from __future__ import annotations

from tests.planted.defect import Defect

SPACE, POLICY = "launcher/planning/space.py", "launcher/search/policy.py"
COORDINATES = "tests/trainer/test_coordinates.py"
ARMS = "launcher/search/arms.py"

DEFECTS = [
    Defect(
        "what was before a release is what came with it",
        "launcher/config/engine.py",
        "if version < limit else ()",
        "if version >= limit else ()",
        "tests/config/test_engine_releases.py",
    ),
    Defect(
        "a plan is that of the newest release of an engine",
        "launcher/planning/serving/plan.py",
        "    config = replace(config, engine=released(config.engine))\n",
        "    config = replace(config, engine=replace(config.engine, version=released(config.engine).version))\n",
        "tests/cost/test_plan_inference.py",
    ),
    Defect(
        "a measured row is predicted as the newest release of its engine",
        "launcher/tables/inference.py",
        'version=version if profile.earlier else "")',
        'version="")',
        "tests/cost/test_inference_tables.py",
    ),
    Defect(
        "steps of an early phase count as those of all",
        "launcher/search/loss.py",
        "return one.mean_step_s(measured.phases, steps) or measured.seconds",
        "return measured.seconds",
        "tests/search/test_loss_search.py",
    ),
    Defect(
        "an arm is told to be slower by the shortest length that it was trained for",
        "launcher/search/arms.py",
        "not bounded and not self.misses(other, upto)",
        "not self.misses(other, upto)",
        "tests/search/test_loss_search.py",
    ),
    Defect(
        "every branch begins where the first one does",
        "launcher/search/branches.py",
        "at=every * piece)",
        "at=every)",
        "tests/search/test_loss_search.py",
    ),
    Defect(
        "a model with a base has the rate of its own size",
        "launcher/planning/baseline.py",
        "interpolate(model.family, count(base), lambda",
        "interpolate(model.family, parameters, lambda",
        "tests/search/test_size.py",
    ),
    Defect(
        "layouts whose sharding does not divide the replicas are planned",
        SPACE,
        '(table["optimizer"] % table["grads"] != 0) | (shared % table["optimizer"] != 0),',
        '(table["optimizer"] % table["grads"] != 0),',
        "tests/search/test_space.py",
    ),
    Defect(
        "the space lacks layouts of one stage",
        SPACE,
        "for d in divisors(world) if d <= min(limits.max_pipeline or model.layers, model.layers)]",
        "for d in divisors(world) if 1 < d <= min(limits.max_pipeline or model.layers, model.layers)]",
        "tests/search/test_space.py",
    ),
    Defect(
        "the best of a group is taken for dominated",
        "launcher/planning/plan.py",
        "np.r_[True, need[1:] < least[:-1]]",
        "np.r_[False, need[1:] < least[:-1]]",
        "tests/search/test_plan.py",
    ),
    Defect(
        "a layout that may just not fit is never tried",
        "launcher/planning/plan.py",
        "np.where(predicted.fits >= CANNOT_FIT, AT_EDGE, MEMORY))",
        "np.where(predicted.fits >= FITS, AT_EDGE, MEMORY))",
        "tests/search/test_plan.py tests/search/test_plan_command.py",
    ),
    Defect(
        "a trial is pruned as soon as it is slower than the best",
        POLICY,
        "None if best is None else best * ratio * (1 + self.settings.tolerance)",
        "None if best is None else best * ratio * (1 - self.settings.tolerance)",
        "tests/search/test_policy.py",
    ),
    Defect(
        "a search may run one trial more than it was given",
        POLICY,
        "if limit is not None and spent >= limit:",
        "if limit is not None and spent > limit:",
        "tests/search/test_policy.py",
    ),
    Defect(
        "a step of fewer nodes is not scaled up",
        POLICY,
        "seconds = measured.seconds * float(self.candidates.parts[index].sum() / parts[index].sum())",
        "seconds = measured.seconds",
        "tests/search/test_policy.py",
    ),
    Defect(
        "a trial that ran out of memory is taken for one that fitted",
        "launcher/search/surrogate.py",
        "np.maximum(fits if ran else 1 - fits, 1e-12)",
        "np.maximum(fits, 1e-12)",
        "tests/search/test_surrogate.py tests/search/test_policy.py",
    ),
    Defect(
        "a size is found for twice the tokens",
        "launcher/planning/size.py",
        "executed_flops(model, recompute) * tokens / (gpus * tflops * 1e12)",
        "executed_flops(model, recompute) * tokens / (gpus * tflops * 2e12)",
        "tests/search/test_size.py",
    ),
    Defect(
        "a recipe's own layout is compared with the slowest one",
        "launcher/goals/training/configured.py",
        "planned.seconds[planned.order[0]]",
        "planned.seconds[planned.order[-1]]",
        "tests/search/test_plan_command.py",
    ),
    Defect(
        "a run that misses the loss can make its arm the fastest",
        ARMS,
        "not bounded and not self.misses(other, upto) and",
        "not bounded and",
        "tests/search/test_arms.py",
    ),
    Defect(
        "arms are compared without pairing their seeds",
        ARMS,
        "if a and (b := self.runs[other].get(seed))",
        "if a and (b := self.runs[other].get(len(self.runs[other]) - 1 - seed))",
        "tests/search/test_arms.py",
    ),
    Defect(
        "several arms are compared as if there were two",
        ARMS,
        "return 2 * max(len(self.runs) - 1, 1)",
        "return 0.5",
        "tests/search/test_arms.py",
    ),
    Defect(
        "one validation below the loss counts as reaching it",
        ARMS,
        "CONSECUTIVE = 3",
        "CONSECUTIVE = 1",
        "tests/search/test_arms.py",
    ),
    Defect(
        "arms with other batches are validated on other text",
        "launcher/goals/loss/arms.py",
        "eval_batches=sequences // batch",
        "eval_batches=base.run.eval_batches",
        "tests/search/test_loss_search.py",
    ),
    Defect(
        "arms of one layout have errors of their own",
        "launcher/search/loss.py",
        "same = np.array([[one.same(other) for other in found] for one in found])",
        "same = np.eye(len(found), dtype=bool)",
        "tests/search/test_loss_search.py",
    ),
    Defect(
        "the change of activations is taken for their size",
        "trainer/coordinates.py",
        "[b - a for a, b in",
        "[b for a, b in",
        COORDINATES,
    ),
    Defect(
        "only activations that shrink are told",
        "launcher/planning/coordinates.py",
        "power > TOLERANCE",
        "power < -TOLERANCE",
        COORDINATES,
    ),
    Defect(
        "a wider model has the heads of the narrow one",
        "launcher/planning/coordinates.py",
        'heads=scaled(model, "heads", model.heads, width)',
        "heads=model.heads",
        COORDINATES,
    ),
]
