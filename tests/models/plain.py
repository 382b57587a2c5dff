"""A second Transformer, from the paper and tensor2tensor, that uses a model's weights and shares no code."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def position_table(length: int, dim: int, layout: str, first: int = 0) -> Tensor:
    """Computes the table of positions, (length, dim) fp64."""
    table = torch.zeros(first + length, dim, dtype=torch.float64)
    for position in range(first, first + length):
        for i in range(dim // 2):
            if layout in ("interleaved", "halves"):  # the paper, section 3.5
                angle = position / 10000 ** (2 * i / dim)
                sine, cosine = (2 * i, 2 * i + 1) if layout == "interleaved" else (i, dim // 2 + i)
                table[position, sine], table[position, cosine] = math.sin(angle), math.cos(angle)
            else:  # tensor2tensor, get_timing_signal_1d
                angle = position * math.exp(-i * math.log(10000.0) / (dim // 2 - 1))
                table[position, i], table[position, dim // 2 + i] = math.sin(angle), math.cos(angle)
    return table[first:]


def bucket(distance: int, config, causal: bool) -> int:
    """Returns T5's bucket (Mesh TensorFlow, _relative_position_bucket) for a key's position minus its query's."""
    first, count = 0, config.num_buckets
    if causal:
        away = max(0, -distance)
    else:
        count //= 2
        first, away = count if distance > 0 else 0, abs(distance)
    alone = count // 2
    if away < alone:
        return first + away
    share = math.log(away / alone) / math.log(config.max_distance / alone)
    return first + min(count - 1, alone + int(share * (count - alone)))


class PlainTransformer:
    """Computes a model's logits one sequence at a time, without padding, from its state_dict and config."""

    def __init__(self, state: dict[str, Tensor], config) -> None:
        self.w, self.config = state, config
        self.dim, self.heads = config.d_model, config.num_heads

    def norm(self, x: Tensor, name: str) -> Tensor:
        mean = x.mean(-1, keepdim=True) if self.config.norm == "layer" else 0.0
        x = x - mean
        variance = (x**2).mean(-1, keepdim=True)
        weight, bias = self.w[f"{name}.weight"], self.w.get(f"{name}.bias", 0.0)
        return x / torch.sqrt(variance + self.config.layer_norm_eps) * weight + bias

    def attend(self, x: Tensor, memory: Tensor, name: str, causal: bool = False, window: int | None = None) -> Tensor:
        size, rows = self.config.head_dim or self.dim // self.heads, []
        wq, wk, wv = self.w[f"{name}.in_proj_weight"].chunk(3)
        zero = torch.zeros(3 * size * self.heads, dtype=x.dtype)
        bq, bk, bv = self.w.get(f"{name}.in_proj_bias", zero).chunk(3)
        q, k, v = x @ wq.T + bq, memory @ wk.T + bk, memory @ wv.T + bv
        for i in range(len(x)):
            last = i + 1 if causal else len(memory)
            first = 0
            if window is not None:
                first, last = max(0, i - window), min(last, i + window + 1)
            heads = []
            for h in range(self.heads):
                part = slice(h * size, (h + 1) * size)
                scores = k[first:last, part] @ q[i, part] / math.sqrt(size)
                if self.config.positions == "relative" and name.endswith("self_attn"):
                    table = self.w[f"{name.partition('.')[0]}_position_bias.table"]
                    rows_of = [bucket(j - i, self.config, causal) for j in range(first, last)]
                    scores = scores + table[rows_of, h]
                weights = scores.exp() / scores.exp().sum()
                heads.append(weights @ v[first:last, part])
            rows.append(torch.cat(heads))
        return torch.stack(rows) @ self.w[f"{name}.out_proj.weight"].T + self.w.get(f"{name}.out_proj.bias", 0.0)

    def feed_forward(self, x: Tensor, name: str) -> Tensor:
        hidden = x @ self.w[f"{name}.linear1.weight"].T + self.w.get(f"{name}.linear1.bias", 0.0)
        if self.config.activation == "geglu_tanh":
            gate, up = hidden.chunk(2, -1)
            hidden = 0.5 * gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * up
        else:
            hidden = hidden.clamp(min=0)
        return hidden @ self.w[f"{name}.linear2.weight"].T + self.w.get(f"{name}.linear2.bias", 0.0)

    def layer(self, x: Tensor, name: str, blocks: list) -> Tensor:
        for i, block in enumerate(blocks, 1):
            if self.config.norm_first:
                x = x + block(self.norm(x, f"{name}.norm{i}"))
            else:
                x = self.norm(x + block(x), f"{name}.norm{i}")
        return x

    def embed(self, ids: Tensor, side: str) -> Tensor:
        name = "embedding" if self.config.tie_embeddings else f"{side}_embedding"
        vectors = self.w[f"{name}.weight"][ids] * (math.sqrt(self.dim) if self.config.scale_embedding else 1.0)
        if not self.config.embed_pad:
            vectors = torch.where((ids == 0)[:, None], 0.0, vectors)
        if self.config.positions == "learned":
            vectors = vectors + self.w[f"{side}_position.table"][: len(ids)]
        elif self.config.positions != "relative":
            vectors = vectors + position_table(len(ids), self.dim, self.config.positions, self.config.first_position)
        return self.norm(vectors, f"{side}_embedding_norm") if self.config.embedding_norm else vectors

    def __call__(self, source: Tensor, target: Tensor) -> Tensor:
        """Computes logits (seqlen, vocab_size) for source ids (seqlen,) and target ids (seqlen,)."""
        c, memory, x = self.config, self.embed(source, "source"), self.embed(target, "target")
        for i in range(c.num_encoder_layers):
            name = f"encoder.layers.{i}"
            attend = lambda y, n=name: self.attend(y, y, f"{n}.self_attn", window=c.window_size)  # noqa: E731
            memory = self.layer(memory, name, [attend, lambda y, n=name: self.feed_forward(y, n)])
        memory = self.norm(memory, "encoder.norm") if c.norm_first else memory
        for i in range(c.num_decoder_layers):
            name = f"decoder.layers.{i}"
            attend = lambda y, n=name: self.attend(y, y, f"{n}.self_attn", True, c.window_size)  # noqa: E731
            cross = lambda y, n=name: self.attend(y, memory, f"{n}.multihead_attn")  # noqa: E731
            x = self.layer(x, name, [attend, cross, lambda y, n=name: self.feed_forward(y, n)])
        x = self.norm(x, "decoder.norm") if c.norm_first else x
        x = x / math.sqrt(self.dim) if c.scale_output else x
        return x @ self.w["embedding.weight" if c.tie_embeddings else "output.weight"].T + self.w.get(
            "output_bias", 0.0
        )
