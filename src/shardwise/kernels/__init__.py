"""Fast paths, each in a folder of its own beside its plain reference (naive.py); they know nothing of models."""
