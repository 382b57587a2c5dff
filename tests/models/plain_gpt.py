"""A plain decoder-only model that uses a GPT's weights, one sequence at a time, with every option."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def plain_logits(
    config,
    weights: Mapping[str, Tensor],
    tokens: Tensor,
    cached: Callable[[Tensor], Tensor] = lambda x: x,
    routed: Callable[[Tensor], object] = lambda experts: None,
) -> Tensor:
    """Returns the logits (seqlen, vocab_size) of one sequence (seqlen,), in the dtype of the weights.

    cached: what a cache makes of keys and of values, (seqlen, heads, size).
    routed: is told the experts of a token, layer by layer and token by token.
    """
    return _PlainGpt(config, weights, len(tokens), cached, routed).logits(tokens)


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Returns a model's parameters, and the numbers by which its experts are chosen, which are no parameters."""
    chosen_by = {name: buffer for name, buffer in model.named_buffers() if name.endswith(".choice_bias")}
    return {**dict(model.named_parameters()), **chosen_by}


class _PlainGpt:
    def __init__(
        self,
        config,
        weights: Mapping[str, Tensor],
        length: int,
        cached: Callable[[Tensor], Tensor],
        routed: Callable[[Tensor], object],
    ) -> None:
        self.c, self.w, self.n, self.cached, self.routed = config, weights, length, cached, routed
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}
        self.inputs: Tensor | None = None

    def linear(self, x: Tensor, name: str, separator: str = ".") -> Tensor:
        return F.linear(x, self.w[f"{name}{separator}weight"], self.w.get(f"{name}{separator}bias"))

    def norm(self, x: Tensor, name: str, rms: bool | None = None) -> Tensor:
        rms = self.c.norm == "rms" if rms is None else rms
        x = x if rms else x - x.mean(-1, keepdim=True)
        x = x / torch.sqrt((x**2).mean(-1, keepdim=True) + self.c.layer_norm_eps)
        return x * self.w[f"{name}.weight"] + self.w.get(f"{name}.bias", 0.0)

    def turn(self, x: Tensor, local: bool) -> Tensor:
        """Rotates the first features of heads (seqlen, heads, size) as complex numbers."""
        c, size = self.c, x.shape[-1]
        if c.positions != "rotary":
            return x
        count = int(size * c.rotary_fraction)
        is_local = local and c.local_rotary_base is not None
        base = c.local_rotary_base if is_local else c.rotary_base
        speed, scale = base ** (-torch.arange(count // 2, dtype=torch.float64) * 2 / count), 1.0
        if c.rotary_scaling is not None and not is_local:  # held against transformers in test_rotary_scaling.py
            speed, scale = c.rotary_scaling.speeds(count, base)
        angle = torch.arange(self.n, dtype=torch.float64)[:, None, None] * speed
        cos, sin = ((scale * part).to(x.dtype) for part in (angle.cos(), angle.sin()))
        real, imaginary, rest = x.split([count // 2, count // 2, size - count], -1)
        return torch.cat([real * cos - imaginary * sin, imaginary * cos + real * sin, rest], -1)

    def attend(self, x: Tensor, name: str, has_window: bool) -> Tensor:
        c, n, layer = self.c, self.n, int(name.split(".")[2])
        if c.linear[layer]:
            return self.mix(x, name)
        if c.mamba[layer]:
            return self.scan(x, name)
        if c.conv[layer]:
            b, gate, u = self.linear(x, f"{name}.in_proj").chunk(3, -1)
            return self.linear(gate * self.convolve(b * u, name), f"{name}.out_proj")
        kv_heads, size = c.num_kv_heads or c.num_heads, c.head_dim or c.d_model // c.num_heads
        if not has_window:
            kv_heads, size = c.global_num_kv_heads or kv_heads, c.global_head_dim or size
        rows = self.linear(x, f"{name}.in_proj", "_")
        q, own = rows[:, : c.num_heads * size], rows[:, c.num_heads * size :]
        is_shared = layer >= c.num_layers - c.shared_kv_layers
        q = self.norm(q, f"{name}.q_norm", True) if c.qk_norm == "all" else q
        q = q.reshape(n, -1, size)
        q = self.norm(q, f"{name}.q_norm", True) if c.qk_norm == "head" else q
        rotates = c.rotary_layers is None or c.rotary_layers[layer]
        q = self.turn(q, has_window) if rotates else q
        q = self.norm(q, f"{name}.q_norm", True) if c.qk_norm == "rotated" else q
        if rotates and c.query_growth:
            steps = torch.tensor([place // c.query_growth_length for place in range(n)])
            q = q * (1 + c.query_growth * torch.log1p(steps.float())).to(q.dtype)[:, None, None]
        if is_shared:
            k, v = self.kept[has_window]
        else:
            k, v = own[:, : kv_heads * size], own[:, -kv_heads * size :]
            k = self.norm(k, f"{name}.k_norm", True) if c.qk_norm == "all" else k
            k, v = k.reshape(n, -1, size), v.reshape(n, -1, size)
            k = self.norm(k, f"{name}.k_norm", True) if c.qk_norm == "head" else k
            v = v / torch.sqrt((v**2).mean(-1, keepdim=True) + c.layer_norm_eps) if c.value_norm else v
            k = self.turn(k, has_window) if rotates else k
            k = self.norm(k, f"{name}.k_norm", True) if c.qk_norm == "rotated" else k
            self.kept[has_window] = k, v = self.cached(k), self.cached(v)
        k, v = (t.repeat_interleave(c.num_heads // kv_heads, 1) for t in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q, k) * (c.attention_scale or size**-0.5)
        if c.attention_softcap is not None:
            scores = c.attention_softcap * torch.tanh(scores / c.attention_softcap)
        distance = torch.arange(n)[:, None] - torch.arange(n)[None]
        hidden = (distance < 0) | (distance > (c.window_size if has_window else n))
        scores = scores.masked_fill(hidden, float("-inf"))
        if c.attention_sinks:  # a last key, whose value is left out
            sinks = self.w[f"{name}.sinks"].view(-1, 1, 1).expand(-1, n, 1)
            weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        out = torch.einsum("hij,jhd->ihd", weights, v).flatten(1)
        if c.attention_gate:
            out = out * self.linear(x, f"{name}.gate_proj").sigmoid()
        return self.linear(out, f"{name}.out_proj")

    def convolve(self, x: Tensor, name: str) -> Tensor:
        """Applies the convolution of a layer that has a state."""
        taps = self.w[f"{name}.conv_weight"][:, 0].T
        before = F.pad(x, (0, 0, len(taps) - 1, 0))
        total = x.new_zeros(x.shape)
        for i, tap in enumerate(taps):
            total = total + tap * before[i : i + self.n]
        return total

    def mix(self, x: Tensor, name: str) -> Tensor:
        """Applies a gated DeltaNet, one token after another."""
        c, n, keys = self.c, self.n, self.c.linear_key_heads
        values = c.linear_value_heads or keys
        sizes = [keys * c.linear_key_dim, keys * c.linear_key_dim, values * c.linear_value_dim]
        qkv, z = self.linear(x, f"{name}.in_proj").split([sum(sizes), sizes[2]], -1)
        qkv = F.silu(self.convolve(qkv, name))
        q, k, v = (t.reshape(n, heads, -1) for t, heads in zip(qkv.split(sizes, -1), (keys, keys, values), strict=True))
        q, k = (t / torch.sqrt((t**2).sum(-1, keepdim=True) + 1e-6) for t in (q, k))
        q, k = (t.repeat_interleave(values // keys, 1) for t in (q / c.linear_key_dim**0.5, k))
        b, a = self.linear(x, f"{name}.gates").chunk(2, -1)
        decay = torch.exp(-self.w[f"{name}.A_log"].exp() * torch.log1p(torch.exp(a + self.w[f"{name}.dt_bias"])))
        state, rows = x.new_zeros(values, c.linear_key_dim, c.linear_value_dim), []
        for i in range(n):
            state = state * decay[i, :, None, None]
            new = b[i].sigmoid()[:, None] * (v[i] - torch.einsum("hkv,hk->hv", state, k[i]))
            state = state + k[i][..., None] * new[:, None]
            rows.append(torch.einsum("hkv,hk->hv", state, q[i]))
        out = self.norm(torch.stack(rows), f"{name}.norm", True).flatten(1)
        return self.linear(out * F.silu(z), f"{name}.out_proj")

    def scan(self, x: Tensor, name: str) -> Tensor:
        """Applies a state space model, one token after another."""
        c, n, heads, groups = self.c, self.n, self.c.mamba_heads, self.c.mamba_groups
        values = heads * c.mamba_head_dim
        z, xbc = self.linear(x, f"{name}.in_proj").split([values, values + 2 * groups * c.mamba_state_dim], -1)
        xbc = F.silu(self.convolve(xbc, name) + self.w.get(f"{name}.conv_bias", 0.0))
        x_in, b, read = xbc.split([values, groups * c.mamba_state_dim, groups * c.mamba_state_dim], -1)
        x_in = x_in.view(n, heads, -1)
        b, read = (t.view(n, groups, -1).repeat_interleave(heads // groups, 1) for t in (b, read))
        dt = torch.log1p(torch.exp(self.linear(x, f"{name}.gates") + self.w[f"{name}.dt_bias"]))
        state, rows = x.new_zeros(heads, c.mamba_state_dim, c.mamba_head_dim), []
        for i in range(n):
            decay = torch.exp(-self.w[f"{name}.A_log"].exp() * dt[i])
            written = torch.einsum("hs,hd->hsd", b[i] * dt[i][:, None], x_in[i])
            state = state * decay[:, None, None] + written
            rows.append(torch.einsum("hsd,hs->hd", state, read[i]) + self.w[f"{name}.D"][:, None] * x_in[i])
        out = (torch.stack(rows).flatten(1) * F.silu(z)).view(n, groups, -1)
        out = out / torch.sqrt((out**2).mean(-1, keepdim=True) + c.layer_norm_eps)
        return self.linear(out.flatten(1) * self.w[f"{name}.norm_weight"], f"{name}.out_proj")

    def feed(self, x: Tensor, name: str) -> Tensor:
        """Applies a layer's feed-forward network, or its experts to one token after the other."""
        place, c = f"{name}.mixture", self.c
        if f"{place}.router.weight" not in self.w:
            return self.network(x, name)
        scores = self.linear(x, f"{place}.router")
        # In fp32, as in transformers: rounded to bf16, different scores give equal weights.
        of_experts = scores[:, : c.num_experts].to(torch.promote_types(x.dtype, torch.float32))
        weights = 1 / (1 + torch.exp(-of_experts)) if c.router_activation == "sigmoid" else of_experts.softmax(-1)
        added = self.w[f"{place}.router.choice_bias"] if c.choice_bias else 0.0
        rows = []
        for token, score, weight in zip(x, scores, weights, strict=True):
            chosen = (weight + added).argsort(descending=True)[: c.num_experts_per_tok]
            self.routed(chosen)
            whole = weight[chosen].sum() + c.norm_topk_eps if c.norm_topk_prob else 1.0
            factors = weight / whole * c.expert_scale
            row = sum(factors[i].to(x.dtype) * self.network(token, place, int(i)) for i in chosen)
            if c.shared_expert_d_ff is not None:
                gate = score[-1].sigmoid() if c.shared_expert_gate else 1.0
                row = row + gate * self.network(token, f"{place}.shared")
            rows.append(row)
        return torch.stack(rows)

    def of_expert(self, name: str, expert: int | None) -> tuple[Tensor, Tensor | None]:
        weight, bias, count = self.w[f"{name}.weight"], self.w.get(f"{name}.bias"), self.c.num_experts
        if expert is None:
            return weight, bias
        return weight.chunk(count)[expert], None if bias is None else bias.chunk(count)[expert]

    def network(self, x: Tensor, name: str, expert: int | None = None) -> Tensor:
        y = F.linear(x, *self.of_expert(f"{name}.linear1", expert))
        if self.c.activation == "clamped_swiglu":
            gate, up = y.chunk(2, -1)
            gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
            y = gate / (1 + torch.exp(-1.702 * gate)) * (up + 1)
        elif self.c.activation in ("swiglu", "geglu_tanh"):
            gate, up = y.chunk(2, -1)
            y = (F.silu(gate) if self.c.activation == "swiglu" else F.gelu(gate, approximate="tanh")) * up
        else:
            y = F.gelu(y, approximate="tanh" if self.c.activation == "gelu_tanh" else "none")
        return F.linear(y, *self.of_expert(f"{name}.linear2", expert))

    def logits(self, tokens: Tensor) -> Tensor:
        c, w = self.c, self.w
        x = w["embedding.weight"][tokens]
        if c.embedding_scale is not None:
            x = x * torch.tensor(c.embedding_scale, dtype=x.dtype)
        if c.positions == "learned":
            x = x + w["embedding.position.table"][: self.n]
        elif c.positions == "sinusoidal":
            even = torch.arange(0, c.d_model, 2, dtype=torch.float64)
            angle = torch.arange(self.n, dtype=torch.float64)[:, None] / 10000 ** (even / c.d_model)
            x = x + torch.stack([angle.sin(), angle.cos()], -1).flatten(-2).to(x.dtype)
        if c.layer_input_dim is not None:
            shape = (self.n, c.num_layers, c.layer_input_dim)
            own = F.linear(x, w["layer_embedding.projection.weight"]).view(shape) * c.d_model**-0.5
            scale = torch.tensor(c.layer_input_dim**0.5, dtype=x.dtype)
            table = w["layer_embedding.embedding.weight"][tokens].view(shape) * scale
            self.inputs = (self.norm(own, "layer_embedding.norm", True) + table) * 0.5**0.5
        for i in range(c.num_layers):
            x = self.end(self.layer(x, f"decoder.layers.{i}", self.has_window(i)), i)
        output = w.get("output.weight", w["embedding.weight"])
        logits = F.linear(self.norm(x, "decoder.norm"), output, w.get("output_bias"))
        return logits if c.logit_softcap is None else c.logit_softcap * torch.tanh(logits / c.logit_softcap)

    def end(self, x: Tensor, i: int) -> Tensor:
        name = f"decoder.layers.{i}"
        if self.inputs is not None:
            gate, activation = self.linear(x, f"{name}.layer_input.gate"), self.c.activation
            approximate = "tanh" if activation.endswith("_tanh") else "none"
            gate = F.silu(gate) if activation in ("swiglu", "silu") else F.gelu(gate, approximate=approximate)
            given = self.linear(gate * self.inputs[:, i], f"{name}.layer_input.projection")
            x = x + self.norm(given, f"{name}.layer_input.norm", True)
        return x * self.w[f"{name}.layer_scalar"] if self.c.layer_scalars else x

    def has_window(self, i: int) -> bool:
        return self.c.window_size is not None and (self.c.window_layers is None or self.c.window_layers[i])

    def layer(self, x: Tensor, name: str, has_window: bool) -> Tensor:
        attention, placement = f"{name}.self_attn", self.c.norm_placement
        if self.c.parallel_residual:
            attended = self.attend(self.norm(x, f"{name}.norm1"), attention, has_window)
            norm = f"{name}.norm1" if self.c.shared_norm else f"{name}.norm2"
            return x + attended + self.feed(self.norm(x, norm), name)
        y = self.attend(x if placement == "post" else self.norm(x, f"{name}.norm1"), attention, has_window)
        x = x + (y if placement == "pre" else self.norm(y, f"{name}.post_norm1"))
        y = self.feed(x if placement == "post" else self.norm(x, f"{name}.norm2"), name)
        return x + (y if placement == "pre" else self.norm(y, f"{name}.post_norm2"))
