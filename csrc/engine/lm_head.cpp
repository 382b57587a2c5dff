#include "engine/lm_head.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>

#include "common/softcap.h"

namespace fastformer {
namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();
constexpr int64_t kLogitsTogether = 4096;  // 16 KiB

// Inserts a value into the k best, which are in descending order; equal values stay in order of insertion.
void insert(float value, int32_t column, int64_t k, float* values, int32_t* columns) {
  int64_t i = k - 1;
  for (; i > 0 && values[i - 1] < value; --i) values[i] = values[i - 1], columns[i] = columns[i - 1];
  values[i] = value, columns[i] = column;
}

template <typename T>
void reserve(std::vector<T>& v, int64_t n) {
  if (std::ssize(v) < n) v.resize(n);
}

}  // namespace

Shortlist make_shortlist(const PackedModel& model, const Ids& ids) {
  for (size_t i = 0; i < ids.size(); ++i)
    if (ids[i] < 0 || ids[i] >= model.vocab_size() || (i && ids[i] <= ids[i - 1]))
      throw std::invalid_argument("expected a shortlist of unique ids of the vocabulary in ascending order");
  return {ids, ids.empty() ? PackedWeight() : model.output.columns(ids)};
}

void LmHead::add_stages(const PackedRows& states, int64_t rows, const Selection& selection, int threads,
                        Candidates& candidates, std::vector<Stage>& stages) {
  part_panels_ = std::clamp<int64_t>((weight().num_panels + 15) / 16, 4, 64);
  num_parts_ = (weight().num_panels + part_panels_ - 1) / part_panels_;
  num_shards_ = std::min<int64_t>(num_parts_, threads);
  reserve(sums_, num_parts_ * rows);
  reserve(best_, num_shards_ * rows);
  reserve(values_, num_shards_ * rows * selection.k);
  reserve(columns_, num_shards_ * rows * selection.k);
  places_.assign(selection.logit_rows.empty() ? 0 : rows, -1);
  for (size_t i = 0; i < selection.logit_rows.size(); ++i)
    places_.at(selection.logit_rows[i]) = static_cast<int32_t>(i);
  mask_places_.assign(selection.masked_rows.empty() ? 0 : rows, -1);
  for (size_t i = 0; i < selection.masked_rows.size(); ++i)
    mask_places_.at(selection.masked_rows[i]) = static_cast<int32_t>(i);
  bans_.clear(), keeps_shares_ = false;
  for (Selection::Ban ban : selection.bans) {
    if (!shortlist_.ids.empty()) {
      const auto it = std::lower_bound(shortlist_.ids.begin(), shortlist_.ids.end(), ban.id);
      if (it == shortlist_.ids.end() || *it != ban.id) continue;
      ban.id = static_cast<int32_t>(it - shortlist_.ids.begin());
    }
    bans_.push_back(ban);
    keeps_shares_ = keeps_shares_ || ban.keeps_share;
  }
  std::sort(bans_.begin(), bans_.end(), [](const Selection::Ban& a, const Selection::Ban& b) { return a.id < b.id; });
  // Fill the logits of ids outside of the shortlist.
  if (!shortlist_.ids.empty()) std::fill_n(selection.logits, selection.logit_rows.size() * model_.vocab_size(), kNever);
  candidates.k = selection.k;
  candidates.ids.resize(rows * selection.k), candidates.values.resize(rows * selection.k);

  stages.push_back({num_shards_,
                    [=, this, &states, &selection](int64_t shard) { scan_shard(shard, states, rows, selection); },
                    gemm_work(states, rows, weight())});
  const bool is_short = rows < 8 && !selection.choose;
  const int64_t tasks = threads == 1 || is_short ? 1 : std::min<int64_t>(rows, 4 * threads);
  stages.push_back({tasks, [=, this, &selection, &candidates](int64_t task) {
                      for (int64_t row = rows * task / tasks; row < rows * (task + 1) / tasks; ++row)
                        merge_shards(row, rows, selection, candidates);
                    }});
}

