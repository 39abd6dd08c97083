"""The programs: flags, settings, progress, signals, plots, reports, launcher, searches. Nothing below imports it."""
