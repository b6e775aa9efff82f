"""Tables of measured runs as they were published, turned into canonical ones: what sources, notes, model names and blank cells mean.

Everything here is knowledge of other people's tables. The cost model and the tool know none of it: what a cell says and what was assumed
is in the table that this writes.
"""
