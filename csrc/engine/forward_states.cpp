// Layers that have a state in the place of keys and values. A call handles the tokens of a span one after the other, so
// the bits of a row don't depend on how its tokens are split into spans.
//
// - Gated DeltaNets, linear attention (Yang et al. 2025; fastformer/nn/gated_delta.py has the formulas): a row has a
//   state for each value head, (key_dim, value_dim), and the last inputs of the convolution. A call handles one key
//   head and the value heads that share it.
// - State space models (Dao & Gu 2024; fastformer/nn/mamba.py has the formulas): a row has a state for each head,
//   (state_dim, head_dim), and the last inputs of the convolution. The convolutions of a span come first, some channels
//   in a call, and replace their inputs; then a call handles one head.
// - Gated convolutions (`ShortConv` in fastformer/nn/state_mixing.py): a row has their last inputs. A call handles some
//   channels.

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "common/rows.h"
#include "engine/forward.h"

namespace fastformer {
namespace {

using V = Vec<float>;

constexpr int64_t kTokens = 64;     // at a time: their queries, keys and values stay in the cache
constexpr int64_t kChannels = 512;  // of a convolution, in a call

// The inputs and the outputs of one value head.
struct HeadTokens {
  int64_t count, key_dim, width;  // width: of a row of the state, whole vectors
  const float *q, *k;             // (count, key_dim), of length 1; q is scaled
  const float* qk;                // the products of both
  const float *v, *decay, *beta;  // v: (count, width), with zeros behind the head's values
  float* out;                     // (count, width)
};

// Runs tokens through R vectors of the columns of a state. Each token's update of a row of the state is followed by the
// next token's sums over that row.
template <int R>
void run_columns(const HeadTokens& tokens, float* state, int64_t column) {
  const int64_t dim = tokens.key_dim, width = tokens.width;
  V by_key[R], by_query[R], written[R];
  const auto sum_up = [&](const V* row, float k, float q) {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
      by_key[r] = fmadd(row[r], V(k), by_key[r]), by_query[r] = fmadd(row[r], V(q), by_query[r]);
  };
  const auto clear = [&] {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) by_key[r] = by_query[r] = V(0.f);
  };
  clear();
  for (int64_t i = 0; i < dim; ++i) {
    V row[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) row[r] = V::load(state + i * width + column + r * V::size);
    sum_up(row, tokens.k[i], tokens.q[i]);
  }
  for (int64_t t = 0; t < tokens.count; ++t) {
    const V decay(tokens.decay[t]), beta(tokens.beta[t]), qk(tokens.qk[t]);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const int64_t at = t * width + column + r * V::size;
      written[r] = (V::load(tokens.v + at) - decay * by_key[r]) * beta;
      fmadd(qk, written[r], decay * by_query[r]).store(tokens.out + at);
    }
    clear();
    const float *k = tokens.k + t * dim, *next_k = k + dim, *next_q = tokens.q + (t + 1) * dim;
    const bool is_last = t + 1 == tokens.count;
    for (int64_t i = 0; i < dim; ++i) {
      V row[R];
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        float* const at = state + i * width + column + r * V::size;
        row[r] = fmadd(V(k[i]), written[r], decay * V::load(at));
        row[r].store(at);
      }
      if (!is_last) sum_up(row, next_k[i], next_q[i]);
    }
  }
}

void run_tokens(const HeadTokens& tokens, float* state) {
  int64_t column = 0;
  for (; column + 4 * V::size <= tokens.width; column += 4 * V::size) run_columns<4>(tokens, state, column);
  for (; column < tokens.width; column += V::size) run_columns<1>(tokens, state, column);
}

// Updates R vectors of the columns of a state, (dim, width), by a token: state = decay * state + b * written; and
// writes the sum of its rows by the factors c.
template <int R>
void scan_columns(float* state, int64_t dim, int64_t width, float decay, const float* written, const float* b,
                  const float* c, float* out) {
  V sum[R], value[R];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) sum[r] = V(0.f), value[r] = V::load(written + r * V::size);
  for (int64_t i = 0; i < dim; ++i) {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      float* const at = state + i * width + r * V::size;
      const V row = fmadd(V(b[i]), value[r], V(decay) * V::load(at));
      row.store(at);
      sum[r] = fmadd(V(c[i]), row, sum[r]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) sum[r].store(out + r * V::size);
}

