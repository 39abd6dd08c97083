"""The processes that train together, called ranks.

Provides: the group of a process and what its ranks send (`group`), the check that they train the same thing
(`agreement`), sums of gradients over the ranks (`reduction`), and sharded optimizer state (`zero`).
Imports `network`.
"""
