"""Decides which trial to measure next, and when to stop: pure functions over plain data; nothing is read, run or written.

problem -> policy (surrogate)     candidates; which to measure next and when to stop, given the measurements
replay                            the same policy over a table of measured trials; launcher.sweep.search runs it on a cluster
"""
