"""Stat logger 1.0: counts."""

from rabbet.contracts import register_stat_logger
from rabbet.contracts.observability import StatLogger


@register_stat_logger("frozen_count")
class FrozenCount(StatLogger):
    def __init__(self, config):
        super().__init__(config)
        self.running = self.tokens = 0

    def on_stats(self, stats):
        self.running = stats.num_running

    def on_request(self, record):
        self.tokens += record.num_output_tokens
