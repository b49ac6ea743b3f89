"""What a person reads of runs: status, list, logs, report, comparison."""
