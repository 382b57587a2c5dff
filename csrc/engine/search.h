// Greedy decoding and beam search of one request. fastformer/generation/search.py documents them, and also has sampling
// and groups; these find the same, with the same arithmetic (double) and the same order of ties, without the
// interpreter.

#pragma once

#include <cstdint>
#include <memory>
#include <vector>

namespace fastformer {

struct Hypothesis {
  std::vector<int32_t> tokens;
  std::vector<float> log_probs;
  double score;  // of a beam search's: the sum of log_probs, divided by the length penalty
};

// The hypotheses of one request.
class Search {
 public:
  virtual ~Search() = default;

  int64_t limit;           // the most new tokens
  int64_t num_candidates;  // that it wants to see for each row
  int64_t num_rows;        // of the next step
  int64_t peak_rows;       // the most that it ever has
  bool is_done = false;    // no more steps
  bool is_broken = false;  // done, because a value was NaN or infinite

  std::vector<int32_t> suppressed;  // never chosen: the caller that steps the model gives them -inf
  int64_t min_tokens = 0;           // before so many, nor what ends a row
  int64_t num_tokens = 0;           // of each row that goes on
  const std::vector<int32_t>& eos() const { return eos_; }

  // Takes in what may follow each row: ids and values (log-probabilities, or logits), best first, of equals the lowest
  // id first, -inf for what can't follow. A row's begin `stride` behind the last one's; num_candidates of them count.
  // For each row that goes on the row that it goes on from; none when the search is done.
  virtual const std::vector<int32_t>& advance(const int32_t* ids, const float* values, int64_t stride) = 0;

  bool has_begun() const { return !nodes_.empty(); }

  // The new tokens of a row that goes on.
  std::vector<int32_t> tokens(int64_t row) const { return line_of(last_[row]).tokens; }

  // The last token of each row that goes on; where it has begun.
  void last_tokens(int32_t* to) const {
    for (int64_t row = 0; row < num_rows; ++row) to[row] = nodes_[last_[row]].token;
  }

  // What was found, best first; before the end, what there is.
  virtual std::vector<Hypothesis> results() const = 0;

 protected:
  // A token and what stands before it: hypotheses share their beginnings.
  struct Node {
    int32_t parent, token;  // parent: -1 at the beginning
    float log_prob;
  };

  Search(int64_t limit, std::vector<int32_t> eos) : limit(limit), eos_(std::move(eos)) {}

  bool ends(int32_t token) const;
  int32_t append(int32_t parent, int32_t token, float log_prob);
  Hypothesis line_of(int32_t node) const;  // without its score
  const std::vector<int32_t>& finish();    // there is no next step

  std::vector<int32_t> eos_;
  std::vector<Node> nodes_;
  std::vector<int32_t> last_;     // of each row its last node
  std::vector<int32_t> parents_;  // what advance gives
};

// The best token again and again. The score of its result is 0: the sum of the log-probabilities is the caller's.
std::unique_ptr<Search> make_greedy_search(int64_t limit, std::vector<int32_t> eos);

// Whether a beam search ends before its limit as soon as num_beams hypotheses have ended.
enum class EarlyStopping {
  kNo,
  kYes,
  kNever,  // of transformers' rules: nor while a hypothesis may still become better
};

// begun: tokens in front of the new ones that count in lengths by transformers' rules, as a language that is told does.
std::unique_ptr<Search> make_beam_search(int64_t limit, std::vector<int32_t> eos, int64_t num_beams, double alpha,
                                         int64_t num_return, EarlyStopping early_stopping, bool by_transformers_rules,
                                         int64_t begun = 0);

}  // namespace fastformer
