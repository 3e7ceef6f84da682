"""The laboratory, which predicts, measures, compares and proves runs: no run needs it."""
