#include "engine/search.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>

namespace fastformer {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Returns ((5 + length) / 6) ** alpha. The length includes EOS.
double length_penalty(int64_t length, double alpha) {
  return std::pow((5.0 + static_cast<double>(length)) / 6.0, alpha);
}

// Whether all values can be ordered: none is NaN or +inf.
bool are_sound(const float* values, int64_t count) {
  return std::all_of(values, values + count, [](float value) { return value < kInfinity; });
}

class GreedySearch final : public Search {
 public:
  GreedySearch(int64_t limit, std::vector<int32_t> eos) : Search(limit, std::move(eos)) {
    num_candidates = num_rows = peak_rows = 1;
    last_ = {-1};
  }

  const std::vector<int32_t>& advance(const int32_t* ids, const float* values, int64_t) override {
    if (is_done) return finish();
    is_broken = !are_sound(values, 1);
    if (is_broken || values[0] == -kInfinity) return finish();  // every token is forbidden
    last_[0] = append(last_[0], ids[0], values[0]);
    if (++num_tokens >= limit || ends(ids[0])) return finish();
    parents_.assign(1, 0);
    return parents_;
  }

  std::vector<Hypothesis> results() const override { return {line_of(last_[0])}; }
};

class BeamSearch : public Search {
 public:
  BeamSearch(int64_t limit, std::vector<int32_t> eos, int64_t num_beams, double alpha, int64_t num_return,
             EarlyStopping early_stopping)
      : Search(limit, std::move(eos)),
        num_beams_(num_beams),
        num_return_(num_return),
        alpha_(alpha),
        early_stopping_(early_stopping),
        best_penalty_(length_penalty(alpha > 0 ? limit : 1, alpha)) {
    // So many that num_beams of them continue, even if all others end.
    num_candidates = (1 + std::ssize(eos_)) * num_beams;
    num_ending_ = num_candidates;
    most_finished_ = num_beams;
    num_rows = 1;  // all beams start identical
    peak_rows = num_beams;
    last_ = {-1};
  }

  const std::vector<int32_t>& advance(const int32_t* ids, const float* values, int64_t stride) override {
    if (is_done) return finish();
    ++num_tokens;
    pool_.clear();
    for (int64_t beam = 0; beam < num_rows; ++beam, ids += stride, values += stride) {
      if (!are_sound(values, num_candidates)) {
        is_broken = true;
        return finish();
      }
      for (int64_t i = 0; i < num_candidates; ++i)
        pool_.push_back({-scores_[beam] - values[i], static_cast<int32_t>(beam), ids[i], values[i]});
    }
    const auto end = pool_.begin() + num_candidates;
    std::partial_sort(pool_.begin(), end, pool_.end());
    const double penalty = penalty_of_ended(num_tokens);
    bool ended = false;
    parents_.clear();
    next_.clear();
    next_scores_.clear();
    for (auto candidate = pool_.begin(); candidate != end && candidate->negative != kInfinity; ++candidate) {
      const bool is_end = ends(candidate->token);
      const int64_t place = candidate - pool_.begin();
      if (is_end && place >= num_ending_) continue;
      if (!is_end && (std::ssize(next_) == num_beams_ || place >= most_continuing())) continue;
      best_ended_ = best_ended_ || (is_end && place == 0);
      const int32_t node = append(last_[candidate->beam], candidate->token, candidate->value);
      if (is_end) {
        finished_.push_back({node, -candidate->negative / penalty});
        ended = true;
      } else {
        next_.push_back(node);
        next_scores_.push_back(-candidate->negative);
        parents_.push_back(candidate->beam);
      }
    }
    last_.swap(next_);
    scores_.swap(next_scores_);
    if (ended) {
      best_first(finished_);
      if (std::ssize(finished_) > most_finished_) finished_.resize(most_finished_);
    }
    if (last_.empty() || num_tokens >= limit) return finish();
    drop_hopeless();
    if (last_.empty()) return finish();
    num_rows = std::ssize(last_);
    return parents_;
  }

