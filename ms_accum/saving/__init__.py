"""What survives a run?

Provides: models as checkpoints, training states and their folder, the `Checkpointer`, and resuming a run.
Imports `network`, `numerics`, `ranks` and `window`.
"""
