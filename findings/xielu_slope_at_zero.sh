#!/usr/bin/env bash
# transformers 5.23.0: at 0 the slope of xIELU (Apertus) has the wrong sign.
#
# xIELU (arXiv 2411.13010) is a_p x^2 + b x above 0 and a_n (exp(x) - 1 - x) + b x below; both branches meet at 0 with
# the slope b. The class takes exp(min(x, -1e-6)), so from -1e-6 to 0, 0 included, the derivative of the exponential is
# lost, and what is left is b - a_n. A pre-activation that is exactly 0 gets that slope: with the defaults -0.3, not 0.5.
#
# Seen: value 0.0 and slope -0.3 at 0.0, slope -0.3 at -5e-7; 0.5 at -2e-6 and at +1e-7.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.23.0
cat > "$folder/run.py" <<'PYTHON'
import torch
import transformers
from transformers.activations import XIELUActivation

transformers.logging.set_verbosity_error()
layer = XIELUActivation(dtype=torch.float64).double()


def slope(at):
    x = torch.tensor([at], dtype=torch.float64, requires_grad=True)
    layer(x).sum().backward()
    return round(x.grad.item(), 3)


slopes = {at: slope(at) for at in (-2e-6, -5e-7, 0.0, 1e-7)}
print("transformers", transformers.__version__, "slopes:", slopes)
assert slopes == {-2e-6: 0.5, -5e-7: -0.3, 0.0: -0.3, 1e-7: 0.5}, "the behaviour has changed"
PYTHON
"$folder/venv/bin/python" "$folder/run.py"
