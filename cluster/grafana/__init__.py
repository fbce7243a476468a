"""Grafana's dashboards, made from the table of metrics."""
