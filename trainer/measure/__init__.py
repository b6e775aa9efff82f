"""What a run measures: step times and their parts, memory, timelines; and the MLflow forwarder."""