bool LmHead::may_choose(int64_t row, int64_t first, int64_t count, const Selection& selection) const {
  if (mask_places_[row] < 0) return true;
  const uint32_t* mask = selection.masks.data() + mask_places_[row] * selection.mask_words;
  if (shortlist_.ids.empty()) {  // a panel's columns are whole words
    const auto is_zero = [](uint32_t word) { return word == 0; };
    return !std::all_of(mask + first / 32, mask + std::min(selection.mask_words, (first + count + 31) / 32), is_zero);
  }
  for (int64_t c = first; c < first + count; ++c)
    if (const int32_t id = shortlist_.ids[c]; mask[id / 32] >> (id % 32) & 1) return true;
  return false;
}

void LmHead::apply_mask(int64_t row, int64_t first, int64_t count, const Selection& selection, float* z) const {
  if (mask_places_[row] < 0) return;
  const uint32_t* mask = selection.masks.data() + mask_places_[row] * selection.mask_words;
  for (int64_t c = 0; c < count; ++c) {
    const int32_t id = id_of(static_cast<int32_t>(first + c));
    if (!(mask[id / 32] >> (id % 32) & 1)) z[c] = kNever;
  }
}

void LmHead::scan_shard(int64_t shard, const PackedRows& states, int64_t rows, const Selection& selection) {
  // A product of several panels reads them without a pause. The logits of more rows would not stay in L1.
  const int64_t stored = rows * states.parts();
  const int64_t together = std::clamp<int64_t>(kLogitsTogether / (std::max<int64_t>(1, stored) * kPanelColumns), 1, 4);
  const int64_t ld = together * kPanelColumns;
  static thread_local std::vector<float> tile;
  reserve(tile, stored * ld);
  const PackedWeight& w = weight();
  const int64_t k = selection.k, vocab = model_.vocab_size();
  const float cap = model_.options.logit_softcap;
  Best* best = best_.data() + shard * rows;
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t at = (shard * rows + row) * k;
    best[row] = {kNever, false, values_.data() + at, columns_.data() + at};
    std::fill_n(best[row].values, k, kNever);
    std::fill_n(best[row].columns, k, 0);
  }
  const int64_t begin = num_parts_ * shard / num_shards_ * part_panels_;
  const int64_t end = std::min(w.num_panels, num_parts_ * (shard + 1) / num_shards_ * part_panels_);
  auto ban = std::lower_bound(bans_.begin(), bans_.end(), begin * kPanelColumns,
                              [](const Selection::Ban& b, int64_t column) { return b.id < column; });
  const auto is_needed = [&](int64_t panel) {
    const int64_t first = panel * kPanelColumns, count = std::min(kPanelColumns, w.n - first);
    bool is = mask_places_.empty();
    for (int64_t row = 0; row < rows && !is; ++row) is = may_choose(row, first, count, selection);
    return is;
  };
  for (int64_t from = begin, to; from < end; from = to) {
    // Logits that no row may choose aren't computed.
    const bool computes = is_needed(from);
    for (to = from + 1; to < std::min(end, from + together) && is_needed(to) == computes;) ++to;
    if (computes) gemm(states, rows, w, from, to, tile.data(), ld);
    else std::fill_n(tile.data(), rows * ld, kNever);
    for (int64_t row = 0; row < rows && cap > 0 && computes; ++row)
      cap_row(tile.data() + row * ld, (to - from) * kPanelColumns, 1 / cap, cap);
    for (int64_t panel = from; panel < to; ++panel) {
      const int64_t first = panel * kPanelColumns, count = std::min(kPanelColumns, w.n - first);
      float* logits = tile.data() + (panel - from) * kPanelColumns;
      Sum* sums = sums_.data() + panel / part_panels_ * rows;
      if (panel % part_panels_ == 0) std::fill_n(sums, rows, Sum{kNever, 0});
      const auto here = ban;
      const auto forbid = [&](bool keeps_share) {
        for (ban = here; ban != bans_.end() && ban->id < first + kPanelColumns; ++ban)
          for (int64_t row = ban->begin; row < ban->end && ban->keeps_share == keeps_share; ++row)
            logits[row * ld + ban->id - first] = kNever;
      };
      forbid(false);
      for (int64_t row = 0; row < rows; ++row) {
        float* z = logits + row * ld;
        std::fill(z + count, z + kPanelColumns, kNever);
        if (!mask_places_.empty() && computes) apply_mask(row, first, count, selection, z);
        if (selection.log_probs) add_exponentials(z, sums[row]);
      }
      if (keeps_shares_) forbid(true);
      for (int64_t row = 0; row < rows; ++row) {
        const float* z = logits + row * ld;
        if (!places_.empty() && places_[row] >= 0) {
          float* to_row = selection.logits + places_[row] * vocab;
          for (int64_t c = 0; c < count; ++c) to_row[id_of(static_cast<int32_t>(first + c))] = z[c];
        }
        keep_best(z, first, k, best[row]);
      }
    }
  }
}

