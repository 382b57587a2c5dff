// Greedy decoding and beam search of one request. fastformer/generation/search.py documents them, and also has sampling
// and groups. These searches have the same results, with the same arithmetic (double) and the same order of ties,
// without the interpreter.

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
  int64_t num_candidates;  // the number of candidates that it needs for each row
  int64_t num_rows;        // of the next step
  int64_t peak_rows;       // the most that it ever has
  bool is_done = false;    // no more steps
  bool is_broken = false;  // done, because a value was NaN or infinite

  std::vector<int32_t> suppressed;  // never chosen: the caller that steps the model sets them to -inf
  int64_t min_tokens = 0;           // before this many, ids that end a row are set to -inf as well
  int64_t num_tokens = 0;           // of each row that continues
  const std::vector<int32_t>& eos() const { return eos_; }

  // Advances by a step. The candidates of a row are ids and values (log-probabilities, or logits), best first, of equal
  // ones the lowest id first, -inf if forbidden; rows are `stride` apart, and num_candidates of each count. Returns for
  // each row that continues the row that it continues from; empty when the search is done.
  virtual const std::vector<int32_t>& advance(const int32_t* ids, const float* values, int64_t stride) = 0;

  bool has_begun() const { return !nodes_.empty(); }

  // The new tokens of a row that continues.
  std::vector<int32_t> tokens(int64_t row) const { return line_of(last_[row]).tokens; }

  // The last token of each row that continues; only after the first step.
  void last_tokens(int32_t* to) const {
    for (int64_t row = 0; row < num_rows; ++row) to[row] = nodes_[last_[row]].token;
  }

  // The results, best first; before the end, those so far.
  virtual std::vector<Hypothesis> results() const = 0;

 protected:
  // A token and the one before it: hypotheses share their beginnings.
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
  std::vector<int32_t> parents_;  // the result of advance
};

// Always the best token. The score of its result is 0: the caller sums the log-probabilities.
std::unique_ptr<Search> make_greedy_search(int64_t limit, std::vector<int32_t> eos);

// Whether a beam search ends before its limit as soon as num_beams hypotheses have ended.
enum class EarlyStopping {
  kNo,
  kYes,
  kNever,  // of transformers' rules: nor while a hypothesis may still become better
};

// begun: tokens before the new ones that count in lengths by transformers' rules, such as a language's token.
std::unique_ptr<Search> make_beam_search(int64_t limit, std::vector<int32_t> eos, int64_t num_beams, double alpha,
                                         int64_t num_return, EarlyStopping early_stopping, bool by_transformers_rules,
                                         int64_t begun = 0);

}  // namespace fastformer
