"""Which numbers does a network compute, and are they those that a person expects?

Provides: a Dropout whose masks survive a run that is resumed; BatchNorm replaced, frozen, or with statistics pooled
over a window. Imports `network` and `ranks`.
"""
