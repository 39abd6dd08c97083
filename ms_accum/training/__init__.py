"""The host: data, window, record, callbacks and states, from one micro-batch to the next."""
