"""What can be seen of a run when it is over?

Provides: the metrics of a run as a file, a table, a picture and for TensorBoard; the figures of an evaluation, and the
page that shows them. Imports `ranks` and `saving`.
"""
