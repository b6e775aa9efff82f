"""What a run measures: step times, their parts, memory, timelines; and who is told."""
