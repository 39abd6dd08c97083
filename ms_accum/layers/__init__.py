"""Layers that behave in micro-batches as in one large batch, or the same in a resumed run.

Provides: a Dropout whose masks are the same in a resumed run; BatchNorm replaced or frozen. Imports `network`.
"""