  std::vector<Hypothesis> results() const override {
    std::vector<Scored> all = finished_;
    const double penalty = penalty_of(num_tokens);
    for (size_t row = 0; has_begun() && row < last_.size(); ++row)  // live beams are already sorted, best first
      all.push_back({last_[row], scores_[row] / penalty});
    order(all);
    if (std::ssize(all) > num_return_) all.resize(num_return_);
    std::vector<Hypothesis> hypotheses;
    for (const Scored& finished : all) {
      hypotheses.push_back(line_of(finished.node));
      hypotheses.back().score = finished.score;
    }
    return hypotheses;
  }

 protected:
  struct Scored {
    int32_t node = -1;
    double score = 0.0;
  };

  static void best_first(std::vector<Scored>& all) {
    std::stable_sort(all.begin(), all.end(), [](const Scored& a, const Scored& b) { return a.score > b.score; });
  }

  // The divisor for the score of a hypothesis with this many tokens.
  virtual double penalty_of(int64_t length) const { return length_penalty(length, alpha_); }
  virtual double penalty_of_ended(int64_t length) const { return penalty_of(length); }

  // How many of the best candidates may continue a hypothesis in this step.
  virtual int64_t most_continuing() const { return num_candidates; }

  // Whether the search is decided, no matter how the live hypotheses continue.
  virtual bool is_decided() const {
    return early_stopping_ == EarlyStopping::kYes && std::ssize(finished_) == num_beams_;
  }

  // Whether no continuation of a hypothesis with this score can be among the results.
  virtual bool is_hopeless(double score) const {
    return early_stopping_ != EarlyStopping::kYes && std::ssize(finished_) >= num_return_ &&
           finished_[num_return_ - 1].score >= score / best_penalty_;
  }

  // Sorts the results. By these rules they need no sorting: finished hypotheses come before unfinished ones.
  virtual void order(std::vector<Scored>&) const {}

  const int64_t num_beams_, num_return_;
  const double alpha_;
  const EarlyStopping early_stopping_;
  int64_t num_ending_;  // a hypothesis may only end if it is among this many of the best
  int64_t most_finished_;
  bool best_ended_ = false;  // in some step, the best candidate was an end
  std::vector<Scored> finished_;

 private:
  // Candidates are ordered by their members: by the negated score, then by beam, then by id.
  struct Candidate {
    double negative;
    int32_t beam, token;
    float value;
    bool operator<(const Candidate& other) const {
      return std::tie(negative, beam, token, value) < std::tie(other.negative, other.beam, other.token, other.value);
    }
  };

  // Drops hopeless beams. Their continuations would rank below those of all other beams, so the other beams find the
  // same texts without them.
  void drop_hopeless() {
    size_t rows = is_decided() ? 0 : last_.size();
    while (rows > 0 && is_hopeless(scores_[rows - 1])) --rows;
    last_.resize(rows);
    scores_.resize(rows);
    parents_.resize(rows);
  }

  const double best_penalty_;  // the penalty within the limit that gives a negative score its best value
  std::vector<double> next_scores_;
  std::vector<int32_t> next_;
  std::vector<Candidate> pool_;
};

class TransformersBeamSearch final : public BeamSearch {
 public:
  TransformersBeamSearch(int64_t limit, std::vector<int32_t> eos, int64_t num_beams, double alpha, int64_t num_return,
                         EarlyStopping early_stopping, int64_t begun)
      : BeamSearch(limit, std::move(eos), num_beams, alpha, num_return, early_stopping),
        looks_ahead_(early_stopping == EarlyStopping::kNever && alpha > 0),
        begun_(static_cast<double>(begun)) {
    num_ending_ = num_beams;
  }

 protected:
  double penalty_of(int64_t length) const override { return std::pow(begun_ + static_cast<double>(length), alpha_); }

