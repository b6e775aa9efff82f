"""What the cost model scored, commit by commit: one JSON file for each time that the figures were taken."""
