"""Which numbers does a network compute, and are they those that a person expects?

Provides: losses that couple the rows of a batch. Imports `network` and `loss`.
"""