void scan_token(float* state, int64_t dim, int64_t width, float decay, const float* written, const float* b,
                const float* c, float* out) {
  int64_t column = 0;
  for (; column + 4 * V::size <= width; column += 4 * V::size)
    scan_columns<4>(state + column, dim, width, decay, written + column, b, c, out + column);
  for (; column < width; column += V::size)
    scan_columns<1>(state + column, dim, width, decay, written + column, b, c, out + column);
}

// Gives a vector the length `length`, as far as it isn't near 0.
void normalise_length(float* x, int64_t n, float length) {
  const float squares = sum_vecs<float>(n, [=](int64_t c, int64_t m) {
                          const V value = V::load(x + c, m);
                          return value * value;
                        }).sum();
  const float factor = length / std::sqrt(squares + 1e-6f);
  for_each_vec<float>(n, [=](int64_t c, int64_t m) { (V::load(x + c, m) * V(factor)).store(x + c, m); });
}

float softplus(float x) { return x > 20 ? x : std::log1p(std::exp(x)); }

}  // namespace

// Adds the stages that mix the tokens of a layer with a state; the result is in context_.
void Forward::add_states(const Pass& pass, size_t layer) {
  const PackedLayer& weights = pass.stack.layers[layer];
  const auto add = [&](int64_t begin, int64_t end, int64_t parts, const auto& mix) {
    const int64_t all = (end - begin) * parts;
    if (all == 0) return;
    const int64_t tasks = pass.threads == 1 ? 1 : std::min<int64_t>(all, 2 * pass.threads);
    stages_.push_back({tasks, [=, &spans = pass.batch.spans](int64_t task) {
                         for (int64_t i = all * task / tasks; i < all * (task + 1) / tasks; ++i)
                           mix(spans[begin + i / parts], i % parts);
                       }});
  };
  const auto add_all = [&](int64_t begin, int64_t end) {
    if (!weights.delta.empty())
      add(begin, end, weights.delta[0].key_heads,
          [=, this, &weights](const Span& span, int64_t head) { mix_span(weights, span, head); });
    const auto add_channels = [&](int64_t channels, auto mix) {
      add(begin, end, (channels + kChannels - 1) / kChannels, [=, this, &weights](const Span& span, int64_t part) {
        (this->*mix)(weights, span, part * kChannels, std::min(channels, (part + 1) * kChannels));
      });
    };
    if (!weights.conv.empty()) add_channels(weights.conv[0].channels(), &Forward::convolve_span);
    if (weights.mamba.empty()) return;
    add_channels(weights.mamba[0].channels(), &Forward::filter_span);
    add(begin, end, weights.mamba[0].heads,
        [=, this, &weights](const Span& span, int64_t head) { scan_span(weights, span, head); });
  };
  add_all(pass.steps, pass.spans);  // prompts come first: steps may continue them
  add_all(0, pass.steps);
  for (const Mamba& mamba : weights.mamba)
    add_rows(pass.rows, pass.threads, [=, this, &mamba, size = mamba.values() / mamba.groups](int64_t r) {
      float* const row = context_.data() + r * mamba.values();
      for (int64_t at = 0; at < mamba.values(); at += size)
        normalise_row<false, false, float, float, float>(row + at, nullptr, nullptr, mamba.norm.data() + at,
                                                         mamba.no_bias.data(), model_.options.eps, true, size, nullptr,
                                                         row + at);
    });
}

// Replaces some channels of x, b and c of the tokens of a span by their convolutions, and changes the parts of the
// row's state that belong to them.
void Forward::filter_span(const PackedLayer& weights, const Span& span, int64_t begin, int64_t end) {
  const Mamba& mamba = weights.mamba[0];
  const int64_t ld = padded(weights.qkv.n), channels = mamba.channels(), before = mamba.conv_size - 1;
  const int64_t length = span.end - span.begin, count = end - begin;
  float* const state = span.row->state->data() + mamba.state + mamba.heads * mamba.state_dim * mamba.width() + begin;
  float* const rows = qkv_.data() + span.begin * ld + mamba.values() + begin;
  const auto input = [=](int64_t t) { return t < 0 ? state + (before + t) * channels : rows + t * ld; };
  static thread_local std::vector<float> kept;
  kept.resize(before * count);
  for (int64_t t = 0; t < before; ++t) std::copy_n(input(length - before + t), count, kept.data() + t * count);
  for (int64_t t = length - 1; t >= 0; --t)  // backwards: a token reads those before it
    for_each_vec<float>(count, [&](int64_t c, int64_t n) {
      V sum = V::load(mamba.conv_bias.data() + begin + c, n);
      for (int64_t tap = 0; tap <= before; ++tap)
        sum = fmadd(V::load(input(t - before + tap) + c, n), V::load(mamba.conv.data() + tap * channels + begin + c, n),
                    sum);
      (sum * sigmoid(sum)).store(rows + t * ld + c, n);
    });
  for (int64_t t = 0; t < before; ++t) std::copy_n(kept.data() + t * count, count, state + t * channels);
}

