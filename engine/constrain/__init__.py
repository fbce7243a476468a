"""Completions that obey a schema, a regular expression or a grammar."""
