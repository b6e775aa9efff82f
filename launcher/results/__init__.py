"""What the trials showed: the order of the measured, the MLflow mirror, the report."""
