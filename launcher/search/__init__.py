"""Which model, and which layout: decided here as pure functions over plain data; nothing is read, run or written.

size, shapes, anchors, baseline      a model and its hyper-parameters from GPUs, days and tokens (encoder_decoder: T5, mT5)
space -> plan                        every layout as one table, predicted, with the reason for each that is out
contest -> policy (belief)           candidates; which to measure next and when to stop, given what was measured
replay                               the same policy over a table of published trials; launcher.sweep.search runs it on a cluster
naming, wanted, recipe               layouts as words, Hydra's sweeps as columns, runs as recipes
"""
