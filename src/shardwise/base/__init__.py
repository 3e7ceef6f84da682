"""Parts that every room may use: batches, layouts, schedules, records, processes and words."""

__version__ = "0.1.0"
