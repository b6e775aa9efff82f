"""The language that launcher and trainer share: the standard library and yaml alone, no torch and no numpy.

``families`` describes architectures; ``run`` a run; ``parallel`` its layout over ranks; ``corpora`` its data; ``records`` the files that it
leaves.
"""