  bool is_decided() const override {
    if (std::ssize(finished_) < num_beams_) return false;
    return early_stopping_ == EarlyStopping::kYes ||
           finished_.back().score >= scores_[0] / penalty_of(looks_ahead_ ? limit : num_tokens);
  }

  bool is_hopeless(double score) const override {
    return std::ssize(finished_) == num_beams_ &&
           finished_.back().score >= score / penalty_of(alpha_ > 0 ? limit : num_tokens);
  }

  void order(std::vector<Scored>& all) const override { best_first(all); }

 private:
  const bool looks_ahead_;
  const double begun_;  // the number of tokens before the new ones that count in lengths
};

class PatientBeamSearch final : public BeamSearch {
 public:
  PatientBeamSearch(int64_t limit, std::vector<int32_t> eos, int64_t num_beams, double alpha, int64_t num_return,
                    int64_t most_finished, int64_t begun)
      : BeamSearch(limit, std::move(eos), num_beams, alpha, num_return, EarlyStopping::kYes), begun_(begun) {
    num_ending_ = num_beams, most_finished_ = most_finished;
  }

 protected:
  double penalty_of(int64_t length) const override { return std::pow(static_cast<double>(begun_ + length), alpha_); }
  double penalty_of_ended(int64_t length) const override { return penalty_of(length - 1); }
  int64_t most_continuing() const override { return num_tokens < limit ? num_candidates : num_beams_; }
  bool is_decided() const override {
    if (alpha_ == 0) return best_ended_ && std::ssize(finished_) >= num_return_;
    return std::ssize(finished_) >= most_finished_;
  }
  bool is_hopeless(double) const override { return false; }
  void order(std::vector<Scored>& all) const override { best_first(all); }

 private:
  const int64_t begun_;
};

class SamplingSearch final : public Search {
 public:
  SamplingSearch(int64_t limit, std::vector<int32_t> eos, int64_t rows, double alpha, int64_t begun)
      : Search(limit, std::move(eos)), alpha_(alpha), begun_(begun) {
    num_candidates = peak_rows = rows;  // all come from one row at first
    num_rows = 1;
    last_ = {-1};
    for (int64_t row = 0; row < rows; ++row) rows_.push_back(row);
  }

  const std::vector<int32_t>& advance(const int32_t* ids, const float* values, int64_t stride) override {
    if (is_done) return finish();
    const bool is_first = num_tokens++ == 0;
    std::vector<int32_t> next;
    std::vector<double> next_scores;
    std::vector<int64_t> next_rows;
    parents_.clear();
    for (size_t i = 0; i < rows_.size(); ++i) {
      const size_t parent = is_first ? 0 : i, at = is_first ? i : i * stride;
      if (!are_sound(values + at, 1)) {
        is_broken = true;
        return finish();
      }
      const int32_t node = append(last_[parent], ids[at], values[at]);
      const double score = scores_[parent] + values[at];
      if (ends(ids[at]) || num_tokens >= limit) {
        finished_.push_back({node, score / std::pow(static_cast<double>(begun_ + num_tokens - ends(ids[at])), alpha_)});
        continue;
      }
      next.push_back(node), next_scores.push_back(score), next_rows.push_back(rows_[i]);
      parents_.push_back(static_cast<int32_t>(parent));
    }
    last_.swap(next), scores_.swap(next_scores), rows_.swap(next_rows);
    if (last_.empty()) return finish();
    num_rows = std::ssize(last_), num_candidates = 1;
    return parents_;
  }

  void choose(int64_t row, float* logits, int64_t vocab, int64_t k, int32_t* ids, float* values) const override {
    const float total = apply_rules(row, logits, vocab);
    std::fill_n(ids, k, 0);
    std::fill_n(values, k, static_cast<float>(-kInfinity));
    for (int64_t i = 0; i < num_candidates; ++i) {
      ids[i] = rules->sample(logits, vocab, has_begun() ? rows_[row] : i, num_tokens);
      values[i] = logits[ids[i]] - total;
    }
  }

