"""Metrics of every process: one table of families, from which all else that names a metric is made or checked."""