// Mixes the tokens of a span for one head, and changes its state. The outputs are multiplied by silu(z).
void Forward::scan_span(const PackedLayer& weights, const Span& span, int64_t head) {
  const Mamba& mamba = weights.mamba[0];
  const int64_t dim = mamba.head_dim, states = mamba.state_dim, width = mamba.width(), values = mamba.values();
  const int64_t ld = padded(weights.qkv.n), gates_ld = padded(weights.gates.n);
  const int64_t group = head / (mamba.heads / mamba.groups);
  float* const state = span.row->state->data() + mamba.state + head * states * width;
  static thread_local std::vector<float> scratch;
  scratch.resize(2 * width);
  float *const written = scratch.data(), *const out = written + width;
  std::fill_n(written, width, 0.f);
  for (int64_t t = span.begin; t < span.end; ++t) {
    const float *const z = qkv_.data() + t * ld + head * dim, *const x = z + values;
    const float *const b = qkv_.data() + t * ld + 2 * values + group * states, *const c = b + mamba.groups * states;
    const float dt = softplus(gates_.data()[t * gates_ld + head] + mamba.dt_bias[head]);
    for_each_vec<float>(dim, [=](int64_t i, int64_t n) { (V::load(x + i, n) * V(dt)).store(written + i, n); });
    scan_token(state, states, width, std::exp(mamba.rate[head] * dt), written, b, c, out);
    float* const context = context_.data() + t * values + head * dim;
    for_each_vec<float>(dim, [=, skip = mamba.skip[head]](int64_t i, int64_t n) {
      const V gate = V::load(z + i, n);
      (fmadd(V(skip), V::load(x + i, n), V::load(out + i, n)) * gate * sigmoid(gate)).store(context + i, n);
    });
  }
}

// Convolves some channels of the tokens of a span, and changes the parts of the row's state that belong to them.
void Forward::convolve_span(const PackedLayer& weights, const Span& span, int64_t begin, int64_t end) {
  const ShortConv& conv = weights.conv[0];
  const int64_t dim = conv.channels(), ld = padded(weights.qkv.n), before = conv.size - 1;
  const int64_t length = span.end - span.begin, count = end - begin;
  float* const state = before ? span.row->state->data() + conv.state + begin : nullptr;  // (before, dim)
  const float* const rows = qkv_.data() + span.begin * ld + begin;
  const auto input = [=](int64_t t, int64_t c, int64_t n) {  // b * u of a token, which may be before the span
    if (t < 0) return V::load(state + (before + t) * dim + c, n);
    const float* const row = rows + t * ld + c;
    return V::load(row, n) * V::load(row + 2 * dim, n);
  };
  for (int64_t t = 0; t < length; ++t) {
    float* const context = context_.data() + (span.begin + t) * dim + begin;
    for_each_vec<float>(count, [&](int64_t c, int64_t n) {
      V sum(0.f);
      for (int64_t tap = 0; tap <= before; ++tap)
        sum = fmadd(input(t - before + tap, c, n), V::load(conv.taps.data() + tap * dim + begin + c, n), sum);
      (sum * V::load(rows + t * ld + dim + c, n)).store(context + c, n);
    });
  }
  for (int64_t t = 0; t < before; ++t)
    for_each_vec<float>(count,
                        [&](int64_t c, int64_t n) { input(length - before + t, c, n).store(state + t * dim + c, n); });
}

