"""One script per claim; each prints a table and writes JSON. Claims are ratios measured side by side in one run."""
