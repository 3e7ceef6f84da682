"""Parity cells by feature: each file here has its `CELLS`, and in `FIXED` what `make test` runs."""
