"""What the trials showed: measurements, their order, the report."""
