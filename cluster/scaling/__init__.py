"""The ratio of prefill to decode runs itself: what is measured, what is forecast, what is decided, and who does it."""
