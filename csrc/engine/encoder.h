// A standalone encoder: one call computes the states of the tokens of texts, or one pooled row per text, from token ids
// or embeddings.

#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string_view>
#include <vector>

#include "engine/packed_model.h"
#include "engine/token_cache.h"

namespace fastformer {

using Ids = std::vector<int32_t>;

// How the states of a text become its output rows, in fp32 for any precision of the products.
enum class Pooling {
  none,           // all states
  cls,            // the first state
  last,           // the last state
  mean,           // the sum of the states divided by their number
  max,            // the maximum of each feature
  mean_sqrt_len,  // the sum of the states divided by the square root of their number
  weighted_mean,  // the first state has weight 1, the second one 2, and so on
};
// Returns the pooling with a name of sentence-transformers, or "none": "cls", "lasttoken", "mean", "max",
// "mean_sqrt_len_tokens" or "weightedmean". Throws std::invalid_argument for other names.
Pooling pooling_named(std::string_view name);

struct Texts {
  std::vector<Ids> ids;
  std::vector<Ids> types;  // the types of the tokens; empty: all are 0
  // Instead of ids: embeddings of d_model floats, one text after another, and the number of tokens of each text.
  const float* embedded = nullptr;
  std::vector<int64_t> lengths;
  // Or the features of recordings, (count, num_mels, frames), of which every second frame becomes a token.
  const float* features = nullptr;
  int64_t frames = 0;
  // For texts whose padding between tokens was omitted. An empty list, or no lists: the text had no padding.
  std::vector<Ids> positions;   // the position ids of the tokens
  std::vector<Ids> places;      // the original indices of the tokens, in which attention measures distances; ascending
                                // among unseen tokens, and among the others
  std::vector<int64_t> unseen;  // how many tokens at the beginning of each text attend but are attended to by none

  bool is_sparse(int64_t text) const { return !places.empty() && !places[text].empty(); }
  int64_t num_unseen(int64_t text) const { return unseen.empty() ? 0 : unseen[text]; }
  bool has_ids() const { return embedded == nullptr && features == nullptr; }
  int64_t count() const { return has_ids() ? std::ssize(ids) : std::ssize(lengths); }
  int64_t length(int64_t text) const { return has_ids() ? std::ssize(ids[text]) : lengths[text]; }
};

// Thread-safe: several threads may use one encoder at once.
class Encoder {
 public:
  // Throws std::invalid_argument for a model without an encoder. The model's decoder is not run.
  explicit Encoder(std::shared_ptr<const PackedModel> model);
  ~Encoder();
  Encoder(const Encoder&) = delete;
  Encoder& operator=(const Encoder&) = delete;

  // Returns the number of rows that encode() writes. Throws std::invalid_argument for texts that are empty or longer
  // than max_len, or have ids outside of the vocabulary or types that the model lacks; for ids if the model has no
  // embedding table, and for embeddings if it projects its own; for positions or places that don't fit the tokens or
  // the model's tables; and for unseen tokens in a text without other tokens or without places, or with pooling.
  int64_t num_rows(const Texts& texts, Pooling pooling) const;

  // Writes rows of d_model floats for texts that num_rows() accepts. normalise: divides each row by its L2 norm. The
  // bits of a text depend neither on the other texts nor on the number of threads, which is at least 1.
  //
  // With few tokens, all threads share each product. With more, each thread encodes texts of its own and waits for no
  // other thread.
  void encode(const Texts& texts, Pooling pooling, bool normalise, int threads, float* out);

  const PackedModel& model() const { return *model_; }

 private:
  void check_sparse(const Texts& texts, Pooling pooling) const;

  struct Lane;  // the buffers of a thread, reused in later calls

  std::unique_ptr<Lane> take();
  void give_back(std::unique_ptr<Lane> lane);

  std::shared_ptr<const PackedModel> model_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Lane>> lanes_;  // those that no call is using
};

}  // namespace fastformer
