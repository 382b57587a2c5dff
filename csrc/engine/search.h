// Greedy decoding and beam search of one request, as documented in fastformer/generation/search.py, which also has
// sampling and groups. These searches give the same results without the interpreter: they use the same arithmetic
// (double) and break ties in the same order.

#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "engine/token_rules.h"

namespace fastformer {

struct Hypothesis {
  std::vector<int32_t> tokens;
  std::vector<float> log_probs;
  double score;  // in beam search: the sum of log_probs divided by the length penalty
};

// The hypotheses of one request.
class Search {
 public:
  virtual ~Search() = default;

  int64_t limit;           // the maximum number of new tokens
  int64_t num_candidates;  // the number of candidates that the search needs for each row
  int64_t num_rows;        // the number of rows in the next step
  int64_t peak_rows;       // the maximum of num_rows over all steps
  bool is_done = false;    // there are no more steps
  bool is_broken = false;  // the search is done because a value was NaN or infinite

  std::vector<int32_t> suppressed;  // ids that are never chosen: the caller that steps the model sets them to -inf
  int64_t min_tokens = 0;           // with fewer tokens, the caller sets ids that end a row to -inf as well
  bool keeps_shares = false;        // forbidden ids keep their share of the probability: others don't get it
  int64_t num_tokens = 0;           // the number of new tokens of each row that continues

  // Not null: the search chooses from all logits of a row, by `choose`.
  std::shared_ptr<const TokenRules> rules;
  // The probability of a token after another one in the prompt, which the first step computes; token < 0: none. The
  // position of the other one; negative: it is the prompt's last token.
  struct Probed {
    int32_t token = -1, at = 0;
    int64_t position = 0;
    float probability = 0;
  };
  mutable Probed probed;
  // Applies the rules to the logits of a row that continues, and writes its num_candidates candidates, and -inf for
  // the rest of k.
  virtual void choose(int64_t row, float* logits, int64_t vocab, int64_t k, int32_t* ids, float* values) const;
  const std::vector<int32_t>& eos() const { return eos_; }

  // Advances by a step. The candidates of a row are ids and values (log-probabilities or logits), best first, with ties
  // in the order of ids; forbidden ones are -inf. Rows are `stride` apart, and the first num_candidates of each are
  // used. Returns, for each row of the next step, the row that it continues; empty if the search is done.
  virtual const std::vector<int32_t>& advance(const int32_t* ids, const float* values, int64_t stride) = 0;

  bool has_begun() const { return !nodes_.empty(); }

  // For each row that continues: the sum of its log-probabilities in a beam search, else 0.
  const std::vector<double>& scores() const { return scores_; }

  // The new tokens of a row that continues.
  std::vector<int32_t> tokens(int64_t row) const { return line_of(last_[row]).tokens; }

  // The last token of each row that continues; only after the first step.
  void last_tokens(int32_t* to) const {
    for (int64_t row = 0; row < num_rows; ++row) to[row] = nodes_[last_[row]].token;
  }

  // Returns the results so far, best first.
  virtual std::vector<Hypothesis> results() const = 0;

 protected:
  // A token and a link to the token before it, so that hypotheses share their prefixes.
  struct Node {
    int32_t parent, token;  // parent: -1 at the beginning
    float log_prob;
  };

  Search(int64_t limit, std::vector<int32_t> eos) : limit(limit), eos_(std::move(eos)) {}

  // Applies the rules to the logits of a row, and returns the logarithm of the sum of their exponentials.
  float apply_rules(int64_t row, float* logits, int64_t vocab) const;
  bool ends(int32_t token) const;
  int32_t append(int32_t parent, int32_t token, float log_prob);
  Hypothesis line_of(int32_t node) const;  // without the score
  const std::vector<int32_t>& finish();    // ends the search

  std::vector<int32_t> eos_;
  std::vector<Node> nodes_;
  std::vector<int32_t> last_;        // the last node of each row
  std::vector<double> scores_{0.0};  // see scores
  std::vector<int32_t> parents_;     // the result of advance
};

// Always chooses the best token. The score of its result is 0; the caller sums the log-probabilities.
std::unique_ptr<Search> make_greedy_search(int64_t limit, std::vector<int32_t> eos);

// Whether a beam search ends before its limit, once num_beams hypotheses have ended.
enum class EarlyStopping {
  kNo,
  kYes,
  kNever,  // by transformers' rules: continues as long as some hypothesis may still become better
};

// begun: the number of tokens before the new ones that count in lengths by transformers' rules, such as a language
// token.
std::unique_ptr<Search> make_beam_search(int64_t limit, std::vector<int32_t> eos, int64_t num_beams, double alpha,
                                         int64_t num_return, EarlyStopping early_stopping, bool by_transformers_rules,
                                         int64_t begun = 0);

// Searches as CTranslate2's: a score is the sum of log-probabilities divided by length ** alpha, and the length has no
// EOS. The search ends after most_finished hypotheses or, if alpha is 0, when the best one has ended and num_return
// have. begun: the number of tokens before the new ones that count in lengths.
std::unique_ptr<Search> make_patient_beam_search(int64_t limit, std::vector<int32_t> eos, int64_t num_beams,
                                                 double alpha, int64_t num_return, int64_t most_finished,
                                                 int64_t begun);
// Draws num_rows hypotheses, independent of each other.
std::unique_ptr<Search> make_sampling_search(int64_t limit, std::vector<int32_t> eos, int64_t num_rows, double alpha,
                                             int64_t begun);

}  // namespace fastformer
