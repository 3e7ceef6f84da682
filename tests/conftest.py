"""Settings that hold for every test."""

from __future__ import annotations

import os
import tempfile

from hypothesis import settings

# Before torch is imported anywhere: several processes of one thread each, no network, no fork warnings.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Costs that somebody has measured on this machine are not to move a test's split.
os.environ["SHARDWISE_CACHE"] = os.path.join(tempfile.gettempdir(), "shardwise-no-such-cache")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

settings.register_profile("patient", deadline=None)  # a busy machine may take a while for one example
settings.load_profile("patient")
