"""Reports of simulations: figures, a page with plots, JSON. Draws results, knows nothing of how they came about."""

from traces.reports.page import write_page
from traces.reports.summary import format_summary, summary

__all__ = ["format_summary", "summary", "write_page"]