// Adds 64 logits of a row, of the columns from `first` on.
void LmHead::keep_best(const float* z, int64_t first, int64_t k, Best& best) {
  using V = Vec<float>;
  for (int64_t c = 0; c < kPanelColumns; c += V::size)
    // NaN counts as larger than everything.
    for (uint32_t above = lanes_above(V::load(z + c), V(best.worst)); above; above &= above - 1) {
      const int64_t lane = c + __builtin_ctz(above);
      if (!(z[lane] < std::numeric_limits<float>::infinity())) {
        best.is_broken = true;
      } else if (z[lane] > best.worst) {
        insert(z[lane], static_cast<int32_t>(first + lane), k, best.values, best.columns);
        best.worst = best.values[k - 1];
      }
    }
}

void LmHead::add_exponentials(const float* z, Sum& sum) {
  using V = Vec<float>;
  V most(kNever);
  for (int64_t c = 0; c < kPanelColumns; c += V::size) most = max(most, V::load(z + c));
  const float largest = most.max();
  if (largest > sum.largest) {
    if (sum.sum > 0) sum.sum *= std::exp(sum.largest - largest);
    sum.largest = largest;
  }
  if (sum.largest == kNever) return;
  V total(0.f);
  for (int64_t c = 0; c < kPanelColumns; c += V::size) total = total + exp(V::load(z + c) - V(sum.largest));
  sum.sum += total.sum();
}

void LmHead::merge_shards(int64_t row, int64_t rows, const Selection& selection, Candidates& candidates) const {
  const int64_t k = selection.k;
  float* values = candidates.values.data() + row * k;
  int32_t* ids = candidates.ids.data() + row * k;
  if (selection.choose && !places_.empty() && places_[row] >= 0)
    return selection.choose(row, selection.logits + places_[row] * model_.vocab_size(), ids, values);
  std::copy_n(best_[row].values, k, values);
  std::copy_n(best_[row].columns, k, ids);
  bool is_broken = best_[row].is_broken;
  for (int64_t shard = 1; shard < num_shards_; ++shard) {
    const Best& best = best_[shard * rows + row];
    is_broken = is_broken || best.is_broken;
    for (int64_t i = 0; i < k && best.values[i] > values[k - 1]; ++i)
      insert(best.values[i], best.columns[i], k, values, ids);
  }
  for (int64_t i = 0; i < k; ++i) ids[i] = id_of(ids[i]);
  if (is_broken) return (void)std::fill_n(values, k, std::numeric_limits<float>::quiet_NaN());
  if (!selection.log_probs) return;
  float largest = kNever, sum = 0;
  for (int64_t part = 0; part < num_parts_; ++part) largest = std::max(largest, sums_[part * rows + row].largest);
  if (largest == kNever) return;  // every token is banned
  for (int64_t part = 0; part < num_parts_; ++part) {
    const Sum& one = sums_[part * rows + row];
    if (one.sum > 0) sum += one.sum * std::exp(one.largest - largest);
  }
  const float total = largest + std::log(sum);
  for (int64_t i = 0; i < k; ++i) values[i] -= total;
}

}  // namespace fastformer
