"""Which layers behave in micro-batches as in one large batch?

Provides: a Dropout whose masks a resumed run repeats; BatchNorm replaced, frozen, or with statistics pooled over a
window. Imports `network` and `ranks`.
"""
