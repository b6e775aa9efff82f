"""The architectures that can be trained: one file, one record each. The differences between families are declared here and nowhere else.

``family`` defines such a record; ``registry`` finds the records.
"""
