"""From a client's request to a checked one: text, chat and tokens, sampling, and the limits on all of them."""
