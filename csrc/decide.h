// What adaptive clips decide about a step, and what they remember of it, for the CPU and the device alike. The
// rules are those of gradstat/adaptive, which says where they come from and has them in plain torch as well.
// A `Team` is the threads that decide together (ops.cpp, decide_cuda.cuh):
//   rank, size           of a thread among them
//   meet()               until all are here; what they wrote is visible then
//   merged(value, how)   of the values of all, for all
//   ordered(numbers, count, k)   the k-th smallest number, from 0, and the one behind it, if any, else the same
#pragma once

#include "stat.h"

#if defined(__CUDACC__)
#define GRADSTAT_TEAMWORK __device__ __forceinline__
#else
#define GRADSTAT_TEAMWORK inline
#endif

namespace gradstat {

struct Neighbours {
  double lower, upper;
};

// Of numbers(0 .. count - 1), at least one, none NaN: interpolated linearly, as by numpy.percentile.
template <class Team, class Numbers>
GRADSTAT_TEAMWORK double quantile(const Team& team, const Numbers& numbers, int64_t count, double share) {
  const double place = share * static_cast<double>(count - 1);
  const auto below = static_cast<int64_t>(place);
  const Neighbours at = team.ordered(numbers, count, below);
  const double part = place - static_cast<double>(below), gap = at.upper - at.lower;
  return part < 0.5 ? at.lower + part * gap : at.upper - (1.0 - part) * gap;
}

// In the order of the constants in gradstat/adaptive/_base.py.
enum class ClipRule : int64_t { kFixed, kPercentile, kZScore, kTensors, kUnits };
constexpr int kClipOptions = 5;

// The state of a clip begins with these, as in gradstat/adaptive/_history.py. Behind them are the last norms,
// in a ring, and what the rule itself keeps.
struct ClipTotals {
  double recorded, nonfinite, decided, clipped, remaining, smallest;
};
constexpr int64_t kClipTotals = sizeof(ClipTotals) / sizeof(double);

struct ClipRequest {
  ClipRule rule;
  double options[kClipOptions];  // those of the rule's class, in its order
  double* state;
  int64_t window;       // norms that are kept
  const double* norm;   // of all gradients; null: that of the rows
  const Row* rows;      // of the tensors, or units, that have a coefficient each
  int64_t count;        // of them
  const Row* weights;   // of units
  const float* factor;  // what everything is to be multiplied by besides; null: 1
  const float* skip;    // not 0 if this is no step at all; null: 0
  double* out;  // the coefficient, or one for each row, times the factor, and then the norm times the factor
};

namespace clips {

// What brings a norm down to a limit. NaN limits nothing.
GRADSTAT_HD double limited(double norm, double limit) { return norm > limit ? limit / norm : 1.0; }
GRADSTAT_HD bool is_finite(double x) { return x - x == 0; }

// What a thread decided.
struct Tally {
  double decided = 0, clipped = 0, remaining = 0, smallest = 1;

