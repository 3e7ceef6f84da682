"""Fine-tune hybrid-attention language models under every parallel strategy, proven equal."""

__version__ = "0.1.0"
