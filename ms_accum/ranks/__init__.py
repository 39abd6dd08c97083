"""Who trains together?

Provides: the group of a process and its collectives (`parallel`), sums of gradients over the ranks (`reduction`),
sharded optimizer state (`zero`), and the processes that the launcher starts and monitors. Imports `network`.
"""
