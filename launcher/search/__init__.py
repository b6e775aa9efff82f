"""Which trial to measure next, and when to stop: decided here as pure functions over plain data; nothing is read, run or written.

problem -> policy (surrogate)     candidates; which to measure next and when to stop, given what was measured
replay                            the same policy over a table of measured trials; launcher.sweep.search runs it on a cluster
"""
