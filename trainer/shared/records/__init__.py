"""The files that one program writes and the other reads: their names, their content, and the checks when they are read."""
