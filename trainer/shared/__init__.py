"""The language that launcher and trainer share: the standard library and yaml alone, no torch and no numpy.

``families`` says what an architecture is; ``run`` what a run is; ``parallel`` how it is laid over ranks; ``corpora`` what it reads;
``records`` what is left on disk.
"""
