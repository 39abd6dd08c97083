"""One window, compiled: how a micro-batch is added, and how the window ends."""
