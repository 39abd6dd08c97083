"""The programs: flags, settings, output, signals, plots, reports, the launcher. The library never imports them."""
