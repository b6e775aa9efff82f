"""Measurements of a run: step times and their parts, memory, timelines; and the MLflow forwarder."""
