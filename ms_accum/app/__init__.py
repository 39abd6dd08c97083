"""The programs: flags, signals, plots, reports, launcher, searches. The library does not import them."""
