"""Which layers behave in micro-batches as in one large batch?

Provides: a Dropout whose masks are the same in a resumed run; BatchNorm replaced, frozen, or with statistics pooled
over a window. Imports `network` and `ranks`.
"""