  GRADSTAT_HD double count(double coefficient) {
    decided += 1;
    if (coefficient < 1) {
      clipped += 1;
      remaining += coefficient;
      smallest = merge::min(smallest, coefficient);
    }
    return coefficient;
  }
};

// `statistics`: mean and deviation. `recorded` norms have been seen, this one among them.
GRADSTAT_HD double by_z_score(const double* options, double* statistics, double norm, double recorded) {
  const double z_threshold = options[0], alpha = options[1], warmup = options[2], to = options[3];
  const double mean = statistics[0], deviation = statistics[1];
  const bool warming_up = recorded <= warmup;
  const double excess = norm - mean, ordinary = z_threshold * deviation;
  double after = norm;
  if (!warming_up && excess > ordinary) {
    after = mean + (to == 0 ? ordinary * (ordinary / excess) : to == 1 ? ordinary : 0.0);
  }
  // One update for both phases: over the first norms the weight of each is its share of them, which gives their
  // mean and, by Welford's update, their variance. hypot adds variances without squaring, so that no finite
  // norm makes them infinite.
  const double weight = warming_up ? 1 / recorded : 1 - alpha;
  const double step = after - mean;
  const double distance = fabs(step) * (warming_up ? sqrt(1 - weight) : 1 - weight);
  statistics[0] = mean + weight * step;
  statistics[1] = hypot(sqrt(1 - weight) * deviation, sqrt(weight) * distance);
  return limited(norm, merge::min(after, options[4]));
}

// `mean` is that of the tensor's norms after clipping, infinite before the first.
GRADSTAT_HD double by_own_mean(const double* options, double& mean, double norm, double total,
                               bool warming_up) {
  const double relative = options[0], beta = options[1], absolute = options[3];
  const double coefficient = warming_up ? limited(total, absolute) : limited(norm, relative * mean);
  const double after = coefficient * norm;
  mean = warming_up ? merge::min(mean, after) : is_inf(mean) ? after : beta * mean + (1 - beta) * after;
  return coefficient;
}

}  // namespace clips

template <class Team>
GRADSTAT_TEAMWORK void decide_clip(const ClipRequest& request, const Team& team) {
  const double* const options = request.options;
  auto& totals = *reinterpret_cast<ClipTotals*>(request.state);
  double* const norms = request.state + kClipTotals;
  double* const own = norms + request.window;
  const double factor = request.factor != nullptr ? static_cast<double>(*request.factor) : 1.0;
  double norm = 0;
  if (request.norm != nullptr) {
    norm = *request.norm;
  } else {
    Row all = identity_row();
    for (int64_t i = team.rank(); i < request.count; i += team.size()) merge_into(all, request.rows[i]);
#define GRADSTAT_FIELD(name, how) \
  all.name = team.merged(all.name, [](double a, double b) { return merge::how(a, b); });
#include "stat_fields.def"
    norm = factor * reported_norm(all, false);
  }

  const bool is_step = request.skip == nullptr || *request.skip == 0;
  const bool is_kept = is_step && clips::is_finite(norm);
  const double before = totals.recorded, recorded = before + (is_kept ? 1 : 0);
  const bool leads = team.rank() == 0;
  team.meet();
  if (leads) {
    if (is_kept) norms[static_cast<int64_t>(before) % request.window] = norm;
    totals.recorded = recorded;
    totals.nonfinite += clips::is_finite(norm) ? 0 : 1;
  }
  team.meet();

  clips::Tally tally;
  const bool decides_each = request.rule == ClipRule::kTensors || request.rule == ClipRule::kUnits;
  if (decides_each) {
    const bool warming_up = request.rule == ClipRule::kTensors && before < options[2];
    for (int64_t i = team.rank(); i < request.count; i += team.size()) {
      const double each = factor * reported_norm(request.rows[i], false);
      double coefficient = 1;
      if (!is_step || !clips::is_finite(each)) {
      } else if (request.rule == ClipRule::kUnits) {
        const double weight = reported_norm(request.weights[i], false);
        coefficient = tally.count(clips::limited(each, options[0] * merge::max(weight, options[1])));
      } else if (each > 0 && (is_kept || !warming_up)) {
        // While all are clipped together a norm says nothing unless all of them are finite.
        coefficient = tally.count(clips::by_own_mean(options, own[i], each, norm, warming_up));
      }
      request.out[i] = coefficient * factor;
    }
  } else {
    double limit = 0;
    if (request.rule == ClipRule::kPercentile && is_kept) {
      const auto window = static_cast<double>(request.window);
      const auto count = static_cast<int64_t>(merge::min(recorded, window));
      limit = quantile(team, [&](int64_t i) { return norms[i]; }, count, options[0] / 100);
    }
    if (leads) {
      double coefficient = 1;
      if (is_kept) {
        coefficient =
            tally.count(request.rule == ClipRule::kFixed    ? clip_coefficient(norm, options[0])
                        : request.rule == ClipRule::kZScore ? clips::by_z_score(options, own, norm, recorded)
                                                            : clips::limited(norm, limit));
      }
      request.out[0] = coefficient * factor;
    }
  }

  const auto sum = [](double a, double b) { return merge::sum(a, b); };
  tally.decided = team.merged(tally.decided, sum);
  tally.clipped = team.merged(tally.clipped, sum);
  tally.remaining = team.merged(tally.remaining, sum);
  tally.smallest = team.merged(tally.smallest, [](double a, double b) { return merge::min(a, b); });
  if (!leads) return;
  totals.decided += tally.decided;
  totals.clipped += tally.clipped;
  totals.remaining += tally.remaining;
  totals.smallest = merge::min(totals.smallest, tally.smallest);
  request.out[decides_each ? request.count : 1] = norm;
}

}  // namespace gradstat
