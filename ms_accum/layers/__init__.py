"""Layers that behave in micro-batches as in one large batch, or the same in a resumed run.

Provides: a Dropout whose masks are the same in a resumed run; BatchNorm replaced, frozen, or with statistics pooled
over a window. Imports `network` and `ranks`.
"""
