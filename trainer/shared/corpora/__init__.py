"""Text to train and tune on: its sources, and the index of a prepared corpus."""
