"""The host: data, window, record, callbacks and states, from one window to the next."""
