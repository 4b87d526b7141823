"""Reports of simulations: figures, a page with plots, JSON. Does not know how results are produced."""

from traces.reports.page import write_page
from traces.reports.summary import format_summary, summary

__all__ = ["format_summary", "summary", "write_page"]
