// The output projection of a step and the selection of its best tokens. Logits are computed 64 columns at a time, and
// written to memory only for rows whose logits are requested.

#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "common/thread_team.h"
#include "engine/packed_model.h"

namespace fastformer {

using Ids = std::vector<int32_t>;

// The results that a step returns for each row.
struct Selection {
  // Forbids an id for the rows [begin, end). keeps_share: log-probabilities are those of a choice among all ids.
  struct Ban {
    int32_t id;
    int64_t begin, end;
    bool keeps_share;
  };

  int64_t k;                // the number of best tokens
  bool log_probs;           // return log-probabilities instead of logits
  Ids logit_rows;           // rows, in ascending order, for which all logits are returned as well
  float* logits = nullptr;  // (len(logit_rows), vocab_size)
  // Chooses the candidates of a row of logit_rows from its logits, which it may change; several threads call it. Empty:
  // all rows get their best tokens.
  std::function<void(int64_t row, float* logits, int32_t* ids, float* values)> choose;
  std::vector<Ban> bans;
  // Rows, in ascending order, that may only choose some ids: id i of the r-th of them if bit i % 32 is set in
  // masks[r * mask_words + i / 32].
  Ids masked_rows;
  std::vector<uint32_t> masks;
  int64_t mask_words = 0;
};

// The best tokens of each row, (rows, k), best first; ties go to the lower id. If there are fewer than k, the rest is
// -inf. A row with NaN or +inf among its logits has NaN as values.
struct Candidates {
  int64_t k = 0;
  Ids ids;
  std::vector<float> values;
};

// The ids that may be chosen, in ascending order, and their columns of the output projection; empty: all ids.
struct Shortlist {
  Ids ids;
  PackedWeight weight;
};
Shortlist make_shortlist(const PackedModel& model, const Ids& ids);

class LmHead {
 public:
  // The shortlist is read at the beginning of each step.
  LmHead(const PackedModel& model, const Shortlist& shortlist) : model_(model), shortlist_(shortlist) {}

  // Adds the stages that select tokens for `rows` rows of normalised states. They read the selection while they run.
  void add_stages(const PackedRows& states, int64_t rows, const Selection& selection, int threads,
                  Candidates& candidates, std::vector<Stage>& stages);

 private:
  // The largest logit of one row in one part of the vocabulary, and the sum of exp(z - largest).
  struct Sum {
    float largest, sum;
  };
  // The k best of one row in one shard (several consecutive parts), the worst of them, and whether there was a NaN or
  // +inf.
  struct Best {
    float worst;
    bool is_broken;
    float* values;
    int32_t* columns;
  };

  const PackedWeight& weight() const { return shortlist_.ids.empty() ? model_.output : shortlist_.weight; }
  int32_t id_of(int32_t column) const { return shortlist_.ids.empty() ? column : shortlist_.ids[column]; }
  // Returns whether the row may choose an id of one of these columns.
  bool may_choose(int64_t row, int64_t first, int64_t count, const Selection& selection) const;
  // Sets the logits of columns that the row may not choose to -inf.
  void apply_mask(int64_t row, int64_t first, int64_t count, const Selection& selection, float* z) const;
  void scan_shard(int64_t shard, const PackedRows& states, int64_t rows, const Selection& selection);
  void merge_shards(int64_t row, int64_t rows, const Selection& selection, Candidates& candidates) const;
  static void keep_best(const float* z, int64_t first, int64_t k, Best& best);
  static void add_exponentials(const float* z, Sum& sum);

  const PackedModel& model_;
  const Shortlist& shortlist_;
  // For a step: its bans by column, and the index of each row among those whose logits are written (-1: not written).
  std::vector<Selection::Ban> bans_;
  bool keeps_shares_ = false;  // whether any of the bans does
  Ids places_;
  Ids mask_places_;  // likewise of each row among those with a mask
  // The parts depend only on the vocabulary, so that sums are the same for any number of threads. The number of shards
  // depends on the threads, because it doesn't change which tokens are best; each shard has to fill its k best first.
  int64_t num_parts_ = 0, part_panels_ = 0, num_shards_ = 0;
  std::vector<Sum> sums_;   // (parts, rows)
  std::vector<Best> best_;  // (shards, rows)
  std::vector<float> values_;
  Ids columns_;
};

}  // namespace fastformer
