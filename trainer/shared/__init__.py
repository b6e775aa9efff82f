"""The language that launcher and trainer share: the standard library and yaml alone, no torch and no numpy.

``run`` says what a run is; ``parallel`` how it is laid over ranks; ``corpora`` what it reads; ``records`` what is left on disk.
"""
