"""Tables of measured runs, ranking, reports."""

from __future__ import annotations

from tests.planted.defect import Defect

RANKING, METRICS = "launcher/results/ranking.py", "launcher/tables/metrics.py"

DEFECTS = [
    Defect(
        "of many machines in one table each run has another one's constants",
        "launcher/tables/predictions.py",
        "return np.repeat(values, count) if",
        "return np.tile(values, count) if",
        "tests/cost/test_calibrate.py",
    ),
    Defect(
        "trials are ranked by what was predicted",
        RANKING,
        "timed.sort(key=lambda m: (m.other_model, m.step_time_s, m.trial))",
        "timed.sort(key=lambda m: (m.other_model, m.predicted_step_time_s or m.step_time_s, m.trial))",
        "tests/results/test_order.py tests/results/test_ranking.py",
    ),
    Defect(
        "equal times are ordered as they came",
        RANKING,
        "timed.sort(key=lambda m: (m.other_model, m.step_time_s, m.trial))",
        "timed.sort(key=lambda m: (m.other_model, m.step_time_s))",
        "tests/results/test_order.py tests/results/test_ranking.py",
    ),
    Defect(
        "intervals that overlap at one end are no tie",
        RANKING,
        "return low_a <= high_b and low_b <= high_a",
        "return low_a <= low_b <= high_a",
        "tests/results/test_order.py tests/results/test_ranking.py",
    ),
    Defect(
        "a trial that trains another model wins",
        RANKING,
        "timed.sort(key=lambda m: (m.other_model, m.step_time_s, m.trial))",
        "timed.sort(key=lambda m: (m.step_time_s, m.trial))",
        "tests/results/test_order.py tests/results/test_ranking.py",
    ),
    Defect(
        "a trial that failed is ranked by its first steps",
        RANKING,
        "return m.status is Status.DONE and m.step_time_s is not None",
        "return m.step_time_s is not None",
        "tests/results/test_order.py tests/results/test_ranking.py",
    ),
    Defect(
        "steps of the warm-up are measured",
        RANKING,
        "for value in written[warmup:] if",
        "for value in written if",
        "tests/results/test_order.py tests/results/test_ranking.py",
    ),
    Defect(
        "the interval of a median is too narrow",
        RANKING,
        "while 1 - 2 * (more := outside + _half_binomial(n, k)) >= confidence:",
        "while 1 - (more := outside + _half_binomial(n, k)) >= confidence:",
        "tests/results/test_order.py tests/results/test_ranking.py",
    ),
    Defect(
        "regret is measured against what was predicted fastest",
        METRICS,
        "return statistics.fmean(chosen) / min(measured) - 1",
        "return statistics.fmean(chosen) / statistics.fmean(measured) - 1",
        "tests/results/test_metrics.py",
    ),
    Defect(
        "ties of an area under a curve count nothing",
        METRICS,
        "(order[:count].sum() - count * (count + 1) / 2) / (count * len(negative))",
        "(order[:count].sum() - count * (count - 1) / 2) / (count * len(negative))",
        "tests/results/test_metrics.py",
    ),
    Defect(
        "the interval of a ratio is that of a comparison by overlap",
        "launcher/results/comparison.py",
        "error = WIDER * math.hypot(",
        "error = math.hypot(",
        "tests/results/test_compare.py",
    ),
    Defect(
        "a trial that failed is hidden from a comparison",
        "launcher/results/comparison.py",
        "for record, _, _ in trials if record.id not in ids]",
        "for record, m, _ in trials if record.id not in ids and m.place]",
        "tests/results/test_compare.py",
    ),
    Defect(
        "the report names the smallest differences as the reason",
        "launcher/results/reasons.py",
        "key=lambda each: -abs(each.saved)",
        "key=lambda each: abs(each.saved)",
        "tests/results/test_report.py",
    ),
    Defect(
        "the report repeats a secret of the command",
        "launcher/results/reasons.py",
        'return _key(word).startswith("cluster.env")',
        "return False",
        "tests/results/test_report.py",
    ),
    Defect(
        "the winner is compared with a trial that it cannot be told from",
        "launcher/results/report.py",
        "next((trial for trial in ranked[1:] if not trial.measured.tied_with_best), None)",
        "next((trial for trial in ranked[1:]), None)",
        "tests/results/test_report.py",
    ),
    Defect(
        "the model of a row forgets what it does otherwise than its family",
        "launcher/tables/cases.py",
        'return from_dict(ModelConfig, keys | changes, "model_changes: model.")',
        'return from_dict(ModelConfig, keys, "model_changes: model.")',
        "tests/cost/test_own_table.py",
    ),
    Defect(
        "a published T5 has the blocks of one stack in both",
        "benchmarks/published/pairs.py",
        '"layers": read + written, "encoder_layers": read,',
        '"layers": read, "encoder_layers": read // 2,',
        "tests/published/test_pairs.py",
    ),
    Defect(
        "losses of trials that are not drawn are not compared",
        "launcher/results/report.py",
        "plots.widest_gap(series)))",
        "plots.widest_gap(drawn)))",
        "tests/results/test_report.py",
    ),
]
