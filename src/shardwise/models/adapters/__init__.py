"""LoRA adapters in PEFT's format: which weights have them, on a model, in a folder, written."""
