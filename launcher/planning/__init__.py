"""The choice of a model and all its layouts, as pure functions over plain data; nothing is read, run or written.

size, shapes, baseline                     a model and its hyper-parameters from GPUs, days and tokens
space -> plan                              every layout in one table, predicted, with the reason for each exclusion
layout_names, layout_filter, recipe        layouts as words, overrides as columns of a table, runs as recipes
"""