// Mixes the tokens of a span for one key head, and changes the parts of the row's state that belong to it.
void Forward::mix_span(const PackedLayer& weights, const Span& span, int64_t key_head) {
  const DeltaNet& net = weights.delta[0];
  const int64_t key_dim = net.key_dim, value_dim = net.value_dim, width = net.width(), channels = net.channels();
  const int64_t shared = net.value_heads / net.key_heads, first_value = key_head * shared;
  const int64_t ld = padded(weights.qkv.n), gates_ld = padded(weights.gates.n), before = net.conv_size - 1;
  float* const states = span.row->state->data() + net.state;
  float* const inputs = states + net.value_heads * key_dim * width;  // (conv_size - 1, channels), before the span
  const float* rows = qkv_.data() + span.begin * ld;
  const auto input = [=](int64_t t) { return t < 0 ? inputs + (before + t) * channels : rows + t * ld; };
  static thread_local std::vector<float> scratch;
  scratch.resize(kTokens * (2 * key_dim + 2 * width + 3));
  float *const q = scratch.data(), *const k = q + kTokens * key_dim, *const v = k + kTokens * key_dim;
  float *const out = v + kTokens * width, *const qk = out + kTokens * width;
  float *const decay = qk + kTokens, *const beta = decay + kTokens;
  const auto convolve = [&](int64_t t, int64_t channel, int64_t count, float* to) {
    for_each_vec<float>(count, [&](int64_t c, int64_t n) {
      V sum(0.f);
      for (int64_t tap = 0; tap <= before; ++tap)
        sum = fmadd(V::load(input(t - before + tap) + channel + c, n),
                    V::load(net.conv.data() + tap * channels + channel + c, n), sum);
      (sum * sigmoid(sum)).store(to + c, n);
    });
  };
  const int64_t q_channel = key_head * key_dim, k_channel = (net.key_heads + key_head) * key_dim;
  const int64_t v_channel = 2 * net.key_heads * key_dim + first_value * value_dim, length = span.end - span.begin;
  for (int64_t first = 0; first < length; first += kTokens) {
    const int64_t count = std::min(kTokens, length - first);
    for (int64_t t = 0; t < count; ++t) {
      float *const own_q = q + t * key_dim, *const own_k = k + t * key_dim;
      convolve(first + t, q_channel, key_dim, own_q), convolve(first + t, k_channel, key_dim, own_k);
      normalise_length(own_q, key_dim, 1 / std::sqrt(static_cast<float>(key_dim)));
      normalise_length(own_k, key_dim, 1);
      qk[t] = sum_vecs<float>(key_dim, [=](int64_t c, int64_t n) {
                return V::load(own_q + c, n) * V::load(own_k + c, n);
              }).sum();
    }
    for (int64_t head = first_value; head < first_value + shared; ++head) {
      for (int64_t t = 0; t < count; ++t) {
        const float* gates = gates_.data() + (span.begin + first + t) * gates_ld;
        beta[t] = 1 / (1 + std::exp(-gates[head]));
        decay[t] = std::exp(net.rate[head] * softplus(gates[net.value_heads + head] + net.dt_bias[head]));
        convolve(first + t, v_channel + (head - first_value) * value_dim, value_dim, v + t * width);
        std::fill(v + t * width + value_dim, v + (t + 1) * width, 0.f);
      }
      run_tokens({count, key_dim, width, q, k, qk, v, decay, beta, out}, states + head * key_dim * width);
      for (int64_t t = 0; t < count; ++t) {
        float* const context = context_.data() + (span.begin + first + t) * net.values() + head * value_dim;
        const float* const z = input(first + t) + channels + head * value_dim;
        normalise_row<false, false, float, float, float>(out + t * width, nullptr, nullptr, net.norm.weight.data(),
                                                         net.norm.bias.data(), model_.options.eps, true, value_dim,
                                                         nullptr, context);
        for_each_vec<float>(value_dim, [=](int64_t c, int64_t n) {
          const V gate = V::load(z + c, n);
          (V::load(context + c, n) * gate * sigmoid(gate)).store(context + c, n);
        });
      }
    }
  }
  for (int64_t t = 0; t < before; ++t) {
    const auto keep = [&](int64_t channel, int64_t count) {
      std::copy_n(input(length - before + t) + channel, count, inputs + t * channels + channel);
    };
    keep(q_channel, key_dim), keep(k_channel, key_dim), keep(v_channel, shared * value_dim);
  }
}

// Runs the stages of a batch of the decoder. The states of its rows then contain its tokens; after an error they are
// unusable.
void Forward::run_decoder(const Batch& batch, int threads) {
  if (cache_->state_bytes() == 0) return run_stages(stages_, threads);
  const auto set = [](const Span& span, int64_t tokens) { span.row->state->tokens = tokens; };
  const auto advance = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const Span& span = batch.spans[i];
      if (!span.stores || span.row->state->tokens != span.first_position)
        throw std::logic_error("expected tokens that follow those in the row's states");
      set(span, span.first_position + span.end - span.begin);
    }
  };
  try {
    advance(batch.steps(), std::ssize(batch.spans)), advance(0, batch.steps());
    run_stages(stages_, threads);
  } catch (...) {
    for (const Span& span : batch.spans) set(span, -1);
    throw;
  }
}

}  // namespace fastformer
