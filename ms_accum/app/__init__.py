"""The programs: flags, settings, signals, plots, reports, launcher, searches. The library never imports it."""
