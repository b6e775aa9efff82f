"""The definition of a run: its keys, how they are read, the rules between their values, and the error for wrong input."""
