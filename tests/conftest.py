"""Settings that hold for every test."""

from __future__ import annotations

import os

# Before torch is imported anywhere: several processes of one thread each, no network, no fork warnings.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
