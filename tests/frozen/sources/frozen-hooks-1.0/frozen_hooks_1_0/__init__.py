"""Hooks 1.0: one section of a bug report."""

from rabbet.contracts import register_hooks
from rabbet.contracts.hooks import Hooks, hookimpl


@register_hooks("frozen_report")
class FrozenReport(Hooks):
    @hookimpl
    def bug_report_sections(self):
        return {"frozen": "still here"}
