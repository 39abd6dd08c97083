"""What survives a run?

Provides: models as checkpoints, training states and their folder, the `Checkpointer`, and resuming a run.
Imports `network`, `ranks`, `layers`, `numerics` and `window`.
"""
