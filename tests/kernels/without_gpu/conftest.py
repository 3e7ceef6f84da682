"""Before Triton is imported anywhere: its kernels run operation by operation, on the CPU."""

import os

os.environ["TRITON_INTERPRET"] = "1"
