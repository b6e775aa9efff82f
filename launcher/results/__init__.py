"""Results of trials: measurements, ranking, report."""
