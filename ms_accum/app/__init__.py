"""The programs: flags, settings, progress, signals, plots, reports, launcher, searches. The library never imports it."""
