#include "engine/token_rules.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "common/simd.h"

namespace fastformer {
namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();
using V = Vec<float>;

float largest_of(const float* x, int64_t count) {
  V most(kNever);
  int64_t i = 0;
  for (; i + V::size <= count; i += V::size) most = max(most, V::load(x + i));
  float largest = most.max();
  for (; i < count; ++i) largest = std::max(largest, x[i]);
  return largest;
}

// Returns a number in [0, 1) that depends on all arguments (SplitMix64).
double uniform(uint64_t seed, uint64_t row, uint64_t step) {
  uint64_t x = seed;
  for (const uint64_t part : {row, step}) {
    x += 0x9e3779b97f4a7c15ull * (part + 1);
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    x ^= x >> 31;
  }
  return static_cast<double>(x >> 11) * 0x1p-53;
}

}  // namespace

float log_sum_exp(const float* x, int64_t count) {
  const float most = largest_of(x, count), largest = most == kNever ? 0.f : most;
  V total(0.f);
  int64_t i = 0;
  for (; i + V::size <= count; i += V::size) total = total + exp(V::load(x + i) - V(largest));
  float sum = total.sum();
  for (; i < count; ++i) sum += std::exp(x[i] - largest);
  return largest + std::log(sum);
}

int64_t keep_best(const float* x, int64_t count, int64_t k, int32_t* ids, float* values) {
  int64_t found = 0;
  const auto insert = [&](int64_t id) {
    if (!(x[id] > (found < k ? kNever : values[k - 1]))) return;
    int64_t place = found < k ? found++ : k - 1;
    for (; place > 0 && values[place - 1] < x[id]; --place)
      values[place] = values[place - 1], ids[place] = ids[place - 1];
    values[place] = x[id], ids[place] = static_cast<int32_t>(id);
  };
  int64_t i = 0;
  for (; i + V::size <= count; i += V::size) {
    const float worst = found < k ? kNever : values[k - 1];
    for (uint32_t above = lanes_above(V::load(x + i), V(worst)); above; above &= above - 1)
      insert(i + __builtin_ctz(above));
  }
  for (; i < count; ++i) insert(i);
  return found;
}

float TokenRules::apply(const Ids& tokens, float* logits, int64_t vocab) const {
  forbid_repetition(tokens, logits);
  for (const int32_t id : suppressed) logits[id] = kNever;
  if (tokens.empty())
    for (const int32_t id : suppressed_first) logits[id] = kNever;
  if (timestamp_begin >= 0) apply_timestamps(tokens, logits, vocab);
  return log_sum_exp(logits, vocab);
}

void TokenRules::forbid_repetition(const Ids& tokens, float* logits) const {
  if (repetition_penalty == 1 && no_repeat_ngram_size == 0) return;
  Ids all = prefix;
  all.insert(all.end(), tokens.begin(), tokens.end());
  if (repetition_penalty != 1) {
    Ids unique = all;
    std::sort(unique.begin(), unique.end());
    unique.erase(std::unique(unique.begin(), unique.end()), unique.end());
    for (const int32_t id : unique)
      logits[id] = logits[id] < 0 ? logits[id] * repetition_penalty : logits[id] / repetition_penalty;
  }
  const int64_t n = no_repeat_ngram_size, count = std::ssize(all);
  if (n == 0 || count < n) return;
  const auto last = all.end() - (n - 1);
  for (auto begin = all.begin(); begin + n <= all.end(); ++begin)
    if (std::equal(last, all.end(), begin)) logits[begin[n - 1]] = kNever;
}

void TokenRules::apply_timestamps(const Ids& tokens, float* logits, int64_t vocab) const {
  const auto forbid = [&](int64_t begin, int64_t end) {
    if (begin < end) std::fill(logits + begin, logits + std::min(end, vocab), kNever);
  };
  forbid(timestamp_begin - 1, timestamp_begin);  // the token for no timestamps
  if (tokens.empty()) {
    if (!prefix.empty()) return;
    forbid(0, timestamp_begin);
    forbid(max_initial_timestamp + 1, vocab);
    return;
  }
  const int32_t last = tokens.back();
  if (last >= timestamp_begin) {
    if (tokens.size() < 2 || tokens[tokens.size() - 2] >= timestamp_begin) return forbid(timestamp_begin, vocab);
    forbid(0, end_of_text);
    forbid(timestamp_begin, last);
  } else {
    const auto is_timestamp = [this](int32_t id) { return id >= timestamp_begin; };
    const auto latest = std::find_if(tokens.rbegin(), tokens.rend(), is_timestamp);
    if (latest != tokens.rend()) forbid(timestamp_begin, *latest + 1);
  }
  if (log_sum_exp(logits + timestamp_begin, vocab - timestamp_begin) > largest_of(logits, timestamp_begin))
    forbid(0, timestamp_begin);
}

int32_t TokenRules::sample(const float* logits, int64_t vocab, int64_t row, int64_t step) const {
  std::vector<float> scaled(logits, logits + vocab);
  if (top_k > 0 && top_k < vocab) {
    std::vector<int32_t> ids(top_k);
    std::vector<float> values(top_k);
    const int64_t count = keep_best(logits, vocab, top_k, ids.data(), values.data());
    std::fill(scaled.begin(), scaled.end(), kNever);
    for (int64_t i = 0; i < count; ++i) scaled[ids[i]] = values[i];
  }
  const float largest = largest_of(scaled.data(), vocab), factor = 1 / temperature;
  double sum = 0;
  for (float& x : scaled) {
    x = std::exp((x - largest) * factor);
    sum += x;
  }
  double left = uniform(seed, row, step) * sum;
  int32_t chosen = 0;
  for (int64_t id = 0; id < vocab; ++id) {
    if (!(scaled[id] > 0)) continue;
    chosen = static_cast<int32_t>(id);
    if ((left -= scaled[id]) < 0) break;
  }
  return chosen;
}

}  // namespace fastformer
