"""The architectures that can be trained: one file, one record each. What varies from family to family is said here and nowhere else.

``family`` says what such a record holds; ``registry`` finds the records.
"""
