"""Executors: one rank in a thread, or one process a rank."""