  std::vector<Hypothesis> results() const override {
    std::vector<std::pair<int32_t, double>> all = finished_;
    std::stable_sort(all.begin(), all.end(), [](const auto& a, const auto& b) { return a.second > b.second; });
    std::vector<Hypothesis> hypotheses;
    for (const auto& [node, score] : all) {
      hypotheses.push_back(line_of(node));
      hypotheses.back().score = score;
    }
    return hypotheses;
  }

 private:
  const double alpha_;
  const int64_t begun_;
  std::vector<int64_t> rows_;  // the number of each row that continues, which its draws depend on
  std::vector<std::pair<int32_t, double>> finished_;
};

}  // namespace

void Search::choose(int64_t row, float* logits, int64_t vocab, int64_t k, int32_t* ids, float* values) const {
  const float total = apply_rules(row, logits, vocab);
  std::fill_n(ids, k, 0);
  std::fill_n(values, k, total == total ? static_cast<float>(-kInfinity) : total);
  const int64_t count = keep_best(logits, vocab, std::min(num_candidates, k), ids, values);
  for (int64_t i = 0; i < count; ++i) values[i] -= total;
}

float Search::apply_rules(int64_t row, float* logits, int64_t vocab) const {
  if (!has_begun() && probed.token >= 0 && probed.position < 0)
    probed.probability = std::exp(logits[probed.token] - log_sum_exp(logits, vocab));
  return rules->apply(has_begun() ? tokens(row) : Ids(), logits, vocab);
}

bool Search::ends(int32_t token) const { return std::find(eos_.begin(), eos_.end(), token) != eos_.end(); }

int32_t Search::append(int32_t parent, int32_t token, float log_prob) {
  nodes_.push_back({parent, token, log_prob});
  return static_cast<int32_t>(nodes_.size()) - 1;
}

Hypothesis Search::line_of(int32_t node) const {
  Hypothesis line{};
  for (; node >= 0; node = nodes_[node].parent) {
    line.tokens.push_back(nodes_[node].token);
    line.log_probs.push_back(nodes_[node].log_prob);
  }
  std::reverse(line.tokens.begin(), line.tokens.end());
  std::reverse(line.log_probs.begin(), line.log_probs.end());
  return line;
}

const std::vector<int32_t>& Search::finish() {
  is_done = true;
  num_rows = 0;
  parents_.clear();
  return parents_;
}

std::unique_ptr<Search> make_greedy_search(int64_t limit, std::vector<int32_t> eos) {
  return std::make_unique<GreedySearch>(limit, std::move(eos));
}

std::unique_ptr<Search> make_beam_search(int64_t limit, std::vector<int32_t> eos, int64_t num_beams, double alpha,
                                         int64_t num_return, EarlyStopping early_stopping, bool by_transformers_rules,
                                         int64_t begun) {
  if (by_transformers_rules)
    return std::make_unique<TransformersBeamSearch>(limit, std::move(eos), num_beams, alpha, num_return, early_stopping,
                                                    begun);
  return std::make_unique<BeamSearch>(limit, std::move(eos), num_beams, alpha, num_return, early_stopping);
}

std::unique_ptr<Search> make_patient_beam_search(int64_t limit, std::vector<int32_t> eos, int64_t num_beams,
                                                 double alpha, int64_t num_return, int64_t most_finished,
                                                 int64_t begun) {
  return std::make_unique<PatientBeamSearch>(limit, std::move(eos), num_beams, alpha, num_return, most_finished, begun);
}

std::unique_ptr<Search> make_sampling_search(int64_t limit, std::vector<int32_t> eos, int64_t num_rows, double alpha,
                                             int64_t begun) {
  return std::make_unique<SamplingSearch>(limit, std::move(eos), num_rows, alpha, begun);
}

}  // namespace fastformer
