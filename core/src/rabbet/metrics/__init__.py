"""Counters, the text of /metrics, the periodic log line."""
