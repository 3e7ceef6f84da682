"""JetBlock: a gated delta rule whose values pass a convolution with kernels made of the input.

Facts (names, shapes, formulas) are from github.com/NVlabs/Jet-Nemotron (Apache-2.0) and arXiv
2508.15884.
"""

import math
from collections import OrderedDict
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import initialization as init
from transformers.cache_utils import Cache

from shardwise.kernels.dynamic_conv import dynamic_conv
from shardwise.kernels.gated_delta_rule import gated_delta_rule
from shardwise.kernels.gated_norm import gated_norm
from shardwise.kernels.recurrence import wide
from shardwise.kernels.rms_norm import rms_norm
from shardwise.models.families.jet_nemotron.configuration import JetNemotronConfig


class JetNemotronRMSNorm(nn.Module):
    """Root mean square norm; with a gate, times its silu.

    It computes in float32 (float64 of float64) and rounds once.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        """Return the norm of x [..., size], with a gate of that shape, in x's dtype."""
        if gate is not None:
            return gated_norm(x, self.weight, gate, self.eps)
        return rms_norm(x, self.weight, self.eps)


class JetNemotronDynamicConv(nn.Module):
    """The kernels of the values' convolution, which are w2(silu(w1(input))).

    w2's bias is the kernel that all tokens share.
    """

    def __init__(self, config: JetNemotronConfig) -> None:
        super().__init__()
        values = config.linear_num_value_heads * config.linear_value_head_dim
        between = values // config.jet["dconv_generator_reduction"]
        self.width = config.jet["conv_size"]
        self.kernel_generator = nn.Sequential(
            OrderedDict(
                w1=nn.Linear(config.hidden_size, between, bias=False),
                act=nn.SiLU(),
                w2=nn.Linear(between, values * self.width),
            )
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return [B, T, N V, W], a kernel of W taps per value, of tokens `hidden` [B, T, D]."""
        return self.kernel_generator(hidden).unflatten(-1, (-1, self.width))


class JetBlock(nn.Module):
    """The token mixer of a `jet` layer."""

    def __init__(self, config: JetNemotronConfig, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.key_dim, self.value_dim = config.linear_key_head_dim, config.linear_value_head_dim
        heads, width = config.linear_num_value_heads, config.hidden_size
        self.q_proj = nn.Linear(width, heads * self.key_dim, bias=False)
        self.k_proj = nn.Linear(width, heads * self.key_dim, bias=False)
        self.v_proj = nn.Linear(width, heads * self.value_dim, bias=False)
        self.b_proj = nn.Linear(width, heads, bias=False)
        self.a_proj = nn.Linear(width, heads, bias=False)
        self.A_log = nn.Parameter(torch.empty(heads))
        self.dt_bias = nn.Parameter(torch.empty(heads))
        self.dynamic_conv1d = JetNemotronDynamicConv(config)
        self.g_proj = nn.Linear(width, heads * self.value_dim, bias=False)
        # Published files have the epsilon as text.
        self.o_norm = JetNemotronRMSNorm(self.value_dim, float(config.jet["norm_eps"]))
        self.o_proj = nn.Linear(heads * self.value_dim, width, bias=False)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Return [B, T, D], and None for attention's weights, of hidden_states [B, T, D].

        attention_mask [B, T] is 0 where padded, before a sequence or after it. A cache holds the
        state and the last values before the convolution. A padded token leaves both as they are if
        it comes before the sequence, and not by itself, since transformers makes no mask for one
        token.
        """
        # No projection has a bias, so a padded token's value and key are 0.
        if attention_mask is not None:
            hidden_states = hidden_states * attention_mask[..., None].to(hidden_states.dtype)
        values, state = self.v_proj(hidden_states), None
        if past_key_values is not None:
            if past_key_values.has_previous_state(self.layer_idx):
                layer: Any = past_key_values.layers[self.layer_idx]
                state = layer.recurrent_states[0]
            width = self.dynamic_conv1d.width
            values = past_key_values.update_conv_state(
                values.mT, self.layer_idx, conv_kernel_size=width
            ).mT
        v = dynamic_conv(values, self.dynamic_conv1d(hidden_states), "silu")
        q, k = F.silu(self.q_proj(hidden_states)), F.silu(self.k_proj(hidden_states))
        q, k = (x.unflatten(-1, (-1, self.key_dim)) for x in (q, k))
        beta = self.b_proj(hidden_states).sigmoid()
        g = -wide(self.A_log).exp() * F.softplus(wide(self.a_proj(hidden_states)) + self.dt_bias)
        out, state = gated_delta_rule(q, k, v.unflatten(-1, (-1, self.value_dim)), g, beta, state)
        if past_key_values is not None:
            past_key_values.update_recurrent_state(state, self.layer_idx)
        gate = self.g_proj(hidden_states).unflatten(-1, (-1, self.value_dim))
        return self.o_proj(self.o_norm(out, gate).flatten(-2)), None

    @torch.no_grad()
    def initialise(self, std: float) -> None:
        """Draw what is no matrix: the rates of decay, and the kernel that all tokens share.

        Rates are as in Gated DeltaNet: e^A_log in (0, 16), dt in (0.001, 0.1).
        """
        rate = torch.empty_like(self.A_log, dtype=torch.float32).uniform_(0, 16)
        init.copy_(self.A_log, rate.log_())
        low, high = math.log(0.001), math.log(0.1)
        dt = (torch.rand_like(self.dt_bias, dtype=torch.float32) * (high - low) + low).exp()
        init.copy_(self.dt_bias, dt + torch.log(-torch.expm1(-dt)))  # what softplus makes dt of
        shared_kernel = self.dynamic_conv1d.kernel_generator.get_parameter("w2.bias")
        init.normal_(shared_kernel, mean=0.0, std=std)
