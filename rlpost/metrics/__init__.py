"""metrics.jsonl, progress lines, plots."""
