// Rules that change the logits of a row by the tokens before it: those of Whisper's decoding, and sampling.

#pragma once

#include <cstdint>
#include <vector>

namespace fastformer {

using Ids = std::vector<int32_t>;

struct TokenRules {
  Ids prefix;            // tokens before the new ones that count as repeatable
  Ids suppressed;        // ids that are never chosen
  Ids suppressed_first;  // ids that are no first token
  float repetition_penalty = 1;
  int64_t no_repeat_ngram_size = 0;  // 0: n-grams may repeat
  // Timestamps are the ids from timestamp_begin on; negative: no rules for them. They come in pairs, except directly
  // before end_of_text, and never decrease. The first token is one, up to max_initial_timestamp, unless there is a
  // prefix. Text is forbidden where all timestamps together are more probable than each token of the text.
  int32_t timestamp_begin = -1, max_initial_timestamp = 0, end_of_text = 0;
  int64_t top_k = 0;  // sampling chooses among so many of the best tokens; 0: among all
  float temperature = 1;
  uint64_t seed = 0;

  // Applies the rules after these new tokens, and returns the logarithm of the sum of exp(logits).
  float apply(const Ids& tokens, float* logits, int64_t vocab) const;
  // Draws a token by a number that depends on the seed, the row and the step alone.
  int32_t sample(const float* logits, int64_t vocab, int64_t row, int64_t step) const;

 private:
  void forbid_repetition(const Ids& tokens, float* logits) const;
  void apply_timestamps(const Ids& tokens, float* logits, int64_t vocab) const;
};

// Returns log(sum(exp(x))), which is -inf if all x are, and NaN if one of them is NaN or +inf.
float log_sum_exp(const float* x, int64_t count);

// Writes the k best values above -inf, best first, with ties in the order of ids; returns how many there are. Ignores
// NaN.
int64_t keep_best(const float* x, int64_t count, int64_t k, int32_t* ids, float* values);

}  // namespace fastformer
