"""Thresholds on the probability of fitting into memory, one for each decision. Memory is a verdict with a margin, not a cliff."""

SURELY_FITS = 0.99
"""From here on a search takes it that a layout fits: to recompute would save memory that is not needed, for more work. In the published
tables all 19 pairs of runs that differ in nothing else are slower with recomputation, by 14 to 40 %."""

FITS = 0.5
"""From here on a layout is said to fit; below, it is more likely than not to run out of memory."""

CANNOT_FIT = 0.02
"""Below this a layout is refused and left out of plans, unless ``sweep.ignore_memory`` says otherwise."""

NEVER_TRIED = 0.01
"""Below this a search does not try a layout. Lower than ``CANNOT_FIT``: what a search has measured moves the probability."""
