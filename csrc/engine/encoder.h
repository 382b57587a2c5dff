// An encoder alone, in one call: from texts as ids, or as embeddings, to the states of their tokens, or to one row for
// each text.

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

// The function from the states of a text to its rows, in fp32, whatever the precision of the products.
enum class Pooling {
  none,           // all of them
  cls,            // the first one
  last,           // the last one
  mean,           // their sum divided by their number
  max,            // of each feature
  mean_sqrt_len,  // their sum divided by the root of their number
  weighted_mean,  // the first one weighs 1, the second one 2, and so on
};
// By the names of sentence-transformers: "none", "cls", "lasttoken", "mean", "max", "mean_sqrt_len_tokens" and
// "weightedmean"; std::invalid_argument for another name.
Pooling pooling_named(std::string_view name);

struct Texts {
  std::vector<Ids> ids;
  std::vector<Ids> types;  // of their tokens; none: all are 0
  // Instead of ids: rows of d_model numbers, one text after another, and the number of rows of each text.
  const float* embedded = nullptr;
  std::vector<int64_t> lengths;
  // For texts from which padding between tokens was omitted; an empty list, or no lists: the text has no padding.
  std::vector<Ids> positions;   // the rows of the table of positions that their tokens have
  std::vector<Ids> places;      // where their tokens stand, rising: attention counts distances in these
  std::vector<int64_t> unseen;  // how many tokens at the beginning of each text attend, and are attended to by none

  bool is_sparse(int64_t text) const { return !places.empty() && !places[text].empty(); }
  int64_t num_unseen(int64_t text) const { return unseen.empty() ? 0 : unseen[text]; }
  int64_t count() const { return static_cast<int64_t>(embedded ? lengths.size() : ids.size()); }
  int64_t length(int64_t text) const { return embedded ? lengths[text] : static_cast<int64_t>(ids[text].size()); }
};

// Several threads may call one encoder at once.
class Encoder {
 public:
  // Throws std::invalid_argument for a model without an encoder. The model's decoder is not run.
  explicit Encoder(std::shared_ptr<const PackedModel> model);
  ~Encoder();
  Encoder(const Encoder&) = delete;
  Encoder& operator=(const Encoder&) = delete;

  // The number of rows that encode writes. Throws std::invalid_argument for invalid texts: without tokens, longer than
  // max_len, with ids outside of the vocabulary, or types that the model lacks; for ids if the model has no table of
  // embeddings; for positions or places that don't fit the tokens or the model's tables; and for unseen tokens in a
  // text without other tokens or without places, or with pooling.
  int64_t num_rows(const Texts& texts, Pooling pooling) const;

  // Writes rows of d_model numbers for texts that num_rows accepts. normalise: divides each row by its length. The bits
  // of a text depend neither on its neighbours nor on the number of threads, one or more.
  //
  // A few tokens go through the stack with all threads sharing each product. With more, each thread encodes texts of
  // its own, and waits for no other.
  void encode(const Texts& texts, Pooling pooling, bool normalise, int threads, float* out);

  const PackedModel& model() const { return *model_; }

 private:
  void check_sparse(const Texts& texts, Pooling pooling) const;

  struct Lane;  // what a thread needs, kept from call to call

  std::unique_ptr<Lane> take();
  void give_back(std::unique_ptr<Lane> lane);

  std::shared_ptr<const PackedModel> model_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Lane>> lanes_;  // that no call uses
};

}  // namespace fastformer
