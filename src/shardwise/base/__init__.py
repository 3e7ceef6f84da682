"""Parts that every room may use: batches, layouts, schedules, records, processes and words."""
